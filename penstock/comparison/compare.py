"""How a pipeline is compared with one device: bit for bit, and where the two part."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from penstock.capture import Attribute, Key, Program, Trace
from penstock.capture.equality import has_nan, same, same_tensor
from penstock.capture.replay import ForwardResults, replay_results
from penstock.capture.trees import flatten_result
from penstock.comparison.reference import copied, run_with_threads
from penstock.devices.settings import float32_rounding
from penstock.oracle import Oracle, tensors
from penstock.plan import Plan

T = TypeVar("T")


@dataclass(frozen=True)
class Comparison:
    """Tensors of one kind, compared pairwise.

    Attributes:
        what: what they are, such as `"gradients of train_step()"`.
        count: the number of pairs.
        different: the names of pairs that are not bitwise equal; parameters in the order in which
            the forward uses them.
        largest: the largest absolute difference of all elements.
        undefined: the names of pairs with NaN in the same places. They count as equal, but prove
            little.
    """

    what: str
    count: int
    different: tuple[str, ...]
    largest: float
    undefined: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether there are pairs and all are equal."""
        return self.count > 0 and not self.different

    def __str__(self) -> str:
        if self.ok and self.undefined:
            return (
                f"{self.what}: {self.count} compared, all equal, but {len(self.undefined)} have a "
                f"NaN in the same places on both sides; the first is {self.undefined[0]}"
            )
        if self.ok:
            return f"{self.what}: {self.count} compared, all bitwise equal"
        if not self.count:
            return f"{self.what}: nothing to compare"
        return (
            f"{self.what}: {len(self.different)} of {self.count} differ, by up to "
            f"{self.largest:.3g}; the first is {self.different[0]}"
        )


@dataclass(frozen=True)
class Origin:
    """Where a difference arises.

    Attributes:
        stage: the stage of the call.
        call: its number in the program.
        label: its description, such as `"layer1.0.conv1"`.
        microbatch: the micro-batch of the first step; `None` if the forwards do not differ.
        parameter: the parameter whose gradient or value differs; `None` if the result of the call
            does.
        last: of the parameters whose gradients differ, the one that is used last, and its call; the
            backward reaches it first.
        largest: the largest absolute difference there.
    """

    stage: int
    call: int
    label: str
    microbatch: int | None = None
    parameter: str | None = None
    last: str | None = None
    largest: float | None = None

    def __str__(self) -> str:
        where = f"stage {self.stage}, call {self.call} ({self.label})"
        if self.parameter is None:
            return (
                f"{where}, in micro-batch {self.microbatch}: its result is the first that differs "
                f"from the model's own forward, by up to {self.largest:.3g}"
            )
        end = f"; the last is {self.last}, which the backward reaches first" if self.last else ""
        return (
            f"{where}, the first call that uses something that differs: {self.parameter}{end}. "
            "Replayed in one thread, every call has the result of the model's own forward. So the "
            "difference arises in the backward, in a later step, or in how a worker runs the call"
        )


@dataclass(frozen=True)
class VerifyReport:
    """The result of `penstock.verify`.

    Attributes:
        subject: what was verified, in words.
        comparisons: all comparisons.
        workers: the kind of workers that ran the stages.
        place: where the first difference, in the order of the forward, arises; `None` if there is
            none, or if no call uses what differs.
        boundary_dtype: the dtype to which values were rounded at every cut, such as `"bfloat16"`,
            which causes differences by itself; `None` without rounding.
        deterministic: whether torch's kernels give the same bits in every run: on CPUs with one
            intra-op thread each, or under `torch.use_deterministic_algorithms`.
    """

    subject: str
    comparisons: tuple[Comparison, ...]
    workers: str = "threads"
    place: Origin | None = None
    boundary_dtype: str | None = None
    deterministic: bool = True

    @property
    def ok(self) -> bool:
        """Whether everything is bitwise equal; rounding by `boundary_dtype` counts as different."""
        return all(comparison.ok for comparison in self.comparisons)

    def __str__(self) -> str:
        verdict = "exact" if self.ok else "NOT exact"
        lines = [f"  {'=' if c.ok else '!'} {c}" for c in self.comparisons]
        if self.place is not None:
            lines.append(f"  it arises in {self.place}")
        if self.boundary_dtype is not None and not self.ok:
            rounded = f"values and gradients are rounded to {self.boundary_dtype} at every cut"
            lines.append(f"  {rounded}, which changes results by design")
        if not self.deterministic and not self.ok:
            lines.append(
                "  some of PyTorch's kernels add in any order with several threads or on GPUs; "
                "verify under torch.use_deterministic_algorithms(True)"
            )
        return "\n".join([f"{self.subject}: {verdict}", *lines])


