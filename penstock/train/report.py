"""What `penstock.verify` found: every comparison, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Comparison:
    """Tensors of one kind, compared pairwise.

    Attributes:
        what: what they are, `"gradients of train_step"` for instance.
        count: how many pairs.
        different: the names of those that are not `torch.equal`, the first one first.
        largest: the largest absolute difference among all elements.
    """

    what: str
    count: int
    different: tuple[str, ...]
    largest: float

    @property
    def ok(self) -> bool:
        """Whether every pair is equal, and there is one at all."""
        return self.count > 0 and not self.different

    def __str__(self) -> str:
        if self.ok:
            return f"{self.what}: {self.count} compared, all bitwise equal"
        if not self.count:
            return f"{self.what}: nothing to compare"
        return (
            f"{self.what}: {len(self.different)} of {self.count} differ, by up to "
            f"{self.largest:.3g}; the first is {self.different[0]}"
        )


@dataclass(frozen=True)
class VerifyReport:
    """The result of `penstock.verify`.

    Attributes:
        subject: what was verified, in words.
        comparisons: everything that was compared.
    """

    subject: str
    comparisons: tuple[Comparison, ...]

    @property
    def ok(self) -> bool:
        """Whether everything is bitwise equal."""
        return all(comparison.ok for comparison in self.comparisons)

    def __str__(self) -> str:
        verdict = "exact" if self.ok else "NOT exact"
        lines = [f"  {'=' if c.ok else '!'} {c}" for c in self.comparisons]
        return "\n".join([f"{self.subject}: {verdict}", *lines])


Named = Mapping[str, torch.Tensor | None]


def compare(what: str, ours: Named, theirs: Named) -> Comparison:
    """Compare two sets of tensors by name; a tensor that only one side has is a difference."""
    different, largest, count = [], 0.0, 0
    for name in theirs:
        mine, other = ours.get(name), theirs[name]
        if mine is None and other is None:
            continue
        count += 1
        if mine is None or other is None or mine.shape != other.shape:
            different.append(name)
            largest = float("inf")
        elif not torch.equal(mine, other.to(mine.device)):
            different.append(name)
            gap = (mine.detach().double() - other.detach().to(mine.device).double()).abs().max()
            largest = max(largest, float(gap))
    return Comparison(what, count, tuple(different), largest)


def compare_leaves(what: str, ours: Sequence[object], theirs: Sequence[object]) -> Comparison:
    """Compare the tensors among two lists of leaves."""
    return compare(
        what,
        {str(k): leaf for k, leaf in enumerate(ours) if isinstance(leaf, torch.Tensor)},
        {str(k): leaf for k, leaf in enumerate(theirs) if isinstance(leaf, torch.Tensor)},
    )
