"""One model: captured, cut into two and four stages, and compared with itself."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import msgspec
import torch
from torch import nn

import penstock as ps
from penstock.capture import Key, untouched
from penstock.capture.equality import same
from penstock.capture.trees import flatten
from penstock.tuning import mean_square
from penstock.verification import copied, run_with_threads
from tests.models import own_forward
from tests.zoo.entry import Entry, Inputs

STAGES = (2, 4)


class DoesNotRunError(Exception):
    """The plain model fails on its own: nothing to capture."""


@dataclass
class Result:
    """What became of a model.

    Attributes:
        name: the model.
        family: the table.
        status: `exact`; `coarse` (exact, but with fewer possible cuts than two stages need);
            `refused` (an error at capture); `wrong`; `does not run` (without Penstock either).
        line: an exception's reason, or what was not compared, in one line.
        calls: of the program.
        closed: why modules that have children stayed closed.
        stages: into how many it was cut.
        capture_seconds: how long capturing took.
    """

    name: str
    family: str
    status: str
    line: str = ""
    calls: int = 0
    closed: dict[str, str] = field(default_factory=dict)
    stages: list[int] = field(default_factory=list)
    capture_seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


def check(entry: Entry) -> Result:
    """Capture the model and compare it with itself, at three batch sizes, in both modes."""
    result = Result(entry.name, entry.family, "exact")
    try:
        _check(entry, result)
    except DoesNotRunError as error:
        result.status, result.line = "does not run", _line(error)
    except AssertionError as error:
        result.status, result.line = "wrong", _line(error)
    except Exception as error:
        result.status, result.line = "refused", _line(error)
    return result


def _line(error: BaseException) -> str:
    name = (
        "" if isinstance(error, (DoesNotRunError, AssertionError)) else f"{type(error).__name__}: "
    )
    return f"{name}{error}".splitlines()[0][:300]


def _check(entry: Entry, result: Result) -> None:
    model, batches = _built(entry)
    args, kwargs = batches[0]
    before = _Snapshot(model)
    start = time.perf_counter()
    program = ps.capture(model, args, kwargs, keep_closed=entry.keep_closed)
    result.capture_seconds = time.perf_counter() - start
    before.check(model)
    modules = dict(model.named_modules())
    result.calls = len(program)
    result.closed = {p: why for p, why in program.closed.items() if any(modules[p].children())}
    profile = ps.profile(program, devices=["cpu"], num_microbatches=1)
    before.check(model)
    allowed = [k for k in range(1, len(program)) if k not in profile.forbidden]
    result.stages = [p for p in STAGES if len(allowed) >= p - 1]
    if not result.stages:
        result.status = "coarse"
        result.line = next(iter(program.closed.values()), "it is one call")
    state = copy.deepcopy(model.state_dict())
    modes = {True: True, False: _learns_in_evaluation(model, batches[0])}
    if not modes[False]:
        result.line = result.line or "evaluation compared without gradients: PyTorch has none"
    for stages in result.stages or [1]:
        _compare(program, _plan(profile, stages), batches, state, modes)


def _plan(profile: ps.Profile, stages: int) -> ps.Plan:
    """Balanced by time."""
    alike = msgspec.structs.replace(profile, devices=("cpu",) * stages)
    return ps.plan(alike, num_microbatches=1, schedule="gpipe")


def _built(entry: Entry) -> tuple[nn.Module, list[Inputs]]:
    """The model and batches of three sizes, if it runs on them at all, forward and backward."""
    torch.manual_seed(0)
    try:
        model = entry.build()
        model.train()
        batches = [entry.inputs(rows) for rows in (entry.rows, entry.rows + 1, 2 * entry.rows + 1)]
        twin = copied(model)
        for args, kwargs in copy.deepcopy(batches):
            mean_square(twin(*args, **kwargs)).backward()
        twin.eval()
        with torch.no_grad():
            twin(*batches[0][0], **batches[0][1])
    except Exception as error:
        raise DoesNotRunError(f"{type(error).__name__}: {error}") from error
    return model, batches


def _learns_in_evaluation(model: nn.Module, batch: Inputs) -> bool:
    """Whether plain PyTorch can go backward more than once in evaluation mode.

    Models that keep there what they made of their parameters, as levit its attention biases, keep
    its graph as well; others refuse to go backward at all.
    """
    twin = copied(model).eval()
    try:
        for _ in range(2):
            args, kwargs = copy.deepcopy(batch)
            loss = mean_square(twin(*args, **kwargs))
            if loss.requires_grad:
                loss.backward()
    except Exception:
        return False
    return True


class _Snapshot:
    """A model and the generator as they were."""

    def __init__(self, model: nn.Module) -> None:
        self._state = {n: (t._version, t.clone()) for n, t in _tensors(model)}
        self._flags = [m.training for m in model.modules()]
        self._attributes = [sorted(vars(m)) for m in model.modules()]
        self._generator = torch.get_rng_state()

    def check(self, model: nn.Module) -> None:
        """Raise unless it is still so."""
        for name, tensor in _tensors(model):
            version, value = self._state[name]
            assert same(tensor, value), f"capture changed {name}"
            assert tensor._version == version, f"capture wrote {name}"
        assert self._flags == [m.training for m in model.modules()], "a training flag changed"
        attributes = [sorted(vars(m)) for m in model.modules()]
        assert self._attributes == attributes, "attributes changed"
        assert torch.equal(self._generator, torch.get_rng_state()), "the generator was used"
        assert all(p.grad is None for p in model.parameters()), "there are gradients"


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.state_dict(keep_vars=True).items()


def _compare(
    program: ps.Program,
    plan: ps.Plan,
    batches: Sequence[Inputs],
    state: dict[str, Any],
    modes: dict[bool, bool],
) -> None:
    """Compare in training and evaluation mode; `modes` says in which with gradients."""
    model = program.model
    for training, learns in modes.items():
        model.load_state_dict(state)
        with untouched(model):  # a forward may leave things that cannot be copied
            model.train(training)
            _compare_steps(program, plan, batches, training, learns)
        model.zero_grad()
        names = list(model.state_dict())
        assert names == list(state), "the names of the state dict changed"
    model.train()
    model.load_state_dict(state)


def _compare_steps(
    program: ps.Program, plan: ps.Plan, batches: Sequence[Inputs], training: bool, learns: bool
) -> None:
    model, twin = program.model, copied(program.model)
    pipe = ps.Pipeline(model, plan=plan, program=program, devices=plan.devices)
    with pipe, torch.set_grad_enabled(learns):
        for step, (args, kwargs) in enumerate(batches):
            where = f"{len(plan.stages)} stages, {'train' if training else 'eval'}, step {step}"
            key = Key(torch.initial_seed(), step, 0)
            ours = _run(_called_like_a_model(pipe), args, kwargs)
            alone = partial(own_forward, program, key=key, model=twin)
            work = partial(_run, alone, args, kwargs)
            theirs = run_with_threads(work, pipe.threads_per_worker)
            _assert_equal(ours, theirs, f"results ({where})")
            _assert_equal(*(_gradients(m) for m in (model, twin)), f"gradients ({where})")
            _assert_equal(*(_buffers(m) for m in (model, twin)), f"buffers ({where})")


def _called_like_a_model(pipe: ps.Pipeline) -> Callable[[Any, Any], Any]:
    return lambda args, kwargs: pipe(*args, **kwargs)


def _run(forward: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    output = forward(*copy.deepcopy((args, kwargs)))
    loss = mean_square(output)
    if loss.requires_grad:
        loss.backward()
    return {str(k): leaf for k, leaf in enumerate(flatten(output)[0])}


def _gradients(model: nn.Module) -> dict[str, Any]:
    return {name: p.grad for name, p in model.named_parameters()}


def _buffers(model: nn.Module) -> dict[str, Any]:
    return dict(model.named_buffers())


def _assert_equal(ours: dict[str, Any], theirs: dict[str, Any], what: str) -> None:
    assert list(ours) == list(theirs), f"{what}: others"
    for name, mine in ours.items():
        assert same(mine, theirs[name]), f"{what}: {name} differs"
