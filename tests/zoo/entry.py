"""What is checked: a model to build, and its inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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
        batch_dim: given to `capture`, where an input has several entries for each row: the name or
            the position of the argument, with the dimension and how many there are.
        model: what is counted, if several entries are the same model with other inputs.
    """

    name: str
    family: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], Inputs]
    rows: int = 2
    keep_closed: tuple[str, ...] = ()
    model: str = ""
    batch_dim: Mapping[str | int, tuple[int, int]] = field(default_factory=dict)

    @property
    def counted(self) -> str:
        """The model's name; an entry of its own inputs is a variant of it."""
        return self.model or self.name