def gap(ours: object, theirs: object) -> float:
    """The largest absolute difference of two results; infinite if they cannot be compared."""
    if isinstance(ours, (int, float)) and isinstance(theirs, (int, float)):
        return gap(torch.tensor(ours), torch.tensor(theirs))
    if not isinstance(ours, torch.Tensor) or not isinstance(theirs, torch.Tensor):
        return float("inf")
    if ours.shape != theirs.shape:
        return float("inf")
    wide = torch.complex128 if ours.is_complex() else torch.double
    ours, theirs = ours.detach().to(wide), theirs.detach().to(ours.device, wide)
    equal = (ours == theirs) | (ours.isnan() & theirs.isnan())  # two infinities have no difference
    difference = (ours - theirs).abs().masked_fill(equal, 0.0)
    difference = difference.nan_to_num(nan=float("inf"), posinf=float("inf"))
    return float(difference.max()) if difference.numel() else 0.0


def compare(what: str, ours: Mapping[str, object], theirs: Mapping[str, object]) -> Comparison:
    """Compare two sets of tensors, or of other results, by name; `None` equals a missing entry."""
    different: list[str] = []
    undefined: list[str] = []
    largest, count = 0.0, 0
    for name in dict.fromkeys([*theirs, *ours]):
        mine, other = ours.get(name), theirs.get(name)
        if mine is None and other is None:
            continue
        count += 1
        if not same(mine, other):
            different.append(name)
            largest = max(largest, gap(mine, other))
        elif has_nan(mine):
            undefined.append(name)
    return Comparison(what, count, tuple(different), largest, tuple(undefined))


def compare_leaves(what: str, ours: Sequence[object], theirs: Sequence[object]) -> Comparison:
    """Compare two lists of leaves."""
    return compare(what, *({str(k): leaf for k, leaf in enumerate(x)} for x in (ours, theirs)))


def compare_results(what: str, ours: Any, theirs: Any) -> Comparison:
    """Compare two results of a model and their structures."""
    (mine, structure), (others, other) = flatten_result(ours), flatten_result(theirs)
    if structure != other:
        count = max(len(mine), len(others), 1)
        return Comparison(what, count, ("its structure",), float("inf"))
    return compare_leaves(what, mine, others)


# -- rows ---------------------------------------------------------------------------------


def rows_in_order(ours: Any, theirs: Any) -> Comparison:
    """Compare a result that was put together from micro-batches with that of the unsplit model.

    Kernels may round differently for another number of rows, so bits prove nothing here. Instead,
    the row of the unsplit result that is nearest to a row must be the one in the same place, up to
    rounding. Each dimension is checked, as any of them could be that of the rows. This does not
    hold for models that decide otherwise on a micro-batch than on the whole batch.
    """
    what = "rows of a call in evaluation mode, next to those of the unsplit model"
    pairs = list(zip(tensors(ours), tensors(theirs), strict=True))
    different = [str(k) for k, (mine, other) in enumerate(pairs) if not _in_order(mine, other)]
    return Comparison(what, len(pairs), tuple(different), float("inf") if different else 0.0)


