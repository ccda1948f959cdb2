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
    """

    name: str
    family: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], Inputs]
    rows: int = 2
    keep_closed: tuple[str, ...] = ()
