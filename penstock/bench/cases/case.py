"""What a case is: a function that is given a trainer and returns what it has in the end.

A line of the table is the first line of the function's docstring.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from penstock.bench.cases import models
from penstock.bench.cases.models import WIDTH
from penstock.bench.cases.trainers import Found, Setup, Trainer

Script = Callable[[Trainer], Found]

_GENERATOR = torch.Generator().manual_seed(3)
X, Y = (torch.randn(12, WIDTH, generator=_GENERATOR) for _ in range(2))
TOKENS = torch.randint(16, (12, 5), generator=_GENERATOR)
LABELS = torch.tensor([1, -100, -100, -100, 2, 3, 4, 5, 6, -100, -100, 7])


@dataclass(frozen=True)
class Case:
    """A line of the table.

    Attributes:
        script: what everybody does.
        setup: what for.
        without: to whom this does not apply, and why.
    """

    script: Script
    setup: Setup
    without: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        """Of the function."""
        return self.script.__name__

    @property
    def title(self) -> str:
        """The line's first words."""
        return (self.script.__doc__ or self.name).splitlines()[0].rstrip(".")


CASES: list[Case] = []


def case(
    model: Callable[[], Any] = models.linear,
    *,
    without: dict[str, str] | None = None,
    **setup: Any,
) -> Callable[[Script], Script]:
    """Add a case: what the decorated function does, with this model."""

    def added(script: Script) -> Script:
        reasons = tuple((without or {}).items())
        CASES.append(Case(script, Setup(model, **setup), reasons))
        return script

    return added


def trained(trainer: Trainer, kind: Any, steps: int = 3, **options: Any) -> Any:
    """Some steps; returns the optimizer."""
    trainer.step((X,), Y)
    optimizer = trainer.optimizer(kind, **options)
    optimizer.step()
    for k in range(1, steps):
        optimizer.zero_grad()
        trainer.step((X + k,), Y)
        optimizer.step()
    return optimizer
