"""Worker processes of this machine, driven by this one."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from penstock.board.activity import STARTING, Activity
from penstock.board.memory import Board
from penstock.board.runs import new_board
from penstock.cadence import wait_until
from penstock.errors import BY_USER, IN_A_FORK, InputError, WorkerDied, WorkerTimeout, closed
from penstock.forks import disown_in_forks
from penstock.interrupts import interrupts_wait
from penstock.links.local import Aborted
from penstock.links.pickling import pack, unpack
from penstock.links.shared_memory import Borrower, Lender
from penstock.links.slots import Arrivals
from penstock.links.wire import Gone, Wire, polling
from penstock.workers.heartbeat import Pulse
from penstock.workers.pool import Dispatch, Job, JobResult, Late, Pool
from penstock.workers.processes.child import COMMAND
from penstock.workers.processes.messages import Give, GiveUp, Grant, Report
from penstock.workers.processes.shared_model import SharedLocation

_GRACE = 3.0  # seconds that workers have to notice that a step was given up
_READ = 10.0  # seconds that a worker has to read a short message
_REST = 10.0  # seconds for the rest of a message that has begun to come
_LEAVE = 2.0  # seconds that workers have to end by themselves
_LEAVE_BROKEN = 0.5  # if something went wrong before
_DUMP = 0.5  # seconds to write down a stack
_CPU = torch.device("cpu")


class _Process:
    """One worker's process, and how to talk to it."""

    def __init__(self, worker: int, workers: int, board: Board) -> None:
        here, there = socket.socketpair()
        self.dump = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        lifeline, self.lifeline = os.pipe()
        with there, os.fdopen(lifeline):
            fds = (there.fileno(), lifeline, board.fd, self.dump.fileno())
            command = COMMAND.format(
                path=[str(entry) for entry in sys.path], arguments=(worker, workers, *fds)
            )
            # In a group of its own, a Ctrl-C of the terminal does not reach it, and what it
            # starts can be ended with it.
            self.popen = subprocess.Popen(
                [sys.executable, *(f"-W{each}" for each in sys.warnoptions), "-c", command],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                process_group=0,
            )
        self.end = os.pidfd_open(self.popen.pid) if hasattr(os, "pidfd_open") else -1
        self.pulse = Pulse(self.popen.pid)
        self.wire = Wire(here, self._check_runs)
        self.how = ""  # how this process has ended it, in words; empty if it has not
        self.lost = False  # whether somebody was interrupted between reading and noting a report
        self.lender = Lender(self.wire)
        self.borrower = Borrower(Arrivals(_CPU))

    def has_ended(self) -> bool:
        """Whether it has; then it is reaped, and what is left of its process group is killed."""
        if self.popen.returncode is None:
            with contextlib.suppress(ChildProcessError):
                if not os.waitid(os.P_PID, self.popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                    return False
                self.kill()  # before its number is free for others
            self.popen.wait()
        return True

    def kill(self) -> None:
        """End it, and what it has started."""
        if self.popen.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.popen.pid, signal.SIGKILL)

    def how_it_ended(self) -> str:
        """Its exit code or signal in words; waits up to a second for it to end."""
        wait_until(self.has_ended, seconds=1.0, pause=0.005)
        code, pid = self.popen.returncode, self.popen.pid
        if self.how:
            return f"(process {pid}) {self.how}"
        if code is None:
            return f"(process {pid}) closed its connection"
        if code >= 0:
            return f"(process {pid}) ended with exit code {code}"
        name = signal.Signals(-code).name
        hint = ", as the kernel does when memory runs out," if name == "SIGKILL" else ""
        return f"(process {pid}) was killed by {name}{hint}"

    def ask_for_stack(self, by: signal.Signals) -> None:
        """Have it write down what its Python code is doing; `written` reads that.

        Args:
            by: SIGUSR1, or SIGUSR2 if it cannot run Python, see `penstock.workers.processes.child`.
        """
        with contextlib.suppress(ProcessLookupError, ValueError):  # another thread has closed it
            os.ftruncate(self.dump.fileno(), 0)
            self.dump.seek(0)
            self.popen.send_signal(by)

    def written(self) -> str:
        """The stacks that it has written, as text."""
        with contextlib.suppress(ValueError):  # another thread has closed it
            self.dump.seek(0)
            return self.dump.read().decode(errors="replace").rstrip()
        return ""

    def _check_runs(self) -> None:
        """Raise if it has been stopped for so long that nobody should wait for it.

        Raises:
            TimeoutError: it has.
        """
        if self.pulse.has_stopped():
            raise TimeoutError("it is stopped by a signal")

    def close(self) -> None:
        """Let go of what belongs to it. It has ended."""
        del self.lender, self.borrower  # with the memory that they share with it
        self.dump.close()
        self.let_go()
        if self.end >= 0:
            os.close(self.end)
            self.end = -1

    def let_go(self) -> None:
        """Let it end, if nobody else holds its lifeline."""
        if self.lifeline >= 0:
            os.close(self.lifeline)
            self.lifeline = -1


