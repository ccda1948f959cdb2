"""`Pipeline`: the user's model on all devices. Composes everything below it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self, SupportsIndex

import torch
from torch import nn

from penstock.audit.auditor import Audited, Auditor
from penstock.audit.pace import Setting
from penstock.capture import Program
from penstock.capture.dims import BatchDim, Dynamic
from penstock.capture.options import CaptureOptions
from penstock.checkpoint.saver import Save, Saver
from penstock.devices.allocator import Allocator
from penstock.devices.choice import Devices
from penstock.display.terminal import showing
from penstock.engine.batch import ByHand, Weight, Whole
from penstock.engine.batchnorm import BatchNormMode, closed_norms
from penstock.engine.microbatch import Merge, check_merge
from penstock.engine.objective import Objective, Outputs
from penstock.engine.orders import Pass
from penstock.errors import InputError
from penstock.links.casting import in_words, name_of
from penstock.passes import Passes
from penstock.plan import Plan
from penstock.plan.by_name import Cut
from penstock.plan.request import Recompute, Request
from penstock.planning.planner import given_or_planned
from penstock.profile.measure import Progress
from penstock.runner import Runner
from penstock.schedule import Timeline
from penstock.training.hints import explaining, no_attribute, optimizer_class
from penstock.training.module_like import evaluating
from penstock.training.optimizer import PipelineOptimizer
from penstock.training.parameter_groups import parameter_groups
from penstock.training.scaling import PipelineScaler, scale_of
from penstock.weights import source_of
from penstock.workers.backend import Kind
from penstock.workers.clipping import Clipped, Clipping
from penstock.workers.kinds import WorkerOptions
from penstock.workers.placement import place


class Pipeline:
    """A model split over devices, trained and called like the model itself.

    Threads and processes work on the model's own parameters: optimizers, `state_dict()` and
    everything else that reads `model` go on working. Worker processes share them with this one:
    each has the tensors of its stages in memory that both map, and copies of its modules. They
    follow `train()`, `eval()` and `requires_grad`; other attributes of modules are as they were in
    the beginning, and what a module keeps in attributes, or a loss in a list, stays in the process.
    Hooks are called there, and must have been registered before.

    Under torchrun every rank runs the same script and is one worker. It has a copy of the model, in
    which it uses and trains the parameters of its own stages and leaves the others as they are.
    All ranks must call the same methods in the same order. The rank with the first stage needs the
    inputs, the one with the last stage the target and `loss_fn`; on the others they may be left
    out, and are not looked at. The loss, the result of `pipe(x)`, the norm of
    `clip_grad_norm_` and the state dicts are the same on every rank. `loss.backward()` is called
    by all; what counts is the loss of the rank with the last stage. A state to be loaded is given
    to every rank. If one rank fails, all raise the same error.

    Args:
        model: any module.
        args: example positional arguments, of the batch size that will be usual.
        kwargs: example keyword arguments.
        devices: where the stages run, in order, one each; a device may be listed twice. A `"cpu"`
            is one worker with its share of the cores as intra-op threads. Or their number: the
            first GPUs of this machine, or so many CPU workers. Under torchrun one for
            each rank, of that rank's machine; left out, each rank has `"cuda:LOCAL_RANK"` if there
            is CUDA, else `"cpu"`.
        num_microbatches: into how many a batch is split, or `"auto"`. A batch of fewer rows is
            split into as many as it has rows.
        schedule: a name of `penstock.schedule.SCHEDULES`, or `"auto"`.
        workers: `"threads"` of this process, `"processes"` of this machine that this one drives, or
            `"torchrun"`: the ranks that torchrun has started, on any number of machines. `"auto"`
            is `"torchrun"` in a process that torchrun has started with others, an error in one
            that something else has (a process group, mpirun, srun), else `"threads"`.
        plan: a plan to follow, or the name of its file, instead of profiling and planning. Under
            torchrun rank 0 plans, or reads the plan, for all.
        cuts: cut before these modules (by their qualified names), instead of choosing; one fewer
            than there are devices.
        recompute: which activations are not held but computed again in the backward: `"none"`,
            `"all"`, `"boundaries"`, `"auto"`, or modules by name; see `plan.request.Request`.
        memory_limit: bytes that every worker may hold, or a text like `"8GiB"`.
        stages_per_worker: for schedules that take any number.
        tune: measure the best few plans, on a copy of the model, and keep the fastest.
        boundary_dtype: `torch.bfloat16` or `torch.float16` to send floating point values, and their
            gradients, from stage to stage in it. It rounds them, so it changes results.
        batch_dim: the dimension that counts the rows, see `penstock.capture`.
        dynamic: other dimensions that vary from batch to batch, see `penstock.capture`.
        keep_closed: modules that must stay whole, see `penstock.capture`.
        batchnorm: running statistics move with every `"microbatch"`, or once per batch with those
            of all its rows (`"deferred"`); see `penstock.engine.batchnorm`.
        merge: how the results of micro-batches become that of the batch. `"auto"`: as the model
            would give it; what cannot be put together so is an error. `"rows"`: also where it
            depends on the other rows, or on their order: one after the other. `"list"`: not at all,
            they come in a list. A function of that list: what it returns.
        program: a program of `model` captured before, instead of capturing.
        weights: where parameters that are on the `meta` device come from: a state dict, the name
            of a file of one, or `SeededWeights(seed)`; see `penstock.empty_weights`.
        timeout: seconds that a step may take; `None` derives it from the plan: fifty times the
            predicted step, and a minute at least, as first steps are slower. Under torchrun the
            wait for ranks that are not yet there counts, and `None` is ten minutes at least.
        allocator: `"keep"` lets the process keep freed memory for the next step, which is faster
            on CPUs; `"system"` leaves the C library's behaviour.
        audit: `"auto"`, `n`, or `None`: when one micro-batch of a pass is run by the model's own
            forward and backward on one device as well, and compared bit for bit. `"auto"`: often
            in the first twenty passes, then for less than 0.5 % of the time; `n`: before every n-th
            pass. Not under torchrun, where no rank has all weights; `audit` says what was done.
        progress: called as building goes on, with steps done, steps in all, and what is done.
            `"auto"`: in a terminal or a notebook, a line that shows it after two seconds.

    Attributes:
        plan: the plan in use.
        program: the captured program.
        model: the user's module.
        threads_per_worker: intra-op threads of each CPU worker.
        allocator_kept: whether the process was told to keep freed memory.
        links: how values get from every stage to the next, in words.

    Raises:
        DeviceError: a device does not exist.
        InputError: arguments that do not fit together.
        PlanError: the model cannot be cut into that many stages.
        CaptureError: the model's forward cannot be recorded.
    """

    def __init__(
        self,
        model: nn.Module,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        devices: Devices | None = None,
        num_microbatches: int | Literal["auto"] = "auto",
        schedule: str = "auto",
        workers: Kind = "auto",
        plan: Plan | str | os.PathLike[str] | None = None,
        cuts: Sequence[Cut] | None = None,
        recompute: Recompute = "auto",
        memory_limit: int | str | None = None,
        stages_per_worker: int | Literal["auto"] = "auto",
        tune: bool = False,
        boundary_dtype: torch.dtype | None = None,
        batch_dim: BatchDim = 0,
        dynamic: Dynamic | None = None,
        keep_closed: Iterable[str] = (),
        batchnorm: BatchNormMode = "microbatch",
        merge: Merge = "auto",
        program: Program | None = None,
        weights: Any = None,
        timeout: float | None = None,
        allocator: Allocator = "keep",
        audit: Setting = "auto",
        progress: Progress | Literal["auto"] | None = "auto",
    ) -> None:
        request = Request(
            num_microbatches=num_microbatches,
            schedule=schedule,
            cuts=cuts,
            recompute=recompute,
            memory_limit=memory_limit,
            stages_per_worker=stages_per_worker,
            boundary_dtype=name_of(boundary_dtype),
        )
        if plan is not None and cuts is not None:
            raise InputError("a plan has its own cuts: give plan= or cuts=, not both")
        check_merge(merge)
        chosen = WorkerOptions(workers, devices, timeout, allocator)
        self.model = model
        recording = CaptureOptions(batch_dim, dynamic, closed_norms(model, batchnorm, keep_closed))
        self.allocator_kept = chosen.keep_freed_memory()
        backend = chosen.backend(self.allocator_kept)
        self.threads_per_worker = backend.threads
        with showing(progress) as report, ExitStack() as stack:
            stack.callback(backend.close)
            if report:
                report(0, 1, f"recording what {type(model).__name__} does")
            if program is None:
                with backend.operation("the capture"):
                    program = recording.capture(model, args, kwargs)
            self.program = program
            source = source_of(model, weights)
            with backend.operation("the planning"):
                made = None
                if backend.leads:
                    made = given_or_planned(
                        plan, program, args, kwargs, backend, request, tune, report
                    )
                plan = self.plan = backend.agree(program, made)
            program.check_cuts([a for s in plan.stages for a, _, _ in s.spans if a > 0])
            running = backend.start(plan, model, timeout)
            stack.callback(running.close)
            place(program, plan.cuts, running.homes, source, running.hold)
            program.recordings.rebind()
            self.links = in_words(running.links, plan.boundary_dtype)
            self._workers = running
            self._runner = Runner(program, plan, running, deferred=batchnorm == "deferred")
            self._auditor = Auditor(audit, program, plan, self._runner, self.threads_per_worker)
            self._passes = Passes(self._runner, self._auditor, program, plan, merge)
            self._saver = Saver(model, plan, self._runner)
            stack.pop_all()

    # -- training -------------------------------------------------------------------------

    def train_step(
        self,
        *args: Any,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        target: Any = None,
        weight: Weight = "rows",
        loss_kwargs: Mapping[str, Any] | None = None,
        metrics: Callable[..., Any] | None = None,
        outputs: Outputs = False,
        scaler: PipelineScaler | None = None,
        **kwargs: Any,
    ) -> Any:
        """Forward and backward of a batch, interleaved: the fast path.

        Gradients add up in `.grad`, as `backward()` leaves them. They are bit for bit those of
        one device that runs the same micro-batches one after the other. If anything fails, `.grad`
        is as it was before. Under `torch.no_grad()` or `torch.inference_mode()` there is no
        backward: the loss, and what else is asked for, is returned, and `.grad` stays as it is.

        Args:
            *args: the model's positional arguments.
            loss_fn: `loss_fn(output, target)`, or `loss_fn(output)` without a target; a scalar.
                Called once per micro-batch.
            target: a tensor, or a container of tensors, split along dimension 0 like the batch.
                What else is in the container is in every micro-batch's.
            weight: how the micro-batches' losses make the batch's. `"rows"`: weighted by their
                rows, for a loss that is a mean over rows. `None`: added up, for a loss that is a
                sum. A function: weighted by `weight(target)`, the number of labels that count, say;
                a micro-batch of weight 0 is left out.
            loss_kwargs: keyword arguments of `loss_fn`, whole and the same for every micro-batch;
                tensors are moved to the device of the last stage, and never split.
            metrics: `metrics(output, target)`, called without gradients once per micro-batch, after
                the loss. What it returns is not looked at.
            outputs: whether to return the model's results, too, which are then held until the end
                of the step: put together, or with `"list"` in a list by micro-batch.
            scaler: that of `scaler()`; gradients are scaled by it, the returned loss is not.
            **kwargs: the model's keyword arguments.

        Returns:
            the batch's loss, a detached scalar on the device of the last stage: its backward has
            been done, and calling `backward()` on it is torch's error. Or, with `metrics`
            or `outputs`, a `penstock.StepResult` with that and with what was asked for.

        Raises:
            InputError: the batch or the target does not fit, the loss is not a scalar, or outputs
                are wanted that cannot be put together from micro-batches.
            AuditError: the stages no longer do what the model's own forward does.
            WorkerError: a stage, the loss or the metrics failed; the original error is its cause.
                Gradients and buffers are as they were before the step, and the pipeline can be used
                again.
            ClosedError: the pipeline is closed.
        """
        scale = scale_of(scaler)
        objective = Objective(target, loss_fn, weight, loss_kwargs, metrics, outputs, scale)
        with explaining(self.model, args, kwargs, target):
            return self._passes.step(*_training(), Whole(args, kwargs), objective)

    def train_microbatches(
        self,
        microbatches: Sequence[Any] = (),
        *,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        targets: Sequence[Any] | None = None,
        weight: Weight = "rows",
        loss_kwargs: Mapping[str, Any] | None = None,
        metrics: Callable[..., Any] | None = None,
        outputs: bool = False,
        scaler: PipelineScaler | None = None,
    ) -> Any:
        """Like `train_step`, for micro-batches that were made by hand.

        They may have different numbers of rows, and differ in the dimensions that
        `dynamic=` names: sentences sorted by length, for instance.

        Args:
            microbatches: for each a tuple of the model's positional arguments, or a dict of its
                keyword arguments.
            loss_fn: as in `train_step`.
            targets: for each its target.
            weight, loss_kwargs, metrics: as in `train_step`.
            outputs: whether to return the model's results, too, in a list of one for each.
            scaler: as in `train_step`.

        Returns:
            the loss of all of them, or a `penstock.StepResult`, as `train_step` returns it.

        Raises:
            InputError, AuditError, WorkerError, ClosedError: as `train_step` does.
        """
        scale, by_hand = scale_of(scaler), True
        objective = Objective(
            targets, loss_fn, weight, loss_kwargs, metrics, outputs, scale, by_hand
        )
        return self._passes.step(*_training(), ByHand(microbatches), objective)

    def eval_step(
        self,
        *args: Any,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        target: Any = None,
        weight: Weight = "rows",
        loss_kwargs: Mapping[str, Any] | None = None,
        metrics: Callable[..., Any] | None = None,
        outputs: Outputs = False,
        **kwargs: Any,
    ) -> Any:
        """The loss of a batch without gradients, in evaluation mode.

        The model is in evaluation mode meanwhile, whatever its mode is; every module is as it was
        afterwards. Nothing is kept for a backward, and `.grad` is left alone.

        Args:
            *args: the model's positional arguments.
            loss_fn: as in `train_step`; `lambda output: output.loss` for a model that computes its
                own loss.
            target, weight, loss_kwargs, metrics, outputs: as in `train_step`.
            **kwargs: the model's keyword arguments.

        Returns:
            what `train_step` does.

        Raises:
            InputError, WorkerError, ClosedError: as `train_step` does.
        """
        objective = Objective(target, loss_fn, weight, loss_kwargs, metrics, outputs)
        explained = explaining(self.model, args, kwargs, target)
        with explained, evaluating(self.model), torch.no_grad():
            return self._passes.step("infer", "eval_step", Whole(args, kwargs), objective)

    # -- calls --------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's result for a batch, in its own structure.

        With gradients enabled, `backward()` on a loss of it runs the pipeline's backward; without
        (`torch.no_grad()`), nothing is kept.

        Raises:
            InputError: the batch does not fit, or a result cannot be put together from
                micro-batches.
            AuditError: the stages no longer do what the model's own forward does.
            WorkerError: a stage failed; the original error is its cause.
            ClosedError: the pipeline is closed.
        """
        return self._passes.call(args, kwargs)

    def map(self, batches: Iterable[Any], *, ahead: int | None = None) -> Iterator[Any]:
        """The model's results for many batches, in order, without gradients.

        The next batches enter while the one before is still on its way, so the pipeline never
        drains in between. To stop early, leave the loop: what is under way is waited for.

        Args:
            batches: for each a tuple of the model's positional arguments, or a dict of its keyword
                arguments, or the only argument.
            ahead: how many batches are under way at most; by default as many as keep all stages
                busy.

        Raises:
            InputError, WorkerError, ClosedError: as a call does. Results that came before are
                given out first.
        """
        return self._passes.map(batches, ahead)

    # -- what a module and its trainer offer --------------------------------------------------

    def optimizer(
        self, kind: type[torch.optim.Optimizer], params: Any = None, **options: Any
    ) -> PipelineOptimizer:
        """An optimizer over the model's parameters whose step runs on all workers at once.

        Args:
            kind: a class of `torch.optim`.
            params: parameters or parameter groups; all of the model's by default. The `"params"`
                of groups may also be patterns of names, or functions of a name and a parameter,
                see `penstock.training.parameter_groups`.
            **options: the class's arguments, `lr` and so on; and `master_weights=True` to update
                parameters in half precision by float32 copies (`penstock.training.masters`).

        Raises:
            InputError: the class cannot be divided among workers, or a group fits nothing.
        """
        kind = optimizer_class(kind)
        chosen = parameter_groups(self.model, params)
        divide = partial(self._workers.optimizer, owners=self._owned())
        return PipelineOptimizer(kind, chosen, divide, **options)

    def _owned(self) -> list[list[nn.Parameter]]:
        """The parameters of every worker; those that no stage uses belong to the first."""
        owned: list[list[nn.Parameter]] = []
        seen: set[int] = set()
        for parameters in self._workers.ownership.parameters:
            owned.append([p for p in parameters if id(p) not in seen])
            seen.update(map(id, parameters))
        owned[0] += [p for p in self.model.parameters() if id(p) not in seen]
        return owned

    def scaler(self, **options: Any) -> PipelineScaler:
        """A `torch.amp.GradScaler` for training in float16, with these options of it.

        It scales the loss of the plain style (`scaler.scale(loss).backward()`) or of a step
        (`train_step(..., scaler=scaler)`); `scaler.step(optimizer)` and `scaler.update()` follow.
        """
        return PipelineScaler(self._runner.loss_device, self._workers, **options)

    def state_dict(self, of: nn.Module | None = None) -> dict[str, Any]:
        """The model's state, under the model's names: it loads into the plain model.

        Args:
            of: a copy of the model instead, like the `module` of an `AveragedModel`.
        """
        return self._workers.state(self.model, self.model if of is None else of)

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
        *,
        parameters: Clipped = None,
    ) -> torch.Tensor:
        """Scale gradients down to this norm, as `torch.nn.utils.clip_grad_norm_` does.

        Args:
            max_norm, norm_type, error_if_nonfinite, foreach: as torch's.
            parameters: whose gradients; all of the model's by default. Under torchrun the same on
                every rank, in the same order.

        Returns:
            the norm that they had.
        """
        clipping = Clipping(max_norm, norm_type, error_if_nonfinite, foreach)
        return self._workers.clip(self._clipped(parameters), clipping)

    def clip_grad_value_(
        self, clip_value: float, foreach: bool | None = None, *, parameters: Clipped = None
    ) -> None:
        """Bring every entry of gradients into `[-clip_value, clip_value]`, as torch's does.

        Args:
            clip_value, foreach: as those of `torch.nn.utils.clip_grad_value_`.
            parameters: as in `clip_grad_norm_`. Under torchrun a rank has its own stages' only.
        """
        nn.utils.clip_grad_value_(self._clipped(parameters), clip_value, foreach)

    def _clipped(self, parameters: Clipped) -> list[torch.Tensor]:
        """Those that are to be clipped, each of the model's once."""
        if isinstance(parameters, torch.Tensor):
            return [parameters]
        chosen = list(self.model.parameters() if parameters is None else parameters)
        wrong = [p for p in chosen if not isinstance(p, torch.Tensor)]
        if wrong:
            raise InputError(
                f"parameters= contains {wrong[0]!r}, which is no parameter; names can be looked up "
                "in dict(pipe.named_parameters())"
            )
        return chosen

    def recording(self) -> AbstractContextManager[list[Timeline]]:
        """While open, every pass appends its measured timeline to the list that this gives.

        Outside, nothing is recorded and recording costs nothing.
        """
        return self._runner.recording()

    @property
    def audit(self) -> Audited:
        """What was run by the model's own forward as well, so far."""
        return self._auditor.found

    # -- checkpoints --------------------------------------------------------------------------

    def save(
        self, path: str | os.PathLike[str], *, background: bool = False, **things: Any
    ) -> Save:
        """Save the training run, as it is between two steps, to a folder.

        Saved are the model's weights and buffers, the plan, the random generators of torch, numpy
        and Python, the pipeline's own `random_state()`, and `things`. Gradients are not. Every
        worker writes its own part. A checkpoint that is in the
        folder is replaced at once when the new one is on the disk; whatever happens before, it
        stays. `penstock.load` reads it, with any number of stages and any kind of worker.

        Args:
            path: of the folder. Under torchrun all ranks must see the same.
            background: take a copy, and write it while training goes on. An error is then raised
                by `wait()`, by the next save, which waits for this one, or by `close()`.
            **things: by the names under which `Checkpoint.restore` gets them: optimizers, whatever
                else has `state_dict()` (schedulers, scalers, averaged models), `torch.Generator`s,
                and plain data, such as the position in the training data.

        Returns:
            the save; its `wait()` returns when it is on the disk.

        Raises:
            InputError: one of the things cannot be saved.
            CheckpointError: it cannot be written.
            ClosedError: the pipeline is closed.
        """
        return self._saver.save(path, background, things)

    def random_state(self) -> dict[str, int]:
        """What the random numbers of the next passes depend on, for checkpoints of one's own.

        Dropout masks, and all else that the model and the loss draw, are made of the seed, the
        number of the pass, the micro-batch and the call. `save` has this state in it already; it is
        for whoever saves by other means. Under torchrun it is the same on every rank once there
        was a pass.

        Returns:
            `"seed"`: that of `torch.manual_seed`; `"trained"`: how many passes have trained
            (`train_step`, and calls in training mode, with gradients); `"others"`: how many have
            not. Whole numbers, which `torch.save` and JSON can hold.
        """
        return self._runner.random_state()

    def load_random_state(self, state: Mapping[str, int]) -> None:
        """Draw from now on what was drawn after this state was taken.

        Number of stages, schedule and kind of workers may have been other ones. The seed of the
        state is used until `torch.manual_seed` gives another one than there is now; the generators
        of torch, numpy and Python are left alone. Under torchrun every rank loads it.

        Args:
            state: what `random_state` returned.

        Raises:
            InputError: it is no such state.
        """
        self._runner.load_random_state(state)

    # -- what the model offers, by its own names --------------------------------------------

    def __getattr__(self, name: str) -> Any:
        raise no_attribute(self, vars(self).get("model"), name)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        raise TypeError(
            "a Pipeline cannot be copied or pickled, as it has workers. To copy its model: "
            "copy.deepcopy(pipe.model); to save it: torch.save(pipe.state_dict(), file) or "
            "pipe.save(folder); to have it elsewhere, build another Pipeline there"
        )

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The model's parameters, in the model's order, as `nn.Module.parameters` gives them."""
        return self.model.parameters(recurse)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The model's parameters, with the model's names for them.

        Raises:
            TypeError: `torch.func.functional_call` takes the pipeline for a module.
        """
        if not remove_duplicate:
            raise TypeError(
                "a Pipeline is no nn.Module whose parameters can be replaced for a call, as "
                "torch.func.functional_call does; give it pipe.model, which runs unsplit"
            )
        return self.model.named_parameters(prefix, recurse)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Load a state of the model, from here or from plain PyTorch."""
        self._auditor.expect_news()
        return self.model.load_state_dict(state_dict, strict)

    def train(self, mode: bool = True) -> Self:
        """Switch to training mode, like `nn.Module.train`."""
        self.model.train(mode)
        return self

    def eval(self) -> Self:
        """Switch to evaluation mode, like `nn.Module.eval`."""
        return self.train(False)

    @property
    def training(self) -> bool:
        """Whether the model is in training mode."""
        return self.model.training

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parameters."""
        self.model.zero_grad(set_to_none)

    # -- life -----------------------------------------------------------------------------

    def close(self) -> None:
        """Dismiss the workers. The model stays as it is, trained."""
        try:
            self._saver.finish()
        finally:
            self._runner.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Pipeline({type(self.model).__name__}: {self.plan.summary})"


def _training() -> tuple[Pass, str]:
    """What a step of training does, and is called: without gradients only the forward."""
    if torch.is_grad_enabled():
        return "train", "train_step"
    return "infer", "train_step without gradients"
