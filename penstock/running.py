"""What runs a pipeline: its workers on a plan, and everything that goes on when these change."""

from __future__ import annotations

import platform
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Literal

import torch
from msgspec.structs import replace as replace_fields
from torch import nn

from penstock import __version__
from penstock.account.drift import drift
from penstock.account.history import About, Sample
from penstock.audit.auditor import Auditor
from penstock.board.control import Known, listen
from penstock.board.metrics import Address, MetricsServer
from penstock.board.runs import Run, publish
from penstock.board.status import News, status_of
from penstock.capture import Program
from penstock.changing import Fallbacks, Given, Planning, with_one_replica
from penstock.checkpoint.saver import Saver
from penstock.devices.choice import existing_devices
from penstock.devices.cores import cores
from penstock.devices.machine import processor
from penstock.devices.settings import with_autograd
from penstock.display.terminal import Progress, showing
from penstock.engine.recordable import check_recorded
from penstock.errors import (
    ClosedError,
    InputError,
    PlanError,
    WorkerDied,
    WorkerError,
    WorkerTimeout,
)
from penstock.interrupts import interrupts_wait
from penstock.links.casting import in_words
from penstock.passes import Passes
from penstock.plan import Plan
from penstock.plan.text import prediction
from penstock.planning.overheads import are_known
from penstock.planning.planner import Planned, Replanning
from penstock.profile import Profile
from penstock.runner import Runner
from penstock.steps import note_optimizers
from penstock.training.dividing import Dividing
from penstock.training.optimizer import PipelineOptimizer
from penstock.training.scaling import PipelineScaler
from penstock.units import show_seconds
from penstock.workers.backend import Backend, Survivors, Workers
from penstock.workers.described import description_of
from penstock.workers.kinds import WorkerOptions
from penstock.workers.members import Membership
from penstock.workers.memories import SideEffects
from penstock.workers.placement import place
from penstock.workers.redo import LostWork

_DEATHS = 3
"""How often others take over for workers that have ended at the same work."""

_WRITING = 20.0  # seconds for a save in the background, before workers that write it may leave

_HOW_TO_GO_ON = (
    "The model has its weights and gradients, and optimizers have their state: build another "
    "Pipeline of the same model, and load optimizer.state_dict() and pipe.random_state() there"
)


