"""The actors of a pipeline, driven by the script."""

from __future__ import annotations

import re
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.board.activity import Activity
from penstock.board.memory import Board, Reading
from penstock.board.runs import new_board
from penstock.errors import BY_USER, InputError, WorkerDied, WorkerTimeout
from penstock.links.local import Aborted
from penstock.workers.heartbeat import Pulse
from penstock.workers.pool import Dispatch, Job, JobResult, Late, Pool
from penstock.workers.ranks.operations import GivenUp
from penstock.workers.ranks.rendezvous import RankEntry
from penstock.workers.ray.actor import Actor, ActorReport, ActorState, operation_of
from penstock.workers.ray.cluster import Cluster, kill, ray
from penstock.workers.ray.copies import Entries, Taken
from penstock.workers.ray.pickled import Pickled, pickled, unpickled
from penstock.workers.ray.watch import ClusterWatch

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle
    from ray.util.placement_group import PlacementGroup

_GRACE = 15.0  # seconds that workers have to notice that a pass was given up
_LEAVE = 5.0  # seconds that they have to leave each other by themselves
_SLOW = 60.0  # seconds that one has to hear of its buddy
_LOOK = 2.0  # seconds that a worker has to say what it is doing
_LARGE = 1 << 16  # bytes of a job that Ray keeps once for all workers
_CAUSE = re.compile(r"(?:is dead|died) because (.*)")
_EXIT = re.compile(r"Worker exit type: (\w+) Worker exit detail: (.*?)(?: There are some |$)")


