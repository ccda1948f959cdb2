"""Things of a script that are saved with a run, whatever they are called and look like."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, IterableDataset, Sampler

import penstock as ps
from tests.support.models import mlp

X, Y = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)), torch.zeros(8, 4)


def pipeline(model: nn.Module | None = None, **options: Any) -> ps.Pipeline:
    given = {"devices": ["cpu", "cpu"], "replicas": 1, "audit": None, "progress": None, **options}
    return ps.Pipeline(model or mlp(4, 4, 4), (X,), **given)


def step(pipe: ps.Pipeline) -> torch.Tensor:
    return pipe.train_step(X, target=Y, loss_fn=F.mse_loss)


@pytest.mark.parametrize("name", ["target", "model", "pipe", "folder"])
def test_a_thing_may_have_any_name(tmp_path: Path, name: str) -> None:
    other = nn.Linear(2, 2)
    saved = {k: v.clone() for k, v in other.state_dict().items()}
    with pipeline() as pipe:
        pipe.save(tmp_path / "c", **{name: other})
        for restore in (
            lambda **things: ps.load(tmp_path / "c").restore(pipe, **things),
            lambda **things: ps.resume(tmp_path / "c", pipe, **things),
        ):
            nn.init.zeros_(other.weight)
            restore(**{name: other})
            assert torch.equal(other.weight, saved["weight"])


def test_what_was_none_is_none_again(tmp_path: Path) -> None:
    with pipeline() as pipe:
        optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
        things = {"optimizer": optimizer, "scaler": None, "number": 3}
        pipe.save(tmp_path / "c", **things)
        del things["number"]  # which is returned
        assert ps.load(tmp_path / "c").restore(pipe, **things) == {"scaler": None, "number": 3}
        with pytest.raises(ps.InputError, match="plain data, which is returned"):
            ps.load(tmp_path / "c").restore(pipe, **things, number=3)
        with pytest.raises(ps.InputError, match="not in it"):
            ps.load(tmp_path / "c").restore(pipe, **things, other=None)


class Versioned(nn.Linear):
    """Refuses a state that does not say of which version it is, as some models of torchvision."""

    _version = 2

    def _load_from_state_dict(
        self, state: Any, prefix: str, metadata: dict[str, Any], *rest: Any
    ) -> None:
        if metadata.get("version") != 2:
            raise ValueError(f"version should be set to 2 instead of {metadata.get('version')}")
        super()._load_from_state_dict(state, prefix, metadata, *rest)


def test_models_that_check_their_version(tmp_path: Path) -> None:
    model = nn.Sequential(Versioned(4, 4), Versioned(4, 4))
    average = AveragedModel(model)
    with pipeline(model) as pipe:
        pipe.save(tmp_path / "c", average=average)
        before = {name: value.clone() for name, value in pipe.state_dict().items()}
        nn.init.zeros_(model[0].weight)
        nn.init.zeros_(average.module[1].weight)
        ps.load(tmp_path / "c").restore(pipe, average=average)
        assert all(torch.equal(value, before[n]) for n, value in pipe.state_dict().items())
        assert torch.equal(average.module[1].weight, before["1.weight"])
    other = nn.Sequential(Versioned(4, 4), Versioned(4, 4))
    other.load_state_dict(ps.load(tmp_path / "c").model_state())
    assert torch.equal(other[1].weight, before["1.weight"])


class Remembering(nn.Linear):
    """Has an extra state that grows."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.seen: list[int] = []

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor(self.seen, dtype=torch.int64)

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.seen = state.tolist()


def test_extra_states_may_be_tensors_of_any_size(tmp_path: Path) -> None:
    model = nn.Sequential(Remembering(), Remembering())
    with pipeline(model) as pipe:
        model[0].seen, model[1].seen = [1, 2, 3], [4]
        pipe.save(tmp_path)
    for known in ([], [5, 6]):
        again = nn.Sequential(Remembering(), Remembering())
        again[0].seen = known
        ps.load(tmp_path).restore(again)
        assert [layer.seen for layer in again] == [[1, 2, 3], [4]]


