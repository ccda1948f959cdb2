"""A batch as micro-batches: their inputs, sizes, targets, and weights in the loss."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import torch

from penstock.capture import ROWS, Program, Sizes
from penstock.capture.randomness import user_seed
from penstock.capture.signatures import Inputs
from penstock.capture.trees import flatten, tree_leaves, unflatten
from penstock.engine.microbatch import split
from penstock.errors import InputError

Weight = str | None | Callable[..., float | torch.Tensor]
"""How micro-batch losses add up, see `Pipeline.train_step`."""

Targets = list[tuple[Any, ...]]
"""For every micro-batch what the loss function gets after the output: a target, or nothing."""


@dataclass(frozen=True)
class Batch:
    """The micro-batches of a step.

    Attributes:
        parts: the leaves of the inputs of each; none where the first stage is elsewhere.
        sizes: the sizes of each, by name.
        ways: the number of the way that each takes through the model, once it is known.
        new_ways: for ways that are taken for the first time, by number, the leaves of such inputs.
        seed: of random numbers.
        step: the step on which random numbers depend as well, see `penstock.runner.Counts`.
        number: the number of the pass, which no other pass has.
        digest: a checksum of the inputs, where several processes must have the same.
        tokens: the number of tokens in the batch, see `tokens_of`.
        recorded: whether the logs of the workers are kept.
    """

    parts: Sequence[Inputs]
    sizes: list[Sizes]
    ways: Sequence[int] = ()
    new_ways: Mapping[int, Inputs] = field(default_factory=dict)
    seed: int = field(default_factory=user_seed)
    step: int = -1
    number: int = -1
    digest: int = 0
    tokens: int = 0
    recorded: bool = False

    @classmethod
    def split(cls, leaves: Inputs, most: int) -> Batch:
        """Split a batch into `most` micro-batches, or into one per row if it has fewer rows.

        Raises:
            InputError: it has no rows.
        """
        varying = leaves.signature.varying
        rows = varying.sizes(leaves)[ROWS]
        if rows == 0:
            raise InputError("the batch has no rows")
        parts = split(leaves, varying.batch_dims, min(most, rows))
        sizes = [varying.sizes(part) for part in parts]
        return cls([Inputs(part, leaves.signature) for part in parts], sizes)

    @classmethod
    def given(cls, program: Program, microbatches: Sequence[Any]) -> Batch:
        """Micro-batches that the user has made: each a tuple of arguments, or a dict of them.

        Raises:
            InputError: there is none, or one does not fit the example.
        """
        if not isinstance(microbatches, (list, tuple)):
            raise InputError(
                f"the micro-batches are a {type(microbatches).__name__}, not a list with a tuple "
                "or a dict of arguments for each"
            )
        if not microbatches:
            raise InputError("there are no micro-batches in the list")
        parts = []
        for number, inputs in enumerate(microbatches):
            args, kwargs = arguments(inputs)
            try:
                parts.append(program.flatten_inputs(args, kwargs))
            except InputError as error:
                raise InputError(f"micro-batch {number}: {error}") from None
        sizes = [part.signature.varying.sizes(part) for part in parts]
        if any(size[ROWS] == 0 for size in sizes):
            raise InputError("a micro-batch has no rows")
        return cls(parts, sizes)

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def rows(self) -> list[int]:
        """The number of rows of every micro-batch."""
        return [size[ROWS] for size in self.sizes]


@dataclass(frozen=True)
class Whole:
    """The arguments of a call, which are split into micro-batches.

    Attributes:
        args: positional ones.
        kwargs: keyword arguments.
    """

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    by_hand = False

    @property
    def given(self) -> tuple[Any, ...]:
        """All that enters, to be searched for tensors."""
        return self.args, self.kwargs

    def batch(self, program: Program, most: int) -> Batch:
        """So many micro-batches, or as many as there are rows.

        Raises:
            InputError: the arguments do not fit the program, or have no rows.
        """
        return Batch.split(program.flatten_inputs(self.args, self.kwargs), most)


@dataclass(frozen=True)
class ByHand:
    """Micro-batches that the user has made.

    Attributes:
        microbatches: each a tuple of arguments, or a dict of them.
    """

    microbatches: Sequence[Any]
    by_hand = True

    @property
    def given(self) -> tuple[Any, ...]:
        """All that enters, to be searched for tensors."""
        return (self.microbatches,)

    def batch(self, program: Program, most: int) -> Batch:
        """These, however many they are.

        Raises:
            InputError: there is none, or one does not fit the program.
        """
        return Batch.given(program, self.microbatches)


def arguments(inputs: object) -> tuple[Sequence[Any], Mapping[str, Any]]:
    if isinstance(inputs, Mapping):
        return (), inputs
    return (inputs, {}) if isinstance(inputs, (tuple, list)) else ((inputs,), {})


def split_target(target: object, rows: Sequence[int]) -> Targets:
    """The targets of a batch's micro-batches, on whatever device.

    Raises:
        InputError: it has not as many rows as the batch, or no tensor is found in it.
    """
    if target is None:
        return [()] * len(rows)
    leaves, structure = flatten(target)
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and (leaf.ndim == 0 or len(leaf) != sum(rows)):
            raise InputError(
                f"the target has shape {tuple(leaf.shape)}, but the batch has {sum(rows)} "
                "rows: its first dimension must have as many. What the loss needs whole can "
                "be given in loss_kwargs"
            )
    if not any(isinstance(leaf, (torch.Tensor, type(None))) for leaf in leaves):
        raise InputError(
            f"the target, a {type(target).__name__}, contains no tensor, so it cannot be split: "
            "give a tensor, or a tuple, list, dict or dataclass of tensors. What the loss needs "
            "whole can be given in loss_kwargs"
        )
    dims = [0 if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
    return [(unflatten(structure, part),) for part in split(leaves, dims, len(rows))]


def given_targets(targets: Sequence[Any] | None, rows: Sequence[int]) -> Targets:
    """The targets that came with micro-batches, on whatever device.

    Raises:
        InputError: there are not as many.
    """
    if targets is None:
        return [()] * len(rows)
    if not isinstance(targets, (list, tuple)):
        raise InputError(f"the targets are a {type(targets).__name__}, not a list of one for each")
    if len(targets) != len(rows):
        raise InputError(f"{len(targets)} targets were given for {len(rows)} micro-batches")
    return [(target,) for target in targets]


def weights(weight: Weight, targets: Targets, rows: Sequence[int]) -> list[float]:
    """The factor of every micro-batch's loss in the sum that is the batch's loss.

    Raises:
        InputError: `weight` is none of those that `Pipeline.train_step` lists, or a function
            without a target to call it with, or one whose results cannot be weights.
    """
    if weight is None:
        return [1.0] * len(rows)
    if weight == "rows":
        return [r / sum(rows) for r in rows]
    if not callable(weight):
        raise InputError(f'weight={weight!r} is unknown; choose "rows", None or a function')
    if any(not target for target in targets):
        raise InputError(
            "weight= is a function of the target, and there is none. Where labels are an input of "
            "the model, give them as the target, too: train_step(..., labels=labels, "
            "target=labels, loss_fn=lambda output, labels: output.loss, weight=...)"
        )
    counts = [_number(weight(*target)) for target in targets]
    total = sum(counts)
    if not (total > 0 and min(counts) >= 0 and isfinite(total)):
        raise InputError(
            f"the weights of the micro-batches add up to {total}: {counts}; none may be negative, "
            "and their sum must be a positive number"
        )
    return [count / total for count in counts]


def _number(weight: Any) -> float:
    """What `weight=` returned, as a number."""
    try:
        return float(weight)
    except (TypeError, ValueError, RuntimeError) as error:
        shape = f" of shape {tuple(weight.shape)}" if isinstance(weight, torch.Tensor) else ""
        raise InputError(
            f"weight= returned a {type(weight).__name__}{shape}, not one number for a micro-batch"
        ) from error


def digest(given: object) -> int:
    """A checksum (CRC-32) of the tensors in containers: their shapes, dtypes and values.

    Of quantized tensors, and of layouts other than strided and sparse ones, without the values.
    """
    found = 0
    for leaf in tree_leaves(given):
        if isinstance(leaf, torch.Tensor):
            tensor = leaf.detach().cpu()
            found = zlib.crc32(f"{tensor.shape} {tensor.dtype} {tensor.layout}".encode(), found)
            for part in _entries(tensor):
                plain = part.resolve_conj().resolve_neg().contiguous().reshape(-1)
                found = zlib.crc32(plain.view(torch.uint8).numpy().data, found)
    return found


def _entries(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """The strided tensors that a tensor consists of."""
    if tensor.is_quantized:
        return ()
    if tensor.layout is torch.strided:
        return (tensor,)
    if tensor.layout is torch.sparse_coo:
        summed = tensor.coalesce()
        return summed.indices(), summed.values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return ()


def tokens_of(parts: Sequence[Sequence[Any]]) -> int:
    """Elements of the first input that has integers in two or more dimensions; 0 if none has.

    Args:
        parts: the leaves of the inputs of every micro-batch.
    """
    for k, value in enumerate(parts[0] if parts else ()):
        if isinstance(value, torch.Tensor) and value.ndim > 1 and value.dtype in _INTEGERS:
            return sum(part[k].numel() for part in parts)
    return 0


_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)
