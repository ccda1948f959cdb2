"""A training script that knows what it should compute, whatever happens to it."""

from __future__ import annotations

import copy
import gc
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.board.dump import offer_dumps
from penstock.board.runs import folders
from tests.faults import traps
from tests.faults.traps import Loss, Touchy, Trap, build
from tests.support.models import uniform_plan

OPERATIONS = ("step", "step", "update", "zero", "forward", "backward", "update", "zero")
SOON = 5.0  # seconds in which an error must be there
X, Y = torch.randn(12, 5), torch.randn(12, 6)

State = dict[str, torch.Tensor | None]


class Reference:
    """The same model without a pipeline: one micro-batch after the other."""

    def __init__(self, model: nn.Module, microbatches: int) -> None:
        self.model = build()
        self.model.load_state_dict(model.state_dict())
        self.optimizer = Touchy(self.model.parameters(), lr=0.1)
        self.microbatches = microbatches
        self._results: list[torch.Tensor] = []

    def do(self, operation: str) -> None:
        count = self.microbatches
        parts = list(zip(X.tensor_split(count), Y.tensor_split(count), strict=True))
        if operation == "step":
            for x, y in parts:
                (F.mse_loss(self.model(x), y) * (len(x) / len(X))).backward()
        elif operation == "forward":
            self._results = [self.model(x) for x, _ in parts]
        elif operation == "backward":
            whole = torch.cat(self._results).detach().requires_grad_()
            (gradient,) = torch.autograd.grad(F.mse_loss(whole, Y), whole)
            pieces = gradient.tensor_split(count)
            for result, piece in zip(self._results, pieces, strict=True):
                result.backward(piece)
        elif operation == "update":
            self.optimizer.step()
        else:
            self.model.zero_grad()


