"""What a training step makes of the results of a batch: the loss, metrics, outputs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from penstock.capture import Join
from penstock.capture.trees import flatten, map_leaves, unflatten
from penstock.engine.batch import Targets, Weight, given_targets, split_target, weights
from penstock.engine.ends import Loss, Pieces, UnavailableParameters, to_device
from penstock.engine.microbatch import pieces_of, repeated
from penstock.engine.state import Backup, State
from penstock.engine.user_functions import callable_as, may_have_effects
from penstock.errors import InputError, RowsWarning

Outputs = bool | Literal["list"]
"""Whether a step returns the model's result, too: put together, or in a list by micro-batch."""

_INSTEAD = (
    "train_step(..., loss_fn=penstock.whole_batch(fn)) computes one loss of all rows, if the "
    "result can be put together (Pipeline(merge=)), and so does num_microbatches=1. Where it is "
    'meant by micro-batch, as in gradient accumulation: warnings.filterwarnings("ignore", '
    "category=penstock.RowsWarning)"
)


@dataclass(frozen=True)
class Objective:
    """The arguments of `Pipeline.train_step` that the last stage is concerned with.

    Attributes:
        target: the user's; for micro-batches made by hand a sequence of one for each.
        loss_fn: the user's function of (output, target).
        weight: how the micro-batches' losses make the batch's.
        loss_kwargs: keyword arguments of `loss_fn`, the same for every micro-batch.
        metrics: another function of (output, target), that needs no gradients.
        outputs: whether the model's outputs are wanted, too, as one or in a list.
        scale: what the loss is multiplied by before its backward; `None` without loss scaling.
        by_hand: whether the user has made the micro-batches.
    """

    target: Any
    loss_fn: Callable[..., torch.Tensor] | None
    weight: Weight
    loss_kwargs: Mapping[str, Any] | None
    metrics: Callable[..., Any] | None
    outputs: Outputs
    scale: float | None = None
    by_hand: bool = False

    @property
    def given(self) -> tuple[Any, ...]:
        """What may have tensors among it: the target and the keyword arguments of the loss."""
        return self.target, self.loss_kwargs

    def targets(self, rows: Sequence[int]) -> Targets:
        """The targets of micro-batches that have so many rows, wherever they are.

        Raises:
            InputError: they do not fit.
        """
        make = given_targets if self.by_hand else split_target
        return make(self.target, rows)

    @property
    def wants_more(self) -> bool:
        """Whether anything but the loss is wanted."""
        return bool(self.outputs) or self.metrics is not None

    @contextmanager
    def undone(self) -> Iterator[None]:
        """If what runs inside fails, a loss function that is a module is as it was before."""
        if not isinstance(self.loss_fn, nn.Module):
            yield
            return
        gradients = Backup(self.loss_fn.parameters(), ())
        state = State(self.loss_fn.modules(), self.loss_fn.buffers())
        try:
            yield
        except BaseException:
            gradients.restore()
            state.put_back()
            raise

    def loss(
        self,
        rows: Sequence[int],
        device: torch.device,
        checked: bool = False,
        apart: UnavailableParameters | None = None,
    ) -> Loss:
        """What the last stage ends in.

        Args:
            rows: of every micro-batch.
            device: of the last stage.
            checked: whether it is to be seen if the loss of rows adds up to that of a batch.
            apart: see `Loss`.

        Raises:
            InputError: something is not of the right kind, or does not fit the batch.
        """
        if self.outputs not in (True, False, "list"):
            raise InputError(f'outputs={self.outputs!r} is unknown; choose True, False or "list"')
        if not isinstance(self.loss_kwargs, (Mapping, type(None))):
            raise InputError(
                f"loss_kwargs={self.loss_kwargs!r} is not a dict of keyword arguments for loss_fn"
            )
        found = self.targets(rows)
        shares = weights(self.weight, found, rows)
        has_target = bool(found and found[0])
        function = callable_as("loss_fn", self.loss_fn, has_target, self.loss_kwargs or {})
        if self.metrics is not None:
            callable_as("metrics", self.metrics, has_target, {})
        more = {
            name: map_leaves(lambda leaf: to_device(leaf, device), value)
            for name, value in (self.loss_kwargs or {}).items()
        }
        pieces = self._pieces(found, shares, rows) if checked and len(rows) > 1 else None
        outputs, scale = bool(self.outputs), self.scale
        return Loss(function, found, shares, more, self.metrics, outputs, scale, pieces, apart)

    @property
    def identity(self) -> tuple[Any, ...]:
        """Equal for functions that do the same, such as the same lambda made anew at every step.

        It contains ids of objects, so it is valid only while `given_functions` are kept alive.
        """
        return tuple(map(_identity_of, self.given_functions))

    @property
    def given_functions(self) -> tuple[Any, Any, Any]:
        """The loss, the weight and the metrics, as the user has given them."""
        return self.loss_fn, self.weight, self.metrics

    def _pieces(
        self, targets: Targets, shares: Sequence[float], rows: Sequence[int]
    ) -> Pieces | None:
        """A micro-batch in two pieces whose losses can be computed without being noticed.

        One of a single row is taken twice.
        """
        if may_have_effects(self.loss_fn) or (
            callable(self.weight) and may_have_effects(self.weight)
        ):
            return None
        chosen = max((k for k in range(len(rows)) if shares[k]), key=rows.__getitem__, default=None)
        if chosen is None:
            return None
        copies = 1 if rows[chosen] > 1 else 2
        count = rows[chosen] * copies
        first = (count + 2) // 3
        counts = [first, count - first]
        try:
            whole, *parts = _pieces_of_target(targets[chosen], counts, copies)
            return Pieces(chosen, copies, whole, counts, parts, weights(self.weight, parts, counts))
        except InputError:
            return None