def _in_order(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    if torch.equal(ours, theirs):
        return True
    eps = torch.finfo(ours.dtype).eps if ours.dtype.is_floating_point else 0.0
    if ours.dtype is torch.float32:
        eps = float32_rounding()
    dims = range(ours.ndim)
    return ours.ndim > 0 and all(_nearest(ours, theirs, dim, eps) for dim in dims)


def _nearest(ours: torch.Tensor, theirs: torch.Tensor, dim: int, eps: float) -> bool:
    """Whether every slice along a dimension is nearest to the one in its own place, or nearly."""
    mine, other = (
        t.movedim(dim, 0).flatten(1) if t.ndim > 1 else t[:, None] for t in (ours, theirs)
    )
    mine, other = (t.detach().abs() if t.is_complex() else t.detach() for t in (mine, other))
    mine, other = (t.double().nan_to_num() for t in (mine, other))
    if not mine.numel():
        return True
    apart = torch.cdist(mine, other, compute_mode="donot_use_mm_for_euclid_dist")
    noise = eps**0.5 * float(other.norm(dim=1).max())
    return bool((apart.diagonal() <= apart.min(dim=1).values + noise).all())


# -- where it arises ---------------------------------------------------------------------


def place_of(
    model: nn.Module,
    program: Program,
    oracle: Oracle,
    plan: Plan,
    threads: int,
    comparisons: Sequence[Comparison],
) -> Origin | None:
    """The first place, in the order of the forward, where something differs.

    Args:
        model: the user's model, of which copies are run.
        program: the program, captured from another copy.
        oracle: the unsplit run, whose micro-batches are run again.
        plan: how the model was split.
        threads: intra-op threads of every worker.
        comparisons: the results of the comparison.

    Returns:
        the place; `None` if nothing differs, if no call uses what differs, or if values are rounded
        at cuts and the forwards are the same.
    """
    if all(comparison.ok for comparison in comparisons):
        return None
    theirs = copied(model)
    if not theirs.training:
        theirs.train()
    trace = program.train
    ends = [stage.calls[1] for stage in plan.stages]

    def stage_of(call: int) -> int:
        return min(bisect_right(ends, call), len(ends) - 1)

    ours = copied(theirs)
    found = run_with_threads(lambda: _first_call(program, oracle, ours, theirs), threads)
    if found is not None:
        microbatch, call, largest = found
        label = trace.calls[call].label
        return Origin(stage_of(call), call, label, microbatch, largest=largest)
    uses = _users(trace)
    differing = [name for c in comparisons for name in c.different if name in uses]
    if not differing or plan.boundary_dtype is not None:  # rounding explains it
        return None
    name = min(differing, key=lambda n: uses[n][0])
    last = max(differing, key=lambda n: uses[n][-1])
    end = None if last == name else f"{last} (call {uses[last][-1]})"
    call = uses[name][0]
    return Origin(stage_of(call), call, trace.calls[call].label, parameter=name, last=end)


def _users(trace: Trace) -> dict[str, list[int]]:
    """For every parameter and buffer, by name, the numbers of the calls that use it."""
    found: dict[str, list[int]] = {}
    for number, call in enumerate(trace.calls):
        read = [value.name for value in call.reads() if isinstance(value, Attribute)]
        for name in dict.fromkeys([*read, *call.hidden]):
            found.setdefault(name, []).append(number)
    return found


def in_forward_order(trace: Trace, named: Mapping[str, T]) -> dict[str, T]:
    """`named`, sorted by the first call that uses each name; unused names come last."""
    uses = _users(trace)
    never = [len(trace.calls)]
    return {name: named[name] for name in sorted(named, key=lambda n: uses.get(n, never)[0])}


def _first_call(
    program: Program, oracle: Oracle, ours: nn.Module, theirs: nn.Module
) -> tuple[int, int, float] | None:
    """The first call that gives something else in a replay than in the model's own forward.

    Both run the micro-batches of a step in order, so that what one leaves in buffers is there for
    the next.

    Returns:
        the number of the micro-batch, that of the call, and the largest absolute difference.
    """
    for microbatch, (args, kwargs) in enumerate(oracle.microbatches):
        key = Key(torch.initial_seed(), 0, microbatch)
        expected = ForwardResults(program, theirs, key).run(args, kwargs)
        replayed = replay_results(program, ours, args, kwargs, key)
        for number, call in enumerate(program.train.calls):
            pairs = zip(
                replayed.get(call.identity, ()), expected.get(call.identity, ()), strict=False
            )
            gaps = [gap(a, b) for a, b in pairs if not same_tensor(a, b)]
            if gaps:
                return microbatch, number, max(gaps)
    return None
