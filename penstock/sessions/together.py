"""Sessions where several processes run the script: one of them leads, and the others follow.

Under torchrun every rank calls `generate` or a session. The rank with the first stage does what the
script's process does elsewhere: it runs the model's own `generate`, finds ways, starts passes and
waits for them. It broadcasts each such step to the others, which do their part of it. Each step is
an operation, so one that fails for a process fails for all. When a pass has failed, the process
that leads decides what comes of it; when another step has, the call is over.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from penstock.account.record import CALL
from penstock.capture import Program
from penstock.capture.cuts import KeptInStages
from penstock.capture.signatures import Inputs
from penstock.engine.batch import Batch
from penstock.engine.orders import Order, Outcome
from penstock.engine.residents import States
from penstock.errors import ClosedError, InputError
from penstock.links.link import Values
from penstock.runner import Runner, Started

T = TypeVar("T")


@dataclass(frozen=True)
class Start:
    """A pass begins.

    Attributes:
        batch: its only micro-batch, routed, without the inputs; with all ways that are new.
        training: the mode of the model.
        apart: which inputs and results of new ways stay with their stages, by number.
        states: that it takes and keeps.
        replica: that runs it.
        values: what enters the first stage, if that is with another process than the leading one.
        to_all: whether all processes get the results.
        leaves: how many leaves the arguments of the call have.
        weights_since: the pass since which no weight has changed, see `Order`.
    """

    batch: Batch
    training: bool
    apart: Mapping[int, KeptInStages]
    states: States
    replica: int
    values: Sequence[Values]
    to_all: bool
    leaves: int
    weights_since: int


@dataclass(frozen=True)
class Finish:
    """A pass is waited for; `number` is its batch's."""

    number: int


@dataclass(frozen=True)
class Fetch:
    """The leading process needs values that stay with workers; `numbers` are theirs."""

    numbers: Sequence[int]


@dataclass(frozen=True)
class Drop:
    """Nobody needs values any more; `numbers` are theirs."""

    numbers: Sequence[int]


@dataclass(frozen=True)
class Say:
    """The script is given something in the midst of the call."""

    what: Any


@dataclass(frozen=True)
class Over:
    """The call is over; `result` is what it returns."""

    result: Any = None


Step = Start | Finish | Fetch | Drop | Say | Over


@dataclass
class Followed:
    """What a process knows that follows.

    Attributes:
        passes: that have begun, by number; what was raised instead by those that could not.
        last: the last pass that has ended, and what has come of it.
    """

    passes: dict[int, tuple[Start, Started | Exception]] = field(default_factory=dict)
    last: tuple[Start, Started, Outcome] | None = None