class Running:
    """The workers of a pipeline on a plan, and what runs passes on them.

    Other workers, or another plan, may take their place between two steps. Everything else stays
    the same object and goes on: counts, hooks, random numbers, optimizers, scalers.

    Args:
        model: the user's module.
        program: the captured program.
        given: the options of the pipeline.
        allocator_kept: whether processes keep freed memory.
        served_at: where metrics are served; `None` for nowhere.
        backend: workers without a plan.
        planned: the plan that they get, and its profile.
        stack: gets the callbacks that clean up if the start fails.

    Attributes:
        given: the options of the pipeline, for the next plan.
        profile: the profile that the plan was made from; `None` if the plan was given, or another
            rank has made it.
        members: the present workers.
        threads: intra-op threads of each CPU worker.
        links: for every stage but the last, a description of how values get to the next.
        runner: runs passes.
        auditor: audits some passes.
        passes: turns batches into passes.
        saver: saves checkpoints.
        dividing: makes the workers' parts of optimizers.
        metrics: the server of metrics; `None` if they are not served.
        description: describes the workers and the plan to other processes.
    """

    runner: Runner
    auditor: Auditor
    passes: Passes
    saver: Saver

    def __init__(
        self,
        model: nn.Module,
        program: Program,
        given: Given,
        allocator_kept: bool,
        served_at: Address | None,
        backend: Backend,
        planned: Planned,
        stack: ExitStack,
    ) -> None:
        plan, self.profile, _ = planned
        self.given = given
        self.dividing = Dividing(model)
        self._model = model
        self._program = program
        self._allocator_kept = allocator_kept
        self._served_at = served_at
        self._optimizers: weakref.WeakSet[PipelineOptimizer] = weakref.WeakSet()
        self._scalers: weakref.WeakSet[PipelineScaler] = weakref.WeakSet()
        self._also_noted: Callable[[], Callable[[], list[str]] | None] = lambda: None
        replanning = Replanning(plan, program, *given.example, backend, given.request, None)
        self._fallbacks = self._planned_ahead(replanning)
        workers = self._begun(backend, plan, stack)
        deferred = given.batchnorm == "deferred"
        self.runner = Runner(program, plan, workers, deferred, given.compile, given.graphs)
        if given.graphs:
            check_recorded(len(plan.stages), self.runner.not_recorded, plan.replicas)
        if given.workers.survives:
            self.runner.recovery = weakref.ref(self)
        self.auditor = Auditor(given.audit, program, self.runner, backend.threads)
        self.passes = Passes(self.runner, self.auditor, program, given.merge)
        self.saver = Saver(model, self.runner)
        self.members = Membership(0, 0, tuple(workers.members))
        self._forget_optimizers = note_optimizers(self.runner.steps, model)
        self._at_end(self._forget_optimizers, stack)
        self._show(stack)

    @property
    def plan(self) -> Plan:
        """The plan in use."""
        return self.runner.plan

    @property
    def workers(self) -> Workers:
        """The present workers."""
        return self.runner.workers

    def _at_end(self, end: Callable[[], object], stack: ExitStack) -> None:
        """Register `end` to be called if the start fails, or when this object is collected."""
        stack.callback(end)
        weakref.finalize(self, end).atexit = False

    # -- workers that begin -----------------------------------------------------------------------

    def _begun(self, backend: Backend, plan: Plan, stack: ExitStack) -> Workers:
        """Start workers on a plan, with the model's weights where they want them."""
        given, program = self.given, self._program
        self.threads = backend.threads
        workers = backend.start(plan, self._model, given.workers.timeout)
        stack.callback(workers.close)
        place(program, plan.cuts, workers.homes, given.weights, workers.hold)
        program.recordings.rebind()
        self.links = in_words(workers.links, plan.boundary_dtype)
        self.dividing.workers = workers
        return workers

    def _show(self, stack: ExitStack) -> None:
        """Publish the board, serve the metrics and write the description, for `penstock top`."""
        workers = self.workers
        self.description = description_of(self._model, self.plan, workers)
        answers = _answers_of(self)
        self.metrics = self._served(self._served_at, answers)
        if self.metrics:
            self._at_end(self.metrics.close, stack)
        publish(workers.board, self.description)
        listen(workers.board, answers)
        self.runner.steps.kept.sample_by(_sampling(self))

    def _served(self, where: Address | None, answers: Known) -> MetricsServer | None:
        """A server of metrics at this address; ranks take one port after the other."""
        if where is None:
            return None
        run = _run_of(self)
        port = where.port + self.description.rank if where.port else 0
        try:
            return MetricsServer(where.host, port, run, answers)
        except InputError as error:
            if where.is_asked_for:
                raise
            warnings.warn(str(error), stacklevel=3)  # another pipeline of this process, say
            return None

    def about(self) -> About:
        """The description, the plan and the versions that a run's folder begins with."""
        return About(
            description=self.description,
            plan=self.plan,
            environment={
                "penstock": __version__,
                "torch": str(torch.__version__),
                "python": platform.python_version(),
                "processor": f"{processor()}, {cores()} cores",
                "links between stages": ", ".join(sorted(set(self.links))) or "none",
                "threads per worker": str(self.threads),
                "freed memory": "kept for later" if self._allocator_kept else "given back",
            },
        )

    def notes(self) -> list[str]:
        """Remarks on the run for the user, such as that the plan does not fit any more, and why."""
        kept = self.runner.steps.kept
        seconds = self.workers.board.counted().planned_seconds
        found = drift(kept.accounts(self.plan), self.plan, seconds)
        notes = ["; ".join(found.reasons)] if found is not None and found.has_news else []
        notes = [note for note in notes if note]
        also = self._also_noted()
        return [*notes, *(also() if also is not None else ())]

    def note_also(self, what: Callable[[], list[str]]) -> None:
        """Have what a method says among the notes, as long as its object is there."""
        self._also_noted = weakref.WeakMethod(what)

    def add(self, thing: PipelineOptimizer | PipelineScaler) -> None:
        """Let an optimizer or a scaler go on with the next workers."""
        if isinstance(thing, PipelineOptimizer):
            self._optimizers.add(thing)
        else:
            self._scalers.add(thing)

    def split_into(self, num_microbatches: int) -> None:
        """Split batches into so many micro-batches from now on; stages and schedule stay."""
        self.runner.plan = replace_fields(self.plan, num_microbatches=num_microbatches)

    def _planned_ahead(self, replanning: Replanning) -> Fallbacks | None:
        """Plans for fewer workers, if these are to go on without others."""
        return Fallbacks(replanning) if self.given.workers.on_failure == "continue" else None

    # -- others -----------------------------------------------------------------------------------

    def change(
        self,
        chosen: WorkerOptions,
        planning: Planning,
        progress: Progress | Literal["auto"] | None,
        measures: bool,
    ) -> bool:
        """Switch to other workers, or to another plan; if that fails, the old ones go on.

        Worker processes that can go on are kept, unless links are to be measured: that takes
        processes without a plan.

        Args:
            chosen: the options of the new workers.
            planning: finds the plan.
            progress: as in `Pipeline`.
            measures: whether the links are to be measured again even if their times are known.

        Returns:
            whether the plan or the workers were replaced.
        """
        began, before, old = time.monotonic(), self.members, self.plan
        self.saver.finish()  # a failed save is raised while the old workers are there
        staying = 0 if measures or not self._knows_links(chosen) else self.workers.staying
        backend = chosen.backend(self._allocator_kept, staying=staying)
        with showing(progress) as report, with_autograd(), ExitStack() as stack:
            stack.callback(backend.close)
            left = self.runner.between_passes(lambda: self.workers.left())
            request, note = with_one_replica(self.given.request, old, left)
            example = self.given.example
            replanning = Replanning(old, self._program, *example, backend, request, report)
            plan, profile, stays = planning(replanning)
            if stays:
                self._predict(plan, profile)
                return False
            fallbacks = self._planned_ahead(replanning)
            plan = replace_fields(plan, note=note or plan.note)
            backend.take(plan, is_given=False)
            plan = backend.broadcast_plan(self._program, plan)
            left.bring()
            self.profile = profile
            self._switch(backend, plan, chosen if staying else None)
            stack.pop_all()
        self._fallbacks = fallbacks
        self.given = replace(self.given, workers=chosen)
        self.runner.steps.kept.happened(
            f"{self.members.difference_from(before)}; the change took "
            f"{show_seconds(time.monotonic() - began)}; another plan: {plan.summary}, instead of: "
            f"{old.summary}"
        )
        return True

    def _predict(self, plan: Plan, profile: Profile | None) -> None:
        """Have the workers go on with the same plan, of which something else is predicted now."""
        if plan is self.plan:
            return
        plan = replace_fields(plan, note=self.plan.note)
        self.profile, self.runner.plan = profile, plan
        self.runner.steps.use(self.workers, plan)
        self.description = replace_fields(
            self.description,
            plan=prediction(plan),
            predicted_seconds=plan.predicted_step_seconds,
            bound_seconds=plan.bound_seconds,
        )
        publish(self.workers.board, self.description)
        self.runner.steps.kept.go_on(self.about(), profile)
        self.runner.steps.kept.happened(f"measured again, and the plan stays: {plan.summary}")

    def _knows_links(self, chosen: WorkerOptions) -> bool:
        """Whether it is known what links between such workers on these devices take."""
        if chosen.devices is None:
            return False
        return are_known(
            existing_devices(chosen.devices), self.workers.members[0].kind, self.threads
        )

    def _switch(self, backend: Backend, plan: Plan, afresh: WorkerOptions | None) -> None:
        """Stop the workers and start others; if that fails, start the old ones again.

        Args:
            backend: the other workers.
            plan: the plan that they run.
            afresh: options for starting all new workers anew, in case one that is kept dies
                meanwhile; `None` if no worker is kept.

        Raises:
            ClosedError: neither the new workers nor the old ones could be started.
        """
        self.runner.between_passes(lambda: self.workers.bring())
        old, same = self.plan, self.given.as_they_are(self.workers, self.threads)
        for optimizer in self._optimizers:
            optimizer.divide_again()
        self._serve_again()
        try:
            with interrupts_wait():  # or processes would run of which nobody knows
                if afresh is not None:
                    backend.welcome(self.workers.survivors())
                self.runner.close()
            try:
                self._use(backend, plan)
            except WorkerDied:
                if afresh is None:
                    raise
                backend = afresh.backend(self._allocator_kept)
                backend.take(plan, is_given=False)
                self._use(backend, backend.broadcast_plan(self._program, plan))
        except BaseException as error:
            self._use_again(same, old, error)
            raise

    def _serve_again(self) -> None:
        """Stop serving metrics of the present workers; those of the next are served there."""
        if self.metrics and self._served_at:
            self._served_at = self._served_at._replace(port=self.metrics.port)
            self.metrics.close()

    def _use(self, backend: Backend, plan: Plan) -> None:
        """Go on with workers on a plan; if that fails, none of them is left."""
        with ExitStack() as stack:
            stack.callback(backend.close)
            workers = self._begun(backend, plan, stack)
            self.runner.use(plan, workers)
            self.auditor.begin()
            self.passes.begin()
            self._show(stack)
            stack.pop_all()
        self.runner.steps.kept.go_on(self.about(), self.profile)
        self.members = self.members.changed(workers.members, workers.board.counted().steps)
        for scaler in self._scalers:
            scaler.go_on(self.runner.loss_device, workers)

    def _use_again(self, same: WorkerOptions, plan: Plan, why: BaseException) -> None:
        """Start the old workers again, as the new ones could not be started.

        Args:
            same: the options of the old workers.
            plan: the plan that they had.
            why: the error of the new workers.

        Raises:
            ClosedError: the old workers cannot be started either.
        """
        try:
            backend = same.backend(self._allocator_kept)
            self._use(backend, backend.broadcast_plan(self._program, plan))
        except Exception as error:
            raise ClosedError(
                f"the new workers could not be started ({why}), nor the old ones once more "
                f"({error}), so the pipeline is closed. {_HOW_TO_GO_ON}"
            ) from why
        why.add_note("The pipeline goes on with the devices and the plan that it had before.")

    # -- workers that die -------------------------------------------------------------------------

    def recover(self, death: WorkerDied, deaths: int) -> None:
        """Let others take over for workers that have died, in the midst of whatever they did.

        Args:
            death: says who has died, and at what.
            deaths: how often workers have died at the same work, including this time.

        Raises:
            WorkerDied: it has happened too often, or nobody is left.
            InputError: something is lost that only the dead workers had.
        """
        if deaths > _DEATHS:
            self.workers.close()
            death.add_note(
                f"Others have taken over {_DEATHS} times, and each time a worker has ended at the "
                "same work, so it is probably the work that ends them."
            )
            raise death
        self._take_over(self.workers.remembered, death.what, death)

    def notice_deaths(self) -> None:
        """Let others take over for workers that have died since the last pass, if they do."""
        if self.given.workers.survives:
            self.runner.between_passes(lambda: self.workers.fetch_states(()))

    def hand_over(self) -> None:
        """Let others take over for workers that leave, between two passes.

        What they write of a checkpoint is written first.

        Raises:
            WorkerDied: one has died.
            InputError: something is lost that only those have who leave.
        """
        self.saver.end_within(_WRITING)
        with self._closing_if_lost():
            left = self.workers.left()
        self.workers.bring()
        self._take_over(lambda: left, "a worker was asked to end (SIGTERM)", None)

    def _take_over(
        self, remember: Callable[[], SideEffects], what: str, death: WorkerDied | None
    ) -> None:
        """Let the workers that are left, or new ones, go on.

        Args:
            remember: returns what forwards have left with the workers.
            what: a description of what happened, for messages.
            death: the error, if a worker died; `None` if workers leave.

        Raises:
            WorkerDied: nobody is left.
            ClosedError: nobody could take over.
        """
        began, before, old = time.monotonic(), self.members, self.plan
        with with_autograd(), interrupts_wait():  # so that nothing is lost by a Ctrl-C
            left = self._remembered(remember)
            lost = self.workers.lost_work
            for optimizer in self._optimizers:
                optimizer.divide_again()
            self._serve_again()
            now = self.workers
            survivors = now.survivors()
            chosen = self.given.as_they_are(now, self.threads)
            with self._ending(survivors, lost):
                with lost.rewound():
                    left.bring()
                plan = old
                if self._fallbacks is not None:
                    if not survivors and death is not None:
                        death.add_note("No worker is left to go on.")
                        raise death
                    one_replica = with_one_replica(self.given.request, old, left)[0].replicas == 1
                    plan = self._fallbacks.best(max(1, len(survivors)), one_replica)
                    chosen = self.given.on(list(plan.devices), now, self.threads)
                self._try_to_use(chosen, plan, survivors, what, lost)
            if plan is not old:  # else there are as many as before
                self.given = replace(self.given, workers=chosen)
            took = show_seconds(time.monotonic() - began)
            another = f"; another plan: {plan.summary}" if plan is not old else ""
            self.runner.steps.kept.happened(
                f"{what}; {self.members.difference_from(before)}; others have taken over within "
                f"{took}{another}"
            )

    def _remembered(self, remember: Callable[[], SideEffects]) -> SideEffects:
        """What forwards have left with the workers; an error, if it is lost, says how to resume."""
        try:
            with self._closing_if_lost():
                return remember()
        except WorkerDied as death:
            self.workers.close()
            newest = self.saver.newest
            death.advise(
                f"Resume from the checkpoint {newest}"
                if newest is not None
                else "There is no checkpoint of this run: pipe.autosave(folder, every=...) writes "
                "one, from which penstock.resume goes on"
            )
            raise

    @contextmanager
    def _closing_if_lost(self) -> Iterator[None]:
        """While open, what cannot be brought here closes the pipeline, with an error that helps."""
        try:
            yield
        except InputError as error:
            self.workers.close()
            how = _how_to_go_on(self.workers.lost_work)
            raise InputError(f"{error}. The pipeline is closed. {how}") from error

    @contextmanager
    def _ending(self, survivors: Survivors, lost: LostWork) -> Iterator[None]:
        """While open, an error ends those that are left; it says how to go on."""
        try:
            yield
        except BaseException as error:
            survivors.close()
            if isinstance(error, (InputError, PlanError)):
                how = _how_to_go_on(lost)
                raise type(error)(f"{error}. The pipeline is closed. {how}") from error
            if lost.works and not isinstance(error, ClosedError):  # which says it already
                error.add_note(_how_to_go_on(lost))
            raise

    def _try_to_use(
        self,
        chosen: WorkerOptions,
        plan: Plan,
        survivors: Survivors,
        what: str,
        lost: LostWork,
    ) -> None:
        """Go on with the workers that are left; if that fails, with new ones.

        Args:
            chosen: the options of the workers.
            plan: the plan that they run.
            survivors: the workers that are left.
            what: a description of what happened, for messages.
            lost: work that they do again before anything else.

        Raises:
            ClosedError: nobody could take over.
        """
        for attempt in range(_DEATHS):
            try:
                with lost.rewound():
                    backend = chosen.backend(self._allocator_kept, survivors)
                    self._use(backend, backend.broadcast_plan(self._program, plan))
                    self._redo(lost)
                return
            except (WorkerError, WorkerTimeout) as error:
                survivors.close()
                if attempt == _DEATHS - 1:
                    raise ClosedError(
                        f"{what}, and others could not take over ({error}), so the pipeline is "
                        f"closed. {_how_to_go_on(lost)}"
                    ) from error

    def _redo(self, lost: LostWork) -> None:
        """Have the new workers do again what is lost; if that fails, none of them is left."""
        try:
            self.runner.redo(lost.works)
            self.workers.bring_values(lost.current)
        except BaseException:
            self._serve_again()
            self.workers.survivors().close()  # what they have is not brought here
            for optimizer in self._optimizers:
                optimizer.load_again()
            raise

    # -- the end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop the workers, after a save that is under way."""
        self.runner.steps.kept.close()
        if self.metrics:
            self.metrics.close()
        self._forget_optimizers()
        try:
            self.saver.finish()
        finally:
            self.runner.close()


