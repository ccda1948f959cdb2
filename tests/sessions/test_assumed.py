"""Passes that begin before it is known that the model is as it was."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.workers.processes.jobs import RunLike
from tests.sessions.test_sessions import KINDS, Recurrent, inputs, pipeline
from tests.support.models import uniform_plan

pytestmark = pytest.mark.usefixtures("pool")


class Scaled(Recurrent):
    """Reads an attribute in Python, and may change its input."""

    def __init__(self, in_place: bool = False) -> None:
        super().__init__()
        self.scale, self.in_place = 2.0, in_place

    def forward(self, x: torch.Tensor, hidden: Any = None) -> Any:
        """Values (rows, 4) and the two states; returns values (rows, 3) and the states."""
        if self.in_place:
            x += 1
        out, hidden = super().forward(x, hidden)
        return (out * self.scale if self.scale != 1 else out + 1), hidden


def steps(count: int) -> list[torch.Tensor]:
    return [x[:, 0] for x in inputs(count)]


def assumed(pipe: Any) -> list[bool]:
    """Of every pass that is finished from now on whether it was begun so."""
    sessions, found = pipe._sessions, []
    finish = sessions.finish

    def noted(done: Any) -> Any:
        found.append(done.assumed)
        return finish(done)

    sessions.finish = noted
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_change_of_the_model_takes_effect_at_once(kind: Any) -> None:
    model, xs = Scaled().eval(), steps(14)
    with pipeline(model, xs[0], kind) as pipe, torch.no_grad():
        session, noted = pipe.session(states=[1]), assumed(pipe)
        found, mine = session(xs[0])
        wanted, theirs = model(xs[0])
        for k, x in enumerate(xs[1:]):
            if k == 6:
                model.scale = 1
            if k == 8:
                model.head.weight.mul_(2)
            if k == 10:
                model.train()
            found, mine = session(x, mine)
            wanted, theirs = model(x, theirs)
            assert torch.equal(found, wanted), k
        assert all(map(torch.equal, session.fetch(mine), theirs))
        assert (
            noted[4:8] == [kind == "processes"] * 4
        )  # also the one at whose beginning the scale was another
        assert not noted[11]  # another mode is seen before


@pytest.mark.parametrize("kind", KINDS)
def test_a_replaced_parameter_is_an_error(kind: Any) -> None:
    model, xs = Scaled().eval(), steps(9)
    with pipeline(model, xs[0], kind) as pipe, torch.no_grad():
        session, noted = pipe.session(states=[1]), assumed(pipe)
        found, mine = session(xs[0])
        for x in xs[1:6]:
            found, mine = session(x, mine)
        assert noted[-1] == (kind == "processes")
        before, model.head.weight = model.head.weight, nn.Parameter(torch.zeros(3, 5))
        with pytest.raises(ps.InputError, match=r"'head.weight' was replaced"):
            session(xs[6], mine)
        model.head.weight = before
        kept = session.fetch(mine)
        found, mine = session(xs[7], mine)
        assert torch.equal(found, model(xs[7], kept)[0])


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_are_seen(kind: Any) -> None:
    model, xs = Scaled().eval(), steps(9)
    with pipeline(model, xs[0], kind) as pipe, torch.no_grad():
        session = pipe.session(states=[1])
        _found, mine = session(xs[0])
        for x in xs[1:5]:
            _found, mine = session(x, mine)
        hook = model.register_forward_hook(lambda *_: None)
        with pytest.raises(ps.InputError, match="hooks that were registered"):
            session(xs[5], mine)
        hook.remove()
        kept = session.fetch(mine)
        assert torch.equal(session(xs[6], mine)[0], model(xs[6], kept)[0])


@pytest.mark.parametrize("kind", KINDS)
def test_passes_that_are_given_up_leave_nothing(kind: Any) -> None:
    model, xs = Scaled().eval(), steps(12)
    with pipeline(model, xs[0], kind) as pipe, torch.no_grad():
        session = pipe.session(states=[1])
        mine = None
        for k, x in enumerate(xs):
            model.scale = 1 + k % 2
            found, mine = session(x, mine) if mine else session(x)
            out = model.head(session.fetch(mine)[1])
            assert torch.equal(found, out * 2 if k % 2 else out + 1)
        held = pipe._sessions.held()
        assert sum(held.values()) == 2 * 3 * 5 * 4
        del mine, session, found
        gc.collect()
        pipe._sessions.drop()
        assert not pipe._workers.fetch_states(range(200))


def test_two_sessions_in_flight_and_a_change_between() -> None:
    model, xs = Scaled().eval(), steps(12)
    with pipeline(model, xs[0], "processes") as pipe, torch.no_grad():
        own = [pipe.session(states=[1]) for _ in range(2)]
        sessions, noted = pipe._sessions, assumed(pipe)
        results = [session(xs[k]) for k, session in enumerate(own)]
        theirs = [model(xs[k]) for k in range(2)]
        for k, x in enumerate(xs):
            begun = [sessions.start(s, (x, r[1]), {}) for s, r in zip(own, results, strict=True)]
            if k == 6:
                model.scale = 1  # both began before: what counts is the model when they end
            results = [sessions.finish(each) for each in begun]
            theirs = [model(x, state) for _, state in theirs]
            for found, wanted in zip(results, theirs, strict=True):
                assert torch.equal(found[0], wanted[0]), k
        assert noted[-4:] == [True] * 4


def test_what_changes_its_inputs_is_looked_at_before() -> None:
    model, xs = Scaled(in_place=True).eval(), steps(8)
    with pipeline(model, xs[0].clone()) as pipe, torch.no_grad():
        session, noted = pipe.session(states=[1]), assumed(pipe)
        found, mine = session(xs[0].clone())
        wanted, theirs = model(xs[0].clone())
        for x in xs[1:]:
            found, mine = session(x.clone(), mine)
            wanted, theirs = model(x.clone(), theirs)
            assert torch.equal(found, wanted)
        assert not any(noted)


def test_such_a_pass_is_told_to_processes_in_few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    model, xs = Scaled().eval(), steps(9)
    with pipeline(model, xs[0], "processes") as pipe, torch.no_grad():
        told: list[Any] = []
        start = pipe._workers._pool.start
        monkeypatch.setattr(
            pipe._workers._pool,
            "start",
            lambda jobs, *more: (told.append(jobs), start(jobs, *more))[1],
        )
        session = pipe.session(states=[1])
        _found, mine = session(xs[0])
        for x in xs[1:]:
            _found, mine = session(x, mine)
        assert all(isinstance(job, RunLike) for job in told[-1])
        torch.set_default_dtype(torch.float64)  # which the workers have to be told
        try:
            session(xs[1], mine)
        finally:
            torch.set_default_dtype(torch.float32)
        assert not any(isinstance(job, RunLike) for job in told[-1])


class Called(nn.Module):
    """Reads an attribute of its own, which nobody but the process that has it knows."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Values of any shape, times the factor."""
        return x * self.factor


