"""The interface of all kinds of workers: threads, processes, ranks, and actors of a Ray cluster.

A `Backend` has workers without a plan. It measures the links between them, lets all processes that
run the script agree on a plan, and starts the workers on it. Then they are `Workers`, which run
passes, step optimizers and write checkpoints. Above this module nobody asks which kind they are.

*The script's processes.* Threads, worker processes and actors are driven by one process, which has
the whole model. Under torchrun every rank runs the script, has some of the stages, and calls the
same methods in the same order; `Workers.role` says which part this process has.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from penstock.board.memory import Board, Reading
from penstock.capture import Program
from penstock.capture.equality import same_tensor
from penstock.devices.choice import (
    Devices,
    device_choices,
    existing_devices,
    threads_per_worker,
)
from penstock.display.terminal import Progress
from penstock.engine.orders import Order, Outcome
from penstock.errors import PlanError
from penstock.plan import Plan
from penstock.storage.part import Part
from penstock.workers.clipping import Clipping, clip_values
from penstock.workers.members import Member
from penstock.workers.memories import SideEffects
from penstock.workers.optimizer_parts import Groups, Parts
from penstock.workers.ownership import Ownership
from penstock.workers.probe import LinkProbe
from penstock.workers.redo import LostWork
from penstock.workers.saving import SaveOrder
from penstock.workers.ways import NewWay

WorkerKind = Literal["auto", "threads", "processes", "torchrun", "ray"]
"""Who runs the stages: threads of this process, processes of this machine, torchrun's ranks, or
actors of a Ray cluster."""

_LEAST_TIMEOUT = 60.0  # the smallest default timeout of a pass, in seconds
_PREDICTED = 50  # the default timeout of a pass, as a multiple of the predicted step time

T = TypeVar("T")


@dataclass(frozen=True)
class Role:
    """The part of this process among those that run the script; by default it is the only one.

    Attributes:
        index: the number of this process, from 0, in the order of workers.
        leads: whether it decides for all.
        has_inputs: whether it gives the first stage of a replica its batches.
        routes: whether it chooses the ways of micro-batches for all; such a process has inputs.
        has_loss: whether it gives the last stage of a replica targets and the loss.
        has_all_weights: whether its model always has the current weights of all stages.
        calls_loss: whether the loss is called in this process, where the user's own modules run.
        name: the name of this process in messages; empty if it is the only one.
    """

    index: int = 0
    leads: bool = True
    has_inputs: bool = True
    routes: bool = True
    has_loss: bool = True
    has_all_weights: bool = True
    calls_loss: bool = True
    name: str = ""


class Backend(ABC):
    """Workers that have no plan yet, one for each device.

    Attributes:
        threads: intra-op threads of each CPU worker.
        given_threads: `threads` as the user gave it; 0 if each worker has its share of the cores.
        leads: whether this process makes the plan for all that run the script.
        all_devices: whether a plan has to use every device.
        in_one_memory: whether replicas on CPUs share one copy of the weights.
        copies_gradients: whether a worker holds its gradients twice at the end of a pass, if there
            is one replica; see `penstock.plan.layout.Memory`.
        why_one_replica: a sentence that says why a search tries only one replica; empty if it may
            try several.
        starting: how many processes of this machine start while the model is captured; each keeps
            a core busy.
        probe: measures the links between workers.
    """

    threads: int
    given_threads: int = 0
    leads: bool = True
    all_devices: bool = True
    in_one_memory: bool = True
    copies_gradients: bool = False
    why_one_replica: str = ""
    starting: int = 0
    probe: LinkProbe

    @property
    @abstractmethod
    def devices(self) -> Sequence[torch.device]:
        """For each worker a device of this machine: its own, or one that is like it.

        Raises:
            PlanError: there is none like it, so nothing can be measured here.
        """

    @property
    def choices(self) -> Sequence[Sequence[torch.device]]:
        """The alternative lists of devices; a plan uses one of them, see `device_choices`."""
        return [self.devices]

    def take(self, plan: Plan, is_given: bool) -> None:
        """Have only the workers that a plan needs, if their number is left to the plan.

        Args:
            plan: the plan that `broadcast_plan` will be called with.
            is_given: whether the user gave the plan; it may have other devices than the user gave.

        Raises:
            DeviceError: a device of the plan does not exist.
            InputError: the workers cannot use a device of the plan.
        """
        return

    @abstractmethod
    def broadcast_plan(self, program: Program, plan: Plan | None) -> Plan:
        """Return the plan of the process that leads, in all processes that run the script.

        It ends the operation that is open.

        Args:
            program: the program that this process has captured.
            plan: the plan that this process has made, if it leads; otherwise `None`.

        Raises:
            PlanError: the plan does not fit the program or the devices, or the processes that run
                the script have captured different programs.
        """

    @abstractmethod
    def start(self, plan: Plan, model: nn.Module, timeout: float | None) -> Workers:
        """Start the workers on a plan; from then on `Workers.close` dismisses them.

        Args:
            plan: the plan that they run.
            model: the model whose stages they run.
            timeout: seconds that a pass may take; `None` derives it from the plan.
        """

    def operation(self, what: str) -> AbstractContextManager[None]:
        """Around what all processes that run the script do: if it fails in one, it fails in all.

        Args:
            what: the name of the operation, the same in all of them.
        """
        return nullcontext()

    @abstractmethod
    def check_replicas(self, replicas: int) -> None:
        """Raise unless these workers can be so many replicas.

        Raises:
            InputError: they cannot.
        """

    def welcome(self, survivors: Survivors) -> None:
        """Have the survivors of other workers among these; called before `start`."""
        survivors.close()

    def wait(self, progress: Progress | None) -> None:
        """Wait until the workers have started; `progress` is as in `Pipeline`."""
        return

    def close(self) -> None:
        """Dismiss the workers, if they never got a plan."""
        return


class DrivenBackend(Backend):
    """Workers that this process has or drives.

    Args:
        devices: the workers' devices, as the user gives them; `None` leaves them to the plan.
        least: the smallest number of workers, if `devices` is `None`.
        threads: intra-op threads of each CPU worker; 0 for its share of the cores.

    Raises:
        DeviceError: a device does not exist.
        InputError: there are no devices.
    """

    all_devices = False

    def __init__(self, devices: Devices | None, least: int = 1, threads: int = 0) -> None:
        self._are_given = devices is not None
        self.given_threads = threads
        self._choices = device_choices(devices, least)
        self._have(self._choices[-1], threads)

    def _have(self, devices: Sequence[torch.device], threads: int = 0) -> None:
        self._devices = devices
        self.threads = threads or threads_per_worker(devices)

    @property
    def devices(self) -> Sequence[torch.device]:
        """The device of each worker; before there is a plan, the longest list of `choices`."""
        return self._devices

    @property
    def choices(self) -> Sequence[Sequence[torch.device]]:
        """The alternative lists of devices; a plan uses one of them."""
        return self._choices

    def take(self, plan: Plan, is_given: bool) -> None:
        """Have the devices and threads of a plan, unless the user gave both plan and devices.

        If the user gave only the devices, and the plan uses some of them, each worker has as many
        threads as it would have on all of them.
        """
        if not self._are_given:
            self._have(existing_devices(plan.devices), self.given_threads or plan.threads)
        elif not is_given and len(plan.devices) < len(self._devices):
            self._have(existing_devices(plan.devices), self.threads)

    def broadcast_plan(self, program: Program, plan: Plan | None) -> Plan:
        """The plan as it is, after a check that it fits: one process decides for all workers."""
        if plan is None:
            raise PlanError("this process drives all workers, so it has to plan for them")
        plan.check_fits(program.fingerprint, list(map(str, self._devices)), len(program))
        uneven = len(set(plan.shares)) > 1 and plan.workers_per_replica > 1
        if uneven and self.in_one_memory:
            raise PlanError(
                f"the plan's replicas of {plan.workers_per_replica} workers run "
                f"{', '.join(map(str, plan.shares))} micro-batches; in one memory they could wait "
                "for each other for ever. Start the script with torchrun, or leave out plan= to "
                "have one made for these workers"
            )
        return plan

    def in_order(self, plan: Plan) -> list[torch.device]:
        """The device of every worker: the plan may have put them into another order."""
        return [self._devices[k] for k in order_of(list(map(str, self._devices)), plan)]


def timeout_of(plan: Plan, given: float | None, least: float = _LEAST_TIMEOUT) -> float:
    """The seconds that a pass may take.

    Args:
        plan: the plan that the pass runs.
        given: the user's timeout; `None` for a multiple of the step time that the plan predicts.
        least: the smallest timeout in seconds, if `given` is `None`.
    """
    return given or max(least, _PREDICTED * plan.predicted_step_seconds)


def order_of(names: Sequence[str], plan: Plan) -> list[int]:
    """For every worker the index of its device in `names`.

    It is not the worker's own number if the plan has the same devices in another order.
    """
    if Counter(names) != Counter(plan.devices):
        return list(range(len(names)))
    left = list(range(len(names)))
    order = []
    for device in plan.devices:
        order.append(next(k for k in left if names[k] == device))
        left.remove(order[-1])
    return order


class Survivors(Protocol):
    """Workers that are left after others have ended, and can go on; see `Workers.survivors`."""

    def __len__(self) -> int:
        """How many there are."""

    def close(self) -> None:
        """End those that nobody has taken over."""


class _Nobody:
    """No survivors."""

    def __len__(self) -> int:
        return 0

    def close(self) -> None:
        return


class Ticket(Protocol):
    """A pass that workers were given; see `Workers.start`."""

    def finish(self) -> Outcome:
        """Wait for the pass. If it fails, all passes under way are given up and undone.

        Raises:
            WorkerError: a stage or the loss failed.
            WorkerTimeout: it took too long; workers that do not stop within seconds are closed.
        """


class Workers(ABC):
    """The workers of a pipeline, with their stages and the links between them.

    Attributes:
        role: which part this process has.
        members: who they are, by number.
        board: what they are doing, in memory that anybody may read at any time.
        ownership: the tensors that every worker's stages use.
        devices: of every worker; for one on another machine, this process's own.
        homes: the device of every stage; `None` if its worker is another process with a model of
            its own.
        links: how values get from every stage to the next, in words.
        has_gradients: whether passes leave gradients in `.grad` in this process; under torchrun
            those of its own stages.
        runs_here: whether the calling thread is amid a pass, and so within the user's functions.
        assumes: whether a pass may be sent to them before it is known that the model is unchanged.
        times_sent: how many times changes of the model were sent to them.
        job: an identifier that all processes that run this pipeline have in common, if there are
            several; otherwise empty.
        why_not_profiled: why torch.profiler does not see them in this process; empty if it does.
    """

    role: Role = Role()
    has_gradients: bool = True
    runs_here: bool = False
    assumes: bool = False
    times_sent: int = 0
    job: str = ""
    why_not_profiled: str = ""
    _stops = False
    members: Sequence[Member]
    board: Board
    ownership: Ownership
    devices: Sequence[torch.device]
    homes: Sequence[torch.device | None]
    links: Sequence[str]

    # -- what the processes that run the script do together ---------------------------------

    def operation(self, what: str, seconds: float = 0.0) -> AbstractContextManager[None]:
        """Around what all processes that run the script do: if it fails in one, it fails in all.

        Within another operation it is a part of that one.

        Args:
            what: the name of the operation, the same in all of them.
            seconds: that it may take at least; by default as many as a pass may.
        """
        return nullcontext()

    @property
    def operations(self) -> int:
        """The number of operations so far, the same in all processes that run the script.

        It is 0 if there is only one such process.
        """
        return 0

    def broadcast(self, value: T | None, source: Literal["inputs", "leader"]) -> T:
        """Return the value of one process in all that run the script.

        Each of them calls it, once in an operation.

        Args:
            value: the value; only that of the source counts.
            source: the process whose value it is: `"inputs"` is the one with the first stage's
                inputs, `"leader"` the one that leads.
        """
        return value  # type: ignore[return-value]

    def all_gather(self, what: str, value: T) -> list[T]:
        """Return the values of all processes that run the script, in the order of `Role.index`.

        It ends the operation. Tensors of other processes are on the CPU.

        Args:
            what: the name of the operation, if none is open.
            value: the value of this process.
        """
        return [value]

    # -- requests to stop -------------------------------------------------------------------

    def request_stop(self) -> None:
        """Note that this process is to stop; a signal handler may call it at any moment.

        Others that run the script learn of it with whatever is exchanged next.
        """
        self._stops = True

    @property
    def is_stopping(self) -> bool:
        """Whether one of the processes that run the script is to stop.

        Between two operations it is the same in all of them.
        """
        return self._stops

    @property
    def was_asked_to_stop(self) -> bool:
        """Whether this process is to stop, or another one that the same launcher has started."""
        return self._stops

    # -- stages and passes ------------------------------------------------------------------

    def hold(self, stage: int, tensors: Sequence[torch.Tensor]) -> None:
        """Move what a stage uses to where its worker sees it, once the tensors have values."""
        return

    @abstractmethod
    def add(self, way: NewWay) -> None:
        """Let the stages know one more way through the model.

        Raises:
            InputError: the workers cannot have it.
        """

    def check(self) -> None:
        """Raise if something was done to the model's tensors that the workers do not see.

        Raises:
            InputError: something was; the message says what would work instead.
        """
        return

    @abstractmethod
    def start(self, order: Order) -> Ticket:
        """Have all workers run a pass, after those that were started before it.

        Returns:
            what finishes the pass; passes are finished in the order in which they were started.

        Raises:
            ClosedError: they were dismissed.
        """

    @abstractmethod
    def give_up(self, why: BaseException) -> None:
        """Give up the passes that are under way, and undo them: nobody can finish them any more."""

    def modules_idle(self) -> AbstractContextManager[None]:
        """While open, no worker is inside a module of this process: the script may change them.

        Raises:
            WorkerTimeout: a worker stays inside one for too long.
        """
        return nullcontext()

    @abstractmethod
    def forget(self, training: bool, number: int) -> None:
        """Let go of what stages hold of this batch; may be called from any thread."""

    def is_as_sent(self) -> bool:
        """Whether the workers know the model as it is now, so that passes that assume it are right.

        Raises:
            InputError: it has changed in a way that cannot be sent to them.
        """
        return True

    @abstractmethod
    def fetch_states(self, numbers: Sequence[int]) -> Mapping[int, torch.Tensor]:
        """Return values that stay with the workers between passes, by number.

        All processes that run the script call it with the same numbers, and get all the values.
        """

    @abstractmethod
    def drop_states(self, numbers: Sequence[int]) -> None:
        """Let go of values that stay with the workers; none of their passes is under way."""

    def left(self) -> SideEffects:
        """What forwards, losses and hooks have left with these workers, before others replace them.

        Raises:
            InputError: some of it cannot be brought to this process.
        """
        return SideEffects()

    @property
    def are_leaving(self) -> bool:
        """Whether some workers are to end (SIGTERM), and others take over between two passes."""
        return False

    @property
    def staying(self) -> int:
        """How many of these can go on among the workers that replace them; see `survivors`."""
        return 0

    def survivors(self) -> Survivors:
        """Close these workers, and return those that can go on among others.

        Returns:
            what `WorkerOptions.backend` and `Backend.welcome` take.
        """
        self.close()
        return _Nobody()

    def bring(self) -> None:
        """Copy to this process all that only the workers have, before others replace them.

        Raises:
            WorkerDied: one has died.
        """
        return

    def bring_values(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy to this process what these tensors of the model hold, if workers have changed it.

        Raises:
            WorkerDied: one has died.
        """
        return

    @contextmanager
    def holding(
        self, contents: Iterable[tuple[torch.Tensor, torch.Tensor]], puts_back: bool
    ) -> Iterator[None]:
        """Have passes that are started while this is open find these values in buffers.

        Autograd does not count this as a change.

        Args:
            contents: pairs of a buffer of the model and what the passes find in it.
            puts_back: whether the passes also end while this is open, and buffers are as before
                afterwards; otherwise they keep what the passes make of them.
        """
        wanted = list(contents)
        present = [(buffer, buffer.detach().clone()) for buffer, _ in wanted if puts_back]
        try:
            _have(wanted)
            yield
        finally:
            _have(present)

    def remembered(self) -> SideEffects:
        """What `left` gives, as it was after the last pass, although a worker has died.

        It also copies to this process all that only the workers have had, as it was before the
        work in which the worker died, or before `lost_work`. What the script has changed since is
        kept.

        Raises:
            WorkerDied: some of it is lost.
            InputError: some of it cannot be brought to this process.
        """
        return SideEffects()

    @property
    def has_log(self) -> bool:
        """Whether there would be `lost_work` if a worker had died."""
        return False

    @property
    def lost_work(self) -> LostWork:
        """The work done since the moment to which `remembered` goes back, if there was any.

        The workers that take over do it again before anything else.
        """
        return LostWork()

    # -- parameters -------------------------------------------------------------------------

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """The parameters whose gradients passes leave in this process."""
        return self.ownership.everything()

    @abstractmethod
    def optimizer(
        self,
        kind: type[Optimizer],
        groups: Groups,
        options: Mapping[str, Any],
        owners: Sequence[Sequence[nn.Parameter]],
    ) -> Parts:
        """An optimizer whose parts are where the parameters are.

        Args:
            kind: a class of `torch.optim`.
            groups: its parameter groups.
            options: the class's other arguments.
            owners: for every worker the parameters that it updates.
        """

    def clip(self, parameters: Sequence[torch.Tensor], clipping: Clipping) -> torch.Tensor:
        """As `torch.nn.utils.clip_grad_norm_`, wherever the gradients are; returns the norm."""
        return clipping.clip(parameters)

    def gradients(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """The gradients of these parameters; copies, if they are in other processes."""
        return [parameter.grad for parameter in parameters]

    def clip_value(
        self, parameters: Sequence[torch.Tensor], clip_value: float, foreach: bool | None
    ) -> None:
        """As `torch.nn.utils.clip_grad_value_`, wherever the gradients are."""
        clip_values(parameters, clip_value, foreach)

    def unscale(
        self,
        parameters: Sequence[torch.Tensor],
        inverse: torch.Tensor,
        allows_half: bool,
        unscale: Callable[[], Mapping[torch.device, torch.Tensor]],
    ) -> list[torch.Tensor]:
        """Divide gradients by the scale of a loss scaler, wherever they are.

        Args:
            parameters: the parameters whose gradients are divided.
            inverse: 1 over the scale.
            allows_half: whether gradients may be in float16.
            unscale: divides the gradients that are in this process; returns a scalar for each
                device, which is more than 0 if a gradient there is not finite.

        Returns:
            scalars, of which one is more than 0 if a gradient is not finite.
        """
        return list(unscale().values())

    def state(self, model: nn.Module, of: nn.Module) -> dict[str, Any]:
        """A state dict with the current values of all stages, wherever they are.

        Args:
            model: the pipeline's model.
            of: the module whose state dict it is: `model`, or a copy of it.
        """
        return of.state_dict()

    def fetch(self, model: nn.Module) -> None:
        """Have the current values of all stages in this process's model, whatever it had before.

        Args:
            model: the pipeline's model.
        """
        self.state(model, model)

    def refresh(self, model: nn.Module) -> None:
        """Bring the models of all processes that run the script up to date with the workers.

        It is for running parts of the model outside of the pipeline. Nothing is sent if all models
        are up to date.
        """
        return

    @abstractmethod
    def save(self, save: SaveOrder) -> list[Part]:
        """Have every worker write its part of a checkpoint.

        Returns:
            all parts, which note when they are written, or why they cannot be.
        """

    # -- status -----------------------------------------------------------------------------

    @property
    def recorded(self) -> Sequence[int]:
        """The numbers of the members whose records are on the board, in their order."""
        return [member.number for member in self.members]

    def status(self) -> Mapping[int, Reading]:
        """What members are doing, by number, as far as this process can see it.

        They are not asked, and do not wait; may be called from any thread.
        """
        return dict(zip(self.recorded, self.board.readings(), strict=True))

    @abstractmethod
    def stacks(self) -> Mapping[int, str]:
        """What the workers of this process are doing, by number, with the stacks of their threads.

        May be called from any thread. Workers that are processes write their stacks even if they
        hang in code that holds the interpreter's lock.
        """

    def wanted(self) -> int | None:
        """How many workers there should be now, by the user's policy; `None` without one."""
        return None

    def all_alive(self) -> bool:
        """Whether, as far as is known here, no worker has ended; may be called from any thread."""
        return True

    @abstractmethod
    def close(self) -> None:
        """Dismiss the workers, and wait until they are gone."""


def _have(contents: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy each content into its tensor, unless the tensor holds it already."""
    for tensor, content in contents:
        if not same_tensor(tensor, content):
            tensor.data.copy_(content)
