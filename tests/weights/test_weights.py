"""Models without weights: captured and planned as they are, materialised stage by stage."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.comparison.reference import run_with_threads
from penstock.weights import StoredWeights, source_of
from tests.support.models import gpt2

X = torch.randn(6, 8)


class Net(nn.Module):
    """Random calls, statistics, a tied weight, a buffer that no state dict holds, and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 8)
        self.head.weight = self.first.weight
        self.register_buffer("scale", torch.linspace(0.5, 2, 8), persistent=False)

    def forward(self, x: torch.Tensor, keep: torch.Tensor | None = None) -> torch.Tensor:
        x = self.norm(self.first(x)) * self.scale
        mask = torch.arange(8, device=x.device) % 3 > 0
        for block in self.blocks:
            x = block(x) * mask
        if keep is not None and not keep.all():
            x = x * keep.unsqueeze(1)
        return self.head(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop = nn.Linear(8, 8), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(F.gelu(self.inner(x)))


def empty() -> Net:
    with ps.empty_weights():
        return Net()


def test_nothing_is_allocated_and_the_rest_is_there() -> None:
    model = empty()
    assert all(p.is_meta for p in model.parameters())
    assert model.head.weight is model.first.weight
    assert torch.equal(model.get_buffer("scale"), torch.linspace(0.5, 2, 8))
    assert not any(p.is_meta for p in Net().parameters())


def test_the_program_is_that_of_the_model_with_weights() -> None:
    keep = torch.tensor([1, 1, 0, 1, 1, 1]).bool()
    for kwargs in ({}, {"keep": keep}):
        bare, full = (ps.capture(m, (X,), kwargs) for m in (empty(), Net()))
        assert bare.labels == full.labels
        assert bare.fingerprint == full.fingerprint
        assert not bare.closed
        for training in (True, False):
            ours, theirs = bare.trace(training), full.trace(training)
            assert [c.random for c in ours.calls] == [c.random for c in theirs.calls]
            assert ours.changed == theirs.changed
            assert (ours.questions is None) == (theirs.questions is None)
    assert all(p.is_meta for p in bare.model.parameters())


def test_it_is_profiled_without_weights() -> None:
    program = ps.capture(empty(), (X,))
    profile = ps.profile(program, devices=["cpu", "cpu"], num_microbatches=2)
    assert all(second > 0 for second in profile.call_seconds())
    assert sum(profile.weights) == sum(p.nbytes for p in Net().parameters())
    blocks = [k for k, label in enumerate(profile.labels) if label.endswith(".inner")]
    assert len({profile.call_seconds()[k] for k in blocks}) == 1, "alike calls are measured once"
    assert all(p.is_meta for p in program.model.parameters())


def to_torch(state: dict[str, Any], folder: Path) -> Path:
    torch.save(state, folder / "state.pt")
    return folder / "state.pt"


def to_safetensors(state: dict[str, Any], folder: Path) -> Path:
    save_file({n: t for n, t in state.items() if n != "head.weight"}, folder / "one.safetensors")
    return folder / "one.safetensors"


def to_shards(state: dict[str, Any], folder: Path) -> Path:
    places = {}
    for k, (name, tensor) in enumerate(state.items()):
        if name != "head.weight":  # tied: stored once
            places[name] = f"part-{k}.safetensors"
            save_file({name: tensor}, folder / places[name])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


def as_it_is(state: dict[str, Any], _: Path) -> Any:
    return state


@pytest.mark.parametrize("store", [as_it_is, to_torch, to_safetensors, to_shards])
def test_weights_from_everywhere(
    store: Callable[[dict[str, Any], Path], Any], tmp_path: Path
) -> None:
    torch.manual_seed(3)
    full = Net()
    weights = store(full.state_dict(), tmp_path)
    keep = torch.ones(6).bool()
    model = empty()
    pipe = ps.Pipeline(
        model,
        (X,),
        {"keep": keep},
        devices=["cpu", "cpu"],
        num_microbatches=2,
        weights=weights,
        replicas=1,
    )
    with pipe:
        assert model.head.weight is model.first.weight
        assert not any(t.is_meta for t in model.state_dict().values())
        full.eval()
        pipe.eval()
        for kept in (keep, torch.tensor([1, 0, 1, 1, 1, 1]).bool()):
            expected = run_with_threads(
                lambda kept=kept: torch.cat([full(x, k) for x, k in _halves(kept)]),
                pipe.threads_per_worker,
            )
            assert torch.equal(pipe(X, keep=kept), expected)
            assert torch.equal(pipe.program(X, keep=kept), full(X, kept))
        pipe.train()
        pipe.train_step(X, keep=keep, loss_fn=lambda out: out.square().mean())
        assert all(p.grad is not None for p in model.parameters())


def _halves(keep: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(X.tensor_split(2), keep.tensor_split(2), strict=True))


def seeded(devices: int, seed: int, model: nn.Module, **kwargs: Any) -> dict[str, torch.Tensor]:
    weights = ps.SeededWeights(seed)
    with ps.Pipeline(
        model, devices=["cpu"] * devices, num_microbatches=1, weights=weights, **kwargs, replicas=1
    ) as pipe:
        return {name: t.clone() for name, t in pipe.state_dict().items()}


def test_seeded_weights_do_not_depend_on_the_split() -> None:
    one, two, other = (seeded(n, s, empty(), args=(X,)) for n, s in ((1, 5), (3, 5), (2, 6)))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(one["first.weight"], other["first.weight"])
    assert one["norm.weight"].eq(1).all()
    assert one["first.weight"].abs().max() <= 8**-0.5
    state = torch.get_rng_state()
    seeded(2, 5, empty(), args=(X,))
    assert torch.equal(state, torch.get_rng_state())


def test_seeded_weights_of_a_language_model() -> None:
    with ps.empty_weights():
        model = gpt2()
    tokens = torch.randint(0, 50, (2, 8))
    state = seeded(2, 0, model, kwargs={"input_ids": tokens, "use_cache": False})
    assert 0.01 < state["transformer.h.0.mlp.c_fc.weight"].std() < 0.03
    assert state["transformer.h.0.ln_1.weight"].eq(1).all()
    assert model.lm_head.weight is model.transformer.wte.weight


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.weight


def test_what_cannot_be_had_is_named(tmp_path: Path) -> None:
    def build(weights: Any, model: nn.Module | None = None) -> None:
        if model is None:
            with ps.empty_weights():
                model = Bare()
        ps.Pipeline(
            model, (X,), devices=["cpu", "cpu"], num_microbatches=1, weights=weights, replicas=1
        )

    with pytest.raises(ps.InputError, match=r"are on the meta device: give weights="):
        build(None)
    with pytest.raises(ps.InputError, match="the model has no parameters on the meta device"):
        build({}, Bare())
    with pytest.raises(ps.InputError, match=r"weight was not initialised: Bare has no reset_par"):
        build(ps.SeededWeights())
    with pytest.raises(ps.InputError, match=r"the state dict has no 'inner.weight'"):
        build({"weight": torch.ones(8)})
    with pytest.raises(ps.InputError, match=r"'weight' has shape \(7,\) in the state dict, but"):
        build({**Bare().state_dict(), "weight": torch.ones(7)})
    with pytest.raises(ps.InputError, match=r"there is no file nowhere\.pt"):
        build("nowhere.pt")
    with pytest.raises(ps.InputError, match="holds no safetensors file"):
        build(tmp_path)
    with pytest.raises(ps.InputError, match="weights=3 is neither a state dict"):
        build(3)
    with pytest.raises(ps.InputError, match="SeededWeights'> is neither a state dict"):
        build(ps.SeededWeights)
    for name in ("no.pt", "no.safetensors"):
        (tmp_path / name).write_text("nothing of the kind")
        with pytest.raises(ps.InputError, match=f"{name} is no"):
            build(tmp_path / name)
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(ps.InputError, match="holds a list, not a state dict"):
        build(tmp_path / "list.pt")
    with torch.device("meta"):
        model = Net()
    with pytest.raises(ps.InputError, match="the state dict has no 'scale'"):
        build(Net().state_dict(), model)


def test_only_what_a_stage_needs_is_read() -> None:
    with ps.empty_weights():
        model = Bare()
    state, read = Bare().state_dict(), []

    def reading(name: str) -> torch.Tensor:
        read.append(name)
        return state[name]

    source = source_of(model, StoredWeights(state, reading, "a test"))
    assert source is not None
    source.materialise(model, ["inner.bias"], torch.device("cpu"))
    assert read == ["inner.bias"]
    assert model.weight.is_meta
    assert torch.equal(model.inner.bias, state["inner.bias"])


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), Peeks()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


