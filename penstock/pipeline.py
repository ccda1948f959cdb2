"""`Pipeline`: the user's model on all devices. Each method delegates to the part that does it."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NoReturn, Self, SupportsIndex, TypeVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from penstock.account.attribution import Account
from penstock.account.history import History, RunFolder
from penstock.audit.auditor import Audited
from penstock.audit.pace import Setting
from penstock.board.metrics import address
from penstock.board.status import Status, status_of
from penstock.capture import Program
from penstock.capture.capturing import CaptureOptions
from penstock.capture.dims import BatchDim, Dynamic
from penstock.changing import (
    Given,
    check_can_change,
    plan_for_others,
    with_choices_of,
)
from penstock.checkpoint.autosave import Autosave
from penstock.checkpoint.saver import Save
from penstock.devices.allocator import Allocator
from penstock.devices.choice import Devices, existing_devices
from penstock.devices.cores import threads_beside
from penstock.devices.settings import with_autograd
from penstock.display.terminal import Progress, showing
from penstock.engine.batch import ByHand, Weight, Whole
from penstock.engine.batchnorm import BatchNormMode, closed_batchnorms
from penstock.engine.compiled import COMPILED_WHOLE, check_compiles, compile_options
from penstock.engine.microbatch import Merge, check_merge
from penstock.engine.objective import Objective, Outputs
from penstock.engine.orders import PassKind
from penstock.engine.recordable import check_records
from penstock.errors import InputError, PlanError, WorkerError, WorkerTimeout
from penstock.generation.generate import Options, generate
from penstock.links.casting import name_of
from penstock.observe.trace import RecordedTimeline
from penstock.plan import Plan
from penstock.plan.request import Cut, Recompute, Request
from penstock.planning.planner import better_plan, decide_plan, warn_of_launches
from penstock.runner import weak_surviving
from penstock.running import Running
from penstock.sessions.session import Session, Sessions
from penstock.steps import Loading, StepHook
from penstock.torch_internals import ASKED_BY_COMPILE
from penstock.training.hints import explaining, no_attribute, optimizer_class
from penstock.training.optimizer import PipelineOptimizer
from penstock.training.parameter_groups import parameter_groups
from penstock.training.scaling import PipelineScaler, scale_of
from penstock.weights import source_of
from penstock.workers.backend import WorkerKind, Workers
from penstock.workers.clipping import Clipped, Clipping
from penstock.workers.kinds import OnFailure, WorkerOptions
from penstock.workers.members import Membership
from penstock.workers.ray.options import Ray

T = TypeVar("T")

_COMPILING = 600.0
"""Seconds that a pass may take by default where stages are compiled in it."""


class Pipeline:
    """A model split over devices, trained and called like the model itself.

    Threads and worker processes use the model's own parameters, so optimizers, `state_dict()` and
    other code that reads `model` work as usual. Worker processes have the parameters and buffers in
    shared memory, and copies of the modules. The copies follow `train()`, `eval()`,
    `requires_grad` and other attributes that the script sets; attributes that a module sets itself
    stay in its process. Hooks are called in the worker, and must be registered before the pipeline
    is built.

    Workers in a Ray cluster have weights, gradients and optimizer state of their own, see
    docs/ray.md. What the script changes in its model is sent to them; what they train comes back
    with `fetch()`, `state_dict()` and `close()`. `.grad` can be dropped or set to zero; `gradients`
    returns copies.

    Under torchrun every rank runs the same script and is one worker. It uses and trains the
    parameters of its own stages in its model and leaves the others unchanged. All ranks must call
    the same methods in the same order. The rank with the first stage needs the inputs, the rank
    with the last stage the target and `loss_fn`; other ranks may omit them, and ignore them
    otherwise. With replicas, the ranks with the first and the last stage of every replica need them
    for the whole batch. The loss, the result of `pipe(x)`, the norm of `clip_grad_norm_` and the
    state dicts are the same on every rank. All ranks call `loss.backward()`, which starts from the
    loss of the rank with the last stage. `load_state_dict` needs the full state on every rank. If
    one rank fails, all raise the same error.

    Args:
        model: any module.
        args: example positional arguments, with the usual batch size.
        kwargs: example keyword arguments.
        devices: the devices of the workers, in order; a device may be listed several times. Each
            `"cpu"` is one worker with its share of the cores as intra-op threads. An integer n
            means the first n GPUs, or n CPU workers if there is no GPU. By default the devices of
            `plan`, if it is given; else all GPUs, if there are some; else as many CPU workers as
            are predicted to be fastest, of 1, 2, 4, ... that share the cores of this process. If
            the plan takes one device alone (see `replicas`), a warning says that the others are not
            used. Under torchrun, one device for each rank, on that rank's machine; by default
            `"cuda:LOCAL_RANK"` if CUDA is available, otherwise `"cpu"`.
        num_microbatches: the number of micro-batches of a batch, or `"auto"`. A batch with fewer
            rows is split into single rows.
        schedule: a name in `penstock.schedule.SCHEDULES`, or `"auto"`.
        workers: `"threads"` of this process; `"processes"` on this machine, driven by this process;
            `"ray"`, actors anywhere in a Ray cluster, driven by this process, or a `penstock.Ray`
            with options for them; or `"torchrun"`, the ranks that torchrun has started, on any
            number of machines.
            `"auto"` is `"torchrun"` if torchrun or Ray Train has started several ranks, and
            `"threads"` otherwise. It is an error if something else has started several ranks (a
            process group, mpirun, srun).
        plan: a plan, or the path of its file, to use instead of profiling and planning. Under
            torchrun, rank 0 plans, or reads the plan, for all. `num_microbatches`, `schedule` and
            `replicas` may not say otherwise; `cuts` and `tune` are errors. `recompute`,
            `memory_limit` and `stages_per_worker` do not change it, and `boundary_dtype` takes the
            place of its own.
        cuts: qualified names of modules, or numbers of calls; the model is cut before them. One
            fewer than devices of a replica, or than stages, if `schedule` has several per worker.
        recompute: which activations are recomputed in the backward instead of held: `"none"`,
            `"all"`, `"boundaries"`, `"auto"`, or names of modules; see `plan.request.Request`.
        memory_limit: bytes that every worker may hold, or a string such as `"8GiB"`. By default the
            memory of its device, if known.
        stages_per_worker: the number of stages of each worker, for schedules that take any number;
            `"auto"` means two for these.
        tune: whether to measure the best few plans, on a copy of the model, and use the fastest.
        boundary_dtype: `torch.bfloat16` or `torch.float16`: floating point values and their
            gradients are rounded to it where they cross from stage to stage. This changes results.
        replicas: the number of replicas of all stages, which share the micro-batches of a batch;
            each runs on its part of the devices. Gradients are added in the order of micro-batches,
            so the results do not depend on it, with the same `num_microbatches` and
            `threads_per_worker`. All devices of a process have to be of one kind. `"auto"` takes
            the plan that is predicted to be fastest of all kinds that fit the memory: stages,
            replicas, replicas of stages, or one of the devices alone; on GPUs stages or one of the
            devices, as replicas have to be asked for there; under torchrun stages. If `schedule`,
            `cuts` or `stages_per_worker` are given, there are stages; models whose forwards change
            more than BatchNorm's statistics have one replica.
        batch_dim: the dimension that counts the rows, see `penstock.capture`.
        dynamic: other dimensions that vary from batch to batch, see `penstock.capture`.
        keep_closed: names of modules that must stay whole, see `penstock.capture`.
        batchnorm: `"microbatch"` updates running statistics with every micro-batch, `"deferred"`
            once per batch with the statistics of all its rows; see `penstock.engine.batchnorm`.
        merge: how the results of micro-batches become that of the batch. `"auto"`: as the model
            would return it; a result for which this is impossible is an error. `"rows"`:
            concatenated, even if rows depend on other rows or on their order. `"list"`: a list with
            one result per micro-batch. A function: what it returns for that list.
        program: a program that was captured from `model` before.
        weights: the source of parameters on the `meta` device: a state dict; the path of a file
            with one, of the index of several safetensors files, or of a folder with either; or
            `SeededWeights(seed)`; see `penstock.empty_weights`.
        timeout: seconds that a step may take; under torchrun with the wait for other ranks. `None`
            means fifty times the predicted step, but at least a minute, as first steps are slower,
            or ten minutes under torchrun. With `compile` it means ten minutes. Without, the only
            worker on a CPU has no limit then, except in `map` and sessions, as the script's own
            thread runs its steps and calls.
        threads_per_worker: intra-op threads of each CPU worker; the bits of results depend on their
            number. By default the worker's share of the cores, or 1 if `devices` is left out, steps
            are short, and one worker with one thread is the fastest. Give a number if the number of
            workers may change.
        allocator: `"keep"` makes the process keep freed memory for the next step, which is faster
            on CPUs; `"system"` does not change the C library's settings.
        on_failure: what happens if a worker process, or an actor of a Ray cluster, ends by itself.
            `"raise"`: a `WorkerDied`, and the pipeline is closed. `"replace"`: another one takes
            its place. `"continue"`: the others go on without it, by another plan. In both cases the
            interrupted work is done again, with the same bits; see docs/elastic.md. These two need
            `workers="processes"` on CPUs, or Ray; with other workers they are errors.
        audit: when one micro-batch of a pass also runs through the model's own forward and backward
            on one device, to be compared bit for bit. `"auto"`: often in the first twenty passes,
            then for less than 0.5 % of the time. An integer n: before every n-th pass. `None`:
            never. There is no audit under torchrun and on Ray, if weights or workers are on several
            devices (such as two GPUs), with `boundary_dtype` or `compile`, or if the forward writes
            parameters; `pipe.audit.why_not` says so.
        metrics: the port where the state of the pipeline is served as OpenMetrics, at
            `http://127.0.0.1:PORT/metrics`, for Prometheus; 0 takes a free one, and `"HOST:PORT"`
            another interface. By default where the environment variable `PENSTOCK_METRICS` says, or
            nowhere. Under torchrun, rank k takes port PORT + k. Needs `pip install
            'penstock[metrics]'`.
        run: a folder where what is known of the run is kept, for `penstock report`: the plan, the
            time of every step, what workers did in a few steps, and what happened. Some hundred
            kilobytes for an hour. Under torchrun, rank 0 writes it. What an earlier run has left
            there is moved to a folder in it, `earlier-1` and so on. By default it is kept in
            memory, for `report`.
        inference: whether the plan is for a steady flow of forwards: `map`, `generate`, `session`
            and calls without gradients, with as many batches or groups under way as keep all
            stages busy. Stages are cut so that the busiest takes as little time as possible, for
            any number of micro-batches. The plan counts no memory for gradients, optimizer state or
            activations for a backward, but counts the states of sessions (docs/generation.md).
            `train_step` and whatever else needs gradients is an error. A `plan` that is given has
            to be such a plan.
        in_flight: the number of groups of sequences, of all replicas together, for whose states the
            plan for inference has room; each group is as large as the example or its micro-batch.
            `generate` has as many under way by default. `None`: one more than the number that keeps
            all stages busy.
        states: parts of the result that are states in sessions: positions in a tuple, or names. The
            plan for inference has room for them, and `session` takes them by default.
        compile: whether each stage is run by `torch.compile` on its worker, or the arguments of
            `torch.compile` as a dict, such as `{"mode": "max-autotune"}` or `{"dynamic": True}`.
            It needs `inference=True`. The first passes of every kind are slow, as they compile.
            Results are those of the compiled stages, which are not bit for bit those of the model,
            so there is no audit.
        cuda_graphs: whether the forward and the backward of every stage on a CUDA device are
            recorded as CUDA graphs, with the same bits. The CPU then launches a stage at once
            instead of kernel by kernel, which is faster where kernels are small; every micro-batch
            in flight takes memory for its copy of the recording. `pipe.cuda_graphs` says which
            stages are recorded. Not with `compile`, replicas, or `batchnorm="deferred"`.
        progress: called while the pipeline is built, with the number of steps done, the number of
            all steps, and a description. `"auto"` shows a progress line after two seconds, in a
            terminal or a notebook.

    Attributes:
        plan: the plan in use.
        program: the captured program.
        model: the user's module.
        threads_per_worker: intra-op threads of each CPU worker; bits depend on it.
        allocator_kept: whether this process keeps freed memory for the next step.
        links: for every stage but the last, a description of how values get to the next.
        metrics: the address where the metrics are served; empty if they are not.
        members: the present workers, each with its number, device, kind, process, and the step
            after which it joined; `members.number` increases with every change of workers.

    Raises:
        DeviceError: a device does not exist.
        InputError: the arguments do not fit together, or not these workers, such as `on_failure`
            with threads; or, with `cuda_graphs`, no stage can be recorded.
        PlanError: no plan satisfies the arguments, or the model cannot be cut as they require.
        CaptureError: the model's forward cannot be recorded.
        WorkerError, WorkerTimeout: the workers could not be started.
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
        workers: WorkerKind | Ray = "auto",
        plan: Plan | str | os.PathLike[str] | None = None,
        cuts: Sequence[Cut] | None = None,
        recompute: Recompute = "auto",
        memory_limit: int | str | None = None,
        stages_per_worker: int | Literal["auto"] = "auto",
        tune: bool = False,
        boundary_dtype: torch.dtype | None = None,
        replicas: int | Literal["auto"] = "auto",
        batch_dim: BatchDim = 0,
        dynamic: Dynamic | None = None,
        keep_closed: Iterable[str] = (),
        batchnorm: BatchNormMode = "microbatch",
        merge: Merge = "auto",
        program: Program | None = None,
        weights: Any = None,
        timeout: float | None = None,
        threads_per_worker: int | None = None,
        allocator: Allocator = "keep",
        on_failure: OnFailure = "raise",
        audit: Setting = "auto",
        inference: bool = False,
        in_flight: int | None = None,
        states: Sequence[int | str] = (),
        compile: bool | Mapping[str, Any] = False,
        cuda_graphs: bool = False,
        progress: Progress | Literal["auto"] | None = "auto",
        metrics: int | str | None = None,
        run: str | os.PathLike[str] | None = None,
    ) -> None:
        request = Request(
            num_microbatches=num_microbatches,
            schedule=schedule,
            cuts=cuts,
            recompute=recompute,
            memory_limit=memory_limit,
            stages_per_worker=stages_per_worker,
            boundary_dtype=name_of(boundary_dtype),
            replicas=replicas,
            inference=inference,
            in_flight=in_flight,
            states=states,
        )
        if plan is not None and cuts is not None:
            raise InputError("a plan has its own cuts: give plan= or cuts=, not both")
        check_merge(merge)
        compiling = compile_options(compile)
        if compiling is not None:
            check_compiles(inference)
            timeout = _COMPILING if timeout is None else timeout
        if cuda_graphs:
            check_records(compiling is not None, batchnorm)
        served = address(metrics)
        threads = 0 if threads_per_worker is None else threads_per_worker
        chosen = WorkerOptions(
            workers=workers,
            devices=devices,
            timeout=timeout,
            allocator=allocator,
            least=request.least_workers,
            threads=threads,
            on_failure=on_failure,
        )
        self.model = model
        self._autosave: Autosave | None = None
        self._tried = 0, 0  # the latest number of workers aimed for, and the membership since then
        recording = CaptureOptions(
            batch_dim, dynamic, closed_batchnorms(model, batchnorm, keep_closed)
        )
        self.allocator_kept = chosen.keep_freed_memory()
        backend = chosen.backend(self.allocator_kept)
        with showing(progress) as report, ExitStack() as stack:
            stack.callback(backend.close)
            if report:
                report(0, 1, f"recording what {type(model).__name__} does")
            if program is None:
                with backend.operation("the capture"), threads_beside(backend.starting):
                    program = recording.capture(model, args, kwargs)
            self.program = program
            source = source_of(model, weights)
            with with_autograd():
                planned = decide_plan(plan, program, args, kwargs, backend, request, tune, report)
                if not cuda_graphs:
                    warn_of_launches(planned)
                given = Given(
                    request=with_choices_of(planned.plan, request),
                    workers=chosen,
                    example=(args, kwargs),
                    weights=source,
                    batchnorm=batchnorm,
                    merge=merge,
                    audit=audit,
                    compile=compiling,
                    graphs=cuda_graphs,
                )
                running = self._running = Running(
                    model,
                    program,
                    given,
                    allocator_kept=self.allocator_kept,
                    served_at=served,
                    backend=backend,
                    planned=planned,
                    stack=stack,
                )
            self._runner, self._passes = running.runner, running.passes
            self._auditor, self._saver = running.auditor, running.saver
            self._sessions = Sessions(running.runner, program, in_flight)
            running.note_also(self._sessions.notes)
            running.given = replace(given, weights=None)  # or a change would load buffers once more
            if run is not None and self._workers.role.index == 0:
                self._runner.steps.kept.write_to(RunFolder(run, running.about(), running.profile))
            stack.pop_all()

    @property
    def _workers(self) -> Workers:
        return self._running.workers

    @property
    def plan(self) -> Plan:
        """The plan in use."""
        return self._running.plan

    @property
    def members(self) -> Membership:
        """The present workers, with a number that increases with every change."""
        return self._running.members

    @property
    def shares_model(self) -> bool:
        """Whether the workers train the parameters of this process's model themselves.

        If so, any optimizer over `model.parameters()` works. Ranks of torchrun train those of
        their own stages only, and workers in a Ray cluster train copies: they need `optimizer`,
        and `fetch` brings the weights here.
        """
        return self._workers.role.has_all_weights

    @property
    def threads_per_worker(self) -> int:
        """Intra-op threads of each CPU worker; bits depend on it."""
        return self._running.threads

    @property
    def links(self) -> Sequence[str]:
        """For every stage but the last, how values get to the next, in words."""
        return self._running.links

    @property
    def cuda_graphs(self) -> Sequence[str]:
        """For every stage `"recorded"`, or why it does not run as CUDA graphs."""
        why = self._runner.not_recorded
        unasked = "" if self._running.given.graphs else "cuda_graphs=True was not asked for"
        stages = range(len(self.plan.stages))
        return [unasked or why.get(number, "recorded") for number in stages]

    @property
    def metrics(self) -> str:
        """The address where the metrics are served; empty if they are not."""
        return self._running.metrics.url if self._running.metrics else ""

    def replan(self, *, progress: Progress | Literal["auto"] | None = "auto") -> bool:
        """Measure the model again, and switch to a better plan if there is one.

        The machine may be slower, or busier, than when it was profiled (`status()` says so). The
        number of micro-batches and the intra-op threads stay, so results do not change by a bit;
        stages, schedule and replicas may change, unless they were given to `Pipeline`. Weights,
        gradients, optimizers, random numbers and hooks are carried over. If no plan is better, the
        present one stays, with new predictions where possible. It takes some seconds, in which
        nothing is trained.

        Args:
            progress: as in `Pipeline`.

        Returns:
            whether the pipeline has switched to another plan, which is in `plan`.

        Raises:
            InputError: results of `pipe(x)` still wait for their backward, or a `map` is under
                way; or the script was started by torchrun: save, and start it again.
            CheckpointError: a save that was under way has failed.
            WorkerError, WorkerTimeout: the new workers could not be started.
            ClosedError: the pipeline is closed; or the old workers could not be started once more.
        """
        again = "start the script again; a new profile is measured if the old one is deleted"
        check_can_change("replan()", self._runner, again)
        given = self._running.given
        now = given.as_they_are(self._workers, self.threads_per_worker)
        if given.workers.devices is not None:
            now = replace(now, devices=given.workers.devices)
        return self._running.change(now, better_plan, progress, measures=True)

    def resize(
        self, devices: Devices, *, progress: Progress | Literal["auto"] | None = "auto"
    ) -> bool:
        """Go on with workers on other devices: more, fewer, or others. See docs/elastic.md.

        A new plan is made for these devices. The options of `Pipeline` still hold; what they left
        open is chosen again. The number of micro-batches and the intra-op threads stay, so results
        do not change by a bit. The model, its parameters and gradients, optimizers, random numbers,
        hooks and counts are carried over. It takes some seconds, in which nothing is trained. If it
        fails, the pipeline goes on with the old workers.

        Args:
            devices: as in `Pipeline`.
            progress: as in `Pipeline`.

        Returns:
            whether the workers have changed; false if they have these devices already.

        Raises:
            InputError: results of `pipe(x)` still wait for their backward, or a `map` is under
                way; the workers cannot use these devices; or the script was started by torchrun:
                save, and start it again.
            DeviceError: a device does not exist.
            PlanError: no plan for these devices satisfies the options given to `Pipeline`.
            CheckpointError: a save that was under way has failed.
            WorkerError, WorkerTimeout: the new workers could not be started.
            ClosedError: the pipeline is closed; or the old workers could not be started once more.
        """
        again = "start the script again with another number of ranks; penstock.load continues it"
        check_can_change("resize()", self._runner, again)
        given = self._running.given
        now, before = existing_devices(devices), given.workers.devices
        if now == (self._workers.devices if before is None else existing_devices(before)):
            return False
        others = given.on(now, self._workers, self.threads_per_worker)
        return self._running.change(others, plan_for_others, progress, measures=False)

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
        """Run the forwards and backwards of a batch, interleaved by the schedule.

        Gradients are added to `.grad`, as by `backward()`. They are bitwise those of one device
        that runs the same micro-batches in order. If an error is raised, `.grad` is restored. Under
        `torch.no_grad()` or `torch.inference_mode()` there is no backward, and `.grad` does not
        change.

        Args:
            *args: the model's positional arguments.
            loss_fn: `loss_fn(output, target)`, or `loss_fn(output)` if there is no target; called
                once per micro-batch. Must return a scalar tensor.
            target: a tensor, or a container of tensors, which are split along dimension 0 like the
                batch. Other values in the container are passed to every micro-batch.
            weight: how the losses of micro-batches are combined. `"rows"`: weighted by their number
                of rows, for a loss that is a mean over rows. `None`: summed, for a loss that is a
                sum. A function: weighted by `weight(target)`, such as the number of valid labels; a
                micro-batch of weight 0 is left out.
            loss_kwargs: keyword arguments of `loss_fn`, the same for every micro-batch. Tensors are
                moved to the device of the last stage and not split.
            metrics: `metrics(output, target)`, called without gradients once per micro-batch, after
                the loss. It may return anything.
            outputs: whether to return the model's results as well. They are held until the end of
                the step. `True`: put together. `"list"`: a list with one per micro-batch.
            scaler: the result of `scaler()`. Gradients are scaled by it, the returned loss is not.
            **kwargs: the model's keyword arguments.

        Returns:
            the loss of the batch, a detached scalar on the device of the last stage. With `metrics`
            or `outputs`, a `penstock.StepResult` of the loss and these.

        Raises:
            InputError: the batch or the target does not fit, the loss is not a scalar, or the
                outputs cannot be put together from those of micro-batches.
            AuditError: the stages no longer compute what the model's own forward computes.
            WorkerError: a stage, the loss or the metrics failed; the original error is its cause.
                Gradients and buffers are as before the step, and the pipeline can be used again.
            WorkerTimeout: a worker did not answer within `timeout` of `Pipeline`.
            ClosedError: the pipeline is closed.
        """
        self._check_trains("train_step", torch.is_grad_enabled())
        self._between_steps()
        scale = scale_of(scaler)
        objective = Objective(target, loss_fn, weight, loss_kwargs, metrics, outputs, scale)
        with explaining(self.model, args, kwargs, target):
            return self._passes.step(*_training("train_step"), Whole(args, kwargs), objective)

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
        """Like `train_step`, for a batch that is already split into micro-batches.

        They may have different numbers of rows, and different sizes in the dimensions that
        `dynamic=` names, such as sentences sorted by length.

        Args:
            microbatches: for each, a tuple of the model's positional arguments, or a dict of its
                keyword arguments.
            loss_fn: as in `train_step`.
            targets: one target for each micro-batch.
            weight, loss_kwargs, metrics: as in `train_step`.
            outputs: whether to return the model's results as well, in a list with one per
                micro-batch.
            scaler: as in `train_step`.

        Returns:
            the loss of all micro-batches, or a `penstock.StepResult`, as from `train_step`.

        Raises:
            InputError, AuditError, WorkerError, WorkerTimeout, ClosedError: as `train_step` does.
        """
        self._check_trains("train_microbatches", torch.is_grad_enabled())
        self._between_steps()
        scale, by_hand = scale_of(scaler), True
        objective = Objective(
            targets, loss_fn, weight, loss_kwargs, metrics, outputs, scale, by_hand
        )
        name = "train_microbatches"
        return self._passes.step(*_training(name), ByHand(microbatches), objective)

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
        """Compute the loss of a batch in evaluation mode, without gradients.

        The model is switched to evaluation mode for this call; afterwards every module has its
        previous mode. `.grad` does not change.

        Args:
            *args: the model's positional arguments.
            loss_fn: as in `train_step`; `lambda output: output.loss` for a model that computes its
                own loss.
            target, weight, loss_kwargs, metrics, outputs: as in `train_step`.
            **kwargs: the model's keyword arguments.

        Returns:
            the same as `train_step`.

        Raises:
            InputError, AuditError, WorkerError, WorkerTimeout, ClosedError: as `train_step` does.
        """
        objective = Objective(target, loss_fn, weight, loss_kwargs, metrics, outputs)
        explained = explaining(self.model, args, kwargs, target)
        with explained, _evaluating(self.model), torch.no_grad():
            return self._passes.step("infer", "eval_step", Whole(args, kwargs), objective)

    # -- calls --------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's result for a batch, in the model's own structure.

        If gradients are enabled, `backward()` on a loss of it runs the pipeline's backward. Under
        `torch.no_grad()` no activations are kept.

        Raises:
            InputError: the batch does not fit, or the result cannot be put together from those of
                micro-batches; or gradients are enabled, and the plan is for inference.
            AuditError: the stages no longer compute what the model's own forward computes.
            WorkerError: a stage failed; the original error is its cause.
            WorkerTimeout: a worker did not answer within `timeout` of `Pipeline`.
            ClosedError: the pipeline is closed.
        """
        self._check_trains("a call with gradients enabled", torch.is_grad_enabled())
        if self.model.training and torch.is_grad_enabled():
            self._between_steps()
        return self._passes.call(args, kwargs)

    def map(self, batches: Iterable[Any], *, ahead: int | None = None) -> Iterator[Any]:
        """Yield the model's results for many batches, in order, without gradients.

        The next batches enter the pipeline before the current one has left it, so it does not drain
        in between. To stop early, leave the loop; batches that are under way are completed first.
        Do not change weights or buffers before the last result, except by the pipeline's own
        optimizer: batches under way would see the change at any point. If forwards draw random
        numbers, threads and ranks run one batch at a time.

        Args:
            batches: for each, a tuple of the model's positional arguments, a dict of its keyword
                arguments, or its only argument.
            ahead: the largest number of batches under way; by default as many as keep all stages
                busy.

        Raises:
            InputError, WorkerError, WorkerTimeout, ClosedError: as a call does, after the results
                of earlier batches.
        """
        return self._passes.map(batches, ahead)

    def session(
        self,
        *,
        states: Collection[int | str] | None = None,
        batch_dim: BatchDim = 0,
        dynamic: Dynamic | None = None,
    ) -> Session:
        """Open a sequence of passes whose states stay with the workers.

        A session is called as the model is, without gradients, one pass at a time. States in its
        result (tensors in an object of a plain class, such as a cache of keys and values) stay with
        the stage that made them. The script sees a tensor that has a shape and no elements: it can
        be given to the next call, rows of it can be chosen or cut off, and `session.fetch` brings a
        copy. The workers let go of a state when the script has no reference to it any more. Under
        torchrun every rank opens the session, calls it with the same arguments, and gets the
        result.

        Args:
            states: parts of the result that are states as well: positions in a tuple, or names. By
                default those that were named to `Pipeline`.
            batch_dim: as of `Pipeline`.
            dynamic: dimensions of the arguments that vary from call to call, as of `Pipeline`.
                Those of states need not be named.
        """
        if states is None:
            states = self._running.given.request.states
        return self._sessions.open(batch_dim, dynamic, states)

    def generate(
        self,
        *args: Any,
        group_size: int | None = None,
        rowwise: bool = False,
        in_flight: int | None = None,
        stream: bool = False,
        seed: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Generate as the model's own `generate` does, with all stages busy.

        The sequences are split into groups: one for each stage of each replica, if there are enough
        sequences. Each group is generated by the model's own `generate`, with whatever it offers:
        logits processors, stopping criteria, sampling, beams. Its calls of the model are passes
        through the stages, and while one group's pass is in a stage, those of others are in the
        other stages. Caches of keys and values stay with the stages. A single sequence is not
        generated faster than on one device.

        The tokens of a group are those that the model's own `generate` returns for it on one device
        with `threads_per_worker` threads, whichever other groups there are. For sampling, that is
        after `torch.manual_seed`: with `seed` for the first group, and for every other with a hash
        of `seed` and the number of its first row.

        Under torchrun every rank calls `generate` and gets the result. The model's own `generate`
        runs only on the rank with the first stage, and only that rank's arguments are used.

        Args:
            args, kwargs: as of the model's `generate`. Tensors with one row for each sequence are
                split into groups. The first may also be a list of prompts of any lengths, each a
                tensor of shape `(length,)`; then every prompt is a group, the next begins when one
                has ended, and the result is a list.
            group_size: how many sequences a group has.
            rowwise: whether each sequence is a group, so that its tokens do not depend on others.
            in_flight: how many groups are under way at a time; by default `in_flight=` of
                `Pipeline`, or as many as a plan for inference has room for, or else one more than
                keep all stages busy.
            stream: whether to return an iterator of new `Tokens` as they come. Leaving the loop
                cancels what is left; under torchrun, if the rank with the first stage leaves it.
            seed: of random numbers; by default drawn from torch's default generator.

        Returns:
            what the model's `generate` returns for the whole batch; groups that have ended earlier
            are padded on the right.

        Raises:
            InputError: the model has no `generate`, or the arguments do not fit.
            WorkerError: a stage failed; the original error is its cause.
            WorkerTimeout: a worker did not answer within `timeout` of `Pipeline`.
        """
        options = Options(group_size, rowwise, in_flight, stream, seed)
        threads = self._running.threads
        return generate(self.model, self._sessions, threads, args, kwargs, options)

    # -- what a module and its trainer offer --------------------------------------------------

    def optimizer(
        self, kind: type[torch.optim.Optimizer], params: Any = None, **options: Any
    ) -> PipelineOptimizer:
        """Create an optimizer whose step runs on the workers that own the parameters.

        Args:
            kind: a class of `torch.optim`, or another subclass of `torch.optim.Optimizer` that
                treats parameters one by one; see `penstock.training.optimizer`.
            params: parameters or parameter groups; by default all parameters of the model. The
                `"params"` of a group may also be patterns of names, or a function of a name and a
                parameter; see `penstock.training.parameter_groups`.
            **options: arguments of the class, such as `lr`. `master_weights=True` updates
                half-precision parameters with float32 copies (`penstock.training.masters`).

        Raises:
            InputError: the class cannot be divided among workers, or a group matches no parameter.
        """
        self._check_trains("optimizer()")
        kind = optimizer_class(kind)
        chosen = parameter_groups(self.model, params)
        optimizer = PipelineOptimizer(
            *(kind, chosen, self._running.dividing),
            surviving=weak_surviving(self._runner),
            **options,
        )
        self._running.add(optimizer)
        return optimizer

    def scaler(self, **options: Any) -> PipelineScaler:
        """Create a `torch.amp.GradScaler` for training in float16.

        Use `scaler.scale(loss).backward()` or `train_step(..., scaler=scaler)`, then
        `scaler.step(optimizer)` and `scaler.update()`.

        Args:
            **options: arguments of `torch.amp.GradScaler`, such as `init_scale`.
        """
        self._check_trains("scaler()")
        runner = self._runner
        scaler = PipelineScaler(runner.loss_device, self._workers, runner.between_passes, **options)
        self._running.add(scaler)
        return scaler

    def state_dict(self, of: nn.Module | None = None) -> dict[str, Any]:
        """Return the model's state dict, under the model's own names.

        Under torchrun it is gathered from all ranks, and this rank's model is updated from it.

        Args:
            of: a copy of the model to use instead, such as the `module` of an `AveragedModel`.
        """
        model = self.model if of is None else of
        return self._runner.between_passes(lambda: self._workers.state(self.model, model))

    def fetch(self) -> None:
        """Bring the weights that workers have changed to this process's model.

        Threads and worker processes use the model's own weights, so there is nothing to do. Workers
        in a Ray cluster have weights of their own: between two calls the model has the weights that
        the earlier one brought. Under torchrun it does what `state_dict` does, so all ranks have to
        call it.
        """
        self._runner.between_passes(lambda: self._workers.fetch(self.model))

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return the gradients of the parameters that have one, by their names.

        They are the parameters' own `.grad`. For workers in a Ray cluster, where `.grad` can only
        be dropped or set to zero, they are copies. A rank returns those of its own stages only.
        """
        named = dict(self.model.named_parameters())
        parameters = tuple(named.values())
        gradients = self._runner.between_passes(lambda: self._workers.gradients(parameters))
        found = zip(named, gradients, strict=True)
        return {name: gradient for name, gradient in found if gradient is not None}

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
        *,
        parameters: Clipped = None,
    ) -> torch.Tensor:
        """Clip the norm of the gradients, as `torch.nn.utils.clip_grad_norm_` does.

        Args:
            max_norm, norm_type, error_if_nonfinite, foreach: as in torch.
            parameters: the parameters; by default all of the model. Under torchrun, the same on
                every rank, in the same order.

        Returns:
            the norm before clipping, a scalar tensor.
        """
        self._check_trains("clip_grad_norm_")
        clipping = Clipping(max_norm, norm_type, error_if_nonfinite, foreach)
        with self._runner.steps.during("clipping"):
            chosen = self._clipped(parameters)
            return self._runner.between_passes(lambda: self._workers.clip(chosen, clipping))

    def clip_grad_value_(
        self, clip_value: float, foreach: bool | None = None, *, parameters: Clipped = None
    ) -> None:
        """Clamp gradients to `[-clip_value, clip_value]`, as `torch.nn.utils.clip_grad_value_`.

        Args:
            clip_value, foreach: as in torch.
            parameters: as in `clip_grad_norm_`. A rank has only the gradients of its own stages.
        """
        self._check_trains("clip_grad_value_")
        with self._runner.steps.during("clipping"):
            chosen = self._clipped(parameters)
            self._runner.between_passes(
                lambda: self._workers.clip_value(chosen, clip_value, foreach)
            )

    def _clipped(self, parameters: Clipped) -> list[torch.Tensor]:
        """The parameters to clip; by default all of the model, each once."""
        if isinstance(parameters, torch.Tensor):
            return [parameters]
        chosen = list(self.model.parameters() if parameters is None else parameters)
        wrong = [p for p in chosen if not isinstance(p, torch.Tensor)]
        if wrong:
            raise InputError(
                f"parameters= contains {wrong[0]!r}, which is not a tensor; look up names in "
                "dict(pipe.named_parameters())"
            )
        return chosen

    def recording(
        self, profile: str | os.PathLike[str] | None = None
    ) -> AbstractContextManager[list[RecordedTimeline]]:
        """A context manager that records timelines.

        It returns a list, to which every pass inside the context appends its measured timeline.
        `timelines[0].save("step.pftrace")` writes one for https://ui.perfetto.dev.

        Args:
            profile: a file, usually `step.json`, to which torch.profiler's Chrome trace of the
                context is written when it ends without an error: every operator and kernel, of
                all threads. Perfetto opens it as well. Under torchrun every rank writes its own,
                `step-worker-0.json` and so on. By default torch.profiler does not run.

        Raises:
            InputError: the workers are processes, which torch.profiler does not see; or it is
                running already; or its trace cannot be written.
        """
        return self._runner.recording(profile)

    # -- watching -----------------------------------------------------------------------------

    def status(self) -> Status:
        """What every worker is doing now, and how fast the latest steps were.

        It reads the board, so it does not disturb the workers, and may be called from any
        thread, also while a step runs or hangs. Under torchrun it covers the ranks of this machine.

        Returns:
            a `penstock.board.status.Status`; `print` shows it as a table, a notebook as HTML, and
            `to_dict()` gives plain data. `penstock top` shows the same from another terminal.
        """
        workers = self._workers
        status = status_of(self._running.description, workers.status(), workers.board.counted())
        events = tuple(self._runner.steps.kept.latest())
        return replace(status, notes=tuple(self._running.notes()), events=events)

    def on_step(self, hook: StepHook) -> RemovableHandle:
        """Call a function after every training step, such as a logger's.

        The hook is called in the user's thread, once the gradients of the parameters are complete:
        at the end of `train_step`, or within `loss.backward()` for a loss of `pipe(x)`, where
        gradients have yet to reach the part of the graph before the pipeline. All hooks are called
        even if one raises; the first exception is then raised there.

        Args:
            hook: called with a dictionary of numbers: `"step"`, counted from 1; `"step_seconds"`
                that its passes took, without the optimizer; `"predicted_seconds"`, the plan's
                prediction for the batch size that it was made for; `"samples"`, the rows of its
                batch, and `"samples_per_second"` since the step before; `"tokens"` and
                `"tokens_per_second"`, if an input has integers in two or more dimensions; and
                `"loss"` of `train_step`, which waits for the device.

        Returns:
            a handle; its `remove()` ends this.
        """
        return self._runner.steps.hook(hook)

    def loading(self, batches: Iterable[T]) -> Loading[T]:
        """Wrap a data loader, to record how long the script waits for each batch.

        `report` can then tell the wait for data from what else the script does between steps. If
        another thread iterates over the result to load ahead, its waits are not counted.

        Args:
            batches: any iterable, such as a `torch.utils.data.DataLoader`. If it has a length, so
                has the result; each `for` over the result iterates over `batches` anew.
        """
        return Loading(batches, lambda what: self._runner.steps.during(what))

    def history(self) -> History:
        """What is known of the run: the times of steps, what workers did in a few, what happened.

        Some steps are kept in detail: the 3rd to 6th step with the present plan, the 9th, 17th and
        33rd, then every 64th, and any that `penstock top` requests; of all these the latest twelve.
        """
        return self._runner.steps.kept.history(self._running.about())

    def accounts(self) -> list[Account]:
        """Where the time of the steps kept in detail went, per worker, and what it was lost to.

        Returns:
            the accounts (`penstock.account.attribution.Account`) of the steps that are kept in
            detail, oldest first; without those in which there was an audit, unless there are no
            others.
        """
        return self._runner.steps.kept.accounts(self.plan)

    def report(self, path: str | os.PathLike[str] = "report.html") -> None:
        """Write a report of the run: one HTML file that needs nothing else.

        It shows where the time of every worker went, why, and what to try. It needs `pip install
        'penstock[report]'`. `penstock report` makes the same of a folder that `run=` has named.

        Args:
            path: of the file.

        Raises:
            InputError: it cannot be written.
            PenstockError: jinja2 is not installed.
        """
        from penstock.observe.report import save_report

        save_report(self.history(), path)

    @property
    def audit(self) -> Audited:
        """What was audited so far, and what was not compared and why."""
        return self._auditor.found

    # -- checkpoints --------------------------------------------------------------------------

    def save(
        self, path: str | os.PathLike[str], *, background: bool = False, **things: Any
    ) -> Save:
        """Save the training run to a folder, between two steps.

        This saves the model's weights and buffers, the plan, the random generators of torch, numpy
        and Python, `random_state()`, and `things`, but not gradients. Every worker writes its own
        part. An existing checkpoint in the folder is replaced atomically when the new one is on the
        disk. `penstock.load` reads it, with any number of stages and any kind of worker.

        Args:
            path: the folder. Under torchrun all ranks must see the same folder.
            background: whether to copy the data and write it while training continues. Errors are
                then raised by `wait()`, by the next save, which waits for this one, or by
                `close()`.
            **things: optimizers, other objects with `state_dict()` (schedulers, scalers, averaged
                models), `torch.Generator`s, and plain data such as the position in the training
                data; under the names that `Checkpoint.restore` expects.

        Returns:
            the save; its `wait()` returns when everything is on the disk.

        Raises:
            InputError: one of the things cannot be saved.
            CheckpointError: the checkpoint cannot be written.
            ClosedError: the pipeline is closed.
        """
        with self._runner.steps.during("saving"):
            return self._runner.between_passes(lambda: self._saver.save(path, background, things))

    def autosave(
        self,
        path: str | os.PathLike[str],
        *,
        every: int,
        on_sigterm: bool = True,
        grace: float = 25.0,
        **things: Any,
    ) -> Autosave:
        """Save every so many training passes, in the background, and on SIGTERM.

        A save that is due is made at the beginning of a pass, when the optimizer, schedulers and
        scalers have done their step: before the first pass at which no gradients wait for an
        optimizer. `penstock.resume` goes on from the save. An error of a save is raised by the next
        one, or by `close()`. Passes after the latest save are not saved when the script ends: call
        `save` for that. A second call of `autosave` replaces the first.

        When this process gets SIGTERM, the step under way is completed, the run is saved where the
        next one would begin, and `SystemExit(0)` is raised there. Under torchrun all ranks do so at
        the same step, if one of them gets the signal. See docs/checkpoints.md.

        Args:
            path: the folder; a checkpoint in it is replaced, as by `save`. Under torchrun all ranks
                must see the same folder.
            every: the number of training passes after which a save is due: calls of `train_step`,
                or of the pipeline in training mode, with gradients.
            on_sigterm: whether to save and end on SIGTERM. A handler that the script had installed
                before is called as well; `close()` and `remove()` install it again.
            grace: seconds after which SIGTERM ends the process without saving, if no step begins;
                torchrun kills its ranks after 30.
            **things: as in `save`, and `penstock.Batches`, whose current batch is saved as not yet
                trained on.

        Returns:
            a handle, whose `remove()` ends it.

        Raises:
            InputError: `every` is not a positive integer, `grace` is not a positive number, the
                plan is for inference, or one of the things is a loader with a state of its own,
                which counts the current batch as done: give `penstock.Batches` of it.
        """
        self._check_trains("autosave()")
        autosave = Autosave(Path(path), every, things, self._runner.counts.completed)
        if self._autosave is not None:
            self._autosave.remove()
        self._autosave = autosave
        if on_sigterm:
            pipe = weakref.ref(self)  # what handles signals lives as long as the process

            def ask() -> bool:
                running = pipe()
                if running is not None:
                    running._workers.request_stop()
                return running is not None

            autosave.on_sigterm(ask, grace)
        return autosave

    def _check_trains(self, what: str, needs_gradients: bool = True) -> None:
        """Raise if this needs gradients, and the plan is for inference.

        Raises:
            InputError: it is.
        """
        if needs_gradients and self.plan.inference:
            raise InputError(
                f"{what} is for training, and the plan of this pipeline is for inference, without "
                "room or order for backwards: use map, generate, session, eval_step, or a call "
                "under torch.no_grad(); to train, build the pipeline without inference=True"
            )

    def _between_steps(self) -> None:
        """Before a training pass: save or change the workers if that is due; drop unused states.

        Unused are states of sessions to which the script has no reference any more.
        """
        self._save_if_due()
        self._resize_if_due()
        self._sessions.drop_between_calls()

    def _resize_if_due(self) -> None:
        """Change the number of workers to what the user's policy wants now, if a plan allows it."""
        wanted = self._workers.wanted()
        if wanted is None or wanted == len(self.members):
            return
        if (wanted, self.members.number) == self._tried:
            return
        if self._runner.is_busy:  # with results whose backward may come; later
            return
        self._running.notice_deaths()
        if wanted == len(self.members):
            return
        try:
            self.resize(["cpu"] * wanted, progress=None)
        except (PlanError, InputError, WorkerError, WorkerTimeout) as error:
            self._runner.steps.kept.happened(f"there should be {wanted} workers, but: {error}")
        self._tried = wanted, self.members.number

    def _save_if_due(self) -> None:
        """Save before a pass that trains, if that was asked for."""
        if self._autosave is not None:
            completed, steps = self._runner.counts.completed, self._runner.steps
            self._autosave.before_step(
                completed,
                lambda found: steps.is_amid_step or steps.is_accumulating(self.model, found),
                self._workers,
                self.save,
            )

    def random_state(self) -> dict[str, int]:
        """Return the state on which the random numbers of the next passes depend.

        Dropout masks and other random numbers of the model and the loss depend on the seed, the
        number of the pass, the micro-batch and the call. `save` includes this state; use this
        method if you save by other means. Under torchrun it is the same on every rank after the
        first pass.

        Returns:
            a dict of integers. `"seed"`: that of `torch.manual_seed`. `"trained"`: the number of
            passes that trained (`train_step`, and calls in training mode with gradients).
            `"others"`: the number of other passes.
        """
        return self._runner.random_state()

    def load_random_state(self, state: Mapping[str, int]) -> None:
        """Continue with the random numbers that followed when this state was taken.

        The number of stages, the schedule and the kind of workers may differ. The seed of the state
        is used until `torch.manual_seed` sets a different seed. The generators of torch, numpy and
        Python do not change. Under torchrun every rank must load the state.

        Args:
            state: a result of `random_state`.

        Raises:
            InputError: it is not such a state.
        """
        self._runner.load_random_state(state)

    # -- what the model offers, by its own names --------------------------------------------

    def __getattr__(self, name: str) -> Any:
        if name == ASKED_BY_COMPILE:
            raise InputError(COMPILED_WHOLE)
        raise no_attribute(self, vars(self).get("model"), name)

    def __iter__(self) -> NoReturn:
        raise TypeError(
            "a Pipeline cannot be iterated over: an optimizer takes pipe.parameters(), what looks "
            "into modules takes pipe.model"
        )

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        raise TypeError(
            "a Pipeline cannot be copied or pickled, because it has workers. To copy its model, "
            "use copy.deepcopy(pipe.model); to save it, torch.save(pipe.state_dict(), file) or "
            "pipe.save(folder); to use it elsewhere, build another Pipeline there"
        )

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The model's parameters, as `nn.Module.parameters` yields them."""
        return self.model.parameters(recurse)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The model's parameters with their names, as `nn.Module.named_parameters` yields them.

        Raises:
            TypeError: `remove_duplicate` is false, as in `torch.func.functional_call`, which needs
                a module.
        """
        if not remove_duplicate:
            raise TypeError(
                "torch.func.functional_call cannot replace the parameters of a Pipeline, which is "
                "not an nn.Module; give it pipe.model, which runs unsplit"
            )
        return self.model.named_parameters(prefix, recurse)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Load a state dict of the model, as `nn.Module.load_state_dict` does."""
        self._auditor.expect_changes()
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
        """Stop the workers. The model keeps its weights."""
        if self._autosave is not None:
            self._autosave.remove()
        self._running.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Pipeline({type(self.model).__name__}: {self.plan.summary})"


def _training(method: str) -> tuple[PassKind, str]:
    """What a training step runs, and its name; without gradients it runs only the forward.

    Args:
        method: the name of the method that the user called.
    """
    if torch.is_grad_enabled():
        return "train", method
    return "infer", f"{method} without gradients"


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode, and every module back in its own mode afterwards.

    Modules that were in training mode with all that is in them are put back by their own `train`,
    which may do more than set a flag. Of others just the flag is set.
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        if any(training for _, training in modes):
            model.eval()
        try:
            yield
        finally:
            _train(model, dict(modes))
    finally:  # also if a module's own `train` has failed
        for module, training in modes:
            module.training = training


def _train(module: nn.Module, modes: Mapping[nn.Module, bool]) -> None:
    """Put what was in training mode back there, but none that was not."""
    if all(modes.get(each, True) for each in module.modules()):
        module.train(True)  # an override may have no default
        return
    for child in module.children():
        _train(child, modes)
