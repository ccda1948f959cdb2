"""The model of a Trainer of transformers as it is called: its batches run through a pipeline."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import convert_to_fp32

from penstock.errors import InputError
from penstock.integrations.late import beside, on_device, state_of, with_microbatches
from penstock.integrations.means import MeanLoss, normalized, weighed
from penstock.pipeline import Pipeline
from penstock.training.optimizer import PipelineOptimizer
from penstock.workers.optimizer_parts import move_state

Inputs = dict[Any, Any]
"""A batch: the model's arguments by name, or by position."""


@dataclass(frozen=True)
class Objective:
    """The loss of a batch, as the Trainer computes it.

    Attributes:
        scaled: whether it is a sum that was divided by the number of items of all batches of the
            optimizer step; otherwise it is a mean.
        divisor: what a mean is divided by: the number of batches of the optimizer step.
        smoothing: keyword arguments of `_smoothed` besides `divisor`; `None` for the loss that the
            model returns.
    """

    scaled: bool
    divisor: int
    smoothing: Mapping[str, Any] | None

    def arguments(self, batches: Sequence[Inputs]) -> tuple[list[Inputs], list[Any], Inputs]:
        """The inputs and targets of batches, and keyword arguments of `train_step` for the loss.

        The labels of a batch are an input of the model, or with smoothing the target of the loss.
        Without smoothing there are no targets.
        """
        more: Inputs = {"divisor": self.divisor}
        if self.smoothing is None or any("labels" not in batch for batch in batches):
            return list(batches), [], {"loss_fn": _returned, "loss_kwargs": more}
        more |= self.smoothing
        inputs = [{n: v for n, v in batch.items() if n != "labels"} for batch in batches]
        targets = [batch["labels"] for batch in batches]
        return inputs, targets, {"loss_fn": _smoothed, "loss_kwargs": more}


