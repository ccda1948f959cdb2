"""What entries of other packages are written with: inputs by their shapes, and a line a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from penstock.loading import tolerate_missing_torchvision_operators
from tests.zoo.entry import Entry, Inputs

Form = Callable[[int], Inputs]
Build = Callable[[], nn.Module]

tolerate_missing_torchvision_operators()


def numbers(*shapes: Sequence[int], **named: Sequence[int]) -> Form:
    """Normally distributed numbers of these shapes for every row."""
    return partial(_numbers, shapes, named)


def _numbers(shapes: Sequence[Any], named: Mapping[str, Any], rows: int) -> Inputs:
    given = tuple(torch.randn(rows, *shape) for shape in shapes)
    return given, {name: torch.randn(rows, *shape) for name, shape in named.items()}


def images(size: int = 32, channels: int = 3) -> Form:
    """Square ones."""
    return numbers((channels, size, size))


def words(length: int, count: int) -> Form:
    """Texts of so many words."""
    return partial(_words, length, count)


def _words(length: int, count: int, rows: int) -> Inputs:
    return (torch.randint(count, (rows, length)),), {}


def lengths(whole: float, part: float) -> Form:
    """How much of a row is there: all of every second one, so of one in every micro-batch."""
    return partial(_lengths, whole, part)


def _lengths(whole: float, part: float, rows: int) -> Inputs:
    return (torch.tensor([whole, part]).repeat(rows)[:rows],), {}


def both(*forms: Form) -> Form:
    """The arguments of one after those of the other."""
    return partial(_both, forms)


def _both(forms: Sequence[Form], rows: int) -> Inputs:
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    for form in forms:
        more, named = form(rows)
        args, kwargs = args + more, kwargs | named
    return args, kwargs


def named(**forms: Form) -> Form:
    """The first arguments of these, by name."""
    return partial(_named, forms)


def _named(forms: Mapping[str, Form], rows: int) -> Inputs:
    return (), {name: form(rows)[0][0] for name, form in forms.items()}


def table(family: str, rows: Mapping[str, tuple[Build, Form]]) -> list[Entry]:
    """An entry for each line."""
    return [Entry(name, family, build, form) for name, (build, form) in rows.items()]