class Stateful:
    """A loader with a state of its own, like torchdata's."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        yield X, Y

    def state_dict(self) -> dict[str, Any]:
        return {"batch": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def test_loaders_with_a_state_are_not_for_autosave(tmp_path: Path) -> None:
    """It saves before the batch in hand is trained, of which their state says that it is done."""
    with pipeline() as pipe:
        with pytest.raises(ps.InputError, match=r"loader=ps.Batches\(...\) of it"):
            pipe.autosave(tmp_path / "c", every=1, loader=Stateful())
        pipe.save(tmp_path / "c", loader=Stateful(), average=nn.Sequential(nn.Linear(2, 2)))
        average = nn.Sequential(nn.Linear(2, 2))  # can be iterated, too
        pipe.autosave(tmp_path / "d", every=1, loader=ps.Batches(Stateful()), average=average)


class History(list[float]):
    """Losses, with a state."""

    def state_dict(self) -> dict[str, Any]:
        return {"losses": [*self]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self[:] = state["losses"]


class Seeded(Sampler[int]):
    """Draws the order of rows from a seed of its own."""

    def __init__(self) -> None:
        self.seed = 0

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed)
        return iter(torch.randperm(4, generator=generator).tolist())

    def __len__(self) -> int:
        return 4

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seed = state["seed"]


class Streamed(IterableDataset[int]):
    """A dataset with a position, which also has rows by number."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(4))

    def __len__(self) -> int:
        return 4

    def __getitem__(self, row: int) -> int:
        return row

    def state_dict(self) -> dict[str, Any]:
        return {"row": 1}


def test_what_is_no_loader_is_for_autosave(tmp_path: Path) -> None:
    with pipeline() as pipe:
        for name, thing in {"history": History([1.0]), "sampler": Seeded()}.items():
            pipe.autosave(tmp_path / name, every=1, batches=ps.Batches([X]), **{name: thing})
        with pytest.raises(
            ps.InputError, match=r"give ps.Batches\(...\) of the loader and iterate"
        ):
            pipe.autosave(tmp_path / "c", every=1, sampler=Seeded())
        with pytest.raises(ps.InputError, match=r"data=ps.Batches\(...\) of it"):
            pipe.autosave(tmp_path / "c", every=1, data=Streamed(), batches=ps.Batches([X]))


def shuffled(seed: int) -> ps.Batches[torch.Tensor]:
    """Numbers in an order that a generator of the loader draws for each epoch."""
    generator = torch.Generator().manual_seed(seed)
    return ps.Batches(DataLoader(range(12), batch_size=3, shuffle=True, generator=generator))


@pytest.mark.parametrize("at", [3, 4, 5, 8])
def test_generators_of_loaders_go_on(at: int) -> None:
    """After a save in the midst of an epoch, and between two."""
    whole, part, seen = shuffled(1), shuffled(1), []
    expected = [batch.tolist() for _ in whole.epochs(3) for batch in whole]
    state: dict[str, Any] = {}
    for _ in part.epochs(3):
        for batch in part:
            seen.append(batch.tolist())
            if len(seen) == at and at % 4:
                state = part.state_dict()
        if len(seen) == at:
            state = part.state_dict()
    resumed = shuffled(2)  # whatever the new process has drawn
    resumed.load_state_dict(state)
    again = shuffled(3)
    again.load_state_dict(resumed.state_dict())  # saved before it goes on
    for batches in (resumed, again):
        assert [b.tolist() for _ in batches.epochs(3) for b in batches] == expected[at:]


class Merging(nn.Module):
    """Has its adapter in the weight while it is evaluated, as loralib's layers."""

    def __init__(self) -> None:
        super().__init__()
        self.merged, self.merges = False, 0
        self.base, self.adapter = nn.Linear(4, 4), nn.Linear(4, 4)

    def train(self, mode: bool = True) -> Merging:
        super().train(mode)
        self.merges += mode != (not self.merged)
        self.merged = not mode
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.base(x)
        return result if self.merged else result + self.adapter(x)