class TrainerModel:
    """A model that is called through a pipeline, which is built for the first batch.

    Everything but calls is the model's own: `parameters()`, `train()`, `config`, and so on.

    Args:
        model: the user's.
        options: keyword arguments of `Pipeline`.
        accumulated: the number of batches of an optimizer step.
        accelerator: opens autocast for the precision in which the model runs, and says on which
            device results are put.

    Attributes:
        model: the user's.
        pipe: the pipeline; `None` before the first batch.
        runs_batches_together: whether the batches of an optimizer step are the micro-batches of
            one pass.
        is_accumulating: whether a batch of the present optimizer step has run already.
        optimizer: the Trainer's optimizer, whose state is moved along when a pipeline moves the
            parameters; `None` before training.
    """

    def __init__(
        self,
        model: Any,
        options: Mapping[str, Any],
        accumulated: int,
        accelerator: Accelerator,
    ) -> None:
        self.model = model
        self.pipe: Pipeline | None = None
        chosen = options.get("num_microbatches", "auto")
        self.runs_batches_together = accumulated > 1 and chosen == "auto"
        self._options = dict(options)
        self.is_accumulating = False
        self.optimizer: torch.optim.Optimizer | None = None
        self._accumulated = accumulated
        self._accelerator = accelerator
        self._shapes: list[_Shapes] = []  # all that were seen and need a pipeline of their own
        self._dynamic: Mapping[Any, Any] = {}  # of the pipeline
        self._sums: bool | None = None
        self._mean = MeanLoss(class_name(model))
        self._trains = False  # whether the pipeline was built for training
        self._random_state: Mapping[str, int] | None = None
        self._num_microbatches: int | str = "auto"
        self._divided: PipelineOptimizer | None = None
        self._kept: dict[str, Any] | None = None  # of a divided optimizer, of a pipeline before

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["model"], name)

    def _get_name(self) -> str:
        """The class of the model, by which the Trainer tells what its labels are."""
        return class_name(self.model)

    # -- the pipeline --------------------------------------------------------------------------

    def prepare(self, batch: Inputs, trains: bool, repeated: int = 1) -> Pipeline:
        """The pipeline for a batch; another one than before if its shapes need that.

        Args:
            batch: arguments of the model, by position or name.
            trains: whether it is a batch of training.
            repeated: how many of such batches are run at once.
        """
        shapes, named = _shapes_of(batch), self._options.get("dynamic") or {}
        fits = _fits(shapes, self._shapes, named)
        if not fits:
            self._shapes.append(shapes)
        varying = _varying(self._shapes, named)
        knows = fits and all(name in self._dynamic for name in varying if name in shapes)
        if self.pipe is not None and knows and (self._trains or not trains):
            return self.pipe
        if self.pipe is not None:
            self._leave_weights(shapes)
            if self._trains:
                self._num_microbatches = self.pipe.plan.num_microbatches
            if self._divided is not None:
                self._kept, self._divided = self._divided.state_dict(), None
            self._random_state = self.pipe.random_state()
            self.close()
        possible = _first(self._shapes).keys() | inspect.signature(self.model.forward).parameters
        dynamic = {**named, **varying}
        self._dynamic = {n: d for n, d in dynamic.items() if n in batch or n not in possible}
        number = self._num_microbatches if repeated == 1 else repeated
        options = with_microbatches({**self._options, "dynamic": self._dynamic}, number)
        example = {name: _repeated(value, repeated) for name, value in batch.items()}
        args, kwargs = _by_position(beside(self.model, example))
        with self._accelerator.autocast():
            self.pipe = Pipeline(self.model, args, kwargs, merge="list", **options)
        self._trains = trains
        if self.optimizer is not None and self.pipe.shares_model:
            move_state(self.optimizer.param_groups, self.optimizer.state)
        if self._random_state is not None:
            self.pipe.load_random_state(self._random_state)
        return self.pipe

    def _leave_weights(self, shapes: _Shapes) -> None:
        """Fetch the weights from the workers, before another pipeline divides the model anew.

        Raises:
            InputError: the workers have accumulated gradients, which would be lost.
        """
        if self.pipe is None or self.pipe.shares_model:
            return
        if self.is_accumulating:
            raise InputError(
                f"a batch has tensors of other sizes, {shapes}, than those before it, while "
                "gradients are being accumulated. Say which dimensions vary, "
                'pipeline={"dynamic": {"input_ids": {1: "length"}, ...}}, or leave out '
                "num_microbatches, so that the batches of a step are run together"
            )
        self.pipe.fetch()

    def divide(self, optimizer: torch.optim.Optimizer) -> PipelineOptimizer:
        """An optimizer in place of this one, whose step runs where the parameters are.

        Args:
            optimizer: the Trainer's or the user's; or the result for an earlier pipeline.
        """
        divided = self._divided
        if divided is None or optimizer is not divided:
            divided = self._divided = self._divide(optimizer)
        self._plain.param_groups = divided.param_groups  # which a scheduler of the user's may hold
        return divided

    def _divide(self, optimizer: torch.optim.Optimizer) -> PipelineOptimizer:
        if self.pipe is None:
            raise InputError("there is no pipeline yet, so the optimizer cannot be divided")
        if not isinstance(optimizer, PipelineOptimizer):
            self._plain = optimizer
        kind = type(self._plain)
        takes = inspect.signature(kind).parameters
        options = {name: v for name, v in self._plain.defaults.items() if name in takes}
        divided = self.pipe.optimizer(kind, optimizer.param_groups, **options)
        state = self._kept or optimizer.state_dict()
        if state["state"]:
            divided.load_state_dict(state)
        self._kept = None
        return divided

    def state(self) -> dict[str, Any]:
        """What a run needs to go on with the same bits, besides what the Trainer saves."""
        return {} if self.pipe is None else state_of(self.pipe)

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on as the run did of which this is the state."""
        self._random_state = state["random_state"]
        self._num_microbatches = state["num_microbatches"]
        if self.pipe is not None:
            self.pipe.load_random_state(state["random_state"])

    def close(self) -> None:
        """Stop the workers."""
        if self.pipe is not None:
            self.pipe.close()
            self.pipe = None

    # -- batches -------------------------------------------------------------------------------

    def train_batch(self, batch: Inputs, objective: Objective) -> torch.Tensor:
        """Run forward and backward of a batch, split into micro-batches.

        Args:
            batch: the model's arguments by name, with labels.
            objective: its loss.

        Returns:
            the loss of the batch, a detached scalar.
        """
        pipe = self.prepare(batch, trains=True)
        is_sum = objective.scaled and (objective.smoothing is not None or self._is_sum(batch))
        inputs, targets, loss = objective.arguments([batch])
        with self._accelerator.autocast():
            found: torch.Tensor = pipe.train_step(
                **inputs[0],
                target=targets[0] if targets else None,
                weight=None if is_sum else "rows",
                **loss,
            )
        return found

    def train_batches(self, batches: Sequence[Inputs], objective: Objective) -> torch.Tensor:
        """Run forward and backward of batches, each as one micro-batch.

        Args:
            batches: as in `train_batch`.
            objective: the loss, of which that of all batches is the sum.
        """
        for batch in batches:
            pipe = self.prepare(batch, trains=True, repeated=self._accumulated)
        inputs, targets, loss = objective.arguments(batches)
        with self._accelerator.autocast():
            found: torch.Tensor = pipe.train_microbatches(
                inputs, targets=targets or None, weight=None, **loss
            )
        return found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns for a batch; with gradients, if they are enabled.

        Tensors of micro-batches are concatenated along the first dimension. A loss is that of the
        whole batch. All are on the device that batches are put on.

        Raises:
            InputError: the results of micro-batches cannot be put together.
        """
        trains = self.model.training and torch.is_grad_enabled()
        batch: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        pipe = self.prepare(batch, trains)
        with self._accelerator.autocast():
            parts = pipe(*args, **kwargs)
        if self._accelerator.mixed_precision != "no":
            parts = convert_to_fp32(parts)
        found = parts[0]
        if len(parts) > 1:
            rows = _rows(batch, len(parts))
            shares = self._shares(batch, [_loss_of(part) for part in parts], rows, trains)
            found = _together(parts, rows, shares)
        return on_device(found, self._accelerator.device)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """What the model's own `generate` returns; its calls run through the pipeline."""
        generates = self.model if self.pipe is None else self.pipe
        with self._accelerator.autocast():
            found = generates.generate(*args, **kwargs)
        return on_device(found, self._accelerator.device)

    def _shares(
        self, batch: Inputs, losses: Sequence[Any], rows: Sequence[int], trains: bool
    ) -> list[float]:
        """How much the losses of micro-batches count in that of their batch."""
        if losses[0] is not None and "num_items_in_batch" in batch and self._is_sum(batch):
            return [1.0] * len(losses)
        if losses[0] is None or trains or 0 in batch:
            return normalized(rows)
        return self._mean.shares(batch, losses, rows, lambda: self._loss_of_whole(batch))

    def _loss_of_whole(self, batch: Inputs) -> torch.Tensor:
        """The loss of a batch that is run as one micro-batch, without gradients."""
        assert self.pipe is not None
        with torch.no_grad(), self._accelerator.autocast():
            found: torch.Tensor = self.pipe.train_microbatches(
                [batch], loss_fn=_returned, weight=None
            )
        return found

    def _is_sum(self, batch: Inputs) -> bool:
        """Whether the model divides its loss by the number of items, as the Trainer takes it to.

        Some models accept `num_items_in_batch` and still return a mean over the rows that they get.
        So the first batch is run twice, the second time with twice the number: the loss of a sum is
        half as large then, and a mean stays the same.
        """
        if self._sums is not None or self.pipe is None or self.pipe.plan.num_microbatches == 1:
            return self._sums is not False
        items = batch["num_items_in_batch"]
        twice = {**batch, "num_items_in_batch": 2 * items}
        with self._accelerator.autocast():
            once, half = (
                self.pipe.eval_step(*args, **kwargs, loss_fn=_returned, weight=None)
                for args, kwargs in map(_by_position, (batch, twice))
            )
        if not bool(torch.isfinite(once)) or not bool(once):
            return True  # nothing is seen in this batch
        if not torch.equal(once, 2 * half) and not torch.equal(once, half):
            warnings.warn(
                f"a part of the loss of {class_name(self.model)} depends on "
                f"num_items_in_batch, and another does not: it is {once.item():.6g}, and "
                f"{half.item():.6g} for twice the number. Such a part is added up over "
                "micro-batches, as the Trainer does with gradient_accumulation_steps",
                stacklevel=2,
            )
        self._sums = not torch.equal(once, half)
        return self._sums


