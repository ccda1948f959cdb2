"""A program replays its model: at other batch sizes, in both modes, cut anywhere."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.capture import Attribute, Key, Size
from penstock.capture.attributes import find, owner_of, put
from penstock.capture.trees import flatten
from tests.support.models import Case, UNet, cases, gpt2, mlp, own_forward
from tests.zoo.crossing import HeldTensors

KEY = Key(1, 2, 3)


def replay_cut(
    program: ps.Program, cuts: tuple[int, ...], args: Any, kwargs: Any, key: Key | None = KEY
) -> list[Any]:
    """The leaves of the result, computed stage after stage."""
    leaves = program.flatten_inputs(args, kwargs)
    stages = program.stages(cuts, program.model.training)
    sizes = program.varying.sizes(leaves)
    values = {value: leaves[value.leaf] for value in stages[0].inputs}
    for stage in stages:
        results = stage.module(sizes, key, *(values[value] for value in stage.inputs))
        values = dict(zip(stage.outputs, results, strict=True))
    trace = program.trace(program.model.training)
    return [
        values.get(leaf, leaf) if not isinstance(leaf, Size) else leaf for leaf in trace.outputs
    ]


def assert_equal(ours: list[Any], theirs: list[Any]) -> None:
    assert len(ours) == len(theirs) > 0
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize("case", cases().values(), ids=str)
def test_replays_at_other_batch_sizes(case: Case) -> None:
    program = ps.capture(case.model(), case.args, case.kwargs)
    for training, rows in [(True, 7), (False, 1)]:
        program.model.train(training)
        args = tuple(a[:rows] for a in case.args)
        kwargs = {k: v[:rows] if isinstance(v, torch.Tensor) else v for k, v in case.kwargs.items()}
        expected = flatten(own_forward(program, args, kwargs, KEY))[0]
        assert_equal(flatten(program.replay(args, kwargs, KEY))[0], expected)
        cuts = tuple(
            k
            for k in range(1, len(program), max(2, len(program) // 9))
            if program.cuts.forbidden(k) is None
        )
        assert len(cuts) >= 2
        assert_equal(replay_cut(program, cuts, args, kwargs), expected)
    assert type(program(*args, **kwargs)) is type(program.model(*args, **kwargs))


def test_every_single_cut() -> None:
    case = cases()["named"]
    program = ps.capture(case.model(), case.args, case.kwargs)
    expected = flatten(own_forward(program, case.args, case.kwargs, KEY))[0]
    for cut in range(1, len(program)):
        assert program.cuts.forbidden(cut) is None
        assert_equal(replay_cut(program, (cut,), case.args, case.kwargs), expected)


def test_random_calls_follow_the_key_and_leave_the_stream_alone() -> None:
    case = cases()["gpt2"]
    program = ps.capture(case.model(), case.args, case.kwargs)
    state = torch.get_rng_state()
    first, again, other = (
        program.replay((), case.kwargs, key).logits for key in (KEY, KEY, Key(1, 2, 4))
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    program(**case.kwargs)  # without a key it draws like the model
    assert not torch.equal(torch.get_rng_state(), state)


class Hostile(nn.Module):
    """A model with everything that capture must leave as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.scale = torch.ones(4)
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.frozen(self.norm(self.layer(x)))) * self.scale
        if self.fails:
            raise LookupError("the forward's own error")
        return x


@pytest.mark.parametrize("fails", [False, True])
def test_capture_leaves_the_model_untouched(fails: bool) -> None:
    model, x = Hostile(), torch.randn(6, 4)
    model.frozen.eval()
    model.fails = fails
    model.layer.weight.grad = torch.ones(4, 4)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    before = {name: (id(t), t._version, t.clone()) for name, t in tensors.items()}
    flags = [module.training for module in model.modules()]
    attributes = [dict(vars(module)) for module in model.modules()]
    state = torch.get_rng_state()
    if fails:
        with pytest.raises(ps.CaptureError, match=r"(?s)raised LookupError.*forward's own error"):
            ps.capture(model, (x,))
    else:
        program = ps.capture(model, (x,))
        program.stages((1, 2), training=True)
        ps.profile(program, devices=["cpu", "cpu"])
    for name, t in {**dict(model.named_parameters()), **dict(model.named_buffers())}.items():
        assert (id(t), t._version) == before[name][:2]
        assert torch.equal(t, before[name][2])
    assert [module.training for module in model.modules()] == flags
    assert [dict(vars(module)) for module in model.modules()] == attributes
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(model.layer.weight.grad, torch.ones(4, 4))
    assert all(p.grad is None for n, p in model.named_parameters() if n != "layer.weight")


@dataclass
class Pair:
    left: torch.Tensor
    right: Any


