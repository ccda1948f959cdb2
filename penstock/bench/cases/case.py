"""A case: a function that trains with a trainer, and returns what the trainer has in the end.

The first line of the function's docstring is its title in the table of docs/exactness.md.
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
    """A case, and a row of the table.

    Attributes:
        script: the training script, which every trainer runs.
        setup: the model, and how it is trained.
        without: the names of contenders to which the case does not apply, each with the reason.
    """

    script: Script
    setup: Setup
    without: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.script.__name__

    @property
    def title(self) -> str:
        """The first line of the function's docstring, without the full stop."""
        return (self.script.__doc__ or self.name).splitlines()[0].rstrip(".")


CASES: list[Case] = []


def case(
    model: Callable[[], Any] = models.linear,
    *,
    without: dict[str, str] | None = None,
    **setup: Any,
) -> Callable[[Script], Script]:
    """Add the decorated function to `CASES`.

    Args:
        model: builds the model, see `Setup`.
        without: reasons by the names of the contenders to which the case does not apply.
        **setup: the other arguments of `Setup`.
    """

    def added(script: Script) -> Script:
        reasons = tuple((without or {}).items())
        CASES.append(Case(script, Setup(model, **setup), reasons))
        return script

    return added


def trained(trainer: Trainer, kind: Any, steps: int = 3, **options: Any) -> Any:
    """Train for some steps, with a new optimizer, and return it.

    Args:
        trainer: what trains.
        kind: the class of the optimizer.
        steps: how many.
        **options: arguments of the optimizer.
    """
    trainer.step((X,), Y)
    optimizer = trainer.optimizer(kind, **options)
    optimizer.step()
    for k in range(1, steps):
        optimizer.zero_grad()
        trainer.step((X + k,), Y)
        optimizer.step()
    return optimizer