# -- losses, which worker processes import ---------------------------------------------------------


def _returned(output: Any, divisor: int = 1) -> torch.Tensor:
    """The loss that a model returns.

    Raises:
        InputError: it returns none.
    """
    if isinstance(output, Mapping) and "loss" not in output:
        raise InputError(
            f"the model returned no loss, only {', '.join(output)}: it needs labels in the batch, "
            "or give the Trainer a compute_loss_func"
        )
    loss: torch.Tensor = output["loss"] if isinstance(output, Mapping) else output[0]
    return loss / divisor if divisor != 1 else loss


def _smoothed(
    output: Any, labels: torch.Tensor, divisor: int, smoother: Any, shifts: bool, items: Any
) -> torch.Tensor:
    """The loss with label smoothing, as `Trainer.compute_loss` computes it: not by autocast."""
    logits = output["logits"] if isinstance(output, Mapping) else output[0]
    with torch.autocast(logits.device.type, enabled=False):
        found = {"logits": convert_to_fp32(logits)}
        loss: torch.Tensor = smoother(found, labels, shift_labels=shifts, num_items_in_batch=items)
        return loss / divisor if divisor != 1 else loss


# -- shapes ----------------------------------------------------------------------------------------

_Shapes = dict[Any, tuple[int, ...]]
"""The sizes of the tensors among a model's arguments, without the rows."""

