"""The two ends of a pipeline: the batch that feeds it, and the loss or result that it ends in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from penstock.capture.calls import ROWS, Join, Sizes
from penstock.capture.lowering import assembled
from penstock.capture.randomness import LOSS, METRICS, Key, Watched
from penstock.capture.trees import (
    cloned,
    flatten,
    map_leaves,
    unflatten,
    versions,
    without_history,
)
from penstock.devices.kind import Event
from penstock.devices.kinds import kind_of
from penstock.devices.streams import Ahead
from penstock.engine.microbatch import pieces_of, repeated
from penstock.engine.state import ValuesSaved
from penstock.errors import InputError
from penstock.links.link import Gradients, Roots, Values, edge_of, edges


@dataclass(frozen=True)
class Pieces:
    """A micro-batch in pieces, whose losses are computed as well, to see if it adds up.

    Attributes:
        microbatch: its number.
        copies: how often its rows are there: twice, if it has one row only.
        whole: what the loss function gets after the output for all of these rows.
        rows: of every piece.
        targets: for every piece what the loss function gets after the output.
        weights: of the pieces' losses in that of the micro-batch.
    """

    microbatch: int
    copies: int
    whole: tuple[Any, ...]
    rows: Sequence[int]
    targets: Sequence[tuple[Any, ...]]
    weights: Sequence[float]


@dataclass(frozen=True)
class UnavailableParameters:
    """The parameters that a loss may not use, as their gradients are made apart from its own.

    Attributes:
        model: whose.
        elsewhere: those, by id, that are not in the graph which the loss is a part of.
        halves: whether gradients of weights are made apart from all others.
    """

    model: nn.Module
    elsewhere: Mapping[int, nn.Parameter]
    halves: bool

    def name_of(self, parameter: torch.Tensor) -> str | None:
        """The name of a parameter, if it is one of them."""
        if id(parameter) not in self.elsewhere and not self.halves:
            return None
        named = self.model.named_parameters()
        return next((name for name, own in named if own is parameter), None)


class LossFailed(Exception):  # noqa: N818 - never reaches a user
    """The loss function failed, or the metrics; the cause is chained.

    Args:
        what: which of them.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        super().__init__(what)


@dataclass(frozen=True)
class Ending:
    """How the last stage's values are put together to the model's result.

    Attributes:
        values: the program's values that the last stage gives, in order; `outputs` refers to them.
        outputs: the leaves of the result: values, sizes and constants.
        structure: the containers that the leaves are put into.
        joins: for every value how it is put together from micro-batches.
    """

    values: tuple[Any, ...]
    outputs: Sequence[Any]
    structure: Any
    joins: Sequence[Join] = ()

    def result(self, values: Sequence[Any], sizes: Sizes) -> Any:
        """The model's result, in its own structure, of the last stage's values."""
        by_value = dict(zip(self.values, values, strict=True))
        return assembled(self.outputs, self.structure, by_value, sizes)


class Endings:
    """The endings of all ways through the model, and which one each micro-batch takes.

    Attributes:
        ways: by number.
        taken: for every micro-batch of the pass its sizes, and the number of its way.
    """

    def __init__(self) -> None:
        self.ways: list[Ending] = []
        self.taken: Sequence[tuple[Sizes, int]] = ()

    def result(self, microbatch: int, values: Values) -> Any:
        """A micro-batch's result in the model's structure, of the last stage's values."""
        sizes, way = self.taken[microbatch]
        return self.ways[way].result(values, sizes)

    def pieces(
        self, microbatch: int, values: Values, rows: Sequence[int], copies: int = 1
    ) -> list[Any]:
        """The results of pieces of a micro-batch that have so many rows each.

        They are copies, without history; `None` stands for what cannot be distinguished.

        Args:
            microbatch: its number.
            values: its results.
            rows: of the pieces.
            copies: how often the rows of the micro-batch are there.
        """
        sizes, way = self.taken[microbatch]
        ending = self.ways[way]
        known = [None if j.why else value for value, j in zip(values, ending.joins, strict=True)]
        dims = [None if join.why else join.dim for join in ending.joins]
        parts = pieces_of(repeated(known, dims, copies), dims, rows)
        return [
            ending.result(part, {**sizes, ROWS: n}) for part, n in zip(parts, rows, strict=True)
        ]


