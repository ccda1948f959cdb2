"""One model: captured, cut, pipelined in several micro-batches, and compared with a plain loop."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import itertools
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

import penstock as ps
from penstock.bench.uniform import uniform_plan
from penstock.capture import Key, untouched
from penstock.capture.equality import same
from penstock.capture.trees import flatten, flatten_result, map_leaves, unflatten
from penstock.comparison.reference import copied, deterministic_algorithms, run_with_threads
from penstock.planning.tuning import mean_square
from penstock.schedule import SCHEDULES
from tests.support.models import own_forward, replicated, workers_for
from tests.zoo.entry import Entry, Inputs

STAGES = (2, 4)
COUNT = 3  # micro-batches, of unequal sizes
PROFILE = 3.0  # seconds for an automatic plan
_EVALUATED = -1  # the step of the first pass that does not train, on which its draws depend
STATUSES = ("exact", "coarse", "refused", "crash", "wrong")
"""What becomes of a model that runs without Penstock."""

NOT_RUN = ("no input form", "cannot be built", "does not train", "not deterministic")
"""Why others do not: nothing here makes inputs that it takes; its library does not build it here;
nothing in its results has a gradient, or plain PyTorch fails to compute it; on a GPU, plain PyTorch
has no kernel for it that gives the same bits twice."""


class WrongError(Exception):
    """The model is not what it is without Penstock."""


class NotRunError(Exception):
    """The plain model does not run here: nothing to capture."""

    def __init__(self, status: str, error: BaseException) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.status = status


@dataclass
class Result:
    """What became of a model.

    Attributes:
        name: of the entry.
        family: the table.
        model: what is counted; several entries may be the same model with other inputs.
        status: one of `STATUSES`, or of `NOT_RUN`. `exact`; `coarse` (exact, but with fewer
            possible cuts than two stages need); `refused` (a `CaptureError` or an `InputError`,
            which name the reason); `crash` (any other error, or not done in time); `wrong`.
        line: the reason, or what was not compared, in one line.
        calls: of the program.
        closed: why modules that have children stayed closed.
        stages: into how many it was cut.
        ran: every pipeline that was compared, in words.
        oracle: `plain` (a loop of plain PyTorch), or `reseeded` (the same, its random calls seeded
            as a replay seeds them).
        capture_seconds: how long capturing took.
        commit: that was checked.
    """

    name: str
    family: str
    status: str
    model: str = ""
    line: str = ""
    calls: int = 0
    closed: dict[str, str] = field(default_factory=dict)
    stages: list[int] = field(default_factory=list)
    ran: list[str] = field(default_factory=list)
    oracle: str = ""
    capture_seconds: float = 0.0
    commit: str = ""

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


@dataclass(frozen=True)
class Batch:
    """Inputs, and along which dimension each leaf has rows; found from two sizes, without Penstock.

    Attributes:
        inputs: all of them.
        rows: how many.
        dims: of every leaf, and how many entries it has there for each row; or `None`.
    """

    inputs: Inputs
    rows: int
    dims: tuple[tuple[int, int] | None, ...]

    def parts(self, count: int) -> list[tuple[Inputs, int]]:
        """The micro-batches, and how many rows they have."""
        leaves, structure = flatten(self.inputs)
        sizes = [len(part) for part in torch.arange(self.rows).tensor_split(count)]
        split = [
            [leaf] * len(sizes)
            if place is None
            else leaf.split([size * place[1] for size in sizes], place[0])
            for leaf, place in zip(leaves, self.dims, strict=True)
        ]
        each = [unflatten(structure, list(part)) for part in zip(*split, strict=True)]
        return list(zip(each, sizes, strict=True))


@dataclass(frozen=True)
class Trial:
    """One pipeline to be compared.

    Attributes:
        plan: how it runs.
        workers: kind.
        words: what is said of it.
    """

    plan: ps.Plan
    workers: str
    words: str


def check(
    entry: Entry, everything: bool = True, replicas: Sequence[int] = (), device: str = "cpu"
) -> Result:
    """Capture the model and compare it with itself, in training and evaluation.

    Args:
        entry: the model.
        everything: also with an automatic plan and in worker processes, where it is its turn.
        replicas: as many replicas instead, of the whole model and, if it can be cut, of two stages.
        device: that stands for those of all workers.
    """
    result = Result(entry.name, entry.family, "exact", model=entry.counted)
    if device != "cpu":
        torch.use_deterministic_algorithms(True)
    try:
        _check(entry, result, everything and device == "cpu", replicas, device)
    except NotRunError as error:
        result.status, result.line = error.status, _line(error)
    except WrongError as error:
        result.status, result.line = "wrong", _line(error)
    except (ps.CaptureError, ps.InputError) as error:
        result.status, result.line = "refused", _line(error)
    except Exception as error:
        result.status, result.line = "crash", _line(error)
    return result


def _line(error: BaseException) -> str:
    """What it says, in one line."""
    named = isinstance(error, (NotRunError, WrongError))
    text = f"{error}" if named else f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:300]


def _check(
    entry: Entry, result: Result, everything: bool, replicas: Sequence[int], device: str
) -> None:
    model, batches = _built(entry, device)
    args, kwargs = batches[0].inputs
    before = _Snapshot(model)
    start = time.perf_counter()
    program = ps.capture(
        model, args, kwargs, keep_closed=entry.keep_closed, batch_dim=entry.batch_dim or 0
    )
    result.capture_seconds = time.perf_counter() - start
    before.check(model)
    modules = dict(model.named_modules())
    result.calls = len(program)
    result.closed = {p: why for p, why in program.closed.items() if any(modules[p].children())}
    allowed = [k for k in range(1, len(program)) if program.cuts.forbidden(k) is None]
    result.stages = [p for p in STAGES if len(allowed) >= p - 1]
    if not result.stages:
        result.status = "coarse"
        reasons = program.closed
        result.line = reasons.get("") or next(iter(reasons.values()), "it is one call")
    traces = (program.train, program.eval)
    result.oracle = "reseeded" if any(c.random for t in traces for c in t.calls) else "plain"
    state = copy.deepcopy(model.state_dict())
    stages = result.stages or [1]
    trials = _trials(entry, program, stages, everything)
    if replicas:
        trials = _on_replicas(program, [1] if stages == [1] else [1, 2], replicas)
    for trial in trials:
        _compare(program, trial, batches, state, result.oracle, device)
        before.check(model)
        result.ran.append(trial.words)


def _trials(
    entry: Entry, program: ps.Program, stages: Sequence[int], everything: bool
) -> Iterator[Trial]:
    """Every number of stages, each with a schedule that is drawn by the model's name."""
    number = int.from_bytes(hashlib.sha256(entry.name.encode()).digest()[:4], "big")
    for k, count in enumerate(stages):
        plan = _plan(program, count, number // 8 + k)
        workers = len(plan.devices)
        said = f"{count} stages on {workers} threads, {plan.schedule}, m={COUNT}"
        yield Trial(plan, "threads", said)
        if everything and k == 0 and count > 1 and number % 4 == 0:
            plan = uniform_plan(program, count, COUNT, "1f1b")
            yield Trial(plan, "processes", f"{count} stages on {count} processes, m={COUNT}")
    if everything and number % 4 == 2 and stages[0] > 1:
        costs = ps.profile(program, devices=["cpu", "cpu"], seconds=PROFILE)
        plan = ps.plan(costs)
        yield Trial(plan, "threads", f"automatic plan: {plan.schedule}, m={plan.num_microbatches}")


def _on_replicas(
    program: ps.Program, stages: Sequence[int], replicas: Sequence[int]
) -> Iterator[Trial]:
    """Every number of stages on every number of replicas."""
    for count, times in itertools.product(stages, replicas):
        plan = replicated(uniform_plan(program, count, COUNT, recompute="none"), times)
        words = f"{times} replicas of {count} {'stage' if count == 1 else 'stages'}, m={COUNT}"
        yield Trial(plan, "threads", words)


def _plan(program: ps.Program, stages: int, number: int) -> ps.Plan:
    """So many stages, in one of the schedules that take them."""
    fitting = {
        name: workers
        for name in SCHEDULES
        if name not in ("gpipe", "naive") and (workers := workers_for(name, stages))
    }
    names = list(fitting)
    for k in range(len(names) if stages > 1 else 0):
        name = names[(number + k) % len(names)]
        with contextlib.suppress(ps.PlanError):  # it would take more stages
            plan = uniform_plan(program, fitting[name], COUNT, name)
            if len(plan.stages) == stages:
                return plan
    return uniform_plan(program, stages, COUNT, "gpipe")


def _built(entry: Entry, device: str) -> tuple[nn.Module, list[Batch]]:
    """The model and batches of two sizes, if it runs on them at all, forward and backward.

    Args:
        entry: the model.
        device: where they are.

    Raises:
        NotRunError: it does not.
    """
    torch.manual_seed(0)
    least = max(2, entry.rows)  # of a micro-batch: BatchNorm refuses one row
    sizes = [COUNT * least + 1, COUNT * least + 2]
    try:
        model = entry.build().to(device)
        model.train()
        twin = copied(model)
    except Exception as error:
        raise NotRunError("cannot be built", error) from error
    try:
        given = [map_leaves(partial(_moved, device=device), entry.inputs(n)) for n in sizes]
        dims = _dims(*given, *sizes, {1, *(times for _, times in entry.batch_dim.values())})
        batches = [Batch(x, rows, dims) for x, rows in zip(given, sizes, strict=True)]
        outputs = [twin(*copy.deepcopy(x[0]), **copy.deepcopy(x[1])) for x in given]
    except Exception as error:
        raise NotRunError("no input form", error) from error
    try:
        for output in outputs:
            mean_square(output).backward()
    except Exception as error:
        raise NotRunError(_why_not_trained(error), error) from error
    try:
        args, kwargs = copy.deepcopy(given[0])
        with torch.no_grad():
            twin.eval()(*args, **kwargs)
    except Exception as error:
        raise NotRunError("no input form", error) from error
    return model, batches


def _dims(
    one: Inputs, other: Inputs, rows: int, others: int, entries: Collection[int]
) -> tuple[tuple[int, int] | None, ...]:
    """Where each leaf has rows: the dimension that is as large as the batch in both, or so often.

    Args:
        one, other: batches.
        rows, others: how many they have.
        entries: how many entries a leaf may have for each row.
    """
    found: list[tuple[int, int] | None] = []
    for a, b in zip(flatten(one)[0], flatten(other)[0], strict=True):
        shapes = zip(a.shape, b.shape, strict=True) if isinstance(a, torch.Tensor) else ()
        sizes = {times: (times * rows, times * others) for times in sorted(entries)}
        fits = [(k, t) for k, pair in enumerate(shapes) for t, s in sizes.items() if pair == s]
        found.append(fits[0] if fits else None)
    return tuple(found)


def _why_not_trained(error: Exception) -> str:
    is_any = "does not have a deterministic implementation" in str(error)
    return "not deterministic" if is_any else "does not train"


def _moved(leaf: Any, device: str) -> Any:
    return leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf


class _Snapshot:
    """A model and the generator as they were."""

    def __init__(self, model: nn.Module) -> None:
        self._state = {n: t.clone() for n, t in _tensors(model)}
        self._flags = [m.training for m in model.modules()]
        self._attributes = [sorted(vars(m)) for m in model.modules()]
        self._generator = torch.get_rng_state()

    def check(self, model: nn.Module) -> None:
        """Raise unless it is still so."""
        changed = [n for n, tensor in _tensors(model) if not same(tensor, self._state[n])]
        attributes = [sorted(vars(m)) for m in model.modules()]
        for wrong, words in (
            (changed, f"{', '.join(changed[:3])} changed"),
            (self._flags != [m.training for m in model.modules()], "a training flag changed"),
            (self._attributes != attributes, "attributes changed"),
            (not torch.equal(self._generator, torch.get_rng_state()), "the generator was used"),
            (any(p.grad is not None for p in model.parameters()), "there are gradients"),
        ):
            if wrong:
                raise WrongError(words)


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.state_dict(keep_vars=True).items()


def _compare(
    program: ps.Program,
    trial: Trial,
    batches: Sequence[Batch],
    state: dict[str, Any],
    oracle: str,
    device: str,
) -> None:
    """Two steps of training and a batch in evaluation, against the loop."""
    model, generator = program.model, torch.get_rng_state()
    with untouched(model):  # a forward may leave things that cannot be copied
        twin = copied(model)
        _compare_steps(program, trial, batches, twin, oracle, device)
    model.zero_grad()
    if list(model.state_dict()) != list(state):
        raise WrongError("the names of the state dict changed")
    model.train()
    model.load_state_dict(state)
    torch.set_rng_state(generator)


def _compare_steps(
    program: ps.Program,
    trial: Trial,
    batches: Sequence[Batch],
    twin: nn.Module,
    oracle: str,
    device: str,
) -> None:
    model, plan = program.model, trial.plan
    devices = [device] * len(plan.devices)
    pipe = ps.Pipeline(
        model, plan=plan, program=program, devices=devices, workers=trial.workers, merge="list"
    )
    with pipe, deterministic_algorithms():  # one worker alone has several threads
        for step, batch in enumerate(batches):
            where = f"{trial.words}, step {step}"
            args, kwargs = copy.deepcopy(batch.inputs)
            ours = pipe.train_step(*args, loss_fn=mean_square, outputs="list", **kwargs)
            alone = partial(_train, program, twin, batch, step, plan.num_microbatches, oracle)
            loss, outputs = run_with_threads(alone, pipe.threads_per_worker)
            _assert_same({"loss": ours.loss}, {"loss": loss}, where)
            _assert_same(_leaves(ours.outputs), _leaves(outputs), f"results, {where}")
            _assert_same(*(_gradients(m) for m in (model, twin)), f"gradients, {where}")
            _assert_same(*(dict(m.named_buffers()) for m in (model, twin)), f"buffers, {where}")
        pipe.eval()
        twin.eval()
        batch, where = batches[0], f"{trial.words}, evaluation"
        args, kwargs = copy.deepcopy(batch.inputs)
        with torch.no_grad():
            results = pipe(*args, **kwargs)
        count = plan.num_microbatches
        last = partial(_evaluate, program, twin, batch, _EVALUATED, count, oracle)
        expected = run_with_threads(last, pipe.threads_per_worker)
        _assert_same(_leaves(results), _leaves(expected), f"results, {where}")


def _run(
    program: ps.Program, twin: nn.Module, batch: Batch, step: int, count: int, oracle: str
) -> Iterator[tuple[Any, int]]:
    """The results of the micro-batches, one after the other, and their rows."""
    for k, (inputs, rows) in enumerate(batch.parts(count)):
        args, kwargs = copy.deepcopy(inputs)
        if oracle == "plain":
            yield twin(*args, **kwargs), rows
        else:
            key = Key(torch.initial_seed(), step, k)
            yield own_forward(program, args, kwargs, key, twin), rows


def _evaluate(
    program: ps.Program, twin: nn.Module, batch: Batch, step: int, count: int, oracle: str
) -> list[Any]:
    """The results of a batch."""
    with torch.no_grad():
        return [output for output, _ in _run(program, twin, batch, step, count, oracle)]


def _train(
    program: ps.Program, twin: nn.Module, batch: Batch, step: int, count: int, oracle: str
) -> tuple[torch.Tensor, list[Any]]:
    """A step of gradient accumulation as anybody would write it: the loss and the results."""
    total: Any = 0.0
    outputs = []
    for output, rows in _run(program, twin, batch, step, count, oracle):
        loss = mean_square(output) * (rows / batch.rows)
        loss.backward()
        total = total + loss.detach()
        outputs.append(output)
    return total, outputs


def _leaves(output: Any) -> dict[str, Any]:
    leaves = flatten_result(output)[0]
    return {str(k): x.detach() if isinstance(x, torch.Tensor) else x for k, x in enumerate(leaves)}


def _gradients(model: nn.Module) -> dict[str, Any]:
    return {name: p.grad for name, p in model.named_parameters()}


def _assert_same(ours: dict[str, Any], theirs: dict[str, Any], what: str) -> None:
    if list(ours) != list(theirs):
        raise WrongError(f"{what}: others")
    for name, mine in ours.items():
        if not same(mine, theirs[name]):
            raise WrongError(f"{what}: {name} differs")
