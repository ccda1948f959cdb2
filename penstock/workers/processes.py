"""Workers that are processes of this machine, driven by this one."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from penstock.errors import InputError, WorkerDied
from penstock.links.parcel import pack, unpack
from penstock.links.segment import Segment
from penstock.links.shared_memory import Receiver, Sender
from penstock.links.wire import Gone, Message, Wire
from penstock.workers.assembly import decode, doing
from penstock.workers.child import ABORT, COMMAND, ERROR, GRANT, JOB
from penstock.workers.rounds import Job, Late, Result, Round, Workers

_GRACE = 2.0  # seconds that workers have to notice that a step was given up
_SEND_TIMEOUT = 10.0  # seconds that a worker has to read what it is sent
_LEAVE = 2.0  # seconds that a worker has to end by itself
_DUMP = 0.2  # seconds to write down a stack
_CPU = torch.device("cpu")


class _Process:
    """One worker's process, and how to talk to it."""

    def __init__(self, worker: int, workers: int, board: Segment, lifeline: int) -> None:
        here, there = socket.socketpair()
        self.dump = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        arguments = (worker, workers, there.fileno(), lifeline, board.fd, self.dump.fileno())
        command = COMMAND.format(path=sys.path, arguments=arguments)
        self.popen = subprocess.Popen(
            [sys.executable, "-c", command], pass_fds=arguments[2:], stdin=subprocess.DEVNULL
        )
        there.close()
        self.wire = Wire(here)
        self.round = 0
        self.sender = Sender(self.wire, lambda: self.round)
        self.receiver = Receiver(self.wire, lambda: 0, _CPU)
        self.grants = 0

    def how_it_ended(self) -> str:
        """In words."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(1.0)
        code, pid = self.popen.poll(), self.popen.pid
        if code is None:
            return f"(process {pid}) closed its connection"
        if code >= 0:
            return f"(process {pid}) ended with exit code {code}"
        name = signal.Signals(-code).name
        hint = ", as the kernel does when memory runs out," if name == "SIGKILL" else ""
        return f"(process {pid}) was killed by {name}{hint}"

    def stack(self) -> str:
        """What its Python code is doing; empty if it does not say."""
        self.dump.seek(0)
        self.dump.truncate()
        with contextlib.suppress(ProcessLookupError):
            self.popen.send_signal(signal.SIGUSR1)
        time.sleep(_DUMP)
        self.dump.seek(0)
        return self.dump.read().decode(errors="replace").rstrip()


class ProcessWorkers(Workers):
    """A process per device. Jobs are pickled, and called with the process's `Site`.

    Args:
        count: how many.
        reset: called when all have stopped after a failure, before the next jobs.
    """

    def __init__(self, count: int, reset: Callable[[], None]) -> None:
        super().__init__(count, _GRACE, reset)
        self._board = Segment(8 * count)
        self._positions = self._board.integers()
        read, write = os.pipe()
        self._processes: list[_Process] = []
        self._finalizer = weakref.finalize(self, _dismiss, self._processes, write)
        _KEPT_FROM_FORKS.add(self)
        self._lifeline = write
        try:
            for worker in range(count):
                self._processes.append(_Process(worker, count, self._board, read))
        except BaseException:
            self._finalizer()
            raise
        finally:
            os.close(read)

    @property
    def pids(self) -> list[int]:
        """The processes' numbers."""
        return [process.popen.pid for process in self._processes]

    def grant(self, worker: int, fd: int) -> int:
        """Send a worker a file descriptor; returns the number under which it has it."""
        process = self._processes[worker]
        process.grants += 1
        self._send(worker, Message(self._rounds, GRANT, process.grants, fd=fd))
        return process.grants

    def _give(self, worker: int, job: Job, current: Round) -> None:
        process = self._processes[worker]
        try:
            data, tensors = pack(job)
        except Exception as error:
            raise InputError(
                f"worker {worker} is another process, and what it needs cannot be sent there: "
                f'{type(error).__name__}: {error}. Use workers="threads"'
            ) from error
        process.round = current.number
        try:
            process.sender.put(tensors, JOB, data)
        except (Gone, TimeoutError):
            current.results[worker] = Result(None, self._died(worker))

    def _send(self, worker: int, message: Message) -> None:
        with contextlib.suppress(Gone, TimeoutError):  # its end is noticed elsewhere
            self._processes[worker].wire.send(message, _SEND_TIMEOUT)

    def _await_report(self, current: Round, seconds: float | None) -> None:
        poller = select.poll()
        for worker in current.waits_for:
            poller.register(self._processes[worker].wire.fileno(), select.POLLIN)
        numbers = {p.wire.fileno(): worker for worker, p in enumerate(self._processes)}
        ready = poller.poll(None if seconds is None else seconds * 1000)
        if not ready:
            raise Late
        for fd, _ in ready:
            self._hear(numbers[fd], current)

    def _hear(self, worker: int, current: Round) -> None:
        """Read one report."""
        process = self._processes[worker]
        try:
            message = process.wire.receive()
        except Gone:
            error = self._died(worker)
            for each in (*self._open, current):
                if worker not in each.results:
                    each.results[worker] = Result(None, error)
            return
        tensors, payload = process.receiver.opened(message)
        value = unpack(payload, tensors)
        result = Result(None, value) if message.kind == ERROR else Result(value, None)
        for each in (*self._open, current):
            if each.number == message.round:
                each.results[worker] = result

    def _died(self, worker: int) -> WorkerDied:
        """The error that says how a process ended, and at what."""
        position = self._positions[worker]
        where = decode(position) if position else (None, None, "")
        return WorkerDied(worker, self._processes[worker].how_it_ended(), *where)

    def _abort(self) -> None:
        for worker, process in enumerate(self._processes):
            if not process.wire.busy:
                self._send(worker, Message(self._rounds - 1, ABORT))

    def _broken(self) -> str | None:
        if any(process.popen.poll() is not None for process in self._processes):
            return "the process of a worker has ended"
        if any(process.wire.busy for process in self._processes):
            return "it was interrupted in the midst of a message"
        return None

    def _describe(self, worker: int) -> str:
        return f"{doing(self._positions[worker])}\n{self._processes[worker].stack()}".rstrip()

    def _dismiss(self) -> None:
        self._finalizer()

    def disown(self) -> None:
        """In a fork of the driver: let go of everything, so that the driver's end is noticed."""
        os.close(self._lifeline)
        for process in self._processes:
            process.wire.close()
        self._finalizer.detach()


def _dismiss(processes: Sequence[_Process], lifeline: int) -> None:
    """Let the processes end by themselves, or kill them, and wait until they are gone."""
    for process in processes:
        process.wire.close()
    deadline = time.monotonic() + _LEAVE
    try:
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.popen.wait(max(0.0, deadline - time.monotonic()))
    finally:
        for process in processes:
            process.popen.kill()
            process.popen.wait()
            process.dump.close()
        os.close(lifeline)


_KEPT_FROM_FORKS: weakref.WeakSet[ProcessWorkers] = weakref.WeakSet()


def _disown_all() -> Any:
    for workers in list(_KEPT_FROM_FORKS):
        workers.disown()


os.register_at_fork(after_in_child=_disown_all)