def _pieces_of_target(target: tuple[Any, ...], rows: Sequence[int], copies: int) -> Targets:
    """The target of a micro-batch with its rows repeated `copies` times, then those of its pieces.

    Raises:
        InputError: the numbers of rows do not fit `rows`, which are those of the pieces.
    """
    leaves, structure = flatten(target)
    dims = []
    for leaf in leaves:
        grows = isinstance(leaf, torch.Tensor)
        if grows and (leaf.ndim == 0 or len(leaf) * copies != sum(rows)):
            raise InputError("the target has another number of rows")
        dims.append(0 if grows else None)
    leaves = repeated(leaves, dims, copies)
    return [unflatten(structure, part) for part in [leaves, *pieces_of(leaves, dims, rows)]]


def _identity_of(given: Any) -> tuple[Any, ...]:
    """What is the same for a function that does the same: its code, and the objects that it uses.

    Tensors and plain data that a function has at hand may be others in every step.
    """
    if isinstance(given, partial):
        rest = (*given.args, *given.keywords.values())
        return _identity_of(given.func), *(id(x) for x in rest if _decides(x))
    code = getattr(given, "__code__", None)
    if code is None:
        return (id(given),)
    cells = getattr(given, "__closure__", None) or ()
    used = [cell.cell_contents for cell in cells if _is_filled(cell)]
    owner = getattr(given, "__self__", None)
    return code, id(owner), *(id(x) for x in used if _decides(x))


def _decides(used: Any) -> bool:
    return isinstance(used, nn.Module) or callable(used)


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


class Mixing:
    """Warns, once each, of losses and models in which rows meet other rows of the batch."""

    def __init__(self) -> None:
        self._losses: set[Any] = set()
        self._warned_of: set[Any] = set()

    def is_new(self, loss: object) -> bool:
        """Whether the loss of this identity was not checked yet."""
        return loss not in self._losses

    def forget(self, loss: object) -> None:
        """Let go of what is known of a loss: another one may have its identity next."""
        self._losses.discard(loss)
        self._warned_of.discard(loss)

    def of_loss(
        self,
        loss: object,
        values: Sequence[torch.Tensor],
        mismatch: tuple[float, float] | None,
        weight: object,
    ) -> None:
        """A loss was looked at; warn if that of a micro-batch is not what its pieces make.

        Nothing can be concluded from a loss that is no number: it is looked at again then, and if
        others are numbers, it is warned of.

        Args:
            loss: the identity of the loss.
            values: of the micro-batches that count.
            mismatch: both values, if they differ.
            weight: how losses of micro-batches were weighed.
        """
        given = repr(weight) if weight is None or isinstance(weight, str) else "a function"
        are_numbers = [value == value for value in map(float, values)]
        if not all(are_numbers):
            if any(are_numbers) and loss not in self._warned_of:
                self._warned_of.add(loss)
                warnings.warn(
                    f"the loss of {are_numbers.count(False)} of {len(values)} micro-batches is NaN "
                    "(not a number), that of the others is not. A mean over some rows only is, in "
                    f"a micro-batch in which none of them counts, and with weight={given} it makes "
                    "the loss of the batch NaN: give weight= a function that counts those rows, "
                    "such as weight=lambda target: (target != -100).sum(); micro-batches of weight "
                    "0 are left out",
                    RowsWarning,
                    stacklevel=5,
                )
            return
        self._losses.add(loss)
        if mismatch is not None:
            whole, made = mismatch
            warnings.warn(
                f"the loss of a micro-batch is {whole:.6g}, but its rows in two pieces make "
                f"{made:.6g} with weight={given}, so a batch's loss depends on how it "
                "is split. If it is a mean over some rows only (such as labels that are not "
                "ignored), give weight= a function that counts those, weight=lambda target: "
                "(target != -100).sum(), or None for a loss that is a sum. If it compares rows "
                f"with each other, it compares those of a micro-batch only: {_INSTEAD}",
                RowsWarning,
                stacklevel=5,
            )

    def of_model(self, joins: Sequence[Join]) -> None:
        """Warn if results that a loss will get have other rows in them."""
        for join in joins:
            if join.mixes and join.why not in self._warned_of:
                self._warned_of.add(join.why)
                warnings.warn(
                    f"the model returns {join.why}. The loss gets the result of a micro-batch, "
                    f"which depends on its own rows only: {_INSTEAD}",
                    RowsWarning,
                    stacklevel=5,
                )