@dataclass
class ProcessSurvivors:
    """Processes of a pool that go on in another one, after others have ended.

    Attributes:
        processes: those that wait for jobs.
        dispatches: the number of dispatches so far, from which the next pool counts on.
        grants: the number of grants so far, from which the next pool counts on.
        unused: how many of the last processes have never had a plan.
        memories: by id, where the driver's tensors are that these processes map.
    """

    processes: list[_Process] = field(default_factory=list)
    dispatches: int = 0
    grants: int = 0
    unused: int = 0
    memories: Mapping[int, SharedLocation] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.processes)

    def joined_by(self, others: ProcessSurvivors) -> ProcessSurvivors:
        """These, and then others that have nothing of a model yet."""
        return ProcessSurvivors(
            [*self.processes, *others.processes],
            max(self.dispatches, others.dispatches),
            max(self.grants, others.grants),
            self.unused + len(others),
            self.memories,
        )

    def close(self) -> None:
        """End those that nobody has taken over."""
        left, self.processes = self.processes, []
        _dismiss(left, _LEAVE_BROKEN)


class _Sent(Dispatch):
    """A dispatch that knows how many messages each worker had been sent before it."""

    def __init__(self, number: int, begun: Sequence[int]) -> None:
        super().__init__(number)
        self.begun = begun