class Peeks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(x) if x.sum() > 0 else x


def test_a_forward_that_reads_what_weights_give_cannot_be_captured_without() -> None:
    with ps.empty_weights():
        model = Reads()
    with pytest.raises(
        ps.CaptureError, match=r"^b reads values that its weights give, and there are no weights"
    ):
        ps.capture(model, (X,))


class Adds(nn.Module):
    """Adds to a copy of its input, in place, what its weight gives."""

    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y += self.c(x)
        return self.c(y)


def test_a_module_that_changes_values_of_inputs_by_its_weights_is_closed_without_them() -> None:
    with ps.empty_weights():
        model = nn.Sequential(nn.Tanh(), Adds(), nn.Tanh())
    program = ps.capture(model, (X,))
    assert "changes a tensor by what weights give (1.add_())" in program.closed["1"]
    assert len(program) == 3
    with ps.Pipeline(
        model,
        devices=["cpu", "cpu"],
        program=program,
        num_microbatches=1,
        weights=ps.SeededWeights(1),
        replicas=1,
    ) as pipe:
        assert torch.equal(pipe(X), model(X))


class Moves(Reads):
    """Reads the inputs' values after it has moved them to the weights' device."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        moved = (x > 100).to(y.device)
        moved |= torch.zeros_like(moved)
        return self.b.c(y) if moved.any() else y.relu()


def test_the_inputs_values_can_be_read_on_the_meta_device() -> None:
    with ps.empty_weights():
        model = Moves()
    program = ps.capture(model, (X,))
    assert not program.closed
    assert program.train.answers == (False,)
    with ps.Pipeline(
        model,
        devices=["cpu", "cpu"],
        program=program,
        num_microbatches=1,
        weights=ps.SeededWeights(1),
        replicas=1,
    ) as pipe:
        for x in (X, X + 1000):
            assert torch.equal(pipe(x), model(x))


class Tied(nn.Module):
    """A weight that is registered twice, and BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm, self.head = nn.Embedding(9, 4), nn.BatchNorm1d(4), nn.Linear(4, 9)
        shared = nn.Parameter(torch.randn(9, 4))
        self.words.weight = shared
        self.head.weight = shared

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.words(ids)))


