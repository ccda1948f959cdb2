"""What is checked: a model to build, and its inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""


@dataclass(frozen=True)
class Entry:
    """One model of the zoo.

    Attributes:
        name: what it is called in its library.
        family: which table it stands in.
        build: makes it, with random weights.
        inputs: a batch of this many rows, random.
        rows: of the example.
        keep_closed: given to `capture`.
        model: what is counted, if several entries are the same model with other inputs.
    """

    name: str
    family: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], Inputs]
    rows: int = 2
    keep_closed: tuple[str, ...] = ()
    model: str = ""

    @property
    def counted(self) -> str:
        """The model's name; an entry of its own inputs is a variant of it."""
        return self.model or self.name
