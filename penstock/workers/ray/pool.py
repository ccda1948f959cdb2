"""The actors of a pipeline, driven by the script."""

from __future__ import annotations

import re
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from penstock.board.activity import Activity
from penstock.board.memory import Board, Reading
from penstock.board.runs import new_board
from penstock.errors import InputError, WorkerDied
from penstock.links.local import Aborted
from penstock.workers.pool import Dispatch, Job, Late, Pool, Result
from penstock.workers.ray.actor import Actor
from penstock.workers.ray.cluster import Cluster, kill, ray
from penstock.workers.ray.pickled import Pickled, pickled, unpickled
from penstock.workers.ray.watch import Watch

_GRACE = 15.0  # seconds that workers have to notice that a pass was given up
_LEAVE = 5.0  # seconds that they have to leave each other by themselves
_LOOK = 2.0  # seconds that a worker has to say what it is doing
_LARGE = 1 << 16  # bytes of a job that Ray keeps once for all workers
_CAUSE = re.compile(r"(?:is dead|died) because (.*)")
_EXIT = re.compile(r"Worker exit type: (\w+) Worker exit detail: (.*?)(?: There are some |$)")


class _Sent(Dispatch):
    """A dispatch with what Ray knows of its jobs.

    Attributes:
        refs: of the results, by worker.
        parcels: of jobs that several workers have, by id.
        failed: when the first failure was noticed.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.refs: dict[int, Any] = {}
        self.parcels: dict[int, tuple[Job, Any]] = {}
        self.failed = 0.0


class ActorPool(Pool):
    """Actors of a Ray cluster. Jobs are pickled, and called with the `ActorState`.

    Args:
        cluster: where they are; it is left when they are closed.
        count: how many.
        cpus: that each of them reserves.

    Attributes:
        board: what those do that are on this machine.
        nodes: for every worker its process, and its node, in words; known after the start.

    Raises:
        InputError: the cluster has no room for them.
    """

    _can_be_killed = False

    def __init__(self, cluster: Cluster, count: int, cpus: float) -> None:
        super().__init__(count, _GRACE, lambda: None)
        self.nodes = ["an actor that is starting"] * count
        self._deaths: dict[int, WorkerDied] = {}
        self._actors: list[Any] = []
        self._cluster, self._cpus = cluster, cpus
        self.board: Board = new_board(count)
        self._reserved: list[Any] = []  # one placement group
        self._end = weakref.finalize(self, _end, self._actors, self._reserved, cluster)
        try:
            self._reserved.append(cluster.reserve(count, cpus))
            self._actors += cluster.start(self._reserved[0], count, cpus, Actor)
        except BaseException:
            self.close("its workers could not be started")
            self.board.close()
            raise

    def watch(self, nodes: Sequence[str]) -> Watch | None:
        """Watch the cluster, if there are to be as many workers as it has room for.

        Args:
            nodes: of the workers, as Ray calls them.
        """
        if self._cluster.options.max is None:
            return None
        return Watch(self._cluster, nodes, self._cpus)

    def reorder(self, order: Sequence[int]) -> None:
        """Number the workers anew.

        Args:
            order: for every number the one that the worker has had.
        """
        self._actors[:] = [self._actors[k] for k in order]

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
        current.refs[worker] = self._actors[worker].do.remote(current.number, packed)

    def _pickled(self, worker: int, job: Job, current: _Sent) -> Any:
        """The job, pickled once for all workers that have it."""
        if id(job) not in current.parcels:
            try:
                packed: Pickled = pickled(job)
            except Exception as error:
                raise InputError(
                    f"worker {worker} is another process, and what it needs cannot be sent there: "
                    f'{type(error).__name__}: {error}. Use workers="threads"'
                ) from error
            kept = ray().put(packed) if packed.nbytes > _LARGE else packed
            current.parcels[id(job)] = job, kept
        return current.parcels[id(job)][1]

    def _recall(self, current: Dispatch) -> None:
        assert isinstance(current, _Sent)
        for worker in current.waits_for:
            if worker not in current.refs:
                current.given.discard(worker)

    def _await_report(self, current: Dispatch, seconds: float | None) -> None:
        assert isinstance(current, _Sent)
        current.parcels.clear()
        waiting = {current.refs[worker]: worker for worker in current.waits_for}
        ready, _ = ray().wait([*waiting], num_returns=len(waiting), timeout=seconds)
        for ref in ready:
            self._hear(waiting[ref], ref, current)
        now = time.monotonic()
        if current.failures() and not current.failed:
            current.failed = now
        if current.failed and now > current.failed + _GRACE:  # it is cut off, and Ray waits longer
            for worker in current.waits_for:
                self._note(worker, Result(None, self._died(worker, "does not answer any more")))
            return
        if not ready:
            raise Late

    def _hear(self, worker: int, ref: Any, current: Dispatch) -> None:
        """Take a report, or notice that there will be none."""
        errors = ray().exceptions
        try:
            failed, packed = ray().get(ref)
            value = unpickled(packed)
        except errors.RayActorError as error:
            self._note(worker, Result(None, self._deaths.get(worker) or self._lost(worker, error)))
        except Exception as error:
            error.add_note(f"The report of worker {worker} cannot be read in this process.")
            current.results.setdefault(worker, Result(None, error))
        else:
            result = Result(None, value) if failed else Result(value, None)
            current.results.setdefault(worker, result)

    def _note(self, worker: int, result: Result) -> None:
        """None of the jobs under way will be done."""
        if isinstance(result.error, WorkerDied):
            self._deaths.setdefault(worker, result.error)
        for each in self._open:
            if worker in each.given:
                each.results.setdefault(worker, result)

    def _lost(self, worker: int, error: Exception) -> WorkerDied:
        """The error for an actor of which Ray says that it is gone."""
        died = self._died(worker, f"died: {cause_of(error)}")
        died.add_note(f"Ray says: {error}")
        return died

    def _died(self, worker: int, how: str) -> WorkerDied:
        where = self.activity(worker).where
        return WorkerDied(worker, f"({self.nodes[worker]}) {how};", *where)

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
        """The stacks of workers, and what they are doing; of those that say so within seconds."""
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
                    found[asked[ref]] = ray().get(ref)
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
    said = " ".join(str(error).split())
    if found := _EXIT.search(said):
        return f"{found[1]}, {found[2].rstrip('. ')}"
    cause = _CAUSE.search(said)
    return (cause[1] if cause else said).split(". ")[0].rstrip(".")


def _is_of(error: BaseException, worker: int) -> bool:
    """Whether it is the error of this worker itself, which has the traceback."""
    return getattr(error, "worker", None) == worker


def _end(actors: Sequence[Any], reserved: Sequence[Any], cluster: Cluster) -> None:
    """End the actors, and leave the cluster."""
    kill(actors, reserved)
    cluster.leave()