class Together:
    """Has all processes that run the script make the calls of sessions together.

    Where there is one such process, as with threads and worker processes, nothing is sent.

    Args:
        runner: runs passes.
        program: the captured program.
    """

    def __init__(self, runner: Runner, program: Program) -> None:
        self._runner = runner
        self._program = program
        self._what = ""  # the call that this process leads
        self._failure: Exception | None = None  # after which nothing is broadcast in this call
        self._to_all = True
        self._new_ways: dict[bool, dict[int, Inputs]] = {
            True: {},
            False: {},
        }  # for the others, by mode

    @property
    def is_alone(self) -> bool:
        """Whether this is the only process that runs the script."""
        return not self._runner.workers.role.name

    @property
    def follows(self) -> bool:
        """Whether another process leads."""
        return not self._runner.workers.role.routes

    def _named(self, what: str) -> str:
        """The name of an operation; models in other modes are in another one."""
        return what if self._program.model.training else f"{what} in evaluation mode"

    # -- in the process that leads --------------------------------------------------------

    def led(self, what: str, work: Generator[T, None, Any]) -> Generator[T, None, Any]:
        """Do some work, of which others do their part.

        Args:
            what: the name of the call.
            work: yields what all processes are given, and returns what the call returns in all.

        Raises:
            BaseException: what the work raises; the others raise it as well.
        """
        with self._leading(what, to_all=False):
            try:
                while True:
                    try:
                        decision = next(work)
                    except StopIteration as end:
                        result = end.value
                        break
                    with self.broadcasting(Say(decision)):
                        pass
                    seen = self._runner.workers.operations
                    try:
                        with self._paused():
                            yield decision
                    except GeneratorExit:
                        if self._runner.workers.operations != seen:  # nobody follows any more
                            self._fail(InputError(f"{what} was left after other calls"))
                        raise
            finally:
                work.close()  # of which the others hear
            with self.broadcasting(Over(result)):
                pass
            return result

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """While open, the script does what it likes, other calls of sessions for instance."""
        own = self._what, self._to_all, self._failure
        self._what, self._to_all, self._failure = "", True, None
        try:
            yield
        finally:
            self._what, self._to_all, self._failure = own

    @contextmanager
    def leading(self, what: str) -> Iterator[None]:
        """While open, others do their part of what this process does; all get results of passes.

        Args:
            what: the name of the call.
        """
        with self._leading(what, to_all=True):
            yield
            with self.broadcasting(Over()):
                pass

    def preparing(self, what: str) -> AbstractContextManager[None]:
        """While open, what is raised before `led` is raised by the others as well.

        Args:
            what: the name of the call.
        """
        return self._leading(what, to_all=False)

    @contextmanager
    def _leading(self, what: str, to_all: bool) -> Iterator[None]:
        """While open, steps are broadcast; an error that leaves it is broadcast last."""
        if self.is_alone:
            yield
            return
        outer = self._what, self._to_all, self._failure
        self._what, self._to_all, self._failure = self._named(what), to_all, None
        try:
            yield
        except BaseException as error:
            self._give_up(error)
            raise
        finally:
            self._what, self._to_all, self._failure = outer

    def _give_up(self, error: BaseException) -> None:
        """Tell the others that it is over, and why; who cannot hear it has an error already."""
        with suppress(Exception), self.broadcasting(Over()):
            if not isinstance(error, GeneratorExit):
                raise error

    @property
    def has_failed(self) -> bool:
        """Whether others do not follow any more in the call that this process leads."""
        return bool(self._what) and self._failure is not None

    def broadcasting(self, step: Step) -> AbstractContextManager[None]:
        """While open, the others do their part of this step; nothing if none are led."""
        return self._broadcasting(step) if self._what else nullcontext()

    @contextmanager
    def _broadcasting(self, step: Step) -> Iterator[None]:
        if self._failure is not None:
            raise self._failure
        workers = self._runner.workers
        try:
            with workers.operation(self._what):
                workers.broadcast(step, "inputs")
                yield
        except Exception as error:
            if _ends(step, error):  # the others have raised it, too, and left
                self._fail(error)
            raise

    def _fail(self, error: Exception) -> None:
        """Broadcast nothing more in this call, and give up its passes, as the others do."""
        if self._what:
            self._failure = error
            self._runner.give_up(error)

    def note(self, new_ways: Mapping[int, Inputs], training: bool) -> None:
        """There are ways that the others do not know; they hear of them with the next pass.

        Args:
            new_ways: the inputs that are the first to take a way, by its number.
            training: the mode of the model.
        """
        if self._what and new_ways:
            self._new_ways[training].update(new_ways)

    def broadcast_start(self, order: Order, batch: Batch, states: States) -> Order:
        """Let the others know of a pass before it is started.

        Args:
            order: the pass.
            batch: its only micro-batch, routed.
            states: that it takes and keeps.

        Returns:
            the order for this process.
        """
        if not self._what:
            return order
        training = self._program.model.training
        new_ways = self._new_ways[training]
        parts = {k: Inputs(part.with_values(part), part.signature) for k, part in new_ways.items()}
        new_ways.clear()
        replica, ways = order.replica or 0, self._runner.ways(training)
        start = Start(
            replace(batch, parts=[], new_ways=parts),
            training,
            {number: ways[number].apart for number in parts},
            states,
            replica,
            order.values if replica else (),
            self._to_all,
            len(batch.parts[0]),
            order.weights_since,
        )
        with self.broadcasting(start):
            pass
        return order.changed(to_all=self._to_all)

    # -- in the others --------------------------------------------------------------------

    def followed(self, what: str, found: Followed) -> Generator[Any, None, Any]:
        """Do this process's part of what another one does, until that says that it is over.

        Args:
            what: the name of the call.
            found: is given what this process hears of passes.

        Yields:
            the decision of the process that leads.

        Returns:
            what it has returned.
        """
        name, failure, listens = self._named(what), None, True
        workers = self._runner.workers
        while True:
            step: Step | None = None
            try:
                with workers.operation(name):
                    received: Step = workers.broadcast(None, "inputs")
                    step = received
                    order = self._do(received, found)
                if isinstance(step, Start) and order is not None:
                    found.passes[step.batch.number] = step, self._started(order)
                failure = None
            except Exception as error:
                if not _ends(step, error):  # the one that leads decides what comes of it
                    failure = failure or error
                    continue
                self._runner.give_up(error)
                if failure is not None and isinstance(error, ClosedError):
                    raise failure from None
                raise
            if isinstance(step, Over):
                if found.passes:  # the one that leads could not start them
                    self._runner.give_up(RuntimeError(f"{what} is over"))
                return step.result
            if isinstance(step, Say) and listens:
                seen = workers.operations
                try:
                    yield step.what
                except GeneratorExit:
                    if workers.operations != seen:
                        self._runner.give_up(InputError(f"{what} was left after other calls"))
                        raise
                    listens = False  # the others go on, and need this process

    def _do(self, step: Step, found: Followed) -> Order | None:
        """This process's part of a step; the pass that begins, if one does."""
        workers = self._runner.workers
        match step:
            case Start():
                return self._order(step)
            case Finish():
                start, started = found.passes.pop(step.number)
                if isinstance(started, Exception):
                    raise started
                found.last = start, started, self._runner.finish(started)
            case Fetch():
                workers.fetch_states(step.numbers)
            case Drop():
                workers.drop_states(step.numbers)
        return None

    def _started(self, order: Order) -> Started | Exception:
        """A pass as it begins; why it could not is raised when it is waited for."""
        try:
            return self._runner.start(order)
        except Exception as error:
            return error

    def _order(self, step: Start) -> Order:
        """A pass that the process that leads begins."""
        with self._runner.steps.during(CALL), torch.no_grad():
            self._runner.follow(step.batch, step.training, step.apart)
            order = self._runner.order("infer", step.batch, step.training)
        microbatches = [m._replace(states=step.states) for m in order.microbatches]
        return replace(
            order,
            microbatches=microbatches,
            values=step.values,
            replica=step.replica,
            to_all=step.to_all,
            weights_since=step.weights_since,
        )


def _ends(step: Step | None, error: Exception) -> bool:
    """Whether a call is over when this step has failed.

    It may go on when a pass has failed; but not if a process does something else meanwhile.
    """
    return not isinstance(step, Finish) or isinstance(error, InputError)