class Feed:
    """The source of the first stage: the micro-batches of a batch.

    Attributes:
        values: for every micro-batch the values that enter; set before a pass.
        gradients: for every micro-batch the gradients of those values, after a backward.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ahead = Ahead(device)
        self.values: list[Values] = []
        self.gradients: dict[int, Gradients] = {}

    def begin(
        self, values: Sequence[Values], share: Sequence[int], made: Mapping[torch.device, Event]
    ) -> None:
        """A pass begins: what is elsewhere is copied to the device before it is needed.

        Args:
            values: of every micro-batch.
            share: the micro-batches that are run here.
            made: as of `Order`.
        """
        self.values = list(values)
        self._ahead.begin({k: self.values[k] for k in share} if self.values else {}, made)

    def end(self) -> None:
        """A pass has ended well; waits until the script may write what has entered."""
        self._ahead.wait_for_copies()
        self.clear()

    def receive(self, microbatch: int) -> Values:
        """The values of a micro-batch; they are there already, on whatever device."""
        if microbatch in self._ahead:
            return tuple(self._ahead.take(microbatch))
        return tuple(self.values[microbatch])

    def send_gradients(self, microbatch: int, gradients: Gradients) -> None:
        """Keep the gradients, for inputs that have some."""
        if any(g is not None for g in gradients):
            self.gradients[microbatch] = gradients

    def clear(self) -> None:
        """Drop the values of the batch and their gradients."""
        self._ahead.clear()
        self.values, self.gradients = [], {}


class Outlet:
    """The sink of the last stage: it collects results, or turns them into losses at once.

    Args:
        endings: how results are put together.
        device: of the last stage, to which targets are copied; `None` leaves them where they are.

    Attributes:
        results: what the last stage gave, by micro-batch, without history.
        gradients: the gradients of those results, for the backward.
        losses: the detached loss of every micro-batch, unweighted.
        metrics: what the metrics function returned, by micro-batch, if there is one.
        mismatch: the loss of a micro-batch, and what its pieces make, if that is something else.
    """

    def __init__(self, endings: Endings, device: torch.device | None = None) -> None:
        self._endings = endings
        self._device = device
        self._ahead = None if device is None else Ahead(device)
        self._loss: Loss | None = None
        self.clear()

    def clear(self) -> None:
        """Drop the loss, gradients and results of the last pass."""
        self.begin(None)

    def begin(
        self,
        loss: Loss | None,
        gradients: Mapping[int, Gradients] = MappingProxyType({}),
        keys: Sequence[Key] = (),
        share: Sequence[int] = (),
        made: Mapping[torch.device, Event] = MappingProxyType({}),
    ) -> None:
        """From now on collect results, or turn them into losses if there is a loss.

        Args:
            loss: the step's.
            gradients: of results that were collected before, for their backward.
            keys: where the random numbers of every micro-batch are.
            share: the micro-batches that are run here, whose targets are copied to the device
                before they are needed.
            made: as of `Order`.
        """
        if self._ahead is not None:
            flat = {}
            if loss is not None:
                targets = {k: loss.targets[k] for k in share}
                flat = {k: flatten(t) for k, t in targets.items() if not self._is_here(t)}
            self._structures = {k: structure for k, (_, structure) in flat.items()}
            self._ahead.begin({k: leaves for k, (leaves, _) in flat.items()}, made)
        self._more = {} if loss is None else map_leaves(self._here, loss.more)
        self.results: dict[int, Values] = {}
        self.gradients: dict[int, Gradients] = dict(gradients)
        self.losses: dict[int, torch.Tensor] = {}
        self.metrics: dict[int, Any] = {}
        self.mismatch: tuple[float, float] | None = None
        self._loss = loss
        self._keys = keys

    @property
    def has_loss(self) -> bool:
        """Whether results are turned into losses."""
        return self._loss is not None

    def send(self, microbatch: int, results: Values) -> Roots:
        """Keep a micro-batch's results, or compute its loss and metrics; where backward starts."""
        if self._loss is None or self._loss.keeps_outputs:
            self.results[microbatch] = tuple(without_history(r) for r in results)
        if self._loss is None:
            return edges(results)
        key, target = self._keys[microbatch], self._target(self._loss, microbatch)
        pieces = self._loss.pieces
        outputs = []
        if pieces and pieces.microbatch == microbatch:
            outputs = [  # before the loss, which may write them
                output
                for rows in ([sum(pieces.rows)], pieces.rows)
                for output in self._endings.pieces(microbatch, results, rows, pieces.copies)
            ]
        before, as_given = versions(self._more) if outputs else [], None
        if outputs and pieces is not None:  # copies likewise
            as_given = map_leaves(cloned, ([pieces.whole, *pieces.targets], self._loss.more))
        loss, weight = self._loss.of(microbatch, key, results, self._endings, target, self._more)
        if as_given and versions(self._more) == before:  # it remembers nothing there
            self.mismatch = self._loss.mismatch(loss.detach(), outputs, *as_given)
        if self._loss.metrics is not None:
            found = self._loss.measured(microbatch, key, results, self._endings, target)
            self.metrics[microbatch] = found
        self.losses[microbatch] = loss.detach()
        self.gradients[microbatch] = [weight]
        return edges((loss,))

    def receive_gradients(self, microbatch: int) -> Gradients:
        """The gradients of what was sent; they are there already."""
        return [self._here(gradient) for gradient in self.gradients.pop(microbatch)]

    def end(self) -> None:
        """A pass has ended well; waits until the script may write the targets."""
        if self._ahead is not None:
            self._ahead.wait_for_copies()
        self.clear()

    def _target(self, loss: Loss, microbatch: int) -> tuple[Any, ...]:
        """What the loss function gets after the output, on this device."""
        if self._ahead is None or microbatch not in self._ahead:
            return loss.targets[microbatch]
        leaves = self._ahead.take(microbatch)
        return unflatten(self._structures[microbatch], leaves)  # type: ignore[no-any-return]

    def _is_here(self, target: tuple[Any, ...]) -> bool:
        """Whether a target is nothing but tensors of this device."""
        return all(isinstance(t, torch.Tensor) and t.device == self._device for t in target)

    def _here(self, value: Any) -> Any:
        return value if self._device is None else to_device(value, self._device)


