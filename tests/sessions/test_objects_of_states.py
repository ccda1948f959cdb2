"""Objects that hold states: a session writes into one where the model does, and into no other."""

from __future__ import annotations

import copy
import os
import signal
import threading
from typing import Any

import pytest
import torch
from torch import nn

import penstock as ps
from tests.support.models import uniform_plan


class Kept:
    """A state in an object."""

    def __init__(self, h: torch.Tensor) -> None:
        self.h = h


class Cells(nn.Module):
    """Gives a new object for each call, or else the one that it was given, changed."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other, self.in_place = nn.Linear(4, 4), nn.Linear(4, 4), in_place

    def forward(self, x: torch.Tensor, kept: Any = None) -> Any:
        h = self.one(x) if kept is None else self.one(x) + kept.h
        if kept is not None and self.in_place:
            kept.h = h
        else:
            kept = Kept(h)
        return self.other(h.relu()), kept


X = torch.linspace(-1, 1, 8).reshape(2, 4)


def pipeline(model: nn.Module, workers: Any = "threads") -> ps.Pipeline:
    program = ps.capture(model, (X,))
    plan = uniform_plan(program, 2, 1)
    pipe = ps.Pipeline(
        model, (X,), plan=plan, program=program, workers=workers, progress=None, audit=None
    )
    pipe.eval()
    return pipe


@pytest.mark.parametrize("in_place", [False, True])
def test_calls_are_those_of_the_model(in_place: bool) -> None:
    """Two calls from one state, after a call of the same kind, and objects that are handed on."""
    model = Cells(in_place).eval()
    with torch.no_grad(), pipeline(model) as pipe:
        session = pipe.session()
        (y, kept), (wanted, theirs) = session(X), model(X)
        assert torch.equal(y, wanted)
        for k in range(4):
            (y, made), (wanted, own) = session(X + k, kept), model(X + k, theirs)
            assert torch.equal(y, wanted)
            assert (made is kept) == (own is theirs) == in_place
            assert torch.equal(session.fetch(kept).h, theirs.h)
            if k == 2:
                kept, theirs = made, own


def test_two_prompts_have_two_objects() -> None:
    model = Cells(in_place=True).eval()
    with torch.no_grad(), pipeline(model) as pipe:
        session = pipe.session()
        firsts = [session(X + k)[1] for k in range(3)]
        theirs = [model(X + k)[1] for k in range(3)]
        assert len(set(map(id, firsts))) == 3
        for kept, own in zip(firsts, theirs, strict=True):
            assert torch.equal(session(X, kept)[0], model(X, own)[0])


def test_a_state_is_copied_without_its_elements() -> None:
    model = Cells(in_place=True).eval()
    with torch.no_grad(), pipeline(model) as pipe:
        session = pipe.session()
        (_, kept), (_, theirs) = session(X), model(X)
        copied, copied_theirs = copy.deepcopy(kept), copy.deepcopy(theirs)
        session(X, kept)
        assert torch.equal(session(X, copied)[0], model(X, copied_theirs)[0])


class Three(nn.Module):
    """Layers of which each has a state."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor, states: Any = None) -> Any:
        made = []
        for k, layer in enumerate(self.layers):
            x = layer(x) + (0 if states is None else states[k])
            made.append(x)
            x = x.relu()
        return x, tuple(made)


def test_a_first_pass_that_others_take_over() -> None:
    """Where its states are is known of the plan that it has run on in the end."""
    model = Three().eval()
    with torch.no_grad():
        wanted, states = model(X)
        following, _ = model(X, states)
    options: dict[str, Any] = {"inference": True, "states": [1], "replicas": 1, "progress": None}
    with ps.Pipeline(
        model, (X,), devices=["cpu"] * 3, workers="processes", on_failure="continue", **options
    ) as pipe:
        pipe.eval()
        session = pipe.session()
        session(X, session(X)[1])  # both ways are known
        pid = pipe.members[0].pid
        os.kill(pid, signal.SIGSTOP)
        threading.Timer(0.3, os.kill, (pid, signal.SIGKILL)).start()
        session = pipe.session()
        y, made = session(X)
        assert torch.equal(y, wanted)
        assert len(pipe.plan.stages) == 2
        assert {state.seen.value.stage for state in made} <= {0, 1}
        for one, other in zip(session.fetch(made), states, strict=True):
            assert torch.equal(one, other)
        assert torch.equal(session(X, made)[0], following)


class Flagged(Cells):
    """Does something else if the state says so, which it need not say."""

    def forward(self, x: torch.Tensor, kept: Any = None) -> Any:
        return super().forward(-x if getattr(kept, "turns", False) else x, kept)


def test_an_attribute_that_an_object_gets_later_is_seen() -> None:
    model = Flagged(in_place=True).eval()
    with torch.no_grad(), pipeline(model) as pipe:
        session = pipe.session()
        (_, kept), (_, theirs) = session(X), model(X)
        for k in range(5):
            if k == 3:
                kept.turns = theirs.turns = True
            assert torch.equal(session(X + k, kept)[0], model(X + k, theirs)[0])
