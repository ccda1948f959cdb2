"""What `penstock.verify` found: every comparison, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from penstock.capture.equality import has_nan, same
from penstock.capture.trees import flatten


@dataclass(frozen=True)
class Comparison:
    """Tensors of one kind, compared pairwise.

    Attributes:
        what: what they are, `"gradients of train_step"` for instance.
        count: how many pairs.
        different: the names of those that are not the same bits; those of parameters in the order
            in which the forward uses them.
        largest: the largest absolute difference among all elements.
        undefined: the names of those that have a nan, in the same places on both sides. They count
            as equal, but one nan is like any other, so they prove little.
    """

    what: str
    count: int
    different: tuple[str, ...]
    largest: float
    undefined: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every pair is equal, and there is one at all."""
        return self.count > 0 and not self.different

    def __str__(self) -> str:
        if self.ok and self.undefined:
            return (
                f"{self.what}: {self.count} compared, all equal, but {len(self.undefined)} have a "
                f"nan in the same places on both sides; the first is {self.undefined[0]}"
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
class Place:
    """Where a difference arises.

    Attributes:
        stage: the stage that makes the call.
        call: its number in the program.
        label: what the call is, `"layer1.0.conv1"` for instance.
        microbatch: in which micro-batch of the first step; `None` if it is not in the forward.
        parameter: whose gradient differs, or what differs after the steps; `None` if it is a
            result of the call that does.
        last: of the gradients that differ, the parameter that is used last and by which call:
            the backward comes there first.
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
                f"{where}, in micro-batch {self.microbatch}: what it gives differs from the "
                f"model's own forward, by up to {self.largest:.3g}, and nothing before it does"
            )
        end = f", the last is {self.last}, where the backward comes first" if self.last else ""
        return (
            f"{where}, of those that use what differs the first: {self.parameter}{end}. "
            "Replayed in one thread, every call gives what it gives in the model's own forward, "
            "so it is in the backward, in a later step, or in where a worker runs it"
        )


@dataclass(frozen=True)
class VerifyReport:
    """The result of `penstock.verify`.

    Attributes:
        subject: what was verified, in words.
        comparisons: everything that was compared.
        workers: the kind of workers that ran the stages.
        place: where the first difference in the order of the forward arises; `None` if there is
            none, or nothing in the program uses what differs.
        boundary_dtype: what values were rounded to at every cut, `"bfloat16"` for instance, which
            makes a difference by itself; `None` if they were not.
    """

    subject: str
    comparisons: tuple[Comparison, ...]
    workers: str = "threads"
    place: Place | None = None
    boundary_dtype: str | None = None

    @property
    def ok(self) -> bool:
        """Whether everything is bitwise equal, to what nothing has rounded."""
        return all(comparison.ok for comparison in self.comparisons)

    def __str__(self) -> str:
        verdict = "exact" if self.ok else "NOT exact"
        lines = [f"  {'=' if c.ok else '!'} {c}" for c in self.comparisons]
        if self.place is not None:
            lines.append(f"  it arises in {self.place}")
        if self.boundary_dtype is not None and not self.ok:
            rounded = f"what crosses a cut is rounded to {self.boundary_dtype}, on its way and back"
            lines.append(f"  {rounded}: that changes results by design")
        return "\n".join([f"{self.subject}: {verdict}", *lines])


def gap(ours: object, theirs: object) -> float:
    """The largest absolute difference of two results; infinite where they cannot be compared."""
    if isinstance(ours, (int, float)) and isinstance(theirs, (int, float)):
        return gap(torch.tensor(ours), torch.tensor(theirs))
    if not isinstance(ours, torch.Tensor) or not isinstance(theirs, torch.Tensor):
        return float("inf")
    if ours.shape != theirs.shape:
        return float("inf")
    wide = torch.complex128 if ours.is_complex() else torch.double
    ours, theirs = ours.detach().to(wide), theirs.detach().to(ours.device, wide)
    difference = (ours - theirs).abs().nan_to_num(nan=float("inf"), posinf=float("inf"))
    return float(difference.max()) if difference.numel() else 0.0


def compare(what: str, ours: Mapping[str, object], theirs: Mapping[str, object]) -> Comparison:
    """Compare two sets of tensors, or of other results, by name.

    What only one side has, and not as `None`, is a difference.
    """
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
    """Compare two lists of leaves, whatever they are."""
    return compare(what, *({str(k): leaf for k, leaf in enumerate(x)} for x in (ours, theirs)))


def compare_results(what: str, ours: Any, theirs: Any) -> Comparison:
    """Compare two results of a model, whatever they are made of, and their structures."""
    (mine, structure), (others, other) = flatten(ours), flatten(theirs)
    if structure != other:
        return Comparison(f"{what} (another structure)", len(mine), ("all",), float("inf"))
    return compare_leaves(what, mine, others)
