"""The audit: now and then a micro-batch of a real step is run by the model itself as well.

A program is what the forward did when it was recorded. What its Python reads besides tensors may
have changed since: a module-level variable, a closure, a file, the clock. Nobody can watch all of
that, but whoever runs the model's own forward beside the pipeline's sees it.

So before a pass that is audited, one of its micro-batches goes through the stages alone, and
through the model's own forward on one device, from the same buffers and with the same random
numbers. Their results must be the same bits, and so must the gradients of all parameters, from the
same gradients of the results. Neither leaves anything behind, and the user's loss is not called.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from penstock.account.record import AUDIT
from penstock.audit.divergence import difference
from penstock.audit.pace import Pace, Setting
from penstock.capture import Program, Trace, untouched
from penstock.capture.calls import TensorInfo, ambient, input_leaves
from penstock.capture.replay import seeded
from penstock.capture.signatures import Inputs
from penstock.capture.trees import leaves_of, unflatten
from penstock.comparison.compare import Comparison, compare, compare_results
from penstock.comparison.reference import (
    deterministic_algorithms,
    is_deterministic,
    run_with_threads,
)
from penstock.devices.kinds import kind_of
from penstock.devices.layout import alike
from penstock.engine.batch import Batch
from penstock.engine.hooks import silenced
from penstock.engine.orders import Order, Outcome
from penstock.engine.state import Attributes, kept
from penstock.errors import AuditError, InputError, WorkerDied, WorkerError, WorkerTimeout
from penstock.plan import Plan
from penstock.runner import Runner
from penstock.workers.ways import Way

_NUMBER = -1  # of the passes that only audits make; those of batches count from 0
_TIMEOUT = 600.0  # seconds, at least, that the model's own forward and backward may take
_STEPS = 100  # steps of the plan that they may take
_TRIES = 3  # with deterministic algorithms
_COPIED = 256 << 20  # bytes of buffers that are copied, whether they are known to change or not


class _LeftOutError(Exception):
    """A micro-batch that could not be compared, and why."""


@dataclass(frozen=True)
class Audited:
    """What the audit of a pipeline has done so far.

    Attributes:
        setting: the pipeline's `audit=`.
        microbatches: how many micro-batches were compared, and found to be the same.
        with_gradients: for how many of these the gradients were compared as well.
        last: the number of the pass with the latest of these, from 0; `None` if there is none yet.
        seconds: the total time that audits have taken.
        why_not: why there are no audits, or why the latest one was left out or compared results
            only; else empty.
    """

    setting: Setting
    microbatches: int = 0
    with_gradients: int = 0
    last: int | None = None
    seconds: float = 0.0
    why_not: str = ""


class Auditor:
    """Runs micro-batches by the model itself as well, when it is time, and compares.

    Args:
        setting: which passes are audited, see `penstock.audit.pace.Setting`.
        program: what the stages run.
        runner: runs the program on the pipeline's workers.
        threads: intra-op threads of each CPU worker.

    Attributes:
        found: the results of all audits so far.
    """

    def __init__(
        self,
        setting: Setting,
        program: Program,
        runner: Runner,
        threads: int,
    ) -> None:
        self._program = program
        self._runner = runner
        self._threads = threads
        self.found = Audited(setting)
        self.begin()

    def begin(self) -> None:
        """Start the pace anew for the present workers and plan; the counts in `found` go on."""
        setting = self.found.setting
        why_not = "audit=None" if setting is None else self._never()
        self.found = replace(self.found, why_not=why_not)
        self._pace, self._off = Pace(setting), bool(why_not)
        self._timeout = max(_TIMEOUT, _STEPS * self._runner.plan.predicted_step_seconds)

    def _never(self) -> str:
        """Why no pass of this pipeline can be audited, if none can."""
        if not self._runner.workers.role.has_all_weights:
            return (
                "under torchrun and on Ray no process has the current weights of all stages, so "
                "none can run the whole model"
            )
        if self._runner.plan.boundary_dtype is not None:
            return f"what crosses a cut is rounded to {self._runner.plan.boundary_dtype}, by design"
        if self._runner.compile is not None:
            return "the stages are compiled, and may round differently than the model's own forward"
        if self._program.written:
            name = min(self._program.written)
            return f"the forward writes parameters ({name}), so it cannot be run once more"
        model = self._program.model
        homes = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
        homes |= {torch.device(device) for device in self._runner.plan.devices}
        if len(homes) > 1:
            return f"no device has the whole model: {', '.join(sorted(map(str, homes)))}"
        return ""

    @contextmanager
    def around(self, order: Order, batch: Batch) -> Iterator[None]:
        """Around a pass: if it is time, one of its micro-batches is audited before.

        Raises:
            AuditError: the stages and the model's own forward differ. The pass is not run.
        """
        if not self._off and self._pace.is_due(_situation(order)):
            begun = time.perf_counter()
            try:
                with self._runner.steps.during(AUDIT):
                    self._audit(order, batch)
            finally:
                seconds = time.perf_counter() - begun
                self._pace.spend(seconds)
                self.found = replace(self.found, seconds=self.found.seconds + seconds)
        begun = time.perf_counter()
        yield
        self._pace.work(time.perf_counter() - begun)

    def expect_changes(self) -> None:
        """Audit the next pass as soon as the pace allows, as after a state was loaded."""
        self._pace.expect_changes()

    def _audit(self, order: Order, batch: Batch) -> None:
        """Audit one micro-batch, another one each time.

        Raises:
            AuditError: something differs.
        """
        k = self.found.microbatches % len(order.microbatches)
        leaves = _moved(batch.parts[k], self._runner.loss_device)
        subject = _Subject(self._program, self._runner, order, leaves, k)
        results_only = self._without_gradients(order)
        try:
            self._compare(subject, learns=not results_only)
        except _LeftOutError as error:
            self.found = replace(self.found, why_not=str(error))
            return
        self.found = replace(
            self.found,
            microbatches=self.found.microbatches + 1,
            with_gradients=self.found.with_gradients + (not results_only),
            last=order.number,
            why_not=results_only,
        )

    def _compare(self, subject: _Subject, learns: bool) -> None:
        """Run a micro-batch both ways, leaving nothing behind, and raise if they differ.

        Raises:
            AuditError: something differs.
            _LeftOutError: it could not be compared.
        """
        comparisons = self._both(subject, learns)
        if all(comparison.ok for comparison in comparisons):
            return
        if self._goes_away(subject, learns):
            first = next(comparison for comparison in comparisons if not comparison.ok)
            reason = (
                f"PyTorch's own kernels do not give the same bits in every run here ({first}), as "
                "they add in whatever order their threads come; "
                "torch.use_deterministic_algorithms(True) makes them"
            )
            warnings.warn(f"an audit has found that {reason}", stacklevel=2)
            raise _LeftOutError(reason)
        raise subject.error(self._runner.plan, comparisons)

    def _both(self, subject: _Subject, learns: bool) -> list[Comparison]:
        """Run it by the stages and by the model's own forward, and compare.

        Raises:
            AuditError: the model's own forward fails.
            _LeftOutError: it could not be compared.
        """
        model = self._program.model
        parameters = [*model.parameters()]
        parameters += [p for own in self._runner.workers.ownership.parameters for p in own]
        shared = self._runner.workers.role.calls_loss  # others silence their own
        with _gradients_kept(parameters if learns else ()):
            try:
                quiet = silenced(model.modules() if shared else ())
                with quiet, kept(model.modules(), self._changing()):
                    split = subject.split(parameters, learns)
            except WorkerDied:
                raise
            except (WorkerError, InputError) as error:  # so will the pass itself, and say it better
                raise _LeftOutError(f"the stages failed: {error}") from error
            silent: list[Any] = []
            try:
                with silenced(model.modules()) as silent, untouched(model):
                    attributes = Attributes(model)
                    comparisons = run_with_threads(
                        lambda: subject.alone(split), self._threads, self._timeout
                    )
                    counted = attributes.changed()
            except WorkerTimeout:
                raise
            except Exception as error:
                if silent:
                    reason = f"hooks are not called once more, and without them: {error}"
                    raise _LeftOutError(reason) from error
                raise subject.error(self._runner.plan, [], error) from error
        if counted and not shared and not all(comparison.ok for comparison in comparisons):
            raise _LeftOutError(
                f"a forward changes {counted[0]}, which worker processes keep for themselves, so "
                "it is not known here what the forward would give there"
            )
        return comparisons

    def _goes_away(self, subject: _Subject, learns: bool) -> bool:
        """Whether a difference goes away with kernels that give the same bits in every run.

        The comparison is repeated `_TRIES` times: a difference that comes and goes for another
        reason is unlikely to stay away each time.
        """
        if is_deterministic(self._runner.plan.devices, self._threads):
            return False
        with deterministic_algorithms():
            return subject.repeats(self._runner.plan) and all(
                comparison.ok for _ in range(_TRIES) for comparison in self._both(subject, learns)
            )

    def _changing(self) -> list[torch.Tensor]:
        """The buffers to restore afterwards: all if they are small, else those known to change."""
        known = [b for own in self._runner.workers.ownership.changing for b in own]
        every = list(self._program.model.buffers())
        return every if sum(b.nbytes for b in every) <= _COPIED else known

    def _without_gradients(self, order: Order) -> str:
        """Why results are compared, but not gradients; empty if gradients are compared, too."""
        parameters = list(self._program.model.parameters())
        learning = [p for p in parameters if p.requires_grad]
        if order.what == "infer":
            return "the pass has no gradients"
        if order.modes.casting:
            return "autocast sums gradients in another precision where a stage casts for itself"
        hooks = [(p._backward_hooks, _hooks_of_accumulation(p)) for p in parameters]
        if any(map(any, hooks)):
            return "parameters have hooks, which are not to be called once more"
        needed, free = sum(p.nbytes for p in learning), _free_bytes(parameters)
        if free is not None and 3 * needed > free:
            return f"gradients take {needed:,} bytes, and {free:,} are free"
        return ""


@dataclass
class _Split:
    """What the stages have made of a micro-batch.

    Attributes:
        results: the values that leave the last stage.
        differentiable: for each result, whether a backward can start from it.
        gradients: the parameters' gradients by `id(parameter)`; each is removed once compared.
        learns: whether the forward ran with gradients enabled, for a backward.
    """

    results: Sequence[Any]
    differentiable: Sequence[bool]
    gradients: dict[int, torch.Tensor]
    learns: bool


def _moved(leaves: Inputs, device: torch.device) -> Inputs:
    """The inputs on a device, moved as the pipeline moves them; the same object if none moves."""

    def moved(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.device == device:
            return leaf
        return alike(leaf, lambda t: t.to(device), to=device).requires_grad_(leaf.requires_grad)

    found = list(map(moved, leaves))
    same = all(one is other for one, other in zip(found, leaves, strict=True))
    return leaves if same else Inputs(found, leaves.signature)


class _Subject:
    """One micro-batch of a pass.

    Args:
        program: what the stages run.
        runner: runs the program on the pipeline's workers.
        order: the pass.
        leaves: the micro-batch's inputs.
        k: the number of the micro-batch in the pass, from 0.
    """

    def __init__(
        self, program: Program, runner: Runner, order: Order, leaves: Sequence[Any], k: int
    ) -> None:
        self._program = program
        self._runner = runner
        self._order = order
        self._leaves = leaves
        self._k = k
        self._microbatch = order.microbatches[k]
        self._way: Way = runner.ways(order.training)[self._microbatch.way]

    def split(self, parameters: Sequence[nn.Parameter], learns: bool) -> _Split:
        """Run it by the stages; parameters have no gradients afterwards."""
        leaves = self._fresh()
        values = tuple(input_leaves(self._way.inputs, leaves))
        order = replace(
            self._order,
            what="forward" if learns else "infer",
            microbatches=[self._microbatch],
            modes=self._order.modes._replace(grad=learns),
            number=_NUMBER,
            values=[values],
            loss=None,
            recorded=False,
            trial=True,
        )
        outcome = self._run(order)
        split = _Split(outcome.results[0], outcome.differentiable, {}, learns)
        if any(split.differentiable):
            starts = [
                _start(value) if differentiable else None
                for value, differentiable in zip(split.results, split.differentiable, strict=True)
            ]
            self._run(order.back({0: starts}, ambient()))
            for parameter in parameters:
                if parameter.grad is not None:
                    split.gradients[id(parameter)], parameter.grad = parameter.grad, None
        return split

    def _run(self, order: Order) -> Outcome:
        try:
            return self._runner.run(order)
        except BaseException:
            self._runner.workers.forget(order.training, _NUMBER)
            raise

    def alone(self, split: _Split) -> list[Comparison]:
        """Run it by the model's own forward, and compare."""
        args, kwargs = self._arguments()
        model = self._program.model
        key = self._microbatch.key
        with torch.set_grad_enabled(split.learns), seeded(self._program, key, model):
            output = model(*args, **kwargs)
        expected = self._way.assemble(split.results, self._microbatch.sizes)
        found = compare_results("results", expected, output)
        if not found.ok or not any(split.differentiable):
            return [found]
        return [found, self._gradients(split, leaves_of(output, self._way.trace.output_structure))]

    def _gradients(self, split: _Split, leaves: Sequence[Any]) -> Comparison:
        """Compare gradients one by one as they come, so that no second set of them is held."""
        names = {id(p): n for n, p in self._program.model.named_parameters()}
        found: list[Comparison] = []

        def compared(parameter: torch.Tensor) -> None:
            ours, name = split.gradients.pop(id(parameter), None), names[id(parameter)]
            found.append(compare("gradients", {name: ours}, {name: parameter.grad}))
            parameter.grad = None

        places = [self._way.trace.outputs.index(value) for value in self._way.outputs]
        pairs = [
            (leaves[place], _start(value))
            for place, value, differentiable in zip(
                places, split.results, split.differentiable, strict=True
            )
            if differentiable
        ]
        with ExitStack() as stack:
            for parameter in self._program.model.parameters():
                if parameter.requires_grad:
                    handle = parameter.register_post_accumulate_grad_hook(compared)
                    stack.callback(handle.remove)
            torch.autograd.backward([leaf for leaf, _ in pairs], [start for _, start in pairs])
        for number, gradient in split.gradients.items():  # which the model itself has none for
            name = names.get(number, "a parameter that the model has no more")
            found.append(compare("gradients", {name: gradient}, {name: None}))
        different = tuple(name for comparison in found for name in comparison.different)
        largest = max((comparison.largest for comparison in found), default=0.0)
        return Comparison("gradients", max(1, len(found)), different, largest)

    def error(
        self, plan: Plan, comparisons: Sequence[Comparison], failure: Exception | None = None
    ) -> AuditError:
        """What is to be raised, with the place where the difference arises."""
        args, kwargs = self._arguments()
        place = difference(self._program, self._way.trace, plan, args, kwargs, self._microbatch)
        if failure is not None:
            what = f"fails in the model's own forward ({type(failure).__name__}: {failure}), and "
            what += "not in the pipeline"
        else:
            first = next(comparison for comparison in comparisons if not comparison.ok)
            what = f"is not what the model's own forward makes of it ({first})"
        return AuditError(what, self._k, self._order.number, place)

    def repeats(self, plan: Plan) -> bool:
        """Whether the model's own forward still makes the recorded calls, with the same results."""
        args, kwargs = self._arguments()
        found = difference(self._program, self._way.trace, plan, args, kwargs, self._microbatch)
        return not found.module

    def _arguments(self) -> Any:
        """The model's arguments, rebuilt from fresh copies of this micro-batch's leaves."""
        return unflatten(self._way.trace.input_structure, self._fresh())

    def _fresh(self) -> list[Any]:
        """The inputs, detached from the user's graph, and cloned if the forward changes any."""
        copies = _changes_inputs(self._way.trace)
        fresh = []
        for leaf in self._leaves:
            if isinstance(leaf, torch.Tensor):
                leaf = leaf.detach().requires_grad_(leaf.requires_grad)
                leaf = leaf.clone() if copies else leaf
            fresh.append(leaf)
        return fresh


