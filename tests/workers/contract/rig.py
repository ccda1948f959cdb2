"""Workers of any kind with a small model, what gives them passes, and what these must give."""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import msgspec
import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.comparison.reference import one_device
from penstock.engine.batch import Batch
from penstock.engine.objective import Objective
from penstock.engine.orders import Order, Outcome, PassKind
from penstock.runner import Runner
from penstock.workers.backend import Backend, WorkerKind
from penstock.workers.kinds import WorkerOptions
from penstock.workers.placement import place
from tests.support.models import uniform_plan
from tests.support.traps import Trap

STAGES, COUNT = 2, 3
_numbers = torch.Generator().manual_seed(1)
X, Y = torch.randn(11, 6, generator=_numbers), torch.randn(11, 6, generator=_numbers)
PARTS = X.tensor_split(COUNT)
PATIENCE = 30.0  # seconds that a pass may take, and that anything else is waited for


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    """A model, the same each time."""
    torch.manual_seed(3)
    return build()


def trapped() -> nn.Module:
    """A module for each stage: a trap behind weights, statistics and masks."""
    layers = (nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Tanh())
    return nn.Sequential(*(nn.Sequential(*copy.deepcopy(layers), Trap()) for _ in range(STAGES)))


class Forked(nn.Module):
    """Takes another way where its input says so."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if (x > 50).any():
            x = x * 0.01
        if not self.training:
            x = x + 1
        return self.second(self.first(x).relu())


class Later(Forked):
    """Has weights that only the other way uses."""

    def __init__(self) -> None:
        super().__init__()
        self.third = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if (x > 50).any():
            y = self.third(y.tanh())
        return y


def backend_of(kind: WorkerKind, timeout: float | None = PATIENCE) -> Backend:
    """Two workers of this kind, without a plan."""
    return WorkerOptions(kind, ["cpu"] * STAGES, timeout, "system").backend(False)


def same(one: Any, other: Any) -> bool:
    """Whether two dictionaries of tensors have the same bits."""
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


class Rig:
    """Workers that have a plan, and one device beside them that does the same.

    Under torchrun there is one in every rank, and all do the same.

    Args:
        kind: of workers.
        build: the model.
        timeout: seconds that a pass may take.
        replicas: each of them has as many stages as there are workers left for it.
        count: of micro-batches.
        schedule: its name.

    Attributes:
        x, y: a batch.
        workers: which are tested.
        model: whose stages they run.
        twin: its copy, which runs on one device.
    """

    def __init__(
        self,
        kind: WorkerKind,
        build: Callable[[], nn.Module] = trapped,
        timeout: float = PATIENCE,
        replicas: int = 1,
        count: int = COUNT,
        schedule: str = "1f1b",
    ) -> None:
        self.model, self.twin = seeded(build), seeded(build)
        self.count = count
        times = -(-count // len(X))
        self.x, self.y = X.repeat(times, 1), Y.repeat(times, 1)
        blocks = [name for name, module in self.model.named_children() if len([*module.children()])]
        self.program = ps.capture(self.model, (self.x,), keep_closed=blocks)
        backend = backend_of(kind, timeout)
        backend.wait(None)
        made = None
        if backend.leads:
            one = uniform_plan(self.program, STAGES // replicas, count, schedule)
            made = msgspec.structs.replace(one, other_replicas=(one.devices,) * (replicas - 1))
        with backend.operation("the planning"):
            self.plan = backend.broadcast_plan(self.program, made)
        self._threads = torch.get_num_threads()
        torch.set_num_threads(backend.threads)  # the twin's bits depend on their number
        self.workers = backend.start(self.plan, self.model, timeout)
        place(self.program, self.plan.cuts, self.workers.homes, None, self.workers.hold)
        self.program.recordings.rebind()
        self.runner = Runner(self.program, self.plan, self.workers)
        torch.manual_seed(5)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.workers.close()
        torch.set_num_threads(self._threads)

    # -- passes ---------------------------------------------------------------------------

    def order(
        self, what: PassKind, x: torch.Tensor | None = None, loss_fn: Any = F.mse_loss
    ) -> Order:
        """A pass of a batch, in the midst of an operation."""
        x = self.x if x is None else x
        role, training = self.workers.role, self.model.training
        batch = None
        if role.has_inputs:
            batch = Batch.split(self.program.flatten_inputs((x,), {}), self.count)
            if role.routes:
                batch = self.runner.route(batch, training, what == "train")
        batch = self.runner.share(batch, training)
        objective = Objective(self.y, loss_fn, "rows", None, None, False)
        ends = what == "train" and role.has_loss
        loss = objective.loss(batch.rows, self.runner.loss_device, False, None) if ends else None
        order = self.runner.order(what, batch, training, loss)
        self.runner.counts.count(order.microbatches[0].key.step)
        return order

    def started(self, what: PassKind, x: torch.Tensor | None = None, **options: Any) -> Any:
        """The ticket of a pass that runs."""
        with self.workers.operation("a start"):
            return self.workers.start(self.order(what, x, **options))

    def run(self, what: PassKind, x: torch.Tensor | None = None, **options: Any) -> Outcome:
        """What comes of a pass."""
        return self.started(what, x, **options).finish()

    def forward(self, x: torch.Tensor) -> tuple[Order, Outcome]:
        """A batch of which stages hold what its backward needs."""
        with self.workers.operation("a call"):
            order = self.order("forward", x)
            ticket = self.workers.start(order)
        return order, ticket.finish()

    def back(self, order: Order, outcome: Outcome, wanted: Any = None) -> Outcome:
        """What comes of the backward of a forward: the gradient of each result is itself."""
        gradients = outcome.results if self.workers.role.has_loss else {}
        back = order.back(gradients, order.modes, wanted)
        with self.workers.operation("backward"):
            ticket = self.workers.start(back)
        return ticket.finish()

    def train(self, steps: int = 1, x: torch.Tensor | None = None, **options: Any) -> None:
        """Train, and see that one device has the same loss, gradients and statistics."""
        for _ in range(steps):
            step = self.runner.counts.trained
            loss = self.run("train", x, **options).loss
            given = self.x if x is None else x
            oracle = one_device(self.twin, self.program, self.count, (given,), {})
            assert torch.equal(loss, oracle.train_step(step, F.mse_loss, self.y))
            self.compare()

    def evaluate(self, *batches: torch.Tensor) -> None:
        """Start batches in evaluation mode, and see that their results are those of one device."""
        modes = {m: m.training for model in (self.model, self.twin) for m in model.modules()}
        self.model.eval()
        self.twin.eval()
        tickets = [self.started("infer", x) for x in batches]
        for x, ticket in zip(batches, tickets, strict=True):
            outcome = ticket.finish()
            with torch.no_grad():
                expected = [self.twin(part) for part in x.tensor_split(self.count)]
            assert all(torch.equal(a, b) for (a,), b in zip(outcome.parts, expected, strict=True))
        for module, mode in modes.items():
            module.training = mode
        self.compare()

    def now(self) -> dict[str, torch.Tensor]:
        """Copies of gradients, and of the buffers that workers have."""
        if self.workers.all_alive():
            self.workers.state(self.model, self.model)
        names, parameters = zip(*self.model.named_parameters(), strict=True)
        found = zip(names, self.workers.gradients(parameters), strict=True)
        named = [(name, gradient) for name, gradient in found if gradient is not None]
        return {n: t.detach().clone() for n, t in [*named, *self.model.named_buffers()]}

    def compare(self) -> None:
        """See that the workers have the gradients and the state of one device."""
        held, theirs = {id(p) for p in self.workers.parameters}, dict(self.twin.named_parameters())
        named = dict(self.model.named_parameters())
        gradients = self.workers.gradients(list(named.values()))
        for (name, parameter), gradient in zip(named.items(), gradients, strict=True):
            other = theirs[name].grad
            if id(parameter) in held and other is not None:
                assert gradient is not None, name
                assert torch.equal(gradient, other), name
            else:
                assert gradient is None, name
        assert same(self.workers.state(self.model, self.model), self.twin.state_dict())

    # -- what happens in the midst of them ------------------------------------------------

    def trap(self, stage: int) -> Trap:
        """The trap of a stage."""
        found: Trap = self.model[stage][-1]  # type: ignore[index, assignment]
        return found

    def disarm(self) -> None:
        """Let no trap do anything."""
        for stage in range(STAGES):
            self.trap(stage).disarm()

    def folder(self) -> Path:
        """A new one, which all processes have."""
        with self.workers.operation("a folder"):
            made = tempfile.mkdtemp() if self.workers.role.leads else None
            return Path(self.workers.broadcast(made, "leader"))


def touch_and_wait(begun: Path, go: Path, seconds: float = PATIENCE) -> None:
    """Make a file, and wait for another; not for good."""
    begun.touch()
    deadline = time.monotonic() + seconds
    while not go.exists() and time.monotonic() < deadline:
        time.sleep(0.005)


def wait_for(path: Path) -> None:
    """Until a file is there."""
    deadline = time.monotonic() + PATIENCE
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.005)