def _how_to_go_on(lost: LostWork) -> str:
    if not lost.works:
        return _HOW_TO_GO_ON
    count = sum(work.order is not None for work in lost.works)
    return (
        "What the workers have done since the last copy of what they had is lost (passes: "
        f"{count}; other work, such as steps of an optimizer: {len(lost.works) - count}). "
        f"{_HOW_TO_GO_ON}, all as of that copy; or resume from a checkpoint"
    )


def _run_of(running: Running) -> Callable[[], Run]:
    """Gives what is to be seen of a pipeline now; it does not keep the pipeline alive."""
    known, board = weakref.ref(running), running.workers.board
    last = [running.description]

    def run() -> Run:
        here = known()
        if here is not None:
            last[0] = here.description
        return Run(last[0], board, board.path)

    return run


def _sampling(running: Running) -> Callable[[int], Sample | None]:
    """What says what workers hold and have done; it does not keep the pipeline alive."""
    known = weakref.ref(running)

    def sample(step: int) -> Sample | None:
        here = known()
        if here is None:
            return None
        workers = here.workers
        status = status_of(here.description, workers.status(), workers.board.counted())
        return Sample(
            at=time.time(),
            step=step,
            memory=tuple(worker.memory for worker in status.workers),
            most_memory=tuple(worker.most_memory for worker in status.workers),
            worked=tuple(worker.worked_seconds for worker in status.workers),
            waited=tuple(worker.waited_seconds for worker in status.workers),
        )

    return sample


def _answers_of(running: Running) -> Known:
    """What other processes may ask for; that does not keep the pipeline alive."""
    known = weakref.ref(running)

    def here() -> Running:
        found = known()
        if found is None:
            raise ValueError("the pipeline was closed")
        return found

    def stacks() -> dict[str, str]:
        return {f"worker {number}": each for number, each in here().workers.stacks().items()}

    def record() -> int:
        steps = here().runner.steps
        steps.ask()
        return steps.kept.records[-1].step if steps.kept.records else 0

    return {
        "stacks": stacks,
        "news": lambda: News(tuple(here().notes()), tuple(here().runner.steps.kept.latest())),
        "history": lambda: here().runner.steps.kept.history(here().about()),
        "record": record,
    }