_Sizes = tuple[int | None, ...]
"""The size of a dimension in each of several batches; `None` where its argument is missing."""


def _shapes_of(batch: Inputs) -> _Shapes:
    return {n: tuple(v.shape[1:]) for n, v in batch.items() if isinstance(v, torch.Tensor)}


def _first(seen: Sequence[_Shapes]) -> _Shapes:
    """The first shape of every argument."""
    return {name: shape for each in reversed(seen) for name, shape in each.items()}


def _sizes(seen: Sequence[_Shapes], name: Any, dim: int, rank: int) -> _Sizes:
    shapes = [each.get(name, ()) for each in seen]
    return tuple(shape[dim - 1] if len(shape) == rank else None for shape in shapes)


def _varying(seen: Sequence[_Shapes], named: Mapping[Any, Any]) -> dict[Any, dict[int, str]]:
    """The dimensions that vary, as for `Pipeline(dynamic=)`; equal sizes in all share a name.

    Batches may have other arguments than those before, such as labels. What was not in all of them
    varies with a dimension that was as large wherever both were.

    Args:
        seen: the shapes of batches.
        named: the dimensions that the user says vary.
    """
    found = {name: dict(dims) for name, dims in named.items() if isinstance(dims, Mapping)}
    each = [
        (name, dim, _sizes(seen, name, dim, len(shape)))
        for name, shape in _first(seen).items()
        for dim in range(1, len(shape) + 1)
    ]
    each.sort(key=lambda one: (one[1] not in found.get(one[0], {}), one[2].count(None)))
    names: list[tuple[_Sizes, str]] = []
    for argument, dim, sizes in each:
        name = found.get(argument, {}).get(dim)
        if name is None:
            name = next((name for others, name in names if _agree(sizes, others)), None)
            if len({*sizes} - {None}) == 1 and (name is None or None not in sizes):
                continue
            name = found.setdefault(argument, {})[dim] = name or f"size{len(names)}"
        names.append((sizes, name))
    return found