def test_what_another_pass_has_told_meanwhile() -> None:
    """A pass that began with the old attribute is wrong, though the process knows the new one."""
    model = Recurrent().eval()
    model.head = nn.Sequential(model.head, called := Called())  # type: ignore[assignment]
    xs = steps(9)
    program = ps.capture(model, (xs[0],), keep_closed=["head.1"])
    plan = uniform_plan(program, 2, 1)
    with (
        ps.Pipeline(
            *(model, (xs[0],)),
            program=program,
            plan=plan,
            workers="processes",
            progress=None,
            threads_per_worker=1,
            audit=None,
        ) as pipe,
        torch.no_grad(),
    ):
        session, sessions = pipe.session(states=[1]), pipe._sessions
        _found, mine = session(xs[0])
        for x in xs[1:6]:
            _found, mine = session(x, mine)
        kept = session.fetch(mine)
        called.factor = 5.0
        begun = sessions.start(session, (xs[6], mine), {})
        assert begun.assumed
        other = sessions.start(pipe.session(states=[1]), (xs[7],), {})
        assert torch.equal(sessions.finish(begun)[0], model(xs[6], kept)[0])
        assert torch.equal(sessions.finish(other)[0], model(xs[7])[0])


def test_a_call_that_is_refused_loses_no_states() -> None:
    model, xs = Scaled().eval(), steps(9)
    with pipeline(model, xs[0], "processes") as pipe, torch.no_grad():
        session = pipe.session(states=[1])
        _found, mine = session(xs[0])
        del mine, _found
        session.familiar = session.result = None
        gc.collect()
        hook = model.head.register_forward_hook(lambda *_: None)
        with pytest.raises(ps.InputError, match="hooks"):
            session(xs[1])
        hook.remove()
        del session
        gc.collect()
        pipe._sessions.drop()
        assert not pipe._workers.fetch_states(range(50))
