"""What `generate` has returned for groups of sequences, as one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn


def merged(results: Sequence[Any], padding: int) -> Any:
    """What the model's `generate` would return for all groups together.

    Sequences of groups that ended earlier are padded on the right.

    Args:
        results: of the groups, in order.
        padding: the token.
    """
    if len(results) == 1:
        return results[0]
    first = results[0]
    if isinstance(first, torch.Tensor):
        return _joined(results, padding)
    if isinstance(first, Mapping) and hasattr(first, "sequences"):
        return _joined_output(results, padding)
    if isinstance(first, (tuple, list)):
        return type(first)(merged(list(each), padding) for each in zip(*results, strict=True))
    return list(results)


def _joined(parts: Sequence[torch.Tensor], padding: int) -> torch.Tensor:
    """Tensors with rows one after another, the last dimension padded to the longest."""
    if parts[0].ndim < 2 or len({part.shape[1:] for part in parts}) == 1:
        return torch.cat(list(parts))
    longest = max(part.shape[-1] for part in parts)
    padded = [
        nn.functional.pad(part, (0, longest - part.shape[-1]), value=padding) for part in parts
    ]
    return torch.cat(padded)


def _joined_output(results: Sequence[Any], padding: int) -> Any:
    """Outputs of transformers' `generate` as one.

    What has an entry for each step has one for each step of the longest group; in those that come
    after a group has ended its numbers are NaN. What cannot be joined, such as caches that are with
    the workers, is `None`.
    """
    values: dict[str, Any] = {}
    for name in results[0]:
        parts = [result[name] for result in results]
        pads = {"sequences": padding, "beam_indices": _NO_BEAM}
        if isinstance(parts[0], torch.Tensor) and name in pads:
            values[name] = _joined(parts, pads[name])
        else:
            values[name] = _along_rows(_in_all_steps(parts) if name in _BY_STEP else parts)
    return type(results[0])(**values)


_OF_STEPS = ("attentions", "hidden_states")
_BY_STEP = {
    *("scores", "logits", "cross_attentions", *_OF_STEPS),
    *(f"decoder_{name}" for name in _OF_STEPS),
}
"""Fields of transformers' outputs that have an entry for each step."""

_NO_BEAM = -1  # as transformers marks where a sequence has ended


def beams_of_the_batch(result: Any, first: int) -> Any:
    """An output of transformers' `generate` whose beams have the numbers that they have in a batch.

    Args:
        result: of a group.
        first: the number in the batch that its first beam has.
    """
    beams = result.get("beam_indices") if isinstance(result, Mapping) else None
    if not isinstance(beams, torch.Tensor) or not first:
        return result
    values = {**result, "beam_indices": torch.where(beams < 0, beams, beams + first)}
    return type(result)(**values)


def _in_all_steps(parts: Sequence[Any]) -> Sequence[Any]:
    """The steps of several groups, of which none has fewer than another."""
    if not all(isinstance(part, tuple) for part in parts):
        return parts
    longest = max(parts, key=len)
    return [
        (*part, *(_after_end(each, part[0]) for each in longest[len(part) :])) for part in parts
    ]


def _after_end(step: Any, own: Any) -> Any:
    """What stands for a step that a group does not take: NaN, or 0 where there is none.

    Args:
        step: that of another group.
        own: a step of this one, which has its rows.
    """
    if isinstance(step, tuple):
        return tuple(map(_after_end, step, own))
    return step.new_full((len(own), *step.shape[1:]), math.nan if step.is_floating_point() else 0)


def _along_rows(parts: Sequence[Any]) -> Any:
    """Tensors with rows one after another, in tuples likewise; `None` if they do not fit."""
    first = parts[0]
    if isinstance(first, torch.Tensor):
        fits = len({part.shape[1:] for part in parts}) == 1
        return torch.cat(list(parts)) if fits else None
    if isinstance(first, tuple) and len({len(part) for part in parts}) == 1:
        return tuple(map(_along_rows, zip(*parts, strict=True)))
    return None