def test_an_evaluation_leaves_modules_as_they_were() -> None:
    model = nn.Sequential(Merging(), nn.Linear(4, 4), nn.Sequential(nn.Dropout(), Merging()))
    model[1].eval()
    nested = model[2]
    nested[1].train(False)  # merged by the script
    nested[1].merges = 0
    with pipeline(model) as pipe:
        modes = [module.training for module in model.modules()]
        pipe.eval_step(X, target=Y, loss_fn=F.mse_loss)
        assert [module.training for module in model.modules()] == modes
        assert not model[0].merged
        assert nested[1].merged
        assert nested[1].merges == 0
        step(pipe)
        assert model[0].adapter.weight.grad is not None


class Explicit(nn.Linear):
    """Its `train` takes no default, and may fail."""

    fails = False

    def train(self, mode: bool) -> Explicit:  # type: ignore[override]
        if mode and self.fails:
            raise RuntimeError("not now")
        return super().train(mode)


def test_an_evaluation_with_a_train_of_the_models_own() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Sequential(Explicit(4, 4), nn.Linear(4, 4)))
    inner = model[1][0]
    with pipeline(model) as pipe:
        model[0].eval()  # so that the others are put back one by one
        modes = [module.training for module in model.modules()]
        pipe.eval_step(X, target=Y, loss_fn=F.mse_loss)
        assert [module.training for module in model.modules()] == modes
        inner.fails = True
        with pytest.raises(RuntimeError, match="not now"):
            pipe.eval_step(X, target=Y, loss_fn=F.mse_loss)
        assert [module.training for module in model.modules()] == modes


@pytest.mark.parametrize(
    "asked", [{"num_microbatches": 3}, {"schedule": "gpipe"}, {"replicas": 2}, {"tune": True}]
)
def test_a_plan_and_something_else(asked: dict[str, Any]) -> None:
    program = ps.capture(mlp(4, 4, 4), (X,))
    profile = ps.profile(program, devices=["cpu", "cpu"])
    plan = ps.plan(profile, num_microbatches=2, schedule="1f1b", replicas=1)
    with pytest.raises(ps.InputError, match=f"{next(iter(asked))}="):
        ps.Pipeline(mlp(4, 4, 4), (X,), plan=plan, devices=["cpu", "cpu"], **asked)
    same = {"num_microbatches": 2, "schedule": "1f1b", "replicas": 1}
    with ps.Pipeline(mlp(4, 4, 4), (X,), plan=plan, devices=["cpu", "cpu"], **same) as pipe:
        assert pipe.plan.num_microbatches == 2


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.RMSprop, torch.optim.SGD])
@pytest.mark.parametrize("workers", ["threads", "processes"])
def test_states_of_older_versions_of_torch(kind: Any, workers: Any) -> None:
    """Which counted steps in a number."""
    plain = mlp(4, 4, 4)
    theirs = kind(plain.parameters(), lr=0.1)
    with pipeline(workers=workers) as pipe:
        for own, other in zip(plain.parameters(), pipe.model.parameters(), strict=True):
            own.data.copy_(other)
        ours = pipe.optimizer(kind, lr=0.1)
        for _ in range(2):
            for own, other in zip(plain.parameters(), pipe.model.parameters(), strict=True):
                own.grad, other.grad = torch.ones_like(own), torch.ones_like(own)
            theirs.step()
            ours.step()
            state = theirs.state_dict()
            for values in state["state"].values():
                if "step" in values:
                    values["step"] = int(values["step"])
            ours.load_state_dict(copy.deepcopy(state))
            theirs.load_state_dict(state)
        for own, other in zip(plain.parameters(), pipe.model.parameters(), strict=True):
            assert torch.equal(own, other)


def test_hints_name_what_works() -> None:
    with pipeline() as pipe:
        with pytest.raises(AttributeError, match="before the pipeline is built"):
            pipe.register_forward_hook(print)
        lbfgs = torch.optim.LBFGS(pipe.model.parameters())
        for given in (lbfgs, "lbfgs", pipe.optimizer(torch.optim.SGD, lr=0.1)):
            with pytest.raises(ps.InputError) as raised:
                pipe.optimizer(given)
            assert "torch.optim.LBFGS" not in str(raised.value)
            assert "torch.optim.PipelineOptimizer" not in str(raised.value)
