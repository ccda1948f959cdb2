"""What cannot be recorded closes the module around it, keeps the reason, and stays right."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import penstock as ps
from penstock.capture import Key
from tests.support.models import mlp

X = torch.randn(6, 4)


class Mapped(torch.autograd.Function):
    """Its backward could run any Python."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, function: Any) -> torch.Tensor:
        result: torch.Tensor = function(x)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * 2, None


class Block(nn.Module):
    """A linear layer with something awkward around it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.how = how
        self.last: Any = None
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        if self.how == "value":
            return x if x.sum() > 0 else -x
        if self.how == "function":
            return Mapped.apply(x, torch.tanh)
        if self.how == "reentrant":
            return checkpoint(torch.relu, x, use_reentrant=True)
        if self.how == "unknown":
            return x + torch.from_numpy(x.detach().numpy() * 2)
        if self.how == "attribute":
            self.last = x.shape
        if self.how == "container":
            self.seen.append(len(x))
        if self.how == "rows" and len(x) > 3:
            return x.relu().tanh()
        return x.relu()


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("value", "its Python reads a tensor's value"),
        ("function", "it applies Mapped, an autograd.Function of its own, applied to a builtin"),
        ("reentrant", "use_reentrant=True, .* with use_reentrant=False it would be opened"),
        ("unknown", "its Python reads a tensor's value|no recorded call made"),
        ("attribute", "its forward assigns to self.last"),
        ("container", "its forward assigns to self.seen"),
        ("rows", "with B=4 it is not what it is with B=2"),
    ],
)
def test_an_awkward_block_is_closed(how: str, reason: str) -> None:
    model = nn.Sequential(Block(how), mlp(4, 4, 4), Block(how))
    program = ps.capture(model, (X,))
    assert set(program.closed) == {"0", "2"}
    for why in program.closed.values():
        assert re.search(reason, why)
    assert [call.label for call in program.train.calls] == ["0", "1.0", "1.1", "1.2", "2"]
    assert model[0].last is None
    assert model[0].seen == []
    for rows in (2, 3, 5, 9):
        x = torch.randn(rows, 4)
        assert torch.equal(program(x), model(x))


@contextmanager
def less_precisely() -> Iterator[None]:
    """Not put back if the forward is broken off, as it is while it is recorded."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision(before)


SETTINGS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "attention": lambda: sdpa_kernel(SDPBackend.MATH),
    "precisions": less_precisely,
}


class Attention(nn.Module):
    """Computes it in a way of its own."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.layer = what, nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)[:, None]
        with SETTINGS[self.what]():
            return F.scaled_dot_product_attention(x, x, x)[:, 0]


@pytest.mark.parametrize("what", SETTINGS)
def test_settings_of_torch_for_a_part_of_a_forward(what: str) -> None:
    """At the rows of the example the bits can be the same, which is no matter."""
    model = nn.Sequential(nn.Linear(32, 32), Attention(what))
    x = torch.randn(4, 16, 32)
    program = ps.capture(model, (x,))
    assert torch.get_float32_matmul_precision() == "highest"
    assert list(program.closed) == ["1"]
    assert f"changes a setting of torch for a part of it ({what})" in program.closed["1"]
    assert torch.equal(program(x), model(x))


class Packing(nn.Module):
    """Keeps what its backward needs in half precision, or on the CPU."""

    def __init__(self, hooks: Callable[[], AbstractContextManager[None]]) -> None:
        super().__init__()
        self.hooks, self.layer = hooks, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.hooks():
            result: torch.Tensor = self.layer(x).sin()
        return result


def test_hooks_on_what_is_saved() -> None:
    def pack() -> Any:
        return torch.autograd.graph.saved_tensors_hooks(lambda t: t.half(), lambda t: t.float())

    program = ps.capture(nn.Sequential(Packing(pack), nn.Linear(4, 4)), (X,))
    assert "hooks on what is saved for the backward" in program.closed["0"]
    moving = nn.Sequential(Packing(torch.autograd.graph.save_on_cpu), nn.Linear(4, 4))
    assert not ps.capture(moving, (X,)).closed


class Seeding(nn.Module):
    """Draws the same numbers every time."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            x = x * torch.rand(4)
        result: torch.Tensor = self.layer(x)
        return result


def test_a_forward_that_seeds_a_generator() -> None:
    model = nn.Sequential(Seeding(), nn.Linear(4, 4))
    program = ps.capture(model, (X,))
    assert "seeds a generator of torch" in program.closed["0"]
    key = Key(seed=1, step=2, microbatch=0)
    assert torch.equal(program.replay((X,), {}, key=key), model(X))


READS: dict[str, Callable[[torch.Tensor], int]] = {
    "numpy": lambda lengths: int(lengths.detach().numpy().max()),
    "__array__": lambda lengths: int(np.asarray(lengths).max()),
    "__dlpack__": lambda lengths: int(np.from_dlpack(lengths).max()),
    "untyped_storage": lambda lengths: max(lengths.untyped_storage().tolist()),
    "__format__": lambda lengths: int(f"{lengths[0]}"),
    "__repr__": lambda lengths: int(repr(lengths[0]).strip("tensor()")),
}


class Scaled(nn.Module):
    """By what Python has read off the inputs in some way."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.layer = how, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(4).numpy().tolist()  # which are always the same
        result: torch.Tensor = self.layer(x)[:, positions] * READS[self.how](lengths)
        return result


@pytest.mark.parametrize("how", READS)
def test_values_that_python_gets_by_way_of_something_else(how: str) -> None:
    model = Scaled(how)
    program = ps.capture(model, (X, torch.full((6,), 5)))
    assert f"reads a tensor's values ({how}())" in program.closed[""]
    for length in (5, 2):
        lengths = torch.full((6,), length)
        assert torch.equal(program(X, lengths), model(X, lengths))


class Judging(nn.Module):
    """Says something of values, beside a tensor."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, bool]:
        return x * 2, bool(x.max() > 20)


