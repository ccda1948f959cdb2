"""Accelerate: a model that is prepared as a pipeline. See docs/integrations/accelerate.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType, DynamoBackend
from torch import nn

from penstock.errors import InputError
from penstock.integrations.late import LatePipeline, check_cpus
from penstock.integrations.module import PipelinedModule
from penstock.pipeline import Pipeline


def prepare(accelerator: Accelerator, model: object, **options: Any) -> Any:
    """Prepare a model so that its calls run through a pipeline.

    What it returns is used like the result of `accelerator.prepare(model)`. The pipeline is built
    by the first call, whose arguments are its example. `save_state` and `load_state` include the
    pipeline's random state and number of micro-batches.

    Args:
        accelerator: of one process; optimizers, loaders and schedulers are prepared with it as
            usual.
        model: any module that is not prepared.
        **options: of `penstock.Pipeline`, such as `devices=`, `num_microbatches=` and `workers=`.

    Returns:
        the prepared module, an `nn.Module` with the parameters and the state dict of the model.

    Raises:
        InputError: the accelerator has several processes, or does what a pipeline cannot; or the
            model is prepared, or a pipeline; or `Pipeline` has no such option.
    """
    if accelerator.num_processes > 1:
        raise InputError(
            f"the Accelerator has {accelerator.num_processes} processes, to which it gives parts "
            "of the batches, while a pipeline's ranks run the same ones. Start the script with "
            'python instead, and use workers="processes"; or use a pipeline without Accelerate '
            "under torchrun"
        )
    if isinstance(model, Pipeline):
        raise InputError(
            "a Pipeline was given, which Accelerate does not save; prepare its model instead: "
            "prepare(accelerator, model, devices=...)"
        )
    if getattr(model, "_is_accelerate_prepared", False):
        raise InputError(
            "the model is prepared already, which may have replaced its forward; give the model "
            "itself, as it was before accelerator.prepare"
        )
    if not isinstance(model, nn.Module):
        raise InputError(
            f"a {type(model).__name__} was given, not an nn.Module; optimizers, loaders and "
            "schedulers are prepared with accelerator.prepare"
        )
    _check(accelerator)
    module = PipelinedModule(model, **options)
    if accelerator.device.type == "cpu":
        check_cpus("Accelerator(cpu=True)", options)
    late = module.late
    if late.are_ranks:
        raise InputError('under Accelerate, workers= is "threads" or "processes"')
    late.home, late.optimizers = accelerator.device, lambda: accelerator._optimizers
    _save_with(accelerator, late)
    return accelerator.prepare(module, device_placement=[False])  # the pipeline places its stages


def _check(accelerator: Accelerator) -> None:
    """Raise if an accelerator divides the model itself, or replaces parts of it.

    Raises:
        InputError: it does.
    """
    kind = accelerator.distributed_type
    if kind != DistributedType.NO:
        raise InputError(
            f"Accelerate was set up for {kind.value}, which divides the model itself, as Penstock "
            "does: use one of them"
        )
    if accelerator.mixed_precision == "fp8":
        raise InputError(
            "mixed_precision='fp8' replaces layers of the model when it is prepared, which the "
            "pipeline would not see: use 'bf16'"
        )
    check_not_compiled(accelerator)


def check_not_compiled(accelerator: Accelerator) -> None:
    """Raise if an accelerator compiles what it prepares.

    Raises:
        InputError: it does.
    """
    backend = accelerator.state.dynamo_plugin.backend
    if backend != DynamoBackend.NO:
        raise InputError(
            f"Accelerate was set up to compile models by {backend.value.lower()}, which cannot be "
            "used with a pipeline; compile submodules of the model, each of which stays whole"
        )


def _save_with(accelerator: Accelerator, late: LatePipeline) -> None:
    """Have an accelerator save and load the state of a pipeline.

    It is in a file of its own, as Accelerate does not load a folder in which an object is missing
    that was registered with it, or in which there is one more.
    """
    number = sum(isinstance(model, PipelinedModule) for model in accelerator._models)
    name = f"penstock_{number}.json" if number else "penstock.json"

    def save(models: Any, weights: Any, folder: str) -> None:
        state = late.state()
        if state is not None:
            Path(folder, name).write_text(json.dumps(state))

    def load(models: Any, folder: str) -> None:
        file = Path(folder, name)
        if file.is_file():
            late.load(json.loads(file.read_text()))

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