class Sizes(nn.Module):
    """Sizes of the form k * rows + d, a mask that depends on none, a dataclass out."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("table", torch.arange(12.0).view(3, 4))

    def forward(self, x: torch.Tensor) -> Pair:
        rows, length, width = x.shape
        flat = self.layer(x.reshape(rows * length, width))
        mask = torch.arange(length).view(1, length, 1) > 0
        assert bool(mask.any())  # may be read: no input has a say in it
        padded = torch.cat([flat, torch.zeros(2, width)])
        with torch.no_grad():
            table = self.table * 2
        return Pair(flat.view(x.shape) * mask + table[0], (padded.shape[0], padded.sum(1)))


def test_sizes_and_modes_inside_the_forward() -> None:
    model = Sizes()
    program = ps.capture(model, (torch.randn(5, 3, 4),))
    for rows in (1, 2, 9):
        x = torch.randn(rows, 3, 4)
        ours, theirs = program(x), model(x)
        assert isinstance(ours, Pair)
        assert torch.equal(ours.left, theirs.left)
        assert ours.right[0] == theirs.right[0] == 3 * rows + 2
        assert torch.equal(ours.right[1], theirs.right[1])


class Autocast(nn.Module):
    """Computes in bfloat16 inside."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = F.gelu(self.a(x)) @ self.b.weight
        return self.b(x.float())


def test_autocast_inside_the_forward() -> None:
    model, x = Autocast(), torch.randn(6, 4)
    program = ps.capture(model, (x,))
    assert torch.equal(program(x), model(x))
    assert_equal(replay_cut(program, (1, 2), (x,), {}), [model(x)])


def test_tied_weights_cross_as_values() -> None:
    program = ps.capture(gpt2(), (), {"input_ids": torch.randint(64, (4, 16))})
    middle = len(program) // 2
    assert Attribute("transformer.wte.weight") in program.cuts.boundary(middle)


class Siamese(nn.Module):
    """Calls one encoder twice."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = mlp(4, 4, 4), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.head(torch.cat([self.encoder(x), self.encoder(y)], 1))


def test_a_module_called_twice_is_cut_in_between() -> None:
    model, inputs = Siamese(), (torch.randn(5, 4), torch.randn(5, 4))
    program = ps.capture(model, inputs)
    for cut in range(1, len(program)):
        assert program.cuts.forbidden(cut) is None
        assert_equal(replay_cut(program, (cut,), inputs, {}), [model(*inputs)])


def test_other_batch_dimensions() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, *, mask: torch.Tensor) -> torch.Tensor:
            return self.layer(x).relu() * mask

    model, mask = Model(), torch.rand(3, 1, 4)
    program = ps.capture(
        model, (torch.randn(3, 5, 4),), {"mask": mask}, batch_dim={0: 1, "mask": None}
    )
    x = torch.randn(3, 8, 4)
    assert torch.equal(program(x, mask=mask), model(x, mask=mask))


@pytest.mark.parametrize("rows", [(5, 4), (4, 5)])
def test_inputs_of_different_batch_sizes(rows: tuple[int, int]) -> None:
    inputs = [torch.randn(n, 4) for n in rows]
    with pytest.raises(ps.InputError, match=f"input 0 has {rows[0]}, input 1 has {rows[1]}"):
        ps.capture(Siamese(), inputs)
    program = ps.capture(Siamese(), [inputs[0], inputs[0]])
    with pytest.raises(ps.InputError, match="different batch sizes"):
        program(*inputs)


def test_stages_can_be_read_and_pickled() -> None:
    model, x = mlp(4, 4, 4), torch.randn(3, 4)
    stage = ps.capture(model, (x,)).stages((1,), training=True)[1]
    assert "relu" in stage.module.code.lower() or "getattr(self" in stage.module.code
    again = pickle.loads(pickle.dumps(stage.module))
    assert torch.equal(again({"B": 3}, None, x)[0], stage.module({"B": 3}, None, x)[0])


class Nested(nn.Module):
    """Reads a weight of a part that it also calls, and calls one part below it."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.ModuleDict({"0": nn.Linear(4, 4), "deep": nn.Sequential(nn.Linear(4, 4))})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.own["0"](x) * self.own["0"].weight.sum()
        return self.own["deep"][0](x)


def test_stages_find_modules_without_looking_for_them() -> None:
    """What they call is in the instances' own dictionaries, but for those of the user's modules."""
    model, x = Nested(), torch.randn(3, 4)
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    stage = ps.capture(model, (x,)).stages((), training=True)[0].module
    original, found = nn.Module.__getattr__, []

    def noted(module: nn.Module, name: str) -> Any:
        found.append((type(module), name))
        return original(module, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Module, "__getattr__", noted)
        (result,) = stage({"B": 3}, None, x)
    assert torch.equal(result, model(x))
    assert {name for kind, name in found} <= {"weight", "bias"}
    for name, module in model.named_modules():
        assert vars(module).keys() == before[name].keys()