def _agree(sizes: _Sizes, others: _Sizes) -> bool:
    """Whether two dimensions were equally large in the batches that had both."""
    both = [pair for pair in zip(sizes, others, strict=True) if None not in pair]
    return bool(both) and all(size == other for size, other in both)


def _fits(shapes: _Shapes, seen: Sequence[_Shapes], named: Mapping[Any, Any]) -> bool:
    """Whether a pipeline takes a batch of these shapes, if it was built for those in `seen`."""
    if not seen:
        return False
    varying, first, sizes = _varying(seen, named), _first(seen), dict[str, int]()
    for name, shape in shapes.items():
        known = first.get(name, () if varying else shape)
        if len(shape) != len(known):
            return False
        for dim, size in enumerate(shape):
            key = varying.get(name, {}).get(dim + 1)
            if size != (known[dim] if key is None else sizes.setdefault(key, size)):
                return False
    return True


def _repeated(value: Any, times: int) -> Any:
    """The tensor with its rows repeated `times` times; other values as they are."""
    if times == 1 or not isinstance(value, torch.Tensor) or value.ndim == 0:
        return value
    return torch.cat([value] * times)


def _by_position(batch: Mapping[Any, Any]) -> tuple[tuple[Any, ...], Inputs]:
    """Arguments whose names are numbers, and the others."""
    args = tuple(batch[k] for k in sorted(name for name in batch if isinstance(name, int)))
    return args, {name: value for name, value in batch.items() if isinstance(name, str)}


def _rows(batch: Inputs, count: int) -> list[int]:
    """How many rows each micro-batch has, if the batch is split into `count` of them."""
    rows = next(len(v) for v in batch.values() if isinstance(v, torch.Tensor) and v.ndim)
    return [len(part) for part in torch.empty(rows).tensor_split(count)]


def _loss_of(result: Any) -> torch.Tensor | None:
    """The loss among the results of a micro-batch, if there is one."""
    if isinstance(result, Mapping):
        found = result.get("loss")
    else:
        found = result[0] if isinstance(result, (tuple, list)) and result else None
    return found if isinstance(found, torch.Tensor) and not found.ndim else None


def _together(
    parts: Sequence[Any], rows: Sequence[int], shares: Sequence[float], is_loss: bool = False
) -> Any:
    """Put the results of micro-batches together into the result of the batch.

    Args:
        parts: the results of the micro-batches.
        rows: the number of rows of every micro-batch, by which scalars other than losses are
            weighted.
        shares: the weights of the micro-batches' losses, which add up to 1 if these are means.
        is_loss: whether `parts` are losses.

    Raises:
        InputError: they are neither tensors nor containers of them.
    """
    first = parts[0]
    if isinstance(first, torch.Tensor):
        if first.ndim:
            return torch.cat(list(parts))
        return weighed(parts, shares if is_loss else normalized(rows))
    if isinstance(first, Mapping):
        made = {
            name: _together([part[name] for part in parts], rows, shares, name == "loss")
            for name in first
        }
        return type(first)(**made)
    if isinstance(first, (tuple, list)):
        items = zip(*parts, strict=True)
        return type(first)([_together(item, rows, shares, k == 0) for k, item in enumerate(items)])
    if all(part is None or part == first for part in parts):
        return first
    raise InputError(
        f"the model returned a {type(first).__name__} for each of {len(parts)} micro-batches, "
        "which cannot be put together: have the model not return it (use_cache=False for a cache "
        'of keys and values), or use pipeline={"num_microbatches": 1}'
    )


def class_name(model: Any) -> str:
    """The class of a model, inside of adapters of PEFT."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return type(inner).__name__