class Loss:
    """A step's loss, and what else is made of the last stage's results.

    Attributes:
        function: the user's.
        targets: for every micro-batch what the function gets after the output, wherever it is.
        weights: of every micro-batch.
        more: keyword arguments of the function.
        metrics: another function of the same outputs and targets, if there is one.
        keeps_outputs: whether the results are wanted, too.
        scale: what the loss is multiplied by before its backward; `None` without loss scaling.
        pieces: a micro-batch in pieces, if it is to be seen whether the loss adds up.
        apart: knows the parameters that the function may not use; `None` where it may use none,
            as their gradients would stay in another process.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        targets: Sequence[tuple[Any, ...]],
        weights: Sequence[float],
        more: Mapping[str, Any] | None = None,
        metrics: Callable[..., Any] | None = None,
        keeps_outputs: bool = False,
        scale: float | None = None,
        pieces: Pieces | None = None,
        apart: UnavailableParameters | None = None,
    ) -> None:
        self.function = function
        self.pieces = pieces
        self.targets = targets
        self.weights = weights
        self.more = dict(more or {})
        self.metrics = metrics
        self._of = Watched(function)
        self._measured = None if metrics is None else Watched(metrics)
        self.keeps_outputs = keeps_outputs
        self.scale = scale
        self.apart = apart

    @property
    def buffers(self) -> list[torch.Tensor]:
        """What the function remembers from one step to the next, if it is a module."""
        return list(self.function.buffers()) if isinstance(self.function, nn.Module) else []

    def of(
        self,
        microbatch: int,
        key: Key,
        results: Values,
        endings: Endings,
        target: tuple[Any, ...],
        more: Mapping[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The loss of a micro-batch, and its weight, scaled, as the gradient to start from.

        There is none for a micro-batch of weight 0: its loss may be no number, such as a mean over
        no labels, and must not get into the gradients of the others.

        Raises:
            LossFailed: the function raised, or returned something else than a scalar tensor.
        """
        try:
            output = endings.result(microbatch, results)
            with ValuesSaved(self.buffers)():
                loss = self._of(key, LOSS, output, *target, **more)
            check_scalar(loss)
            _check_parameters(loss, results, self.apart)
        except BaseException as error:  # a sys.exit() as well
            raise LossFailed("loss") from error
        weight = self.weights[microbatch]
        return loss, gradient_of(loss, weight, self.scale) if weight else None

    def mismatch(
        self,
        loss: torch.Tensor,
        outputs: Sequence[Any],
        targets: Sequence[tuple[Any, ...]],
        more: Mapping[str, Any],
    ) -> tuple[float, float] | None:
        """The loss of a micro-batch and what its pieces make, if that is something else.

        `None` also where nothing can be concluded: the function draws random numbers, does not
        repeat itself, or does not take the pieces.

        Args:
            loss: of the whole micro-batch.
            outputs: copies of the model's result: of the whole, and of every piece.
            targets: copies of what the function gets after these.
            more: copies of its keyword arguments.
        """
        if self.pieces is None or self._of.draws:
            return None
        targets, more = map_leaves(lambda leaf: to_device(leaf, loss.device), (targets, more))
        try:
            with torch.no_grad():
                found = [
                    self.function(output, *target, **map_leaves(cloned, more))
                    for output, target in zip(outputs, targets, strict=True)
                ]
            whole, *parts = map(float, found)
            bound = min(1000 * torch.finfo(loss.dtype).eps, 0.05)
        except Exception:
            return None
        if (whole if self.pieces.copies == 1 else parts[0]) != float(loss):  # or it is no number
            return None
        made = sum(w * part for w, part in zip(self.pieces.weights, parts, strict=True) if w)
        scale = max(abs(value) for value in (whole, *parts) if value == value)
        return None if abs(made - whole) <= bound * scale else (whole, made)

    def measured(
        self,
        microbatch: int,
        key: Key,
        results: Values,
        endings: Endings,
        target: tuple[Any, ...],
    ) -> Any:
        """What the metrics function says of a micro-batch.

        Raises:
            LossFailed: it raised.
        """
        try:
            with torch.no_grad():
                output = endings.result(microbatch, results)
                found = self._measured(key, METRICS, output, *target)  # type: ignore[misc]
            return map_leaves(without_history, found)
        except BaseException as error:
            raise LossFailed("metrics") from error