def state_of(model: nn.Module) -> State:
    """Parameters, buffers and gradients, as they are now."""
    found: State = {name: value.clone() for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        found[f"{name}.grad"] = None if gradient is None else gradient.clone()
    return found


def differing(one: State, other: State) -> list[str]:
    """What is not bit for bit the same."""

    def same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
        return (a is None) == (b is None) and (a is None or b is None or torch.equal(a, b))

    return [name for name in one if not same(one[name], other[name])]


class Session:
    """A pipeline, a reference, and what became of them.

    Args:
        rng: decides whatever is left to chance.
        tell: tells the outside world what happens here.

    Attributes:
        problems: what is not as it should be.
    """

    def __init__(self, rng: random.Random, tell: Callable[..., None]) -> None:
        traps.driver = os.getpid()
        torch.set_num_threads(1)
        torch.manual_seed(rng.randrange(1000))
        self.rng = rng
        self.tell = tell
        self.problems: list[str] = []
        self.loss: Any = Loss()
        offer_stacks()
        self._files = open_files()
        self._later: threading.Thread | None = None

    # -- the script -----------------------------------------------------------------------

    def build(self, timeout: float | None = None, replicas: int = 1) -> None:
        """Have a pipeline of two workers in each replica, and a reference."""
        model = build()
        self.microbatches = self.rng.choice([2, 4])
        self.reference = Reference(model, self.microbatches)
        program = ps.capture(model, (X,))
        assert len(program) == 12, len(program)
        schedules = [("gpipe", [6]), ("1f1b", [6]), ("interleaved", [3, 6, 9])]
        halving = [("zero-bubble", [6])] if replicas == 1 else []
        schedule, cuts = self.rng.choice(schedules + halving)
        plan = uniform_plan(program, 2, self.microbatches, schedule, cuts)
        self.plan = replace(plan, other_replicas=(plan.devices,) * (replicas - 1))
        self.tell("building")
        self.pipe = ps.Pipeline(
            model,
            (X,),
            devices=["cpu"] * 2 * replicas,
            workers="processes",
            plan=self.plan,
            program=program,
            timeout=timeout,
            audit=None,  # whose own passes would spring the traps
        )
        self.optimizer = self.pipe.optimizer(Touchy, lr=0.1)
        self.output: torch.Tensor | None = torch.zeros(())
        self.tell("ready")

    @property
    def pids(self) -> list[int]:
        """Of the workers."""
        return [pid for pid in children() if "penstock" in command_of(pid)]

    def do(self, operation: str) -> None:
        """One operation of the script, in the pipeline."""
        if operation == "step":
            self.pipe.train_step(X, target=Y, loss_fn=self.loss)
        elif operation == "forward":
            self.output = None
            self.output = F.mse_loss(self.pipe(X), Y)
        elif operation == "backward":
            assert self.output is not None
            self.output.backward()
        elif operation == "update":
            self.optimizer.step()
        else:
            self.pipe.zero_grad()

    def go(self, rounds: int, start: int = 0) -> None:
        """Train, and look at every bit.

        Raises:
            Exception: what an operation raises; `operation`, `before` and `after` say where.
        """
        for at in range(start, rounds * len(OPERATIONS)):
            with uninterrupted():
                self.at, self.operation = at, OPERATIONS[at % len(OPERATIONS)]
                self.before = state_of(self.reference.model)
                self.momentum = copy.deepcopy(self.reference.optimizer.state_dict())
                self.reference.do(self.operation)
                self.after = state_of(self.reference.model)
            self.do(self.operation)
            self.compare(self.after, f"after {self.operation}")

    def compare(self, expected: State, when: str) -> None:
        """Note what is not as it should be."""
        wrong = differing(state_of(self.pipe.model), expected)
        if wrong:
            self.problems.append(f"{when} {', '.join(wrong)} differ")

    # -- failure --------------------------------------------------------------------------

    def trap(self) -> tuple[int, int]:
        """The place of one of the traps, and its stage."""
        at = 3 * self.rng.randrange(4) + 2
        return at, max(k for k, s in enumerate(self.plan.stages) if s.spans[0][0] <= at)

    def arm(self, at: int, spring: str, where: int, microbatch: int) -> None:
        """Let the trap at this place spring; see `Trap.arm`."""
        trap = self.pipe.model[at]
        assert isinstance(trap, Trap)
        trap.arm(spring, where, microbatch)

    def disarm(self) -> None:
        """Let no trap spring any more."""
        self.loss = Loss()
        for module in self.pipe.model:
            if isinstance(module, Trap):
                module.disarm()
        self.optimizer.param_groups[0]["spring"] = ""

    @contextmanager
    def expecting(
        self, kind: type[BaseException] | tuple[type[BaseException], ...]
    ) -> Iterator[None]:
        """Note if nothing of this kind is raised, or not soon; what is raised is `self.error`."""
        self.error: BaseException | None = None
        self.moment = time.monotonic()
        try:
            yield
        except kind as error:
            self.error = error
            self.tell("raised", error=said(error))
        except BaseException as error:
            self.error = error
            self.problems.append(f"{said(error)} instead of {kind}")
        else:
            self.problems.append(f"nothing was raised, instead of {kind}")

    def took(self, limit: float = SOON) -> None:
        """Say how long the error took to come, and within which time it should."""
        self.tell("took", seconds=time.monotonic() - self.moment, limit=limit)

    def is_undone(self, maybe_done: bool) -> bool:
        """Whether the operation that failed has left nothing; if not, it must be done in full."""
        now = state_of(self.pipe.model)
        if not differing(now, self.before):
            return True
        if not (maybe_done and not differing(now, self.after)):
            wrong = differing(now, self.before)
            torn = [name for name in wrong if name in differing(now, self.after)]
            if self.operation == "update" and not torn and self.is_closed():
                return True  # of each parameter all or nothing, and nobody can go on
            self.problems.append(f"of the failed {self.operation} {', '.join(wrong)} are left")
        return False

    def is_closed(self) -> bool:
        """Whether the pipeline says that it is."""
        start = time.monotonic()
        try:
            self.pipe.eval()
            with torch.no_grad():
                self.pipe(X)
        except ps.ClosedError:
            if time.monotonic() - start > 0.5:
                self.problems.append("it took long to say that it is closed")
            return True
        finally:
            self.pipe.train()
        return False

    def goes_on(self, undone: bool) -> None:
        """The pipeline can be used, and every bit is right."""
        self.disarm()
        if undone:
            self._put_reference_back()
        again = undone and self.operation != "backward"  # whose activations are gone
        is_lost = self.operation == "forward" and self.output is None  # a Ctrl-C came just after it
        left = self.at + (0 if again else 2 if is_lost else 1)
        try:
            self.go(2 + left // len(OPERATIONS), left)
        except Exception as error:
            self.problems.append(f"afterwards {said(error)} in {self.operation}")

    def _put_reference_back(self) -> None:
        model = self.reference.model
        named: dict[str, Any] = {n: v for n, v in self.before.items() if not n.endswith(".grad")}
        model.load_state_dict(named)
        self.reference.optimizer.load_state_dict(self.momentum)
        for name, parameter in model.named_parameters():
            gradient = self.before[f"{name}.grad"]
            parameter.grad = None if gradient is None else gradient.clone()

    def closes(self) -> None:
        """Close, and see that nothing is left."""
        self.pipe.close()
        self.disarm()
        with torch.no_grad():
            self.pipe.model(X)  # it stays usable
        self.pipe = self.optimizer = self.reference = None  # type: ignore[assignment]
        self.output = torch.zeros(())
        self.error = None
        self.nothing_is_left()

    def nothing_is_left_of_processes(self) -> None:
        """Not even a zombie."""
        if self._later is not None:
            self._later.join()
        while gc.collect():  # what autograd's graph refers to goes with the next one
            pass
        if found := children():
            self.problems.append(f"processes are left: {[command_of(p)[:40] for p in found]}")

    def nothing_is_left(self) -> None:
        """No process, no file."""
        self.nothing_is_left_of_processes()
        files = open_files()
        new = [target for fd, target in files.items() if self._files.get(fd) != target]
        if new:
            self.problems.append(f"files are open: {new}")

    def later(self, most: float, what: Callable[[], None]) -> None:
        """Do something at a random moment within so many seconds, in another thread."""
        seconds = self.rng.uniform(0.0, most)

        def wait() -> None:
            time.sleep(seconds)
            self.moment = time.monotonic()
            what()

        self._later = threading.Thread(target=wait)  # no daemon: they do not survive an exit
        self._later.start()


@contextmanager
def uninterrupted() -> Iterator[None]:
    """A Ctrl-C in here comes at the end: what is expected must not be half done itself."""
    came: list[int] = []
    usual = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
    if came:
        raise KeyboardInterrupt


def said(error: BaseException) -> str:
    """An error on one line."""
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def children(pid: int | str = "self") -> list[int]:
    """Of a process, zombies as well."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended
            found += map(int, path.read_text().split())
    return found


def command_of(pid: int) -> str:
    """What a process runs."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") or "a zombie"
    except OSError:
        return "gone"


def offer_stacks() -> None:
    """Open the file of this process's stacks, which stays open, where its first pipeline would."""
    folder = next(iter(folders()))
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    offer_dumps(folder)


def open_files() -> dict[int, str]:
    """The files that this process has open."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
    return found
