"""`Pipeline.session`: states stay with the workers, and results are those of the model."""

from __future__ import annotations

import copy
import gc
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

import penstock as ps
from tests.support.interrupts import drop_interrupted
from tests.support.models import replicated, uniform_plan

KINDS: Any = ["threads", "processes"]
pytestmark = pytest.mark.usefixtures("pool")


class Memory:
    """What a model remembers: tensors in a list, and how many calls there were."""

    def __init__(self) -> None:
        self.seen: list[Any] = [None, None, None]
        self.calls = 0


class Remembering(nn.Module):
    """Layers that append to their memory, as attention does to its keys."""

    def __init__(self, in_place: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.in_place = in_place

    def forward(self, x: torch.Tensor, memory: Any = None) -> Any:
        memory = Memory() if memory is None else memory
        for k, layer in enumerate(self.layers):
            x = layer(x).tanh()
            before = memory.seen[k]
            if before is None:
                memory.seen[k] = x.sum(1, keepdim=True) if self.in_place else x
            elif self.in_place:
                before += x.sum(1, keepdim=True)
            else:
                memory.seen[k] = torch.cat([before, x], 1)
            x = x + memory.seen[k].mean(1, keepdim=True)
        memory.calls += 1
        return x, memory


class Careful(nn.Linear):
    """Refuses what is no number."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.isnan().any():
            raise ValueError("not a number")
        return super().forward(x)


class Recurrent(nn.Module):
    """Two cells whose states are a plain tuple."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.GRUCell(4, 5), nn.GRUCell(5, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor, hidden: Any = None) -> Any:
        zeros = x.new_zeros(len(x), 5)
        one, other = hidden if hidden is not None else (zeros, zeros)
        one = self.first(x, one)
        other = self.second(one, other)
        return self.head(other), (one, other)


class Feedback(Recurrent):
    """The first cell reads the state of the second, and the second that of the first."""

    def forward(self, x: torch.Tensor, hidden: Any = None) -> Any:
        zeros = x.new_zeros(len(x), 5)
        one, other = hidden if hidden is not None else (zeros, zeros)
        one, other = self.first(x, other), self.second(one, one)
        return self.head(other), (one, other)


def pipeline(model: nn.Module, x: torch.Tensor, kind: Any = "threads", **options: Any) -> Any:
    program = ps.capture(model, (x,))
    plan = replicated(uniform_plan(program, 2, 1), options.pop("replicas", 1))
    return ps.Pipeline(
        *(model, (x,)),
        program=program,
        plan=plan,
        workers=kind,
        progress=None,
        threads_per_worker=1,
        audit=None,
        **options,
    )


def inputs(count: int, rows: int = 3, length: int = 2) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(1)
    return [torch.randn(rows, length, 4, generator=made) for _ in range(count)]


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_states_in_an_object(kind: Any, in_place: bool) -> None:
    model = Remembering(in_place).eval()
    xs = inputs(9)
    mine, theirs = Memory(), Memory()
    with pipeline(model, xs[0], kind) as pipe, torch.no_grad():
        session = pipe.session()
        for number, x in enumerate(xs):
            wanted, theirs = model(x, theirs)
            found, given = session(x, mine)
            assert torch.equal(found, wanted)
            assert given is mine  # the object that was given is what the forward made of it
            assert mine.calls == number + 1
            assert [s.shape for s in mine.seen] == [s.shape for s in theirs.seen]
        with pytest.raises(ps.InputError, match=r"needs the elements .* session.fetch"):
            mine.seen[0].sum().item()
        brought = session.fetch(mine)
        assert all(map(torch.equal, brought.seen, theirs.seen))
        assert pipe.session().fetch(mine.seen[1]).equal(theirs.seen[1])


@pytest.mark.parametrize("kind", KINDS)
def test_states_in_a_tuple(kind: Any) -> None:
    model = Recurrent().eval()
    xs = [x[:, 0] for x in inputs(7)]
    mine = theirs = None
    with pipeline(model, xs[0], kind) as pipe, torch.no_grad():
        session = pipe.session(states=[1])
        for x in xs:
            wanted, theirs = model(x, theirs) if theirs is not None else model(x)
            found, mine = session(x, mine) if mine is not None else session(x)
            assert torch.equal(found, wanted)
        assert mine is not None
        assert "Resident" in repr(mine[0])
        assert all(map(torch.equal, session.fetch(mine), theirs))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_chosen_repeated_and_cut_off(kind: Any) -> None:
    """What the script does to states between two calls, the worker does to the values."""
    model = Remembering().eval()
    xs = inputs(5)
    mine, theirs = Memory(), Memory()
    chosen = torch.tensor([2, 0, 2])
    with pipeline(model, xs[0], kind) as pipe, torch.no_grad():
        session = pipe.session()
        for x in xs:
            wanted, theirs = model(x, theirs)
            found, mine = session(x, mine)
            assert torch.equal(found, wanted)
            for memory in (mine, theirs):
                memory.seen = [s.index_select(0, chosen)[:, -3:] for s in memory.seen]
        for memory in (mine, theirs):
            memory.seen = [s.repeat_interleave(2, dim=0) for s in memory.seen]
        x = torch.cat([xs[0], xs[1]])
        assert torch.equal(session(x, mine)[0], model(x, theirs)[0])


def test_a_branch_keeps_what_was_before() -> None:
    """Two continuations of one state: the first does not disturb the second."""
    model = Remembering().eval()
    x, one, other = inputs(3)
    mine, theirs = Memory(), Memory()
    with pipeline(model, x) as pipe, torch.no_grad():
        session = pipe.session()
        session(x, mine)
        model(x, theirs)
        branch, its = copy.copy(mine), copy.copy(theirs)
        branch.seen, its.seen = list(mine.seen), list(theirs.seen)
        assert torch.equal(session(one, mine)[0], model(one, theirs)[0])
        assert torch.equal(session(other, branch)[0], model(other, its)[0])


def test_states_are_let_go() -> None:
    model = Remembering().eval()
    xs = inputs(6)
    with pipeline(model, xs[0]) as pipe:
        session = pipe.session()
        memory = Memory()
        for x in xs:
            session(x, memory)
        there = pipe._workers.fetch_states(range(pipe._sessions._kept))
        assert len(there) <= 2 * 3  # of the last call, and of the one before it
        layer = 3 * 12 * 4 * 4  # bytes of three rows after six calls of two
        assert pipe._sessions.held() == {0: 2 * layer, 1: layer}
        assert "states of sessions: 1.2 kB with stage 0, 576 B with stage 1" in str(pipe.status())
        del memory, session, there
        gc.collect()
        pipe._sessions.drop()
        assert not pipe._workers.fetch_states(range(pipe._sessions._kept))


def test_a_ctrl_c_is_not_lost_when_states_die() -> None:
    model = Remembering().eval()
    (x,) = inputs(1)
    with pipeline(model, x) as pipe:
        memory = Memory()
        pipe.session()(x, memory)
        held: list[Any] = [memory]
        del memory
        gc.collect()
        with pytest.raises(KeyboardInterrupt):
            drop_interrupted(held)
        gc.collect()
        pipe._sessions.drop()
        assert not pipe._workers.fetch_states(range(pipe._sessions._kept))


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_failed_pass_has_kept_is_let_go(kind: Any) -> None:
    """The first stage has kept a state when the second one fails."""
    model = Remembering().eval()
    model.layers[2] = Careful(4, 4)
    *xs, last = inputs(14)
    with pipeline(model, last, kind) as pipe:
        session, memory = pipe.session(), Memory()
        for x in xs:  # until a new length is not compared with the model
            session(x, memory)
        before = set(pipe._workers.fetch_states(range(pipe._sessions._kept)))
        with pytest.raises(ps.WorkerError, match=r"stage 1 failed[\s\S]*not a number"):
            session(last * torch.nan, memory)
        kept = set(pipe._workers.fetch_states(range(pipe._sessions._kept)))
        assert len(kept - before) == 2  # of the two layers in the first stage
        pipe._sessions.drop()
        assert set(pipe._workers.fetch_states(range(pipe._sessions._kept))) <= before
        session(last, memory)  # and the states that there were before are still there


def test_states_of_another_replica_and_another_pipeline() -> None:
    """States move to the session that uses them."""
    model = Remembering().eval()
    x, other = inputs(2)
    mine, theirs = Memory(), Memory()
    with pipeline(model, x, replicas=2) as pipe, torch.no_grad():
        first, second = pipe.session(), pipe.session()
        first(x, mine)
        model(x, theirs)
        assert torch.equal(second(other, mine)[0], model(other, theirs)[0])


def test_states_that_are_gone() -> None:
    """When a plan is changed, the workers that had them are not there any more."""
    model = Remembering().eval()
    x, other = inputs(2)
    with pipeline(model, x) as pipe:
        session, memory = pipe.session(), Memory()
        session(x, memory)
        pipe.resize(devices=["cpu", "cpu"])
        pipe.resize(devices=["cpu"])
        with pytest.raises(ps.StatesLost, match="Begin the session again"):
            session(other, memory)
        with torch.no_grad():
            assert torch.equal(pipe.session()(x, Memory())[0], model(x, Memory())[0])


def test_dimensions_that_do_not_exist() -> None:
    model = Remembering().eval()
    (x,), (longer,) = inputs(1), inputs(1, length=3)
    with pipeline(model, x) as pipe:
        with pytest.raises(ps.InputError, match=r"dimension 5 \(length\) does not exist in .* 0"):
            pipe.session(dynamic={0: {5: "length"}})(longer)
        with pytest.raises(ps.InputError, match="no argument of this call has rows"):
            pipe.session(batch_dim=3)(longer)


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_of_a_state_stays_as_it_is(kind: Any) -> None:
    """Though the forward changes its state in place."""
    model = Remembering(in_place=True).eval()
    xs = inputs(3)
    mine, theirs = Memory(), Memory()
    with pipeline(model, xs[0], kind) as pipe, torch.no_grad():
        session = pipe.session()
        model(xs[0], theirs)
        session(xs[0], mine)
        their_copy, copied = copy.deepcopy(theirs), copy.deepcopy(mine)
        for memory, same in ((mine, theirs), (copied, their_copy), (mine, theirs)):
            wanted, _ = model(xs[1], same)
            assert torch.equal(session(xs[1], memory)[0], wanted)
        assert all(map(torch.equal, session.fetch(copied).seen, their_copy.seen))


def test_rows_are_chosen_by_the_numbers_of_then() -> None:
    model = Remembering().eval()
    (x,), mine, theirs = inputs(1), Memory(), Memory()
    rows = torch.tensor([2, 0, 0])
    with pipeline(model, x) as pipe, torch.no_grad():
        session = pipe.session()
        model(x, theirs)
        session(x, mine)
        chosen, wanted = mine.seen[0].index_select(0, rows), theirs.seen[0].index_select(0, rows)
        rows.copy_(torch.tensor([1, 1, 1]))
        assert torch.equal(session.fetch(chosen), wanted)


def test_states_that_nobody_has_are_let_go_of_by_the_next_step() -> None:
    model = Remembering()
    (x,), memory = inputs(1), Memory()
    with pipeline(model, x) as pipe:
        with torch.no_grad():
            pipe.session()(x, memory)
        residents = [of_worker for each in pipe._workers._residents for of_worker in each.values()]
        assert any(each._values for each in residents)
        del memory
        gc.collect()
        pipe.train_step(x, loss_fn=lambda output: output[0].square().mean())
        assert not any(each._values for each in residents)


def test_training_between_calls() -> None:
    """States were made by earlier weights, as on one device; later calls have the new ones."""
    model = Remembering()
    plain = copy.deepcopy(model)
    x, other = inputs(2)
    mine, theirs = Memory(), Memory()
    with pipeline(model, x) as pipe:
        optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
        session = pipe.session()
        session(x, mine)
        pipe.train_step(x, loss_fn=lambda output: output[0].square().mean())
        optimizer.step()
        found = session(other, mine)[0]
    with torch.no_grad():
        plain(x, theirs)
    plain(x)[0].square().mean().backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    with torch.no_grad():
        assert torch.equal(found, plain(other, theirs)[0])


def test_weights_that_stay_are_said_to() -> None:
    model, xs = Recurrent().eval(), [x[:, 0] for x in inputs(2)]
    with pipeline(model, xs[0]) as pipe:
        sessions, session = pipe._sessions, pipe.session()

        def since(**said: Any) -> tuple[int, int]:
            done = sessions.start(session, (xs[0],), {}, **said)
            sessions.finish(done)
            order = done.started.order
            return order.number, order.weights_since

        numbers, sinces = zip(*(since(weights_stay=True) for _ in range(3)), strict=True)
        assert set(sinces) == {numbers[0]}
        assert since()[1] == -1
        number, own = since(weights_stay=True)  # after a call of the script itself
        assert own == number
        sessions.script_ran()
        number, own = since(weights_stay=True)
        assert own == number


@pytest.mark.parametrize("kind", KINDS)
def test_weights_go_again_after_a_failure(kind: Any) -> None:
    """What the passes that are given up have carried is lost."""
    model = Remembering().eval()
    model.layers[2] = Careful(4, 4)
    good, other = inputs(2)
    with pipeline(model, good, kind) as pipe, torch.no_grad():
        sessions, since = pipe._sessions, []
        for x in (good, good * torch.nan, other):
            done = sessions.start(pipe.session(), (x, Memory()), {}, weights_stay=True)
            since.append(done.started.order.weights_since)
            with suppress(ps.WorkerError):
                sessions.finish(done)
        assert since[0] == since[1] != since[2]