class ProcessPool(Pool):
    """A process per device. Jobs are pickled, and called with the process's `WorkerState`.

    Args:
        count: how many.
        reset: called when all have stopped after a failure, before the next jobs.
        survivors: processes of another pool, which go on in this one; others are started only if
            these do not suffice.
        keeps_survivors: if a process ends, whether the others wait for `survivors`.
        spares: how many more processes wait, to be among the survivors.
        leave: seconds that the processes have to end by themselves, when they are dismissed.

    Attributes:
        board: where the processes note what they do.
        old: the workers that were in another pool; they have to enter this one first.
        spares: how many more processes wait, to be among the survivors.
    """

    _can_be_killed = True

    def __init__(
        self,
        count: int,
        reset: Callable[[], None],
        survivors: ProcessSurvivors | None = None,
        keeps_survivors: bool = False,
        spares: int = 0,
        leave: float = _LEAVE,
    ) -> None:
        super().__init__(count, _GRACE, reset)
        self.board = new_board(count)
        self.keeps_survivors = keeps_survivors
        self.spares = spares
        self._processes: list[_Process] = []
        self._spares: list[_Process] = []
        self._grants = 0
        self._leave = [leave]
        every = self._processes, self._spares
        self._finalizer = weakref.finalize(self, _dismiss_all, every, self._leave)
        disown_in_forks(self)
        if survivors is not None:
            self._dispatches, self._grants = survivors.dispatches, survivors.grants
            self._processes += survivors.processes[:count]
            rest = survivors.processes[count:]
            kept = min(spares, survivors.unused, len(rest))  # others have what they had
            self._spares += rest[len(rest) - kept :]
            survivors.processes = rest[: len(rest) - kept]
            survivors.close()
        self.old = range(len(self._processes))
        try:
            _uninterrupted(self._start_all)
        except BaseException:
            self.close("its workers could not be started")
            raise

    def _start_all(self) -> None:
        for worker in range(len(self._processes), self._count):
            self.board.records[worker].note(STARTING)
            self._processes.append(_Process(worker, self._count, self.board))
        while len(self._spares) < self.spares:
            self._spares.append(_Process(0, 1, Board(1)))

    def give_spares(self, job: Job) -> None:
        """Have the processes that wait do something meanwhile; nobody waits for it."""
        for process in self._spares:
            data, tensors = pack(job)
            with contextlib.suppress(Gone, TimeoutError), process.lender.lend(tensors) as loan:
                give = pickle.dumps(Give(self._dispatches, data, loan.lent))
                process.wire.send(give, loan.fd, _READ)

    def survivors(self) -> ProcessSurvivors:
        """End this pool, and return its processes that can go on in another one.

        A process cannot if it does not wait for a job, or was interrupted in the midst of a
        message. One that is to end (SIGTERM) is left out, unless others have died and only such
        processes remain. All that cannot go on are ended.
        """
        self._closed_because = self._closed_because or "its processes have gone to another pool"
        every = list(self._processes)
        able = [process for worker, process in enumerate(every) if self._is_able(worker)]
        leaving = [every[worker] for worker in self.leaving if every[worker] in able]
        if self._ended() and len(leaving) == len(able):
            leaving = []
        going_on = [process for process in able if process not in leaving]
        unused = [process for process in self._spares if not process.has_ended()]
        going_on += unused
        if self._finalizer.detach() is not None:
            left = [p for p in (*every, *self._spares) if p not in (*going_on, *leaving)]
            _dismiss(left, 0.0)
            _dismiss(leaving, _LEAVE)
        return ProcessSurvivors(going_on, self._dispatches, self._grants, len(unused))

    def _is_able(self, worker: int) -> bool:
        process, idle = self._processes[worker], self.activity(worker).is_idle
        return idle and not (process.has_ended() or process.wire.busy or process.lost)

    @property
    def pids(self) -> list[int]:
        """The process id of every worker, in their order."""
        return [process.popen.pid for process in self._processes]

    def activity(self, worker: int) -> Activity:
        """What a worker is doing; may be called from any thread."""
        return self.board.reading(worker).activity

    def _codes(self) -> list[int]:
        return [reading.code for reading in self.board.readings()]

    def all_alive(self) -> bool:
        """Whether they are not closed, and none has ended; may be called from any thread."""
        how = os.WEXITED | os.WNOHANG | os.WNOWAIT
        try:
            ended = any(os.waitid(os.P_PID, pid, how) for pid in self.pids)
        except ChildProcessError:
            ended = True
        return self._closed_because is None and not ended

    def grant(self, fd: int, *workers: int) -> int:
        """Send workers a file descriptor; returns the number under which they have it."""
        self._grants += 1
        for worker in workers:
            self._send(worker, Grant(self._grants), fd)
        return self._grants

    def _dispatch(self, number: int) -> Dispatch:
        return _Sent(number, [process.wire.begun for process in self._processes])

    def _recall(self, current: Dispatch) -> None:
        assert isinstance(current, _Sent)
        for worker in current.waits_for:
            if self._processes[worker].wire.begun == current.begun[worker]:
                current.given.discard(worker)  # nothing of its job has come there

    def _give(self, worker: int, job: Job, current: Dispatch) -> None:
        if self._closed_because:  # by another thread
            raise closed(self._closed_because)
        process = self._processes[worker]
        try:
            data, tensors = pack(job)
        except Exception as error:
            raise InputError(
                f"worker {worker} is another process, and what it needs cannot be sent there: "
                f'{type(error).__name__}: {error}. Use workers="threads"'
            ) from error
        try:
            with interrupts_wait(), process.lender.lend(tensors) as loan:
                give = pickle.dumps(Give(current.number, data, loan.lent))
                process.wire.send(give, loan.fd, current.timeout)
        except Gone:
            current.results[worker] = JobResult(None, self._died(worker))
        except TimeoutError:
            details = self.describe([worker])[worker]
            message = f"worker {worker} does not read what it is sent; it is {details}"
            late = WorkerTimeout(message, worker, *self._at(worker))
            current.results[worker] = JobResult(None, late)

    def _send(self, worker: int, message: GiveUp | Grant, fd: int = -1) -> None:
        with contextlib.suppress(Gone, TimeoutError), interrupts_wait():
            wire = self._processes[worker].wire  # whose end is noticed elsewhere
            wire.send(pickle.dumps(message), fd, _READ)

    # -- reports --------------------------------------------------------------------------

    def _await_report(self, current: Dispatch, seconds: float | None) -> None:
        numbers: dict[int, int] = {}
        for worker in current.waits_for:
            process = self._processes[worker]
            if process.lost:
                self._note(worker, JobResult(None, Aborted()), (*self._open, current))
                return
            numbers |= {fd: worker for fd in (process.wire.fileno(), process.end) if fd >= 0}
        ready = polling(*numbers).poll(None if seconds is None else seconds * 1000)
        if not ready:
            raise Late
        for worker in sorted({numbers[fd] for fd, _ in ready}):
            with interrupts_wait():
                self._read_report(worker, current)

    def _read_report(self, worker: int, current: Dispatch) -> None:
        """Read one report, or notice that there will be none."""
        process, dispatches = self._processes[worker], (*self._open, current)
        process.lost = True
        try:
            if not process.wire.ready():  # its end may be held open by what it has started
                raise Gone
            data, fd = process.wire.receive(_REST)
        except Gone:
            why = self._closed_because  # by another thread
            error = closed(why) if why else None
            self._note(worker, JobResult(None, error or self._died(worker)), dispatches)
        except TimeoutError:
            details = self.describe([worker])[worker]
            words = f"worker {worker} stopped in the midst of a report; it is {details}"
            self._note(worker, JobResult(None, WorkerTimeout(words, worker)), dispatches)
        else:
            report: Report = pickle.loads(data)
            if report.leaves:
                self.leaving.add(worker)
            result = self._opened(worker, report, fd)
            self._note(worker, result, [r for r in dispatches if r.number == report.dispatch])
        process.lost = False

    def _opened(self, worker: int, report: Report, fd: int) -> JobResult:
        """The value or the error of a report, with its tensors from shared memory."""
        try:
            tensors = self._processes[worker].borrower.borrow(report.tensors, fd)
            value = unpack(report.value, tensors, _as_there)
        except Exception as error:
            error.add_note(f"The report of worker {worker} cannot be unpacked in this process.")
            return JobResult(None, error)
        return JobResult(None, value) if report.failed else JobResult(value, None)

    def _note(self, worker: int, result: JobResult, dispatches: Sequence[Dispatch]) -> None:
        for each in dispatches:
            each.results.setdefault(worker, result)

    def _died(self, worker: int) -> WorkerDied:
        """The error that says how a process ended, and at what."""
        others = [k for k in range(self._count) if k != worker and self._codes()[k]]
        meanwhile = [f"worker {k} was {self.activity(k)}" for k in others]
        where = self.activity(worker).where
        error = WorkerDied(worker, self._processes[worker].how_it_ended(), *where)
        if meanwhile:
            error.add_note(f"Meanwhile {', '.join(meanwhile)}.")
        if written := self._processes[worker].written():
            error.add_note(f"In the worker's process:\n{written}")
        return error

    # -- failure --------------------------------------------------------------------------

    def _fault(self, current: Dispatch, late: Sequence[int], why: str | None) -> BaseException:
        """What is to be raised; a process that has ended is to blame for links that broke."""
        error = super()._fault(current, late, why)
        return self._blamed(error) if isinstance(error, WorkerTimeout) else error

    def _late(self, current: Dispatch, timeout: float) -> WorkerTimeout | WorkerDied:
        return self._blamed(super()._late(current, timeout))

    def _blamed(self, error: WorkerTimeout | WorkerDied) -> WorkerTimeout | WorkerDied:
        """The error to raise: if others can go on, that of a process that has ended, if one has.

        Processes that a signal has stopped are killed first.
        """
        if not (self.keeps_survivors and self._finalizer.alive):
            return error
        for process in self._processes:
            if process.pulse.is_stopped():
                process.how = "was stopped by a signal for seconds, and then ended"
                process.kill()
                process.popen.wait()
        ended = self._ended()
        return self._died(ended[0]) if ended else error

    def _ended(self) -> list[int]:
        return [k for k, process in enumerate(self._processes) if process.has_ended()]

    def check_open(self) -> None:
        """Raise if they cannot work any more.

        Raises:
            WorkerDied: one has ended, and the others wait to go on without it.
            ClosedError: they were closed.
        """
        if self._closed_because and self.keeps_survivors and self._finalizer.alive:
            raise self._died((self._ended() or [0])[0])
        super().check_open()

    def fail(self, why: str) -> None:
        if self.keeps_survivors and self._ended():
            self._closed_because = why
        else:
            super().fail(why)

    def close(self, why: str = BY_USER) -> None:
        """Let the workers go, for good; `why` is what later calls will say."""
        if self._closed_because is None or self.keeps_survivors:  # which may still wait
            self._closed_because = self._closed_because or why
            self._dismiss()

    def _give_up(self, why: BaseException) -> None:
        if self._closed_because or STARTING in self._codes():
            self._open.clear()  # they do not listen while they import torch
            self.close(f"{type(why).__name__} came as its workers were starting")
        else:
            super()._give_up(why)

    def _abort(self) -> None:
        for worker, process in enumerate(self._processes):
            if not process.wire.busy:
                self._send(worker, GiveUp(self._dispatches - 1))

    def _broken(self) -> str | None:
        if self._ended():
            return "the process of a worker has ended"
        if any(process.wire.busy or process.lost for process in self._processes):
            return "it was interrupted in the midst of a message"
        return None

    def describe(self, workers: Sequence[int]) -> dict[int, str]:
        asked = [worker for worker in workers if self._codes()[worker]]
        now = self._stacks(asked, signal.SIGUSR1)
        hanging = [
            worker
            for worker in asked
            if not now[worker] and not self._processes[worker].pulse.is_stopped()
        ]
        if hanging:
            now |= self._stacks(hanging, signal.SIGUSR2)
        found = {}
        for worker in workers:
            process = self._processes[worker]
            stopped = "stopped by a signal, " if process.pulse.is_stopped() else ""
            what = f"{stopped}{self.activity(worker)} (process {process.popen.pid})"
            found[worker] = f"{what}\n{now.get(worker, '')}".rstrip()
        return found

    def _stacks(self, workers: Sequence[int], by: signal.Signals) -> dict[int, str]:
        """What these write down within a moment, when they get this signal."""
        deadline = time.monotonic() + _DUMP
        for worker in workers:
            self._processes[worker].ask_for_stack(by)
        last, now = None, dict.fromkeys(workers, "")
        while time.monotonic() < deadline and (last != now or not all(now.values())):
            time.sleep(_DUMP / 10)
            last, now = now, {worker: self._processes[worker].written() for worker in workers}
        return now

    def _stopped(self) -> list[int]:
        return [k for k, process in enumerate(self._processes) if process.pulse.has_stopped()]

    def _waits(self, worker: int) -> bool:
        return self.activity(worker).waits or self.activity(worker).is_idle

    def _at(self, worker: int) -> tuple[int | None, int | None, str]:
        return self.activity(worker).where

    # -- the end --------------------------------------------------------------------------

    def _dismiss(self) -> None:
        if self._closed_because != BY_USER:
            self._leave[0] = _LEAVE_BROKEN
        self._finalizer()

    def disown(self) -> None:
        """In a fork of the driver: let go of everything, so that the driver's end is noticed."""
        if self._finalizer.detach() is None:
            return
        self._closed_because = IN_A_FORK
        for process in (*self._processes, *self._spares):
            process.let_go()
            process.wire.close()


