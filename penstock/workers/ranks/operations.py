"""What all ranks of a launch do together, and how failure travels between them.

Every rank runs the same script, so every rank calls the same methods of a pipeline in the same
order. Each such call is an operation. At its end every rank reports to rank 0, which answers with
the verdict: what all have found, or the one error that all of them raise. Nobody goes on before.
Whoever waits for anything else meanwhile, for values on a link, say, also listens to rank 0, and
rank 0 to all; so a failure or the end of a process wakes them.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, TypeVar

from penstock.board.activity import Activity
from penstock.errors import (
    BY_USER,
    IN_A_FORK,
    InputError,
    PenstockError,
    WorkerDied,
    WorkerTimeout,
    closed,
)
from penstock.forks import disown_in_forks
from penstock.links.local import Aborted
from penstock.links.pickling import from_bytes, portable, to_bytes
from penstock.links.wire import Gone, Wire, polling, spin
from penstock.workers.heartbeat import STOPPED, HasStopped
from penstock.workers.ranks.clocks import Clock, ClockOffset, machine

_GRACE = 5.0  # seconds that ranks have to stop when an operation is given up
_REST = 60.0  # seconds in which nothing may come of a message that has begun to
_LONG = 1.0  # seconds of waiting, after which a rank sends rank 0 what for

T = TypeVar("T")


class GivenUp(PenstockError):  # noqa: N818 - never reaches a user
    """The script that drives the ranks, which are Ray actors then, has given the operation up."""


class Broadcast(NamedTuple):
    """What one rank has for all others.

    Attributes:
        number: of the operation in which it is sent.
        what: the name of that operation on this rank.
        value: what the others get.
    """

    number: int
    what: str
    value: Any


class RankReport(NamedTuple):
    """A rank is done with an operation.

    Attributes:
        number: of the operation.
        what: its name on that rank.
        value: what the rank has found.
        error: what it has raised instead.
        sent: when, by that rank's clock.
        stops: whether the rank was asked to stop.
    """

    number: int
    what: str
    value: bytes = b""
    error: BaseException | None = None
    sent: int = 0
    stops: bool = False


class Verdict(NamedTuple):
    """Rank 0 says what has come of an operation.

    Attributes:
        number: of the operation.
        values: everybody's, by rank, if all went well.
        error: the one that all raise, if not.
        rank: the one that has failed, or -1.
        closed: why no other operation can follow, if none can.
        sent: when, by rank 0's clock, in nanoseconds.
        took: nanoseconds that messages of every rank seemed to take at least, see `Clock`.
        machine: on which rank 0 is.
        stopping: the ranks that were asked to stop.
    """

    number: int
    values: list[bytes]
    error: BaseException | None = None
    rank: int = -1
    closed: str = ""
    sent: int = 0
    took: tuple[int | None, ...] = ()
    machine: str = ""
    stopping: tuple[int, ...] = ()


class RankGiveUp(NamedTuple):
    """Rank 0 says that an operation has failed, and whoever still works on it is to stop."""

    number: int


class Waits(NamedTuple):
    """A rank says in which operation it has waited for long."""

    number: int
    what: str


class Leave(NamedTuple):
    """A rank closes its pipeline."""


Message = Broadcast | RankReport | Verdict | RankGiveUp | Waits | Leave


class Ranks:
    """The ranks of a launch, as seen by one of them.

    Args:
        rank: its number.
        names: of all, in words.
        wires: to rank 0; on rank 0 to all others, by rank.
        timeout: seconds that an operation may take.
        pulses: of the ranks at the other ends, where they can be seen.

    Attributes:
        rank: its number.
        names: of all, in words.
        workers: the worker that each rank is.
        doing: what a rank is doing, or did last, as far as that is seen.
        timeout: seconds that an operation may take, waiting for other ranks to begin it included.
        number: of the operation.
        clock: of this rank, beside that of rank 0.
        stops: whether this rank was asked to stop; others hear of it with its next report.
        stopping: the ranks that were, the same on all of them between two operations.
    """

    def __init__(
        self,
        rank: int,
        names: Sequence[str],
        wires: Mapping[int, Wire],
        timeout: float,
        pulses: Mapping[int, HasStopped] | None = None,
    ) -> None:
        self.rank = rank
        self.names = names
        self.workers: Sequence[int] = range(len(names))
        self.doing: Callable[[int], Activity] = lambda rank: Activity.of(0)
        self.timeout = timeout
        self.number = 0
        self.clock = Clock()
        self.stops = False
        self.stopping: tuple[int, ...] = ()
        self._apart_from = [ClockOffset() for _ in names]
        self._wires = dict(wires)
        self._pulses = {k: pulse for k, pulse in (pulses or {}).items() if k in wires}
        self._what = ""
        self._closed_because = ""
        self._seconds = self._deadline = 0.0
        self._pollers: dict[int, select.poll] = {}
        self._begin()
        disown_in_forks(self)

    def _begin(self) -> None:
        self._incoming: Broadcast | None = None
        self._reports: dict[int, RankReport] = {}
        self._apart: dict[int, InputError] = {}  # of ranks that wait in another operation
        self._verdict: Verdict | None = None
        self._given_up = False
        self._has_reported = self.rank == 0  # or rank 0 knows in which operation this rank is

    def __len__(self) -> int:
        return len(self.names)

    @property
    def can_go_on(self) -> bool:
        """Whether other operations can follow, as far as is known; from any thread."""
        return not self._closed_because

    # -- operations -----------------------------------------------------------------------

    @contextmanager
    def operation(self, what: str, seconds: float = 0.0) -> Iterator[None]:
        """An operation of all ranks. If it fails on one of them, it fails on all.

        Within another it is a part of that one.

        Args:
            what: its name; the same on all ranks.
            seconds: that it may take at least, if `timeout` is less.

        Raises:
            ClosedError: an earlier one ended so that none can follow.
            WorkerError: another rank failed; what it raised is the cause.
        """
        if self._what:
            yield
            return
        if self._closed_because:
            raise closed(self._closed_because, in_ranks=True)
        self._begin()
        self.number += 1
        self._what, self._seconds = what, max(seconds, self.timeout)
        self._deadline = time.monotonic() + self._seconds
        try:
            yield
            if self._what:
                self.end(None)
        except BaseException as error:
            if self._what:
                self._conclude(RankReport(self.number, self._what, error=error))
            raise

    def end(self, value: T, only: int | None = None) -> list[Any]:
        """End the operation on this rank, and gather what every rank has of something.

        Args:
            value: what this rank has.
            only: the one rank that gets what the others have; `None` for all. The same on all.

        Returns:
            what every rank has given here; tensors of others are on the CPU. `None` for another
            rank's, if that is not for this one.

        Raises:
            WorkerError, WorkerTimeout, InputError: it failed on some rank.
        """
        values = self._conclude(RankReport(self.number, self._what, to_bytes(value)), only)
        if only is not None and only != self.rank:
            return [value if rank == self.rank else None for rank in range(len(self))]
        return [
            value if rank == self.rank else from_bytes(found) for rank, found in enumerate(values)
        ]

    def broadcast(self, value: T | None, source: int, of: str) -> T:
        """Send a value of one rank to all others.

        Args:
            value: the value on the rank `source`; on other ranks it is ignored.
            source: the rank that has the value.
            of: what the value is, in words, for the message of a timeout.

        Returns:
            the value, on every rank.

        Raises:
            Aborted: the operation failed elsewhere.
        """
        if self.rank == source:
            self._send(Broadcast(self.number, self._what, value), self._wires)
            return value  # type: ignore[return-value]
        while self._incoming is None:
            try:
                self._listen(None, f"waiting for {of} of {self.names[source]}")
            except Aborted:
                if self._incoming is None:  # else that it has failed since is noticed later
                    raise
        if self._incoming.what != self._what:
            raise self._disagreement(source, self._incoming.what)
        return self._incoming.value  # type: ignore[no-any-return]

    def _disagreement(self, rank: int, what: str) -> InputError:
        return InputError(
            f"rank {rank} is in {what} and rank {self.rank} in {self._what}: under torchrun all "
            "ranks must call the same methods of a pipeline in the same order, and in the same mode"
        )

    # -- waiting --------------------------------------------------------------------------

    def left(self) -> float:
        """Seconds that the operation may still take."""
        return max(0.1, self._deadline - time.monotonic())

    def wait_for(self, fd: int, is_there: Callable[[], bool], doing: Callable[[], str]) -> None:
        """Wait for something in this process, and listen to the other ranks meanwhile.

        Args:
            fd: a file descriptor that becomes readable when what is awaited may have come.
            is_there: says whether it has come.
            doing: says what this rank is doing meanwhile, for the message of a timeout.

        Raises:
            Aborted: the operation failed elsewhere.
            WorkerTimeout: it did not come in time.
        """
        while not is_there():
            self._listen(fd, doing)

    def _listen(self, fd: int | None, doing: str | Callable[[], str]) -> None:
        """Wait for something on this file descriptor or from other ranks; note what they say."""
        if not self._wires and fd is None:
            raise Aborted
        left = self.left()
        ready = {
            found for found, _ in spin(self._poller(-1 if fd is None else fd), min(left, _LONG))
        }
        if not ready and left > _LONG:
            self._wait_on()
            return
        if not ready:
            doing = doing if isinstance(doing, str) else doing()
            raise WorkerTimeout(
                f"{self.names[self.rank]} did not finish {self._what} within "
                f"{self._seconds:.0f} s; it is {doing}. Give Pipeline a larger timeout= if that "
                "may take longer"
            )
        for rank, other in list(self._wires.items()):
            if rank in self._wires and other.fileno() in ready:
                self._read_report(rank)
        if self._given_up or self._has_failed() or self._verdict is not None:
            raise Aborted

    def _wait_on(self) -> None:
        """After a second in which nothing came, check whether the wait can still end.

        Raises:
            Aborted: a rank is stopped, or the operation has failed.
        """
        if not self._has_reported:  # rank 0 may be in another one, and both wait for each other
            self._has_reported = True
            self._send(Waits(self.number, self._what), [0])
        for rank in [k for k, p in self._pulses.items() if k in self._wires and p.has_stopped()]:
            self._lost(rank, f"is {STOPPED}")
        if self._has_failed() or self._verdict is not None:
            raise Aborted

    def _has_failed(self) -> bool:
        """Whether some rank has, as far as this one knows."""
        errors = (report.error for report in self._reports.values())
        return bool(self._apart) or any(error is not None for error in errors)

    def _was_given_up(self) -> bool:
        """Whether the script that drives the ranks gave this up, and none has failed otherwise.

        The script has the other ranks give it up as well, but they may begin it much later.
        """
        errors = (report.error for report in self._reports.values())
        failed = [error for error in errors if error is not None]
        given_up = any(isinstance(error, GivenUp) for error in failed)
        return given_up and all(isinstance(error, GivenUp | Aborted) for error in failed)

    def _poller(self, fd: int) -> select.poll:
        """Looks at a socket, and at those to other ranks."""
        if fd not in self._pollers:
            fds = {fd, *(wire.fileno() for wire in self._wires.values())} - {-1}
            self._pollers[fd] = polling(*fds)
        return self._pollers[fd]

    def _read_report(self, rank: int) -> None:
        """Read one message of another rank."""
        try:
            message: Message = from_bytes(self._wires[rank].receive(_REST).data)
        except TimeoutError:
            self._lost(rank, "stopped in the midst of a message")
            return
        except Gone as gone:
            why = _because(gone)
            self._lost(rank, f"cannot be reached any more{why}" if why else "closed its connection")
            return
        if isinstance(message, Leave):
            self._lost(rank, "closed its pipeline")
        elif message.number == self.number:  # and not of an operation that is over
            self._note(rank, message)

    def _note(
        self, rank: int, message: Broadcast | RankReport | Verdict | RankGiveUp | Waits
    ) -> None:
        """Take note of what another rank says of this operation."""
        match message:
            case Broadcast():
                self._incoming = message
                self._send(message, self._wires.keys() - {rank})
            case Waits():
                if message.what != self._what:
                    self._apart[rank] = self._disagreement(rank, message.what)
            case RankReport():
                if message.sent:
                    self._apart_from[rank].note(message.sent, time.monotonic_ns())
                self._reports[rank] = self._read(rank, message)
            case RankGiveUp():
                self._given_up = True
            case Verdict():
                if message.took:
                    self.clock.note(message.machine, message.took[self.rank], message.sent)
                self._verdict = message

    def _read(self, rank: int, report: RankReport) -> RankReport:
        """A rank's report; with an error if it was in another operation."""
        if isinstance(report.error, Aborted) and rank in self._apart:
            return report._replace(error=self._apart[rank])
        if report.what != self._what and report.error is None:
            return report._replace(error=self._disagreement(rank, report.what))
        return report

    def _lost(self, rank: int, how: str) -> None:
        """Note that a rank is gone, and wake everybody who waits for it."""
        self._pollers.clear()
        self._wires.pop(rank).close()
        error = self._died(rank, how)
        if self.rank == 0:
            self._reports.setdefault(rank, RankReport(self.number, self._what, error=error))
            self._closed_because = str(error)
        else:
            self._verdict = self._verdict or Verdict(self.number, [], error, rank, str(error))

    def _send(self, message: Message, ranks: Iterable[int]) -> None:
        """Send a message to those of these ranks that are there."""
        data = to_bytes(message)
        for rank in [rank for rank in ranks if rank in self._wires]:
            try:
                with suppress(Gone):  # its end is noticed when it is listened to
                    self._wires[rank].send(data, -1, self.left())
            except TimeoutError:
                self._lost(rank, "did not read what it was sent")

    # -- the end of an operation ----------------------------------------------------------

    def _conclude(self, mine: RankReport, only: int | None = None) -> list[bytes]:
        """Report, and do as the verdict says; values of all are for the rank `only`, if given."""
        if mine.error is not None and any(wire.busy for wire in self._wires.values()):
            self._what = ""
            self.close("it was interrupted in the midst of a message")
            raise mine.error
        try:
            verdict = self._judged(mine, only) if self.rank == 0 else self._received(mine)
        except BaseException as again:  # an impatient user
            self._what = ""
            self.close(f"{type(again).__name__} came while other ranks were waited for")
            raise
        self._what, self.stopping = "", verdict.stopping or self.stopping
        if verdict.closed:
            self.close(verdict.closed)
        own = mine.error
        if own is not None and (_interrupts(own) or (verdict.rank == self.rank and _says_it(own))):
            raise own
        if verdict.error is not None:
            raise verdict.error
        return verdict.values

    def _received(self, mine: RankReport) -> Verdict:
        """On other ranks than 0: report to rank 0, and return its verdict."""
        if mine.error is not None:
            error = portable(self._as_others_see(mine.error), self.names[self.rank])
            mine = mine._replace(error=error)
        self._has_reported = True
        self._send(mine._replace(sent=time.monotonic_ns(), stops=self.stops), [0])
        now, late = time.monotonic(), isinstance(mine.error, WorkerTimeout)
        self._deadline = (now if late else max(now, self._deadline)) + 1.5 * _GRACE
        while self._verdict is None:
            try:
                self._listen(None, "waiting for rank 0")
            except Aborted:
                continue
            except WorkerTimeout as error:
                failure = mine.error if mine.error is not None and _says_it(mine.error) else error
                why = self._silent(failure, [0])
                return Verdict(self.number, [], why, closed="rank 0 did not answer")
        return self._verdict

    def _judged(self, mine: RankReport, only: int | None) -> Verdict:
        """On rank 0: wait for the reports of all ranks, send them the verdict, and return it."""
        if mine.error is not None:
            mine = mine._replace(error=self._as_others_see(mine.error))
        self._reports[0] = mine._replace(stops=self.stops)
        warned = False
        while missing := sorted(set(range(len(self))) - self._reports.keys()):
            if not warned and self._has_failed() and not self._was_given_up():
                warned, self._deadline = True, time.monotonic() + _GRACE
                self._send(RankGiveUp(self.number), missing)
            try:
                self._listen(None, f"waiting for {', '.join(self.names[r] for r in missing)}")
            except Aborted:
                continue
            except WorkerTimeout as error:
                first = next((r.error for r in self._reports.values() if _says_it(r.error)), error)
                why = self._silent(first or error, missing)
                self._closed_because = f"rank {missing[0]} did not answer"
                closed = self._closed_because
                return self._broadcast(Verdict(self.number, [], why, closed=closed))
        return self._broadcast(self._verdict_of(self._reports), only)

    def _as_others_see(self, error: BaseException) -> BaseException:
        """The error that other ranks get for one of this rank: Ctrl-C or `sys.exit` is its end."""
        if not _interrupts(error):
            return error
        return self._died(self.rank, f"was ended by {type(error).__name__}")

    def _died(self, rank: int, how: str) -> WorkerDied:
        how = f"is {self.names[rank]}, which {how}"
        activity = self.doing(rank)
        where = (None, None, self._what) if activity.stage is None else activity.where
        return WorkerDied(self.workers[rank], how, *where)

    def _silent(self, error: BaseException, ranks: Sequence[int]) -> BaseException:
        """The error, which names the ranks that may be the reason for it."""
        if not isinstance(error, WorkerTimeout):
            return error
        return WorkerTimeout(f"{error}. No answer from {', '.join(self.names[r] for r in ranks)}")

    def _verdict_of(self, reports: Mapping[int, RankReport]) -> Verdict:
        failed = {rank: r.error for rank, r in reports.items() if r.error is not None}
        if not failed:
            return Verdict(self.number, [reports[rank].value for rank in range(len(self))])
        rank, error = min(failed.items(), key=lambda item: _says_little(item[1]))
        if isinstance(error, Aborted):  # a link broke, and nobody else has noticed anything
            error = self._died(rank, f"lost its connection to a neighbour{_because(error)}")
        if isinstance(error, WorkerDied):
            self._closed_because = self._closed_because or str(error)
        return Verdict(self.number, [], error, rank, self._closed_because)

    def _broadcast(self, verdict: Verdict, only: int | None = None) -> Verdict:
        """Send the verdict to all ranks, its values perhaps to one; returns it as they get it."""
        stopping = {rank for rank, report in self._reports.items() if report.stops}
        verdict = verdict._replace(stopping=tuple(sorted(stopping | {*self.stopping})))
        took = tuple(apart.least for apart in self._apart_from)
        sent = verdict._replace(took=took, machine=machine(), sent=time.monotonic_ns())
        if verdict.error is not None and verdict.rank <= 0:  # others have come in bytes
            sent = sent._replace(error=portable(verdict.error, self.names[0]))
        if only is None:
            self._send(sent, self._wires)
        else:
            self._send(sent, [only])
            self._send(sent._replace(values=[]), self._wires.keys() - {only})
        return verdict

    def close(self, why: str = BY_USER) -> None:
        """Say to the others that this rank leaves, and close the connections."""
        self._closed_because = self._closed_because or why
        for rank in list(self._wires):
            self._send(Leave(), [rank])
            if rank in self._wires:
                self._wires.pop(rank).close()
        self._pollers.clear()

    def disown(self) -> None:
        """In a fork: let go of the sockets, so that the end of the original is noticed."""
        self._closed_because = self._closed_because or IN_A_FORK
        for wire in self._wires.values():
            wire.close()


def _says_it(error: BaseException | None) -> bool:
    return error is not None and not isinstance(error, Aborted)


def _says_little(error: BaseException) -> int:
    """More for an error that says less of why an operation has failed."""
    return 2 if isinstance(error, Aborted) else int(isinstance(error, GivenUp))


def _interrupts(error: BaseException) -> bool:
    return not isinstance(error, Exception)


def _because(error: BaseException) -> str:
    text = str(error) or str(error.__cause__ or "")
    return f" ({text})" if text else ""
