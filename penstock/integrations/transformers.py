"""The Trainer of transformers, with its model split by a `Pipeline`; see docs/integrations.

from penstock.integrations.transformers import PenstockTrainer

trainer = PenstockTrainer(model, args, train_dataset=data, pipeline={"devices": 2})
trainer.train()
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from torch import nn
from transformers import Trainer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from penstock.errors import InputError
from penstock.integrations.accelerate import check_not_compiled
from penstock.integrations.late import are_ranks, check_cpus, check_options
from penstock.integrations.trainer_model import Inputs, Objective, TrainerModel, class_name
from penstock.pipeline import Pipeline

if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object

_STATE = "penstock.json"  # beside the Trainer's own files in a checkpoint


class PenstockMixin(_Base):  # type: ignore[misc]
    """Makes any subclass of `transformers.Trainer` run its model through a `Pipeline`.

    `class MyTrainer(PenstockMixin, SFTTrainer): pass`. See `PenstockTrainer`.
    """

    model: Any
    optimizer: Any
    _pipelined: TrainerModel | None = None

    def __init__(
        self, *args: Any, pipeline: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        self._options = _checked(pipeline)
        self._group: list[Inputs] = []  # batches of this optimizer step that are still to be run
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
        _check_arguments(self.args, self._options)
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

    def get_train_dataloader(self) -> Any:
        """The Trainer's loader; its worker processes have the same seeds on all ranks."""
        loader = super().get_train_dataloader()
        inner = getattr(loader, "base_dataloader", loader)  # of Accelerate's
        begin = inner.worker_init_fn
        if isinstance(begin, partial) and "rank" in begin.keywords:
            inner.worker_init_fn = partial(begin, rank=0)
        return loader

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
            self._pipelined = TrainerModel(self.model, self._options, accumulated, self.accelerator)
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
        self, model: nn.Module, inputs: Inputs, num_items_in_batch: Any = None
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
        pipelined.optimizer = self.optimizer
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
        """Whether the loss is the model's or the Trainer's own, not one of a subclass or the user.

        Such a loss is computed in the last stage, micro-batch by micro-batch. Other losses may use
        the results of a batch in any way, so they get those of the whole batch.
        """
        training_step: Any = super().training_step
        return (
            training_step.__func__ is Trainer.training_step
            and type(self).compute_loss is Trainer.compute_loss
            and self.compute_loss_func is None
        )

    def _run(self, pipelined: TrainerModel, batch: Inputs, items: Any) -> torch.Tensor:
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

    def _objective(self, items: Any) -> Objective:
        """The loss that `Trainer.compute_loss` and `Trainer.training_step` compute."""
        scaled = getattr(self, "loss_is_scaled_for_ga", None)
        if scaled is None:
            scaled = self.model_accepts_loss_kwargs and items is not None
        divisor = 1 if scaled else self.current_gradient_accumulation_steps
        smoothing = None
        if self.label_smoother is not None:
            shifts = class_name(self.model) in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
            smoothing = {"smoother": self.label_smoother, "shifts": shifts, "items": items}
        return Objective(bool(scaled), divisor, smoothing)

    def _divide_optimizer(self, pipelined: TrainerModel) -> None:
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
        inputs: Inputs,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Any, Any, Any]:
        """Run a batch through the pipeline without gradients; see `Trainer.prediction_step`."""
        pipelined = self._wrap_model(self.model)
        with self._generating(pipelined, inputs):
            found: tuple[Any, Any, Any] = super().prediction_step(
                pipelined, inputs, prediction_loss_only, ignore_keys
            )
        return found

    @contextmanager
    def _generating(self, pipelined: TrainerModel, inputs: Inputs) -> Iterator[None]:
        """While open, `self.model.generate` of a Trainer that generates runs in the pipeline."""
        if not getattr(self.args, "predict_with_generate", False):
            yield
            return
        if pipelined.pipe is None:
            pipelined.prepare(self._prepare_inputs(dict(inputs)), trains=False)
        own, self.model = self.model, pipelined
        try:
            yield
        finally:
            self.model = own

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate as `Trainer.evaluation_loop` does, with all weights fetched from the workers."""
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


class PenstockTrainer(PenstockMixin, Trainer):  # type: ignore[misc]
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


# -- checks ----------------------------------------------------------------------------------------


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
    "auto_find_batch_size": "what a stage without memory raises is a WorkerError, after which "
    "Accelerate does not try again; set per_device_train_batch_size",
    "torch_empty_cache_steps": "forwards and backwards of micro-batches alternate, so a step has "
    "no point at which memory is to be returned; leave it out",
}

_CHECKPOINTING = ("activation_checkpointing", "gradient_checkpointing")  # which is the older name


def _check_arguments(args: Any, options: Mapping[str, Any]) -> None:
    """Check that the training arguments select nothing that a pipeline replaces or cannot do.

    Raises:
        InputError: an argument does.
    """
    for name, why in _REFUSED.items():
        value = getattr(args, name, None)
        if value:
            raise InputError(f"{name}={value!r} cannot be used with a pipeline: {why}")
    optimizer = str(getattr(args.optim, "value", args.optim))
    if optimizer in ("lomo", "adalomo") or optimizer.endswith("_layerwise"):
        raise InputError(
            f"optim={optimizer!r} cannot be used with a pipeline: it updates parameters within the "
            "backward, and every micro-batch has a backward; use an optimizer that steps after it"
        )
    checkpoints = any(getattr(args, name, None) for name in _CHECKPOINTING)
    if checkpoints and "recompute" not in options and "plan" not in options:
        warnings.warn(
            "activation_checkpointing=True saves no memory in layers that are divided into "
            "calls: say what is computed again, pipeline={'recompute': 'all'}",
            stacklevel=2,
        )
    if args.use_cpu:
        check_cpus("use_cpu=True", options)
    if are_ranks(options):
        _check_ranks(args)


def _check_ranks(args: Any) -> None:
    """Check that the training arguments make all ranks do the same at the same time.

    Raises:
        InputError: an argument would not.
    """
    if getattr(args, "enable_jit_checkpoint", False):
        raise InputError(
            "enable_jit_checkpoint=True cannot be used under torchrun: ranks save together, and "
            "SIGTERM comes to each at another step; save every few steps, save_steps=..."
        )
    if getattr(args, "train_sampling_strategy", "") == "batch_rebalance":
        raise InputError(
            "train_sampling_strategy='batch_rebalance' cannot be used under torchrun: it gives "
            "ranks different rows, and the ranks of a pipeline run the same ones; use "
            "'group_by_length'"
        )


def _check_accelerator(accelerator: Accelerator) -> None:
    """Check that `accelerate launch` leaves the model whole, uncompiled, in float32 or bfloat16.

    Raises:
        InputError: it does not.
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
    check_not_compiled(accelerator)