def gradient_of(loss: torch.Tensor, weight: float, scale: float | None) -> torch.Tensor:
    """The gradient of `loss` in `loss * weight * scale`, in the bits of autograd."""
    if scale is None:
        return torch.full_like(loss, weight)
    scales = torch.full_like(loss, scale, dtype=torch.float32)
    return scales.to(loss.dtype) * weight


def check_scalar(loss: object) -> None:
    """Raise an `InputError` unless this is a number that can be differentiated, if it has to be."""
    if not isinstance(loss, torch.Tensor):
        raise InputError(
            f"the loss function returned a {type(loss).__name__}, not a scalar tensor; "
            "loss_fn(output, target) must return one number that can be differentiated"
        )
    if loss.numel() != 1:
        raise InputError(
            f"the loss has shape {tuple(loss.shape)}, but a scalar is needed to differentiate; "
            "reduce it, with .mean() for instance"
        )
    if torch.is_grad_enabled() and loss.is_complex():
        raise InputError(
            f"the loss is complex ({loss.dtype}), and only a real one can be differentiated; use "
            "its absolute value, for instance"
        )
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise InputError(
            "the loss depends on no parameter that requires a gradient; was it detached?"
        )


def _check_parameters(
    loss: torch.Tensor, results: Values, apart: UnavailableParameters | None
) -> None:
    """Raise if the loss uses a parameter whose gradient would be added up in a second place.

    One device adds the gradients that a parameter has from the model and from the loss, and then
    the sum to `.grad`. With the parameter in another graph it would be two additions, whose order
    depends on timing; in another process, the second one would be lost.
    """
    for leaf in _leaves(loss, results) if loss.requires_grad else ():
        if apart is None and isinstance(leaf, nn.Parameter):
            raise InputError(
                f"the loss function uses a parameter of shape {tuple(leaf.shape)}, whose gradient "
                "would be left in a worker's process. Make it a part of the model, or use "
                'workers="threads"'
            )
        if apart is not None and (name := apart.name_of(leaf)) is not None:
            raise InputError(
                f"the loss function uses the model's parameter {name!r}, whose gradient is "
                "computed in another stage, or in another part of this one. The two would be "
                "summed in another order than on one device. Let the model's forward compute that "
                "term and return it with the output, or use (loss_fn(pipe(x), y) + "
                "term).backward()"
            )


def _leaves(loss: torch.Tensor, results: Values) -> Iterator[torch.Tensor]:
    """The leaves that a loss depends on otherwise than by these results."""
    differentiable = (r for r in results if isinstance(r, torch.Tensor) and r.requires_grad)
    starts = map(edge_of, differentiable)
    seen = {start.node for start in starts if start is not None}
    waiting = [get_gradient_edge(loss).node]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.name().endswith("AccumulateGrad"):
            yield node.variable  # type: ignore[attr-defined]
        waiting += [following for following, _ in node.next_functions if following is not None]


def to_device(value: object, device: torch.device) -> Any:
    """A tensor on `device`, everything else as it is.

    A copy to a CPU is complete on return; one to another device is complete for all later work on
    the device's current stream.
    """
    if not isinstance(value, torch.Tensor):
        return value
    return value.to(device, non_blocking=kind_of(device).has_streams)
