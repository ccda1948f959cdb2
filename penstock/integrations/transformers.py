"""The Trainer of transformers, with its model split by a `Pipeline`; see docs/integrations.

from penstock.integrations.transformers import PenstockTrainer

trainer = PenstockTrainer(model, args, train_dataset=data, pipeline={"devices": 2})
trainer.train()
"""

from __future__ import annotations

import inspect
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType, convert_to_fp32
from torch import nn
from transformers import Trainer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from penstock.errors import InputError
from penstock.integrations.late import check_options
from penstock.pipeline import Pipeline
from penstock.training.optimizer import PipelineOptimizer

if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object

_Inputs = dict[Any, Any]
_STATE = "penstock.json"  # beside the Trainer's own files in a checkpoint


class PenstockMixin(_Base):
    """Makes any subclass of `transformers.Trainer` run its model through a `Pipeline`.

    `class MyTrainer(PenstockMixin, SFTTrainer): pass`. See `PenstockTrainer`.
    """

    model: Any
    optimizer: Any
    _pipelined: PipelinedModel | None = None

    def __init__(
        self, *args: Any, pipeline: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        self._options = _checked(pipeline)
        self._group: list[_Inputs] = []  # batches of this optimizer step that are still to be run
        self._group_size = 1
        super().__init__(*args, **kwargs)

    @property
    def pipe(self) -> Pipeline:
        """The pipeline.

        Raises:
            InputError: there is none yet; it is built for the first batch.
        """
        if self._pipelined is None or self._pipelined.pipe is None:
            raise InputError(
                "there is no pipeline yet: it is built for the first batch, in train(), "
                "evaluate() or predict(). In a callback, use it from on_step_end on"
            )
        return self._pipelined.pipe

    # -- what the Trainer would do with several devices ----------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """Create an accelerator that leaves devices and ranks to the pipeline."""
        _check_arguments(self.args)
        self.args.device  # noqa: B018 - sets the number of GPUs
        self.args._n_gpu = 1  # no DataParallel, and no larger batches for it
        super().create_accelerator_and_postprocess()
        _check_accelerator(self.accelerator)
        self.accelerator.__class__ = _OneProcess
        self.accelerator.dataloader_config.dispatch_batches = False
        self.accelerator.clip = self._clip
        self.gather_function = self.accelerator.gather_for_metrics

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the model where it is; the pipeline places its stages."""

    def get_total_train_batch_size(self, args: Any) -> int:
        """The rows of an optimizer step; all ranks share one batch."""
        return int(self._train_batch_size * args.gradient_accumulation_steps)

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        """The model as the Trainer is to call it."""
        if isinstance(self.model, Pipeline):
            raise InputError(
                "the Trainer was given a Pipeline; give it the model, and what the Pipeline was "
                'given in pipeline={"devices": ...}: it is built for the first batch'
            )
        if self._pipelined is None or self._pipelined.model is not self.model:
            self._close()
            accumulated = self.args.gradient_accumulation_steps
            self._pipelined = PipelinedModel(
                self.model, self._options, accumulated, self.accelerator
            )
        return self._pipelined

    def _clip(self, max_norm: float, norm_type: float) -> torch.Tensor:
        norm = self.pipe.clip_grad_norm_(max_norm, norm_type)
        return norm.to(self.args.device)

    # -- training ------------------------------------------------------------------------------

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as `Trainer.train` does; in the end the model of every process has the weights."""
        found = super().train(*args, **kwargs)
        self._fetch()
        return found

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """The batches of the next optimizer step, as the Trainer collects them."""
        found = super().get_batch_samples(*args, **kwargs)
        self._group, self._group_size = [], max(1, len(found[0]))
        if self._pipelined is not None:
            self._pipelined.is_accumulating = False
        return found

    def training_step(
        self, model: nn.Module, inputs: _Inputs, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Run forward and backward of a batch through the pipeline.

        With `gradient_accumulation_steps`, and if the number of micro-batches was left open, the
        batches of an optimizer step are run together when the last one is there, each as one
        micro-batch.

        Returns:
            the loss, as the Trainer reports it: a detached scalar on `args.device`. Zero for a
            batch that is run with a later one.
        """
        pipelined: Any = self._wrap_model(self.model)
        if self._computes_own_loss():
            self.model.train()
            if callable(getattr(self.optimizer, "train", None)):
                self.optimizer.train()
            loss = self._run(pipelined, self._prepare_inputs(dict(inputs)), num_items_in_batch)
        else:
            loss = super().training_step(pipelined, inputs, num_items_in_batch)
        self._divide_optimizer(pipelined)
        pipelined.is_accumulating = not self._group
        return loss.to(self.args.device)

    def _computes_own_loss(self) -> bool:
        """Whether the loss is the model's or the Trainer's own, of which micro-batches are known.

        It is computed in the last stage then, while other micro-batches are under way. Others may
        do anything with the results of a batch, so they get those of the whole batch.
        """
        training_step: Any = super().training_step
        return (
            training_step.__func__ is Trainer.training_step
            and type(self).compute_loss is Trainer.compute_loss
            and self.compute_loss_func is None
        )

    def _run(self, pipelined: PipelinedModel, batch: _Inputs, items: Any) -> torch.Tensor:
        """Run a batch, or keep it to be run with the last one of its optimizer step."""
        objective = self._objective(items)
        if objective.smoothing is None and self.model_accepts_loss_kwargs and items is not None:
            batch["num_items_in_batch"] = items
        if not pipelined.runs_batches_together:
            return pipelined.train_batch(batch, objective)
        self._group.append(batch)
        if len(self._group) < self._group_size:
            return torch.zeros(())
        group, self._group = self._group, []
        return pipelined.train_batches(group, objective)

    def _objective(self, items: Any) -> _Objective:
        """The loss that `Trainer.compute_loss` and `Trainer.training_step` compute."""
        scaled = getattr(self, "loss_is_scaled_for_ga", None)
        if scaled is None:
            scaled = self.model_accepts_loss_kwargs and items is not None
        divisor = 1 if scaled else self.current_gradient_accumulation_steps
        smoothing = None
        if self.label_smoother is not None:
            shifts = _class_name(self.model) in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
            smoothing = {"smoother": self.label_smoother, "shifts": shifts, "items": items}
        return _Objective(bool(scaled), divisor, smoothing)

    def _divide_optimizer(self, pipelined: PipelinedModel) -> None:
        """Have the workers step the optimizer, if they have parameters of their own."""
        outer = self.optimizer
        if outer is None or pipelined.pipe is None or pipelined.pipe.shares_model:
            return
        if isinstance(outer, AcceleratedOptimizer):
            outer.optimizer = pipelined.divide(outer.optimizer)
        else:
            self.optimizer = pipelined.divide(outer)

    # -- evaluation ----------------------------------------------------------------------------

    def prediction_step(
        self,
        model: nn.Module,
        inputs: _Inputs,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Any, Any, Any]:
        """Run a batch through the pipeline without gradients; see `Trainer.prediction_step`."""
        pipelined = self._wrap_model(self.model)
        found: tuple[Any, Any, Any] = super().prediction_step(
            pipelined, inputs, prediction_loss_only, ignore_keys
        )
        return found

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate as `Trainer.evaluation_loop` does."""
        self._fetch()
        return super().evaluation_loop(*args, **kwargs)

    # -- checkpoints ---------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model as `Trainer.save_model` does. Under torchrun all ranks must call it."""
        self._fetch()
        super().save_model(output_dir, _internal_call)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save the state of the optimizer, which all ranks gather and one writes."""
        optimizer = self.optimizer
        if optimizer is None or self._pipelined is None or self._pipelined.pipe is None:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        self.optimizer = _Gathered(optimizer.state_dict())
        try:
            super()._save_optimizer_and_scheduler(output_dir)
        finally:
            self.optimizer = optimizer

    def _save_rng_state(self, output_dir: str) -> None:
        """Save the random generators, and what the random numbers of the pipeline depend on."""
        super()._save_rng_state(output_dir)
        pipelined = self._pipelined
        if self.args.should_save and pipelined is not None and pipelined.pipe is not None:
            Path(output_dir, _STATE).write_text(json.dumps(pipelined.state()))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Restore the random generators, and what the random numbers of the pipeline depend on."""
        super()._load_rng_state(checkpoint)
        if checkpoint is None:
            return
        file = Path(checkpoint, _STATE)
        if file.is_file() and self._pipelined is not None:
            self._pipelined.load(json.loads(file.read_text()))

    def end(self) -> None:
        """Stop the workers and, as `Trainer.end` does, the process group."""
        self._close()
        end = getattr(super(), "end", None)  # transformers 5.0 has none
        if end is not None:
            end()

    def _fetch(self) -> None:
        """Bring all weights to the model of this process, if they are with the workers."""
        pipe = self._pipelined.pipe if self._pipelined is not None else None
        if pipe is not None and not pipe.shares_model:
            pipe.fetch()

    def _close(self) -> None:
        if self._pipelined is not None:
            self._pipelined.close()


class PenstockTrainer(PenstockMixin, Trainer):
    """A `transformers.Trainer` that runs its model through a `Pipeline`.

    The model stays the user's, and so do arguments, callbacks, metrics and checkpoints. The
    pipeline is built for the first batch. For the same micro-batches, gradients and weights are
    bitwise those of the plain Trainer: with `gradient_accumulation_steps` these are the batches of
    an optimizer step, without it the parts into which a batch is split. See
    docs/integrations/transformers.md.

    Args:
        *args: as `transformers.Trainer` takes them.
        pipeline: keyword arguments of `Pipeline`, such as `{"devices": 2, "num_microbatches": 4}`;
            by default none.
        **kwargs: as `transformers.Trainer` takes them.

    Raises:
        InputError: `pipeline` contains something else, or the training arguments ask for what a
            pipeline replaces or cannot do: DeepSpeed, FSDP, `torch_compile`, float16.
    """


@dataclass(frozen=True)
class _Objective:
    """The loss of a batch, as the Trainer computes it.

    Attributes:
        scaled: whether it is a sum that was divided by the number of items of all batches of the
            optimizer step; otherwise it is a mean.
        divisor: what a mean is divided by: the number of batches of the optimizer step.
        smoothing: arguments of `_smoothed`; `None` for the loss that the model returns.
    """

    scaled: bool
    divisor: int
    smoothing: Mapping[str, Any] | None

    def arguments(self, batches: Sequence[_Inputs]) -> tuple[list[_Inputs], list[Any], _Inputs]:
        """What the model gets of batches, what the loss gets, and its keyword arguments."""
        more: _Inputs = {"divisor": self.divisor}
        if self.smoothing is None or any("labels" not in batch for batch in batches):
            return list(batches), [], {"loss_fn": _returned, "loss_kwargs": more}
        more |= self.smoothing
        inputs = [{n: v for n, v in batch.items() if n != "labels"} for batch in batches]
        targets = [batch["labels"] for batch in batches]
        return inputs, targets, {"loss_fn": _smoothed, "loss_kwargs": more}


class PipelinedModel:
    """A model that is called through a pipeline, which is built for the first batch.

    Everything but calls is the model's own: `parameters()`, `train()`, `config`, and so on.

    Args:
        model: the user's.
        options: keyword arguments of `Pipeline`.
        accumulated: the batches of an optimizer step.
        accelerator: knows in which precision the model runs.

    Attributes:
        model: the user's.
        pipe: the pipeline; `None` before the first batch.
        runs_batches_together: whether the batches of an optimizer step are the micro-batches of
            one pass.
        is_accumulating: whether a batch of the present optimizer step was run.
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
        self._accumulated = accumulated
        self._accelerator = accelerator
        self._shapes: list[_Shapes] = []  # all that were seen and need a pipeline of their own
        self._sums: bool | None = None
        self._trains = False  # whether the pipeline was built for training
        self._random_state: Mapping[str, int] | None = None
        self._num_microbatches: int | str = "auto"
        self._divided: PipelineOptimizer | None = None
        self._kept: dict[str, Any] | None = None  # of a divided optimizer, of a pipeline before

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["model"], name)

    def _get_name(self) -> str:
        """The class of the model, by which the Trainer tells what its labels are."""
        return _class_name(self.model)

    # -- the pipeline --------------------------------------------------------------------------

    def _prepare(self, batch: _Inputs, trains: bool, repeated: int = 1) -> Pipeline:
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
        given: _Inputs = {"dynamic": _varying(self._shapes), **self._options}
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
        args, kwargs = _by_position(example)
        with self._accelerator.autocast():
            self.pipe = Pipeline(self.model, args, kwargs, merge="list", **given)
        self._trains = trains
        if self._random_state is not None:
            self.pipe.load_random_state(self._random_state)
        return self.pipe

    def _leave_weights(self, shapes: _Shapes) -> None:
        """Have the weights in this process, before another pipeline divides the model anew.

        Raises:
            InputError: there are gradients with the workers, who would not have them then.
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

    def train_batch(self, batch: _Inputs, objective: _Objective) -> torch.Tensor:
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

    def train_batches(self, batches: Sequence[_Inputs], objective: _Objective) -> torch.Tensor:
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
        whole batch.

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
        if len(parts) == 1:
            return parts[0]
        first = parts[0]
        has_loss = "num_items_in_batch" in kwargs and (
            not isinstance(first, Mapping) or first.get("loss") is not None
        )
        is_sum = has_loss and self._is_sum(batch)
        return _together(parts, _rows(batch, len(parts)), is_sum)

    def _is_sum(self, batch: _Inputs) -> bool:
        """Whether the model divides its loss by the number of items, as the Trainer takes it to.

        Some models accept `num_items_in_batch` and return a mean over the rows that they get. They
        are asked once: with twice the number the loss is half as large, or the same.
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
                f"a part of the loss of {_class_name(self.model)} depends on "
                f"num_items_in_batch, and another does not: it is {once.item():.6g}, and "
                f"{half.item():.6g} for twice the number. Such a part is added up over "
                "micro-batches, as the Trainer does with gradient_accumulation_steps",
                stacklevel=2,
            )
        self._sums = not torch.equal(once, half)
        return self._sums


class _OneProcess(Accelerator):  # type: ignore[misc]
    """An accelerator that leaves ranks to the pipeline: all have the same batches and results."""

    clip: Callable[[float, float], torch.Tensor]

    @property
    def distributed_type(self) -> DistributedType:
        return DistributedType.NO

    @property
    def use_distributed(self) -> bool:
        return False

    @property
    def num_processes(self) -> int:
        return 1

    @property
    def process_index(self) -> int:
        return 0

    def gather(self, tensor: Any) -> Any:
        return tensor

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        return input_data

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        return tensor

    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False
    ) -> Any:
        return tensor

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        return self.clip(max_norm, norm_type)


class _Gathered:
    """An optimizer's state that all ranks have gathered, for the one that writes it."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        return self._state


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


def _shapes_of(batch: _Inputs) -> _Shapes:
    return {n: tuple(v.shape[1:]) for n, v in batch.items() if isinstance(v, torch.Tensor)}


def _varying(seen: Sequence[_Shapes]) -> dict[str, dict[int, str]]:
    """The dimensions that vary, as `Pipeline(dynamic=)` takes them; those that agree share a name.

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
    """Whether a pipeline that was built for such shapes takes a batch of this one."""
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
    """A tensor with its rows so often."""
    if times == 1 or not isinstance(value, torch.Tensor) or value.ndim == 0:
        return value
    return torch.cat([value] * times)


def _by_position(batch: Mapping[Any, Any]) -> tuple[tuple[Any, ...], _Inputs]:
    """Arguments whose names are numbers, and the others."""
    args = tuple(batch[k] for k in sorted(name for name in batch if isinstance(name, int)))
    return args, {name: value for name, value in batch.items() if isinstance(name, str)}


def _rows(batch: _Inputs, count: int) -> list[int]:
    """The rows of so many micro-batches of a batch."""
    rows = next(len(v) for v in batch.values() if isinstance(v, torch.Tensor) and v.ndim)
    return [len(part) for part in torch.empty(rows).tensor_split(count)]


def _together(
    parts: Sequence[Any], rows: Sequence[int], is_sum: bool, is_loss: bool = False
) -> Any:
    """The result of a batch of those of its micro-batches.

    Args:
        parts: the results.
        rows: of every micro-batch.
        is_sum: whether the loss is a sum; otherwise it is a mean over rows.
        is_loss: whether these are losses.

    Raises:
        InputError: they are neither tensors nor containers of them.
    """
    first = parts[0]
    if isinstance(first, torch.Tensor):
        if first.ndim:
            return torch.cat(list(parts))
        shares = [1.0 if is_sum and is_loss else count / sum(rows) for count in rows]
        total = parts[0] * shares[0]
        for part, share in zip(parts[1:], shares[1:], strict=True):
            total = total + part * share
        return total
    if isinstance(first, Mapping):
        made = {
            name: _together([part[name] for part in parts], rows, is_sum, name == "loss")
            for name in first
        }
        return type(first)(**made)
    if isinstance(first, (tuple, list)):
        items = zip(*parts, strict=True)
        return type(first)([_together(item, rows, is_sum, k == 0) for k, item in enumerate(items)])
    if all(part is None or part == first for part in parts):
        return first
    raise InputError(
        f"the model returned a {type(first).__name__} for each of {len(parts)} micro-batches, "
        "which cannot be put together: have the model not return it (use_cache=False for a cache "
        'of keys and values), or use pipeline={"num_microbatches": 1}'
    )


# -- checks ----------------------------------------------------------------------------------------


def _class_name(model: Any) -> str:
    """The class of a model, inside of adapters of PEFT."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return type(inner).__name__


def _checked(pipeline: object) -> dict[str, Any]:
    """The keyword arguments of `Pipeline` that the user has given.

    Raises:
        InputError: they are something else.
    """
    if pipeline is None:
        return {}
    if not isinstance(pipeline, Mapping):
        what = f"pipeline={pipeline!r}" if isinstance(pipeline, (int, str)) else type(pipeline)
        raise InputError(
            f"{what} is no dict of keyword arguments of Pipeline, such as "
            'pipeline={"devices": 2, "num_microbatches": 4}'
        )
    if "merge" in pipeline:
        raise InputError(
            "pipeline={'merge': ...} is not given: the Trainer puts results together itself"
        )
    check_options(pipeline)
    return dict(pipeline)


_REFUSED = {
    "fp16": "float16 needs a loss scale, which the pipeline does not take from Accelerate; use "
    "bf16=True",
    "fp16_full_eval": "it converts the model's weights; run with bf16=True instead",
    "bf16_full_eval": "it converts the model's weights; run with bf16=True instead",
    "deepspeed": "Penstock divides the model itself",
    "fsdp": "Penstock divides the model itself",
    "parallelism_config": "Penstock divides the model itself",
    "torch_compile": "compile submodules of the model before it is given to the Trainer; each "
    "stays whole",
}


def _check_arguments(args: Any) -> None:
    """Check that nothing is asked for that a pipeline replaces or cannot do.

    Raises:
        InputError: something is.
    """
    for name, why in _REFUSED.items():
        value = getattr(args, name, None)
        if value:
            raise InputError(f"{name}={value!r} cannot be used with a pipeline: {why}")


def _check_accelerator(accelerator: Accelerator) -> None:
    """Check that `accelerate launch` was not told to divide the model or to use float16.

    Raises:
        InputError: it was.
    """
    kind, known = accelerator.distributed_type, ("NO", "MULTI_CPU", "MULTI_GPU")
    if kind.value not in known:
        raise InputError(
            f"Accelerate was set up for {kind.value}, which cannot be used with a pipeline: "
            "Penstock divides the model itself; start the script by torchrun"
        )
    if accelerator.mixed_precision not in ("no", "bf16"):
        raise InputError(
            f"mixed precision {accelerator.mixed_precision!r} cannot be used with a pipeline; "
            "use bf16=True"
        )
