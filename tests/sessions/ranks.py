"""What sessions of ranks of torchrun return; each is a function of the rank."""

from __future__ import annotations

import copy
from typing import Any

import torch

from tests.sessions.test_sessions import (
    Careful,
    Feedback,
    Memory,
    Recurrent,
    Remembering,
    inputs,
    pipeline,
)


def raised(work: Any) -> tuple[str, str]:
    """The error that it ends in."""
    try:
        work()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def split(model: Any, x: torch.Tensor, **options: Any) -> Any:
    return pipeline(model, x, "torchrun", timeout=30.0, **options)


def objects(rank: int, in_place: str) -> Any:
    """States in an object that is given, of which rows are chosen; and what is fetched."""
    model = Remembering(in_place == "True").eval()
    xs, mine = inputs(7), Memory()
    chosen = torch.tensor([2, 0, 1])
    found = []
    with split(model, xs[0]) as pipe:
        session = pipe.session()
        for x in xs:
            result, given = session(x, mine)
            found.append(result)
            assert given is mine
            mine.seen = [state.index_select(0, chosen) for state in mine.seen]
        states = [(type(state).__name__, state.shape) for state in mine.seen]
        return found, states, session.fetch(mine).seen, mine.calls


def tuples(rank: int) -> Any:
    """States in a tuple; a training step between two calls."""
    model = Recurrent()
    xs = [x[:, 0] for x in inputs(5)]
    found, hidden = [], None
    with split(model, xs[0]) as pipe:
        optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
        session = pipe.session(states=[1])
        for x in xs:
            result, hidden = session(x, hidden) if hidden is not None else session(x)
            found.append(result)
            pipe.train_step(x, loss_fn=lambda output: output[0].square().mean())
            optimizer.step()
            optimizer.zero_grad()
        return found, session.fetch(hidden)


def feedback(rank: int, named: str) -> Any:
    """States of which one is read by the other stage in the next call; how many ways there are."""
    model = Feedback().eval()
    xs = [x[:, 0] for x in inputs(6)]
    found, ways, hidden = [], [], None
    with split(model, xs[0]) as pipe, torch.no_grad():
        session = pipe.session(states=[1]) if named == "True" else pipe.session()
        for x in xs:
            result, hidden = session(x, hidden)
            found.append(result)
            ways.append(len(pipe._runner.ways(False)))
        return found, session.fetch(hidden), ways


def replicas(rank: int) -> Any:
    """Sessions of two replicas, by turns; and a state that moves from one to the other."""
    model = Remembering().eval()
    xs = inputs(4)
    found = []
    with split(model, xs[0], replicas=2) as pipe:
        sessions = [pipe.session(), pipe.session()]
        memories = [Memory(), Memory()]
        for x in xs:
            for session, memory in zip(sessions, memories, strict=True):
                found.append(session(x, memory)[0])
        found.append(sessions[1](xs[0], memories[0])[0])
    return found


def failing(rank: int) -> Any:
    """A stage that fails; the states that were there before are still there."""
    model = Remembering().eval()
    model.layers[2] = Careful(4, 4)
    *xs, last = inputs(14)
    with split(model, last) as pipe:
        session, memory = pipe.session(), Memory()
        for x in xs:  # until a new length is not compared with the model
            session(x, memory)
        before = copy.copy(memory)
        before.seen = list(memory.seen)
        error = raised(lambda: session(last * torch.nan, memory))
        unlike = raised(lambda: session(last[0], before))
        return error, unlike, session(last, before)[0]


def apart(rank: int) -> Any:
    """One rank calls a session, and the other one something else."""
    model = Remembering().eval()
    (x,) = inputs(1)
    with split(model, x) as pipe:
        session = pipe.session()
        error = raised(lambda: pipe.train_step(x, loss_fn=_loss) if rank else session(x, Memory()))
        return error, session(x, Memory())[0]


def _loss(output: Any) -> torch.Tensor:
    loss: torch.Tensor = output[0].square().mean()
    return loss