def _situation(order: Order) -> Hashable:
    """What decides whether a pass is new to the audit: its modes, and the ways that it takes."""
    ways = frozenset(m.way for m in order.microbatches)
    return order.training, order.modes, ways


def _changes_inputs(trace: Trace) -> bool:
    """Whether a call writes into the memory of an input: into the input itself, or a view of it."""
    given = {info.storage for info in trace.inputs if isinstance(info, TensorInfo)}
    changed = (trace.info(value) for call in trace.calls for value in call.mutates)
    return any(isinstance(info, TensorInfo) and info.storage in given for info in changed)


def _start(value: torch.Tensor) -> torch.Tensor:
    """The gradient of a result from which both backwards start; its entries differ."""
    steps = torch.arange(value.numel(), device=value.device, dtype=torch.float64)
    start: torch.Tensor = steps.cos() / max(1, value.numel()) ** 0.5
    return start.reshape(value.shape).to(value.dtype)


@contextmanager
def _gradients_kept(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Clear the gradients of these parameters while open, and restore them afterwards."""
    before = [(parameter, parameter.grad) for parameter in parameters]
    try:
        for parameter, _ in before:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient


def _hooks_of_accumulation(parameter: torch.Tensor) -> Any:
    return getattr(parameter, "_post_accumulate_grad_hooks", None)


def _free_bytes(parameters: Sequence[torch.Tensor]) -> int | None:
    """The memory that is free where the parameters are; `None` if nobody knows."""
    device = parameters[0].device if parameters else torch.device("cpu")
    if (memory := kind_of(device).memory(device)) is not None:
        return memory.free
    try:
        with open("/proc/meminfo") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
