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
from penstock.integrations.late import beside, on_device
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

    def _prepare(self, batch: Inputs, trains: bool, repeated: int = 1) -> Pipeline:
        """The pipeline for a batch; another one than before if its shapes need that.

        Args:
            batch: arguments of the model, by position or name.
            trains: whether it is a batch of training.
            repeated: how many of such batches are run at once.
        """
        shapes = _shapes_of(batch)
        fits = _fits(shapes, self._shapes)
        if self.pipe is not None and fits and (self._trains or not trains):
            return self.pipe
        if not fits:
            self._shapes.append(shapes)
        given: Inputs = {"dynamic": _varying(self._shapes), **self._options}
        if self.pipe is not None:
            self._leave_weights(shapes)
            if self._trains:
                self._num_microbatches = self.pipe.plan.num_microbatches
            if self._divided is not None:
                self._kept, self._divided = self._divided.state_dict(), None
            self._random_state = self.pipe.random_state()
            self.close()
        if given.get("num_microbatches", "auto") == "auto" and "plan" not in given:
            given["num_microbatches"] = self._num_microbatches if repeated == 1 else repeated
        example = {name: _repeated(value, repeated) for name, value in batch.items()}
        args, kwargs = _by_position(beside(self.model, example))
        with self._accelerator.autocast():
            self.pipe = Pipeline(self.model, args, kwargs, merge="list", **given)
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
        pipe = self.pipe
        if pipe is None:
            return {}
        return {
            "random_state": pipe.random_state(),
            "num_microbatches": pipe.plan.num_microbatches,
        }

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
        pipe = self._prepare(batch, trains=True)
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
            pipe = self._prepare(batch, trains=True, repeated=self._accumulated)
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
        pipe = self._prepare(batch, trains)
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

_Shapes = dict[str, tuple[int, ...]]
"""The sizes of the tensors among a model's arguments, without the rows."""


def _shapes_of(batch: Inputs) -> _Shapes:
    return {n: tuple(v.shape[1:]) for n, v in batch.items() if isinstance(v, torch.Tensor)}


def _varying(seen: Sequence[_Shapes]) -> dict[str, dict[int, str]]:
    """The dimensions that vary, as for `Pipeline(dynamic=)`; equal sizes in all share a name.

    Args:
        seen: the shapes of batches.
    """
    names: dict[tuple[int, ...], str] = {}
    found: dict[str, dict[int, str]] = {}
    for name, first in seen[0].items():
        shapes = [each[name] for each in seen if name in each]
        for dim in range(len(first)):
            sizes = tuple(shape[dim] for shape in shapes if len(shape) == len(first))
            if len(set(sizes)) > 1:
                found.setdefault(name, {})[dim + 1] = names.setdefault(sizes, f"size{len(names)}")
    return found


def _fits(shapes: _Shapes, seen: Sequence[_Shapes]) -> bool:
    """Whether a pipeline takes a batch of these shapes, if it was built for those in `seen`."""
    if not seen:
        return False
    varying, sizes = _varying(seen), dict[str, int]()
    for name, first in seen[0].items():
        if len(shapes.get(name, first)) != len(first):
            return False
        for dim, size in enumerate(shapes.get(name, first)):
            key = varying.get(name, {}).get(dim + 1)
            if size != (first[dim] if key is None else sizes.setdefault(key, size)):
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