class Judged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.judging = nn.Linear(4, 4), Judging()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, is_large = self.judging(self.layer(x))
        return x - 100 if is_large else x


def test_a_number_beside_tensors_is_no_constant() -> None:
    model = nn.Sequential(Judged(), nn.Linear(4, 4))
    program = ps.capture(model, (X,))
    assert "looks at values, and gives False beside tensors" in program.closed["0"]
    for x in (X, X * 1000):
        assert torch.equal(program(x), model(x))
    whole = Judging()
    assert torch.equal(ps.capture(whole, (X,))(X)[0], whole(X)[0])


def test_values_that_are_always_the_same_close_nothing() -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.layer(x)[:, torch.arange(4).numpy().tolist()]
            return result

    assert not ps.capture(Constant(), (X,)).closed


def test_a_model_that_must_stay_whole_says_how_it_would_not() -> None:
    with pytest.raises(ps.PlanError, match=r"the model itself: .* use_reentrant=False"):
        ps.Pipeline(Block("reentrant"), (X,), devices=["cpu", "cpu"], workers="threads", replicas=1)


def test_both_branches_are_right() -> None:
    model = nn.Sequential(Block("value"), nn.Linear(4, 4))
    program = ps.capture(model, (X,))
    with torch.no_grad():
        for bias in (100.0, -100.0):
            model[0].layer.bias.fill_(bias)
            assert torch.equal(program(X), model(X))


def test_hooks_close_their_module_and_run() -> None:
    model = nn.Sequential(mlp(4, 4, 4), nn.Linear(4, 4))
    model[0].register_forward_hook(lambda module, args, output: output + 1)
    program = ps.capture(model, (X,))
    assert program.closed == {"0": "it has forward hooks, which must run around it"}
    assert torch.equal(program(X), model(X))


def test_closed_as_asked() -> None:
    model = nn.Sequential(mlp(4, 4, 4), mlp(4, 4, 4))
    program = ps.capture(model, (X,), keep_closed=["1"])
    assert [call.label for call in program.train.calls] == ["0.0", "0.1", "0.2", "1"]
    with pytest.raises(ps.CaptureError, match="keep_closed names 'encoder'"):
        ps.capture(model, (X,), keep_closed=["encoder"])


class Opaque(nn.Module):
    """Passes an object of its own from one submodule to the next."""

    class Box:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

    class Pack(nn.Module):
        def forward(self, x: torch.Tensor) -> Opaque.Box:
            return Opaque.Box(x * 2)

    class Unpack(nn.Module):
        def forward(self, box: Opaque.Box) -> torch.Tensor:
            return box.tensor + 1

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.pack, self.unpack = nn.Linear(4, 4), self.Pack(), self.Unpack()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.unpack(self.pack(self.layer(x)))


def test_objects_of_unknown_types_do_not_cross() -> None:
    model = Opaque()
    program = ps.capture(model, (X,))
    assert torch.equal(program(X), model(X))
    assert [program.cuts.forbidden(k) for k in (1, 2)] == [
        None,
        "the result of pack is neither a tensor nor plain data",
    ]


class Aliased(nn.Module):
    """Changes memory that a view of it sees later."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        view = y.view(-1)
        z = torch.tanh(x)
        y.add_(1)
        return z + view.view(x.shape) * y


def test_no_cut_between_a_view_and_a_change() -> None:
    program = ps.capture(Aliased(), (X,))
    labels = [call.label for call in program.train.calls]
    change = labels.index("add_()")
    reasons = [program.cuts.forbidden(k) for k in range(1, len(labels))]
    assert "share memory that is changed later" in str(reasons[change - 1])
    assert reasons[0] is None  # before the view there is only one name for the memory
    assert "changed after one of them was made" in str(reasons[change])
    assert reasons[change + 1] is None  # the view of the view is newer than the change
    assert torch.equal(program(X), program.model(X))


class Counted(nn.Module):
    """Changes a buffer in its own Python, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        x = torch.tanh(x)
        self.count.mul_(2)
        return x + 1


def test_no_cut_between_two_changes_of_a_buffer() -> None:
    program = ps.capture(Counted(), (X,))
    reasons = [program.cuts.forbidden(k) for k in range(1, len(program))]
    assert reasons[:2] == ["count is changed in place and used on both sides"] * 2
    assert reasons[2] is None
    assert program.train.changed == ("count",)


def test_randomness_of_a_closed_block_is_seeded() -> None:
    class Noise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.drop(x) if x.sum() > 0 else self.drop(-x)

    program = ps.capture(nn.Sequential(nn.Linear(4, 4), Noise()), (X,))
    assert "1" in program.closed
    first, again = (program.replay((X,), {}, Key(0, 0, 0)) for _ in range(2))
    assert torch.equal(first, again)
    other = program.replay((X,), {}, Key(0, 0, 1))
    assert not torch.equal(first, other)


def test_whether_a_block_runs_is_its_callers_doing() -> None:
    class Caller(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = mlp(4, 4, 4), mlp(4, 4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.one(x) if len(x) < 4 else self.two(x)

    model = nn.Sequential(nn.Linear(4, 4), Caller())
    program = ps.capture(model, (X,))
    assert {"1"} <= set(program.closed) <= {"1", "1.one", "1.two"}
    for rows in (2, 7):
        x = torch.randn(rows, 4)
        assert torch.equal(program(x), model(x))