class _Sent(Dispatch):
    """A dispatch with what Ray knows of its jobs.

    Attributes:
        refs: of the results, by worker.
        pickled: jobs, and what they are pickled as, by their ids; several workers may have one.
        operation: of all ranks, that the jobs are, if they are one.
        failed: when the first failure was noticed.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.refs: dict[int, ObjectRef] = {}
        self.pickled: dict[int, tuple[Job, Pickled | ObjectRef]] = {}
        self.operation = ""
        self.failed = 0.0


@dataclass
class ActorSurvivors:
    """Actors of a pool that go on in another one, where others have ended.

    Attributes:
        actors: that wait for jobs.
        bundles: of the placement group, where they are.
        group: the placement group.
        cluster: where all of that is; it is left when nobody takes them over.
        cpus: that each of them reserves.
        dispatches: how many they have seen.
        copies: the number of the last copy that they were asked for.
        membership: the number of the members that they were among.
    """

    actors: list[ActorHandle]
    bundles: list[int]
    group: PlacementGroup
    cluster: Cluster
    cpus: float
    dispatches: int
    copies: int
    membership: int
    _is_taken: bool = False

    def __len__(self) -> int:
        return len(self.actors)

    def take(self) -> None:
        """A pool has taken them over, and the cluster with them."""
        self._is_taken = True

    def close(self) -> None:
        """End those that nobody has taken over."""
        if not self._is_taken:
            self._is_taken = True
            _end(self.actors, [self.group], self.cluster)
        self.actors, self.bundles = [], []


class ActorPool(Pool):
    """Actors of a Ray cluster. Jobs are pickled, and called with the `ActorState`.

    Args:
        cluster: where they are; it is left when they are closed.
        count: how many.
        cpus: that each of them reserves.
        keeps_survivors: if an actor dies, whether the others wait for `survivors`; the only one of
            a pool does not.
        survivors: of another pool, which go on in this one, in the same placement group; others are
            started there only if these do not suffice.

    Attributes:
        board: what those do that are on this machine.
        nodes: for every worker its process, and its node, in words; known after the start.
        old: the workers that were in another pool; they have to enter this one first.
        copies: the number of the last copy that they were asked for, by the pool before, too.
        taken: by worker, the last copy that its buddy has, as far as is known.

    Raises:
        InputError: the cluster has no room for them.
    """

    _can_be_killed = False

    def __init__(
        self,
        cluster: Cluster,
        count: int,
        cpus: float,
        keeps_survivors: bool = False,
        survivors: ActorSurvivors | None = None,
    ) -> None:
        super().__init__(count, _GRACE, lambda: None)
        self.nodes = ["an actor that is starting"] * count
        self.keeps_survivors = keeps_survivors and count > 1
        self.copies = self._membership = 0
        self.taken: dict[int, Taken] = {}
        self._deaths: dict[int, WorkerDied] = {}
        self._stuck: set[int] = set()  # have not stopped at what was given up
        self._actors: list[ActorHandle] = []
        self._bundles = list(range(count))
        self._cluster, self._cpus = cluster, cpus
        self.board: Board = new_board(count)
        self._reserved: list[PlacementGroup] = []  # one placement group
        self._pulses: dict[int, Pulse] = {}  # of those on this machine
        self._end = weakref.finalize(self, _end, self._actors, self._reserved, cluster)
        self.old = range(0)
        try:
            if survivors:
                self._take_over(survivors)
            else:
                self._reserved.append(cluster.reserve(count, cpus))
            fresh = self._bundles[len(self._actors) :]
            self._actors += cluster.start(
                self._reserved[0], fresh, cpus, Actor, self.keeps_survivors
            )
        except BaseException:
            self.close("its workers could not be started")
            self.board.close()
            raise

    def _take_over(self, survivors: ActorSurvivors) -> None:
        """Have the actors that are left, and bundles for those that are missing.

        Raises:
            InputError: the cluster has no room for these.
        """
        self._dispatches, self.copies = survivors.dispatches, survivors.copies
        self._membership = survivors.membership + 1
        self._reserved.append(survivors.group)
        self._actors += survivors.actors
        survivors.take()
        taken = survivors.bundles[: self._count]
        kill(self._actors[self._count :], [])
        del self._actors[self._count :]
        missing = self._count - len(taken)
        free = self._cluster.free_bundles(survivors.group, taken, missing)
        self._bundles = [*taken, *free]
        self.old = range(len(taken))

    def watch(self, nodes: Sequence[str]) -> ClusterWatch | None:
        """Watch the cluster, if there are to be as many workers as it has room for.

        Args:
            nodes: of the workers, as Ray calls them.
        """
        if self._cluster.options.max is None:
            return None
        return ClusterWatch(self._cluster, nodes, self._cpus, self._reserved[0], self._bundles)

    def reorder(self, order: Sequence[int]) -> None:
        """Number the workers anew.

        Args:
            order: for every number the one that the worker has had.
        """
        self._actors[:] = [self._actors[k] for k in order]
        self._bundles[:] = [self._bundles[k] for k in order]

    def know(self, places: Sequence[tuple[RankEntry, str, bool]]) -> None:
        """Know where the workers are.

        Args:
            places: what every worker says of itself, its node, and whether that is here.
        """
        self.nodes[:] = [f"process {e.pid} on {e.host}, node {node[:8]}" for e, node, _ in places]
        self._pulses = {k: Pulse(e.pid, e.started) for k, (e, _, near) in enumerate(places) if near}

    def pair(self, buddies: Sequence[int], has_twins: bool) -> None:
        """Let every worker send copies of what it has to another one.

        Args:
            buddies: for every worker the other one.
            has_twins: whether replicas have the same, so that less is sent.

        Raises:
            WorkerDied: one has died.
        """
        refs = {
            self._actors[worker].have_buddy.remote(
                self._membership, worker, self._actors[buddy], buddy, has_twins
            ): worker
            for worker, buddy in enumerate(buddies)
        }
        ready, late = ray().wait([*refs], num_returns=len(refs), timeout=_SLOW)
        for ref in ready:
            try:
                ray().get(ref)
            except ray().exceptions.RayError as error:
                raise self._lost(refs[ref], error) from None
        if late:
            raise self._died(refs[late[0]], "does not answer any more;")

    # -- those that are left --------------------------------------------------------------

    def copies_with(
        self, holders: Mapping[int, int], number: int, patience: float
    ) -> dict[int, Entries]:
        """The copies of this number that the holders have, by the worker whose state is copied.

        Holders that do not answer are taken to have ended.

        Args:
            holders: for every worker whose copy is wanted, the worker that holds it.
            number: of the copies.
            patience: seconds that the holders have to answer.
        """
        found: dict[int, Entries] = {}
        asked = {
            self._actors[holder]
            .copy_of.options(concurrency_group="control")
            .remote(worker, number): (worker, holder)
            for worker, holder in holders.items()
            if holder not in self._deaths
        }
        if not asked:
            return found
        ready, late = ray().wait([*asked], num_returns=len(asked), timeout=patience)
        for ref in ready:
            worker, holder = asked[ref]
            try:
                entries = unpickled(ray().get(ref))
            except Exception as error:
                self._deaths[holder] = self._lost(holder, error)
            else:
                found |= {} if entries is None else {worker: entries}
        for ref in late:
            self._end_by_force(asked[ref][1], "does not answer any more")
        return found

    @property
    def deaths(self) -> Mapping[int, WorkerDied]:
        """The workers that are known to have ended."""
        return self._deaths

    def death_of(self, worker: int) -> WorkerDied:
        """How a worker has ended, as far as is known."""
        return self._deaths.get(worker) or self._died(worker, "has lost what it had;")

    def survivors(self) -> ActorSurvivors:
        """The actors that can go on in another pool; they leave this one.

        Actors that have got a SIGTERM are left out, unless others have ended and all that are left
        have got one.
        """
        ended = self._deaths.keys() | self._stuck
        able = set(range(self._count)) - ended
        leaving = self.leaving & able
        if ended and leaving == able:
            leaving = set()
        left = sorted(able - leaving)
        kill([self._actors[worker] for worker in ended], [])
        for worker in leaving:
            self._actors[worker].leave.remote()
        self._end.detach()
        self._closed_because = self._closed_because or "others have taken over"
        return ActorSurvivors(
            [self._actors[worker] for worker in left],
            [self._bundles[worker] for worker in left],
            self._reserved[0],
            self._cluster,
            self._cpus,
            self._dispatches,
            self.copies,
            self._membership,
        )

    def _end_by_force(self, worker: int, how: str) -> None:
        """End a worker that does not do so by itself."""
        self._deaths.setdefault(worker, self._died(worker, f"{how};"))
        kill([self._actors[worker]], [])
        if worker in self._pulses:  # a process that is stopped does not hear of it
            self._pulses[worker].kill()

    def check_open(self) -> None:
        """Raise if they cannot work any more.

        Raises:
            WorkerDied: one has ended, or they were interrupted, and others can go on.
            ClosedError: they were closed.
        """
        if self.can_go_on:
            deaths = self._deaths or {0: self._died(0, f"cannot go on: {self._closed_because};")}
            raise deaths[min(deaths)]
        super().check_open()

    def fail(self, why: str) -> None:
        """They cannot go on as they are; those that are left may in another pool."""
        if self.keeps_survivors:
            self._closed_because = self._closed_because or why
        else:
            super().fail(why)

    def _part(self, why: str) -> None:
        self.fail(why)

    def _give_up(self, why: BaseException) -> None:
        given_up = list(self._open)
        try:
            super()._give_up(why)
        finally:
            self._stuck.update(worker for each in given_up for worker in each.waits_for)

    def close(self, why: str = BY_USER) -> None:
        """Let the workers go, for good; `why` is what later calls will say."""
        if self._closed_because is None or (self.keeps_survivors and self._end.alive):
            self._closed_because = self._closed_because or why
            self._dismiss()

    @property
    def can_go_on(self) -> bool:
        """Whether they have failed, and those that are left can go on in another pool."""
        return bool(self._closed_because) and self.keeps_survivors and self._end.alive

    @property
    def why_closed(self) -> str | None:
        """Why they are closed; `None` if they are not."""
        return self._closed_because

    # -- jobs -----------------------------------------------------------------------------

    def _dispatch(self, number: int) -> Dispatch:
        return _Sent(number)

    def _give(self, worker: int, job: Job, current: Dispatch) -> None:
        assert isinstance(current, _Sent)
        packed = self._pickled(worker, job, current)
        current.operation = operation_of(job)  # from now on a worker may have it
        self._send(worker, packed, current)

    def _send(self, worker: int, packed: Pickled | ObjectRef, current: _Sent) -> None:
        do = self._actors[worker].do
        current.refs[worker] = do.remote(current.number, current.operation, packed)

    def _pickled(self, worker: int, job: Job, current: _Sent) -> Pickled | ObjectRef:
        """The job, pickled once for all workers that have it."""
        if id(job) not in current.pickled:
            try:
                packed: Pickled = pickled(job)
            except Exception as error:
                raise InputError(
                    f"worker {worker} is another process, and what it needs cannot be sent there: "
                    f'{type(error).__name__}: {error}. Use workers="threads"'
                ) from error
            kept = ray().put(packed) if packed.nbytes > _LARGE else packed
            current.pickled[id(job)] = job, kept
        return current.pickled[id(job)][1]

    def _recall(self, current: Dispatch) -> None:
        assert isinstance(current, _Sent)
        others = [worker for worker in range(self._count) if worker not in current.refs]
        current.given.difference_update(others)
        if current.operation:  # those who have begun it wait for the others
            for worker in others:
                current.given.add(worker)
                self._send(worker, pickled(_never_given), current)

    def _await_report(self, current: Dispatch, seconds: float | None) -> None:
        assert isinstance(current, _Sent)
        current.pickled.clear()
        waiting = {current.refs[worker]: worker for worker in current.waits_for}
        ready, _ = ray().wait([*waiting], num_returns=len(waiting), timeout=seconds)
        for ref in ready:
            self._read_report(waiting[ref], ref, current)
        now = time.monotonic()
        if current.failures() and not current.failed:
            current.failed = now
        if current.failed and now > current.failed + _GRACE:  # it is cut off, and Ray waits longer
            for worker in current.waits_for:
                if self.keeps_survivors:
                    self._end_by_force(worker, "does not answer any more")
                self._note(worker, self._died(worker, "does not answer any more;"), current)
            return
        if not ready:
            raise Late

    def _read_report(self, worker: int, ref: ObjectRef, current: Dispatch) -> None:
        """Take a report, or notice that there will be none."""
        errors = ray().exceptions
        lost = (errors.ObjectLostError,) if self.keeps_survivors else ()  # by another to be ended
        try:
            report: ActorReport = ray().get(ref)
            value = unpickled(report.value)
        except (errors.RayActorError, *lost) as error:
            self._note(worker, self._deaths.get(worker) or self._lost(worker, error), current)
        except Exception as error:
            error.add_note(f"The report of worker {worker} cannot be read in this process.")
            current.results.setdefault(worker, JobResult(None, error))
        else:
            if report.leaves:
                self.leaving.add(worker)
            self.taken[worker] = report.taken
            result = JobResult(None, value) if report.failed else JobResult(value, None)
            current.results.setdefault(worker, result)

    def _note(self, worker: int, died: WorkerDied, current: Dispatch) -> None:
        """None of a worker's jobs will be done, be they under way or given up."""
        self._deaths.setdefault(worker, died)
        for each in (current, *self._open):
            if worker in each.given:
                each.results.setdefault(worker, JobResult(None, died))

    def _stopped(self) -> list[int]:
        """The workers on this machine that a signal has stopped."""
        return [worker for worker, pulse in self._pulses.items() if pulse.has_stopped()]

    def _late(self, current: Dispatch, timeout: float) -> WorkerTimeout | WorkerDied:
        """The error for workers that are late; those that are stopped end, if others can go on."""
        error = super()._late(current, timeout)
        if not self.keeps_survivors:
            return error
        for worker, pulse in self._pulses.items():
            if pulse.is_stopped():
                self._end_by_force(worker, "was stopped by a signal for seconds, and then ended")
        return self._deaths[min(self._deaths)] if self._deaths else error

    def _lost(self, worker: int, error: Exception) -> WorkerDied:
        """The error for an actor of which Ray says that it is gone."""
        died = self._died(worker, f"died: {cause_of(error)};")
        died.add_note(f"Ray says: {error}")
        return died

    def _died(self, worker: int, how: str) -> WorkerDied:
        where = self.activity(worker).where
        return WorkerDied(worker, f"({self.nodes[worker]}) {how}", *where)

    def _fault(self, current: Dispatch, late: Sequence[int], why: str | None) -> BaseException:
        """What is to be raised: what Ray knows of a death says more than what others notice."""
        if self._deaths:
            return self._deaths[min(self._deaths)]
        failures = current.failures()
        own = [e for k, r in current.results.items() if (e := r.error) is not None and _is_of(e, k)]
        return own[0] if own else super()._fault(current, late, why) if failures else Aborted()

    # -- failure --------------------------------------------------------------------------

    def _abort(self) -> None:
        for actor in self._actors:
            with suppress(Exception):  # its end is noticed elsewhere
                beside = actor.give_up.options(concurrency_group="control")
                beside.remote(self._dispatches - 1)

    def _broken(self) -> str | None:
        if self._deaths:
            return str(next(iter(self._deaths.values())))
        return None

    def all_alive(self) -> bool:
        """Whether they are not closed, and none is known to have ended; from any thread."""
        return self._closed_because is None and not self._deaths

    def activity(self, worker: int) -> Activity:
        """What a worker is doing, if it is on this machine; may be called from any thread."""
        return self.board.reading(worker).activity

    def look(self, workers: Sequence[int]) -> dict[int, tuple[str, Reading]]:
        """The stacks of workers, and what they are doing; of those that say so within seconds.

        When they began that is in the time of this machine.
        """
        if self._closed_because or not self._actors:
            return {}
        found = {}
        with suppress(Exception):
            asked = {
                self._actors[k].look.options(concurrency_group="control").remote(): k
                for k in workers
            }
            ready, _ = ray().wait([*asked], num_returns=len(asked), timeout=_LOOK)
            for ref in ready:
                with suppress(Exception):
                    stack, reading, its_now = ray().get(ref)
                    apart = time.monotonic_ns() - its_now if reading.since else 0
                    found[asked[ref]] = stack, replace(reading, since=reading.since + apart)
        return found

    def describe(self, workers: Sequence[int]) -> dict[int, str]:
        """What workers are doing, with the stacks of their threads."""
        seen = self.look(workers)
        return {
            worker: f"{self.nodes[worker]}: "
            + (seen[worker][0] if worker in seen else f"{self.activity(worker)}, and does not say")
            for worker in workers
        }

    def _waits(self, worker: int) -> bool:
        return self.activity(worker).waits or self.activity(worker).is_idle

    def _at(self, worker: int) -> tuple[int | None, int | None, str]:
        return self.activity(worker).where

    # -- the end --------------------------------------------------------------------------

    def _dismiss(self) -> None:
        self._end()


def cause_of(error: Exception) -> str:
    """Why an actor died, out of what Ray says of it."""
    text = " ".join(str(error).split())
    if found := _EXIT.search(text):
        return f"{found[1]}, {found[2].rstrip('. ')}"
    cause = _CAUSE.search(text)
    return (cause[1] if cause else text).split(". ")[0].rstrip(".")


def _never_given(own: ActorState) -> None:
    raise GivenUp


def _is_of(error: BaseException, worker: int) -> bool:
    """Whether it is the error of this worker itself, which has the traceback."""
    return getattr(error, "worker", None) == worker


def _end(
    actors: Sequence[ActorHandle], reserved: Sequence[PlacementGroup], cluster: Cluster
) -> None:
    """End the actors, and leave the cluster."""
    kill(actors, reserved)
    cluster.leave()