def test_a_weight_that_is_registered_twice_stays_one() -> None:
    with ps.empty_weights():
        model = Tied()
    assert model.words.weight is model.head.weight
    ids, full = torch.randint(9, (6,)), Tied()
    full.norm.running_mean += 5
    state = {name: t.clone() for name, t in full.state_dict().items()}
    with ps.Pipeline(
        model, (ids,), devices=["cpu", "cpu"], num_microbatches=1, weights=state, replicas=1
    ) as pipe:
        assert model.words.weight is model.head.weight
        assert model.norm.running_mean[0] == 5, "buffers come from the state dict as well"
        pipe.eval()
        assert torch.equal(pipe(ids), full.eval()(ids))


def test_seeded_weights_initialise_a_tied_one_once() -> None:
    with ps.empty_weights():
        model = Tied()
    seeded(2, 0, model, args=(torch.randint(9, (6,)),))
    assert 0.6 < model.words.weight.std() < 1.6, "as the embedding, and not as the linear layer"


def test_what_fails_half_way_leaves_the_model_as_it_was() -> None:
    with ps.empty_weights():
        model = Bare()
    for weights in (ps.SeededWeights(), {"weight": torch.ones(8), "inner.weight": torch.ones(8)}):
        with pytest.raises(ps.InputError):
            ps.Pipeline(
                model, (X,), devices=["cpu"], num_microbatches=1, weights=weights, replicas=1
            )
        assert all(p.is_meta for p in model.parameters())
    state = Bare().state_dict()
    with ps.Pipeline(
        model, (X,), devices=["cpu"], num_microbatches=1, weights=state, replicas=1
    ) as pipe:
        assert torch.equal(pipe.state_dict()["inner.weight"], state["inner.weight"])


def test_lazy_modules_can_be_built() -> None:
    with ps.empty_weights():
        model = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 3))
    assert model[1].weight.is_meta
