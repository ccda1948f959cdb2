"""`Pipeline.session` under torchrun: every rank calls it, and every rank gets the result."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.sessions.test_sessions import Careful, Feedback, Memory, Recurrent, Remembering, inputs
from tests.workers.ranks.launching import Launcher


@pytest.mark.parametrize("in_place", [False, True])
def test_states_in_an_object(launcher: Launcher, tmp_path: Path, in_place: bool) -> None:
    model, theirs = Remembering(in_place).eval(), Memory()
    wanted = []
    with torch.no_grad():
        for x in inputs(7):
            wanted.append(model(x, theirs)[0])
            theirs.seen = [state.index_select(0, torch.tensor([2, 0, 1])) for state in theirs.seen]
    for found, states, seen, calls in launcher.run(f"has_sessions:objects:{in_place}", tmp_path):
        assert all(map(torch.equal, found, wanted))
        assert states == [("Resident", state.shape) for state in theirs.seen]
        assert all(map(torch.equal, seen, theirs.seen))
        assert calls == 7


def test_states_in_a_tuple_and_training(launcher: Launcher, tmp_path: Path) -> None:
    model: Any = Recurrent()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wanted, hidden = [], None
    for x in (x[:, 0] for x in inputs(5)):
        with torch.no_grad():
            result, hidden = model(x, hidden)
        wanted.append(result)
        model(x)[0].square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert hidden is not None
    for found, last in launcher.run("has_sessions:tuples", tmp_path):
        assert all(map(torch.equal, found, wanted))
        assert all(map(torch.equal, last, hidden))


@pytest.mark.parametrize("named", [False, True])
def test_states_that_move_to_other_stages(launcher: Launcher, tmp_path: Path, named: bool) -> None:
    model: Any = Feedback().eval()
    wanted, hidden = [], None
    with torch.no_grad():
        for x in (x[:, 0] for x in inputs(6)):
            result, hidden = model(x, hidden)
            wanted.append(result)
    assert hidden is not None
    for found, last, ways in launcher.run(f"has_sessions:feedback:{named}", tmp_path):
        assert all(map(torch.equal, found, wanted))
        assert all(map(torch.equal, last, hidden))
        assert ways[2] == ways[-1]


def test_replicas(launcher: Launcher, tmp_path: Path) -> None:
    """Two stages each: inputs of the second go to where its first stage is."""
    model, xs = Remembering().eval(), inputs(4)
    wanted, memories = [], [Memory(), Memory()]
    with torch.no_grad():
        for x in xs:
            wanted += [model(x, memory)[0] for memory in memories]
        wanted.append(model(xs[0], memories[0])[0])
    for found in launcher.run("has_sessions:replicas", tmp_path, 4):
        assert all(map(torch.equal, found, wanted))
        assert len(found) == len(wanted)


def test_errors(launcher: Launcher, tmp_path: Path) -> None:
    """All ranks raise those of a stage and of arguments, and go on with the states of before."""
    model, memory = Remembering().eval(), Memory()
    model.layers[2] = Careful(4, 4)
    *xs, last = inputs(14)
    with torch.no_grad():
        for x in xs:
            model(x, memory)
        wanted = model(last, copy.copy(memory))[0]
    for failed, unlike, found in launcher.run("has_sessions:failing", tmp_path):
        assert failed[0] == "WorkerError"
        assert "stage 1 failed" in failed[1]
        assert "not a number" in failed[1]
        assert unlike[0]
        assert torch.equal(found, wanted)


def test_ranks_that_do_different_things(launcher: Launcher, tmp_path: Path) -> None:
    model = Remembering().eval()
    (x,) = inputs(1)
    with torch.no_grad():
        wanted = model(x, Memory())[0]
    for (kind, text), found in launcher.run("has_sessions:apart", tmp_path):
        assert kind == "InputError"
        assert "all ranks must call the same methods" in text
        assert torch.equal(found, wanted)
