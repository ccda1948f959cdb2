"""What the first forward of a model does besides, and whether that closes the model."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import penstock as ps
from tests.capture.test_preserve import OwnOutput

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))


class KeepsLast(nn.Module):
    """Keeps what it gave last."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = self.inner(x)
        return self.last


def test_a_part_that_assigns_every_time_closes_itself_alone() -> None:
    """What the first forward marks elsewhere does not close more."""
    model, x = OwnOutput(), X
    model.first = KeepsLast()
    program = ps.capture(model, (x,))
    assert program.closed == {"first": "its forward assigns to self.last"}
    assert program.labels == ("first", "tanh()", "last")
    assert model.first.last is None
    assert not hasattr(model, "output_class")
    assert torch.equal(program(x).prediction, model(x).prediction)


class MarksWhatItAssigns(KeepsLast):
    """Its mark stands for a tensor that every forward assigns anew from what was there."""

    ready = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.ready:
            self.last, self.ready = torch.ones(4), True
        assert self.last is not None
        self.last = self.last * 1
        return self.inner(x) + self.last


def test_a_mark_that_stands_for_what_is_assigned_every_time() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), MarksWhatItAssigns()), X
    program = ps.capture(model, (x,))
    assert set(program.closed) == {"1"}
    assert (model[1].last, model[1].ready) == (None, False)
    assert torch.equal(program(x), model(x))


class First(nn.Module):
    """Marks itself the first time, and does something else then."""

    marked = False

    def __init__(self, how: str, inner: type[nn.Module] = KeepsLast) -> None:
        super().__init__()
        self.how, self.inner, self.head = how, inner(), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.marked:
            self.marked = True
            x = ONCE[self.how](self, x)
        result: torch.Tensor = self.head(self.inner(x).relu())
        return result


def hooked(block: First, x: torch.Tensor) -> torch.Tensor:
    block.head.register_forward_hook(lambda module, given, made: made * 2)
    return x


def hooked_before(block: First, x: torch.Tensor) -> torch.Tensor:
    block.head.register_forward_pre_hook(lambda module, given: (given[0] + 1,))
    return x


def writing(block: First, x: torch.Tensor) -> torch.Tensor:
    block.head.register_forward_hook(lambda module, given, made: (made.add_(1), None)[1])
    return x


def backward_hook(block: First, x: torch.Tensor) -> torch.Tensor:
    block.head.register_full_backward_hook(lambda module, gradients, given: (gradients[0] * 2,))
    return x


ONCE: dict[str, Callable[[First, torch.Tensor], torch.Tensor]] = {
    "computes": lambda block, x: x * 7,
    "hook": hooked,
    "pre-hook": hooked_before,
    "hook that writes": writing,
    "backward hook": backward_hook,
}


@pytest.mark.parametrize("inner", [KeepsLast, nn.Identity])
@pytest.mark.parametrize("how", ONCE)
def test_a_first_forward_that_acts_closes_the_model(how: str, inner: type[nn.Module]) -> None:
    """One that marks itself and does something else, at once or by hooks that it installs."""
    model = nn.Sequential(nn.Linear(4, 4), First(how, inner))
    plain = copy.deepcopy(model)
    program = ps.capture(model, (X,))
    assert "1" in program.closed
    assert not model[1].marked
    for _ in range(2):
        expected, found = plain(X), program(X)
        assert torch.equal(found, expected)
        one, other = (
            torch.autograd.grad(y.sum(), m[0].weight)[0]
            for y, m in ((found, model), (expected, plain))
        )
        assert torch.equal(one, other)


class Kinds(nn.Module):
    """Sets its kind when it is called first; another one that the script sets, it replaces."""

    kind: str | None = None

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor = 3 if self.kind == "other" else 1
        if self.kind != "usual":
            self.kind = "usual"
        result: torch.Tensor = self.head(self.body(x * factor).relu())
        return result


def test_a_mark_that_the_script_sets() -> None:
    """What the forward leaves there, and what was there before, are as good as each other."""
    model, plain = Kinds(), Kinds()
    plain.load_state_dict(model.state_dict())
    program = ps.capture(model, (X,))
    assert not program.closed
    for kind in (None, "usual"):
        model.kind = kind
        assert torch.equal(program(X), plain(X))
    model.kind = "other"
    with pytest.raises(ps.CaptureError, match="takes another way than with the example"):
        program(X)
    model.kind = None
    assert torch.equal(program(X), plain(X))


class NotesHow(nn.Module):
    """Notes at every call how it is called, and looks at that."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        self.masked = mask is not None
        self.calls += 1
        y = self.body(x) + self.calls
        if self.masked and mask is not None:
            y = y * mask
        result: torch.Tensor = self.head(y)
        return result


def test_what_every_forward_notes_may_be_something_else_in_between() -> None:
    model, plain = NotesHow(), NotesHow()
    plain.load_state_dict(model.state_dict())
    program = ps.capture(model, (X,))
    assert not program.closed
    assert torch.equal(program(X), plain(X))
    for each in (model, plain):
        each(X, torch.ones(4))
    for _ in range(2):
        assert torch.equal(program(X), plain(X))
    model.masked = torch.ones(3)
    assert torch.equal(program(X), plain(X))


class RunsOnce(KeepsLast):
    """Cannot be run twice before it was reset."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.last is None, "reset me"
        return super().forward(x)


def test_a_forward_that_runs_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4), RunsOnce())
    plain = copy.deepcopy(model)
    program = ps.capture(model, (X,))
    assert set(program.closed) == {"1"}
    assert torch.equal(program(X), plain(X))


class Loss(nn.Module):
    """A loss that a forward tells what it has done; it looks at that when it is called."""

    kind: str | None = None

    def forward(self, made: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return (made - wanted).square().mean() * (2 if self.kind == "double" else 1)


class TellsItsLoss(nn.Module):
    """Assigns to its loss, which does not run in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.loss = nn.Linear(4, 4), nn.Linear(4, 4), Loss()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.loss.kind = "double"
        result: torch.Tensor = self.head(self.body(x).tanh())
        return result


def test_what_a_forward_tells_a_module_that_does_not_run() -> None:
    model = TellsItsLoss()
    plain = copy.deepcopy(model)
    program = ps.capture(model, (X,))
    assert program.closed == {"": "its forward assigns to loss.kind"}
    assert model.loss.kind is None
    assert torch.equal(model.loss(program(X), X), plain.loss(plain(X), X))
