"""Passes of a session: what goes in and comes out, and which values stay with the workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any
from weakref import WeakSet

import torch

from penstock.account.record import CALL
from penstock.capture import Program, Ref, Sizes, Trace
from penstock.capture.attributes import find
from penstock.capture.calls import INPUTS, TensorInfo
from penstock.capture.cuts import KeptInStages
from penstock.capture.dims import BatchDim, Dynamic
from penstock.capture.signatures import Inputs
from penstock.capture.states import states_in
from penstock.capture.trees import (
    flatten_result,
    is_plain_object,
    unflatten,
    unopened,
)
from penstock.engine.batch import Batch
from penstock.engine.hooks import Opened
from penstock.engine.orders import Outcome
from penstock.engine.residents import GONE, States
from penstock.errors import ClosedError, InputError, StatesLost, WorkerError
from penstock.runner import Runner, Started
from penstock.sessions.familiar import Familiar, FamiliarResult
from penstock.sessions.growing import Growing
from penstock.sessions.resident import Living, Resident, Seen, Value
from penstock.sessions.together import Drop, Fetch, Finish, Followed, Together
from penstock.units import show_bytes
from penstock.workers.ways import Way

_CALL = "a call of a session"


@dataclass
class SessionPass:
    """A pass of a session that is under way.

    Attributes:
        session: that the pass belongs to.
        started: the pass as the runner knows it.
        way: that it takes.
        leaves: of its arguments.
        sizes: the sizes in these that vary, by name.
        states: that it takes and keeps.
        args, kwargs: the arguments; objects among them are changed as the forward changes them.
        number: of the way.
        training: whether the model was in training mode.
        familiar: whether its arguments are like those of the session's pass before.
        assumed: whether the model is assumed to be unchanged since then; then it is checked while
            the workers run the pass, before the result counts.
        count: how many passes of all sessions were started, this one included.
        lengths_in: as of `Sessions.start`.
        times_sent: how often changes of the model had been sent to the workers when it began.
    """

    session: Session
    started: Started
    way: Way
    leaves: Inputs
    sizes: Sizes
    states: States
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    number: int
    training: bool
    familiar: bool = False
    assumed: bool = False
    count: int = 0
    lengths_in: Callable[[Mapping[str, Any]], Dynamic] | None = None
    times_sent: int = 0


class Sessions:
    """All sessions of a pipeline.

    Args:
        runner: runs their passes.
        program: the captured program.
        in_flight: how many groups are to be under way; by default as many as were planned.

    Attributes:
        together: has all processes that run the script make calls together.
    """

    def __init__(self, runner: Runner, program: Program, in_flight: int | None = None) -> None:
        self._runner = runner
        self._program = program
        self._in_flight = in_flight
        self._kept = 0
        self._open: WeakSet[Session] = WeakSet()
        self._numbers = count()  # of sessions
        self._living = Living()
        self._opened_modules = Opened(program)
        self._passes = 0
        self._weights_since: int | None = None  # the pass since which no weight has changed
        self._weights: dict[str, tuple[int, int]] = {}  # of those that cross: address, version
        self._looked: dict[tuple[bool, int], int] = {}  # by mode and way: `_passes` at a check
        self.together = Together(runner, program)

    @property
    def width(self) -> int:
        """How many passes of different sessions keep all stages of all replicas busy."""
        return self._runner.plan.replicas * len(self._runner.plan.stages)

    @property
    def devices(self) -> Sequence[torch.device]:
        """Those of all workers, as far as they are this process's."""
        return self._runner.workers.devices

    @property
    def most(self) -> int:
        """How many groups are under way where nobody says otherwise: as many as were planned."""
        plan = self._runner.plan
        if self._in_flight is not None:
            return self._in_flight
        return plan.groups if plan.inference else self.width + 1

    def open(
        self,
        batch_dim: BatchDim = 0,
        dynamic: Dynamic | None = None,
        states: Collection[int | str] = (),
    ) -> Session:
        """A session; its states are with the replica that has the fewest open sessions."""
        replicas = self._runner.plan.replicas
        taken = Counter(session.replica % replicas for session in self._open)
        replica = min(range(replicas), key=lambda number: taken[number])
        growing = Growing(batch_dim, dynamic)
        session = Session(self, growing, replica, next(self._numbers), frozenset(states))
        self._open.add(session)
        return session

    def kinds(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[bool, int]:
        """Whether there was a call with such arguments before, and with how many kinds."""
        signatures = self._program.signatures
        leaves, structure = flatten_result((tuple(args), dict(kwargs)), is_plain_object)
        return signatures.knows(leaves, structure), len(signatures)

    def start(
        self,
        session: Session,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        lengths_in: Callable[[Mapping[str, Any]], Dynamic] | None = None,
        weights_stay: bool = False,
    ) -> SessionPass:
        """Start a pass, which is not waited for.

        Args:
            session: whose pass.
            args, kwargs: of the model's forward.
            lengths_in: says which dimensions of keyword arguments vary, if the session does not; it
                is asked only if the call is unlike the one before.
            weights_stay: whether no weight has changed since the pass before, unless `script_ran`,
                or autograd has counted a change.

        Raises:
            InputError: the model does not take these arguments.
        """
        return self._begun(session, args, kwargs, lengths_in, weights_stay=weights_stay)

    def script_ran(self) -> None:
        """The script has done what it likes, and weights may be others than in the pass before."""
        self._weights_since = None

    def _begun(
        self,
        session: Session,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        lengths_in: Callable[[Mapping[str, Any]], Dynamic] | None,
        step: int | None = None,
        weights_stay: bool = False,
    ) -> SessionPass:
        """Start a pass; with the random numbers of this step, if it is given."""
        runner, training = self._runner, self._program.model.training
        session.replica %= runner.plan.replicas  # there may have been more of them
        with self._operation(), torch.no_grad():
            familiar = self._familiar(session, args, kwargs, training)
            known = session.familiar
            leaves_traces = self._program.remembering or self._program.written
            may_assume = runner.workers.assumes and not leaves_traces
            assumed = may_assume and familiar is not None and bool(known and known.may_assume)
            recordings = self._program.recordings
            if (
                familiar
                and known
                and not recordings.fits(known.trace, familiar.parts[0], familiar.sizes[0])
            ):
                familiar, assumed = None, False
            if not assumed:
                self._opened_modules.check()
                if familiar and known and not recordings.holds(known.trace):
                    familiar = None
            routed = familiar or self._new(session, args, kwargs, lengths_in, training)
            if step is not None:
                routed = replace(routed, step=step)
            leaves: Any = routed.parts[0]
            session.growing.note(leaves, leaves.signature.structure)
            number = routed.ways[0]
            way = runner.ways(training)[number]
            first, self._kept = self._kept, self._kept + len(way.trace.outputs)
            states = self._states(way, leaves, first)
            try:
                order = runner.order(
                    "infer", routed, training, None, states, session.replica, assumed=assumed
                )
                since = self._since(way, order.number) if weights_stay else -1
                self._weights_since = since if weights_stay else None
                order = order.changed(weights_since=since)
                order = self.together.broadcast_start(order, routed, states)
                self._passes += 1
                started = runner.start(order)
            except BaseException:
                self._lose(states, way)
                raise
            sizes = order.microbatches[0].sizes
            return SessionPass(
                *(session, started, way, leaves, sizes, states, args, kwargs, number, training),
                *(familiar is not None, assumed, self._passes, lengths_in),
                runner.workers.times_sent,
            )

    def _since(self, way: Way, number: int) -> int:
        """The pass since which no weight has changed, as far as autograd and addresses show it.

        Args:
            way: that the next pass takes.
            number: of that pass.
        """
        tensors = {name: find(self._program.model, name) for name in way.crossing}
        now = {
            name: (tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version)
            for name, tensor in tensors.items()
        }
        before, self._weights = self._weights, {**self._weights, **now}
        is_same = all(before.get(name, state) == state for name, state in now.items())
        return self._weights_since if is_same and self._weights_since is not None else number

    def _confirmed(self, done: SessionPass) -> SessionPass:
        """This pass, if the model is as it was assumed to be; otherwise a new one in its place.

        Raises:
            InputError: the model has changed in a way that cannot be sent to the workers.
            StatesLost: this one has failed, as the model has changed, and others with it.
        """
        are_others = len(self._runner.under_way) > 1
        try:
            with torch.no_grad():
                if self._is_as_assumed(done):
                    return done
        except BaseException:
            self._give_up(done)
            raise
        if not self._give_up(done) and are_others:
            raise StatesLost(
                "the model changed while passes of several sessions were under way; one of them "
                "failed, so all were given up. Begin these sessions again"
            )
        done.session.familiar = None
        step = done.started.order.microbatches[0].key.step
        return self._begun(done.session, done.args, done.kwargs, done.lengths_in, step)

    def _is_as_assumed(self, done: SessionPass) -> bool:
        """Whether the model is as when the way was recorded, and as the workers knew it.

        The model is looked at once for all passes that were started before.
        """
        trace, program = done.way.trace, self._program
        if self._runner.workers.times_sent != done.times_sent:
            return False  # they have heard since of a change that this pass did not know of
        which = done.training, done.number
        if self._looked.get(which, 0) >= done.count:
            return True
        self._opened_modules.check()
        is_same = program.model.training == done.training and program.recordings.holds(trace)
        if is_same and self._runner.workers.is_as_sent():
            self._looked[which] = self._passes
            return True
        return False

    def _give_up(self, done: SessionPass) -> bool:
        """End a pass whose result nobody wants; whether it has ended well."""
        try:
            self._runner.finish(done.started)
        except Exception:  # of a forward that should not have run
            return False
        finally:
            self._lose(done.states, done.way)
        return True

    def _lose(self, states: States, way: Way) -> None:
        """Some stages may have kept values of a pass, or not have heard of others."""
        self._weights_since = None
        made = range(states.first, states.first + len(way.trace.outputs))
        self._living.lose((*made, *states.dropped))

    def _familiar(
        self, session: Session, args: Sequence[Any], kwargs: Mapping[str, Any], training: bool
    ) -> Batch | None:
        """A call as a routed batch, if its arguments are like those of the one before; cheap."""
        known = session.familiar
        if known is None or known.training != training:
            return None
        leaves = known.inputs(args, kwargs)
        sizes = None if leaves is None else known.sizes(leaves)
        if leaves is None or sizes is None:
            return None
        way = self._runner.ways(training)[known.way]
        if way.trace is not known.trace or self._elsewhere(way, leaves, session.replica):
            return None
        if not self._program.recordings.may_take(known.trace, sizes):
            return None
        leaves.with_values = self.fetch
        return self._runner.routed_like(leaves, sizes, known.way, training)

    def _new(
        self,
        session: Session,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        lengths_in: Callable[[Mapping[str, Any]], Dynamic] | None,
        training: bool,
    ) -> Batch:
        """A call as a routed batch."""
        dynamic = None if lengths_in is None else lengths_in(kwargs)
        varying_of = partial(session.growing.varying_of, dynamic=dynamic)
        signatures = self._program.signatures
        leaves = signatures.flatten_with_states(args, kwargs, varying_of, self.fetch)
        sizes = leaves.signature.varying.sizes(leaves)
        return self._routed(Batch([leaves], [sizes]), training, session)

    def _elsewhere(self, way: Way, leaves: Sequence[Any], replica: int) -> list[int]:
        """The states that another stage has than the one that reads them."""
        return [
            k
            for k, stage in way.taken.items()
            if (value := leaves[k].seen.value).stage != stage or value.replica != replica
        ]

    def _routed(self, batch: Batch, training: bool, session: Session) -> Batch:
        """The batch with its way.

        A state that another stage has than the one that reads it is brought here, and enters with
        the inputs.
        """
        here: set[int] = set()
        while True:
            leaves: Any = batch.parts[0]
            apart_of = partial(self._apart, leaves, session.states)
            route = partial(self._runner.route, batch, training, False, apart_of)
            routed = self._runner.surviving(route)
            self.together.note(routed.new_ways, training)
            way = self._runner.ways(training)[routed.ways[0]]
            moving = self._elsewhere(way, leaves, session.replica)
            if not moving or here.issuperset(moving):
                return routed
            here.update(moving)
            values = self.fetch([leaves[k] for k in moving])
            parts = Inputs(leaves, leaves.signature, leaves.with_values)
            for k, value in zip(moving, values, strict=True):
                parts[k] = value
            batch = replace(batch, parts=[parts])

    def _apart(
        self, leaves: Sequence[Any], parts: Collection[int | str], trace: Trace
    ) -> KeptInStages:
        """The states among the inputs and the results of a way."""
        inputs = frozenset(k for k, leaf in enumerate(leaves) if isinstance(leaf, Resident))
        states = states_in(trace, parts)
        kept = frozenset(
            k
            for k, leaf in enumerate(trace.outputs)
            if isinstance(leaf, Ref)
            and (k in states or leaf.call == INPUTS)
            and isinstance(trace.info(leaf), TensorInfo)
        )
        return KeptInStages(inputs, kept)

    def _states(self, way: Way, leaves: Sequence[Any], first: int) -> States:
        taken: dict[int, int] = {}
        after: dict[int, Any] = {}
        for k in way.taken:
            seen: Seen = leaves[k].seen
            taken[k] = seen.value.number
            if operations := seen.on_worker():
                after[k] = operations
        return States(taken, after, first, self._living.drain())

    def finish(self, done: SessionPass) -> Any:
        """Wait for a pass; returns the model's result, with its states as `Resident`s."""
        if done.assumed:
            done = self._confirmed(done)
        try:
            sent = self.together.broadcasting(Finish(done.started.order.number))
            with self._runner.steps.failing(), sent:
                outcome = self._runner.finish(done.started)
            done.way = self._runner.ways(done.training)[done.number]  # others may have taken over
            leaves = self._leaves_of(done, outcome)
        except BaseException:
            self._lose(done.states, done.way)
            raise
        trace, session = done.way.trace, done.session
        if done.familiar and session.result is not None:
            return session.result.put(leaves)
        made, given = unflatten(trace.output_structure, leaves), (done.args, done.kwargs)
        result = _into_given(made, given, trace.handed_back)
        session.result = FamiliarResult.of(result, trace)
        session.familiar = None
        if session.result is not None:
            session.familiar = Familiar(
                *(done.args, done.kwargs, done.leaves, trace, done.number), done.training
            )
        return result

    def _leaves_of(self, done: SessionPass, outcome: Outcome) -> list[Any]:
        """The leaves of the model's result, of which states are `Resident`s."""
        origins, shapes, (values,) = done.way.origins, outcome.kept, outcome.parts
        first, session, living = done.states.first, done.session, self._living
        homes = self._runner.homes
        leaves = list(origins.leaves)
        for k, stage, made in origins.kept:
            shape = shapes[first + k]
            value = Value(first + k, stage, session.replica, shape, made, session.number, living)
            leaves[k] = Resident(shape, homes[stage], Seen(value))
        for k, leaf in origins.passed:
            leaves[k] = done.leaves[leaf]
        for k, number in origins.brought:
            leaves[k] = values[number]
        for k, size in origins.sized:
            leaves[k] = size.at(done.sizes)
        return leaves

    def call(self, session: Session, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """One pass, on all processes that run the script; all get the result."""
        if self.together.follows:
            return self._followed(session, args, kwargs)
        with self._runner.given_up():
            if self.together.is_alone:
                return self.finish(self.start(session, args, kwargs))
            with self.together.leading(_CALL):
                return self.finish(self.start(session, args, kwargs))

    def _followed(self, session: Session, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The same in a process that does its part of what another one does."""
        found = Followed()
        for _ in self.together.followed(_CALL, found):
            pass
        self._living.drain()  # the one that leads says what the workers let go
        if found.last is None:
            raise StatesLost(GONE)
        start, started, outcome = found.last
        session.replica = start.replica
        way = self._runner.ways(start.training)[start.batch.ways[0]]
        leaves: Any = flatten_result((tuple(args), dict(kwargs)), is_plain_object)[0]
        if len(leaves) != start.leaves:
            raise InputError(
                f"the arguments of a session's call have {len(leaves)} tensors and other values on "
                f"{self._runner.workers.role.name}, and {start.leaves} on the rank with the first "
                "stage; give every rank the same arguments"
            )
        done = SessionPass(
            *(session, started, way, leaves, start.batch.sizes[0], start.states),
            *(args, kwargs, start.batch.ways[0], start.training),
        )
        result = unflatten(way.trace.output_structure, self._leaves_of(done, outcome))
        return _into_given(result, (tuple(args), dict(kwargs)), way.trace.handed_back)

    def fetch(self, leaves: Sequence[Any]) -> list[Any]:
        """The same leaves, with copies that have the elements in place of residents."""
        residents = [leaf for leaf in leaves if isinstance(leaf, Resident)]
        if not residents:
            return list(leaves)
        numbers = [r.seen.value.number for r in residents]
        with self.together.broadcasting(Fetch(numbers)):
            found = self._runner.surviving(lambda: self._runner.workers.fetch_states(numbers))
        result = []
        for leaf in leaves:
            if isinstance(leaf, Resident):
                if (kept := found.get(leaf.seen.value.number)) is None:
                    raise StatesLost(GONE)
                value = kept.clone()
                for operation in leaf.seen.operations:
                    value = operation.on(value)
                leaf = value
            result.append(leaf)
        return result

    def abandon(self, session: Session) -> None:
        """Have nobody need the states of a session any more, though somebody may have them."""
        self._living.abandon(session.number)

    def drop(self) -> None:
        """Let the workers let go of what nobody has any more; no pass is under way."""
        if self.together.has_failed:
            return
        gone = self._living.drain()
        if gone or self._weights_since is not None:
            self._weights_since = None
            # who is gone has let go of everything
            with suppress(ClosedError, WorkerError), self.together.broadcasting(Drop(gone)):
                self._runner.surviving(lambda: self._runner.workers.drop_states(gone))

    def drop_between_calls(self) -> None:
        """As `drop`, when no session is called; ranks do it in the next call, all of them."""
        if self.together.is_alone and not self._runner.is_busy:
            self.drop()

    def refresh(self) -> None:
        """Have present weights in the model of this process, which runs parts of it itself."""
        self._runner.between_passes(lambda: self._runner.workers.refresh(self._program.model))

    def held(self) -> Mapping[int, int]:
        """The bytes of the states that the script has, by stage."""
        return self._living.by_stage()

    def notes(self) -> list[str]:
        """What the states take now, and what is planned for them, in words."""
        held, plan = self.held(), self._runner.plan
        each = []
        for number, stage in enumerate(plan.stages):
            now, planned = held.get(number, 0), stage.state_bytes * plan.replicas
            if now or planned:
                of = f" of {show_bytes(planned)} planned" if planned else ""
                each.append(f"{show_bytes(now)}{of} with stage {number}")
        return [f"states of sessions: {', '.join(each)}"] if each else []

    def check(self) -> None:
        """Raise unless passes can go on; no pass is under way.

        Raises:
            ClosedError: the pipeline is closed.
            WorkerDied: a worker has ended, and nobody takes over.
        """
        self._runner.surviving(lambda: self._runner.workers.fetch_states(()))

    def _operation(self) -> AbstractContextManager[None]:
        return self._runner.steps.during(CALL)


class Session:
    """A sequence of passes whose states stay with the workers.

    Args:
        sessions: of the pipeline.
        growing: which sizes grow.
        replica: that has the states.
        number: of it, among all sessions.
        states: parts of the result that are states, besides plain objects.

    Attributes:
        growing, replica, number, states: as given.
        familiar: the last call, which the next is compared with.
        result: what it returned.
    """

    def __init__(
        self,
        sessions: Sessions,
        growing: Growing,
        replica: int,
        number: int,
        states: frozenset[int | str] = frozenset(),
    ) -> None:
        self._sessions = sessions
        self.growing = growing
        self.replica = replica
        self.number = number
        self.states = states
        self.familiar: Familiar | None = None
        self.result: FamiliarResult | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's result for these arguments; states in it are `Resident`s."""
        return self._sessions.call(self, args, kwargs)

    def fetch(self, state: Any) -> Any:
        """A copy of a state with its elements; containers and objects of states likewise."""
        leaves, structure = flatten_result(state, is_plain_object)
        return unflatten(structure, self._sessions.fetch(leaves))


def _into_given(result: Any, given: tuple[Any, ...], handed_back: Mapping[int, int]) -> Any:
    """The result, in which objects that were given stand for what was made of them.

    Args:
        result: with objects of its own.
        given: the arguments.
        handed_back: which of the result's objects the forward was given, see `Trace`.
    """
    if not handed_back:
        return result
    theirs, (mine, of_result) = unopened(given)[0], unopened(result)
    for k, leaf in handed_back.items():
        vars(theirs[leaf]).clear()
        vars(theirs[leaf]).update(vars(mine[k]))
        mine[k] = theirs[leaf]
    return unflatten(of_result, mine)