def _as_there(device: torch.device) -> torch.device:
    """What a worker has sent from a device is wanted on the same one: both call it the same."""
    return device


def _dismiss_all(groups: Sequence[Sequence[_Process]], leave: list[float]) -> None:
    """Let the processes of several lists end; how long they have may have changed until then."""
    _dismiss([process for group in groups for process in group], leave[0])


def _dismiss(processes: Sequence[_Process], leave: float) -> None:
    """Let the processes end by themselves, or kill them, and wait until they are gone.

    Args:
        processes: which.
        leave: seconds that they have to end by themselves.
    """
    try:
        for process in processes:
            process.wire.close()
        wait_until(lambda: _all_ended(processes), leave, pause=0.002)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.popen.wait()
            process.close()


def _all_ended(processes: Sequence[_Process]) -> bool:
    ended = [process.has_ended() for process in processes]  # of each, as it also cleans up
    return all(ended)


def _uninterrupted(work: Callable[[], None]) -> None:
    """Do some work to its end, even if the user interrupts; the interruption is raised afterwards.

    Another thread does it, as signals interrupt only the main one. Starting a process must not be
    interrupted midway: nobody would know of that process.
    """
    errors: list[BaseException] = []
    begin, done = threading.Lock(), threading.Event()

    def guarded() -> None:
        if not begin.acquire(blocking=False):
            return
        try:
            work()
        except BaseException as error:
            errors.append(error)
        finally:
            done.set()

    try:
        threading.Thread(target=guarded, daemon=True).start()
        done.wait()
    finally:
        if not begin.acquire(blocking=False):  # it has begun
            _patiently(done)
    if errors:
        raise errors[0]


def _patiently(done: threading.Event) -> None:
    """Wait, even if the user interrupts; the interruption is raised afterwards."""
    try:
        done.wait()
    except BaseException:
        _patiently(done)
        raise