class Guarded(nn.Module):
    """Random calls, calls without gradients and under autocast, properties and methods."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(4, 4), nn.Linear(4, 4), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.a(x))
        with torch.no_grad():
            scale = x.mul(2).T.mean(1)
        with torch.autocast("cpu", torch.bfloat16):
            y = F.dropout(self.b(x), 0.3, self.training)
        return y.float() * scale.sum()


def test_random_and_guarded_calls_are_pickled_too() -> None:
    program = ps.capture(Guarded(), (torch.randn(6, 4),))
    (stage,) = program.stages((), training=True)
    again = pickle.loads(pickle.dumps(stage.module))
    x, sizes = torch.randn(5, 4), {"B": 5}
    assert torch.equal(again(sizes, KEY, x)[0], stage.module(sizes, KEY, x)[0])
    assert again.code == stage.module.code
    assert {n.meta.get("call") for n in again.graph.nodes} == {
        n.meta.get("call") for n in stage.module.graph.nodes
    }


class TakesModule(nn.Module):
    """A closed module that is given another as an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.tied = nn.Linear(4, 3), Transposed()
        self.last = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.tied(self.table(x), self.table))


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor, table: nn.Linear) -> torch.Tensor:
        return F.linear(x, table.weight.T, self.bias)


def test_a_module_as_an_argument() -> None:
    model, x = TakesModule(), torch.randn(6, 4)
    program = ps.capture(model, (x,))
    assert not program.closed
    assert torch.equal(program(x), model(x))
    ps.profile(program, devices=["cpu"], num_microbatches=1)
    assert program.cuts.forbidden(program.labels.index("last")) is None


def test_stages_can_be_compiled() -> None:
    program = ps.capture(gpt2(), kwargs={"input_ids": torch.randint(0, 50, (3, 8))})
    program.model.eval()
    cut = next(k for k in range(len(program) // 2, len(program)) if not program.cuts.forbidden(k))
    first, second = program.stages((cut,), training=False)
    for rows in (3, 5):
        values = [torch.randint(0, 50, (rows, 8))]
        sizes = {"B": rows}
        compiled = [torch.compile(s.module, backend="aot_eager") for s in (first, second)]
        with torch.no_grad():
            expected = second.module(sizes, None, *first.module(sizes, None, *values))
            given = compiled[1](sizes, None, *compiled[0](sizes, None, *values))
        assert all(torch.equal(a, b) for a, b in zip(given, expected, strict=True))
    assert "sizes['B']" in first.module.code


def test_boundaries_are_counted_in_bytes() -> None:
    program = ps.capture(mlp(4, 8, 2), (torch.randn(3, 4),))
    assert [program.cuts.num_bytes(k, {"B": 10}) for k in range(3)] == [160, 320, 320]


def test_explain_is_a_table() -> None:
    program = ps.capture(UNet(), (torch.randn(3, 3, 8, 8),))
    explanation = program.explain()
    assert len(explanation.rows) == len(program)
    assert sum(row.weight_bytes for row in explanation.rows) == sum(
        p.nbytes for p in program.model.parameters()
    )
    text = explanation.table()
    assert "down1.0" in text
    assert "float32[Bx4x8x8]" in text
    assert "in place" in text
    assert "UNet: " in text


def test_tensors_in_containers_are_read_by_their_places() -> None:
    model = HeldTensors()
    program = ps.capture(model, *model.inputs(3))
    assert not program.closed
    names = {v.name for c in program.train.calls for v in c.reads() if isinstance(v, Attribute)}
    assert names == {
        *("anchors.0", "anchors.1", "tables.scale", "tables.cpu", "pair.0"),
        *(f"layers.scales.{k}" for k in range(3)),
    }
    first = model.anchors[0]
    put(model, "anchors.0", first + 1)
    put(model, "pair.0", first)
    put(model, "tables.scale", first)
    assert torch.equal(find(model, "anchors.0"), first + 1)
    assert model.pair == (first, 3)
    assert model.tables["scale"] is first
    assert find(model, "anchors.name.0") is None


class NamedLikeMethods(nn.Module):
    """Has tensors under names that modules have methods of."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.cpu = torch.randn(4)
        self.part = nn.Module()
        self.part.half, self.part.half_ = torch.randn(4), torch.randn(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x) * self.cpu + self.part.half
        return self.layers[1](x) - self.part.half_


def test_attributes_that_are_named_like_methods() -> None:
    assert not ps.capture(NamedLikeMethods(), (torch.randn(3, 4),)).closed


def test_a_module_of_several_names_has_its_attributes_by_each() -> None:
    norm = nn.BatchNorm1d(4)
    model = nn.ModuleDict({"a": nn.Sequential(norm), "b": nn.Sequential(norm)})
    assert owner_of(model, "a.0.running_mean") == ("a.0", "running_mean")
    assert owner_of(model, "b.0.running_mean") == ("b.0", "running_mean")


class Cast(nn.Module):
    """Casts by the names and the classes that stand for dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        wide = h.type(torch.DoubleTensor) * 2
        return self.last(wide.type(h.type()).type(torch.float64).type(dtype=h.type()))


def test_kinds_of_tensors_are_dtypes() -> None:
    """`x.type()` says nothing of values, and a program is not bound to the kind's device."""
    model, x = Cast(), torch.randn(4, 4)
    program = ps.capture(model, (x,))
    casts = [call.args[1] for call in program.train.calls if call.label == "type()"]
    assert casts == [torch.float64, torch.float32, torch.float64, torch.float32]
    assert torch.equal(program(x), model(x))
