"""Lightning: strategies for its `Trainer` and for Fabric. See docs/integrations/lightning.md."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.strategies.single_device import SingleDeviceStrategy
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.optim import Optimizer

from penstock.devices.choice import device_choices, existing_devices
from penstock.errors import InputError
from penstock.integrations.late import LatePipeline, are_ranks, check_cpus, check_options, place_of
from penstock.integrations.module import PipelinedModule
from penstock.integrations.optimizers import Divided
from penstock.pipeline import Pipeline
from penstock.training.scaling import PipelineScaler
from penstock.workers.ranks.process_groups import init_process_group

T = TypeVar("T")

_KEY = "penstock"
"""The key of a checkpoint for what belongs to the pipelines."""


class _Ranks:
    """What a strategy does with other processes: under torchrun all ranks run the same script.

    They are one trainer: every rank has the same batches, and gets the same outputs, losses and
    metrics. So there is nothing to add up, and the world that Lightning sees has one process.

    Args:
        options: of `penstock.Pipeline`.

    Attributes:
        several: whether there are other ranks.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.several = are_ranks(options)

    @property
    def rank(self) -> int:
        if not self.several:
            return 0
        return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))

    def begin(self) -> None:
        """Connect the ranks.

        Raises:
            InputError: their random numbers differ, so their batches may.
        """
        if not self.several:
            return
        if not dist.is_initialized():
            init_process_group()
        rank_zero_only.rank = self.rank  # type: ignore[attr-defined]
        seeds: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(seeds, torch.initial_seed())
        if len(set(seeds)) > 1:
            raise InputError(
                "under torchrun all ranks train on the same batches, but their seeds differ "
                f"({seeds[0]} on rank 0, {next(s for s in seeds if s != seeds[0])} on another): "
                "call lightning.seed_everything(...) at the beginning of the script"
            )

    def barrier(self) -> None:
        if self.several and dist.is_initialized():
            dist.barrier()

    def broadcast(self, obj: T, src: int) -> T:
        if not (self.several and dist.is_initialized()):
            return obj
        box = [obj]
        dist.broadcast_object_list(box, src)
        return box[0]

    def decide(self, decision: bool, every: bool) -> bool:
        """Whether the decision is true on all ranks (`every`), or on any of them."""
        if not (self.several and dist.is_initialized()):
            return decision
        decisions: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(decisions, bool(decision))
        return all(decisions) if every else any(decisions)


class PenstockStrategy(Strategy):
    """Runs modules of a `LightningModule` through pipelines, in training and in evaluation.

    Steps stay as they are: while one runs, calls of the module, `self.net(x)`, are calls of the
    pipeline. It is built by the first such call, whose arguments are its example.

    Args:
        module: the name of the module that is split over the devices, several names for a pipeline
            each, or `""` for the `LightningModule` itself, called as `self(x)`. By default the only
            child with parameters.
        precision_plugin, checkpoint_io, accelerator: as of any strategy of Lightning.
        **options: of `penstock.Pipeline`, such as `devices=`, `num_microbatches=` and `workers=`.
            Without `devices=` those of the `Trainer` are used, if they are several.

    Raises:
        InputError: `Pipeline` has no such option.
    """

    def __init__(
        self,
        module: str | Sequence[str] | None = None,
        *,
        accelerator: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        **options: Any,
    ) -> None:
        check_options(options)
        super().__init__(accelerator, checkpoint_io, precision_plugin)
        self._chosen = module
        self._options = options
        self._ranks = _Ranks(options)
        self._late: dict[str, LatePipeline] = {}
        self._states: dict[str, dict[str, Any]] = {}
        self._divided: list[Divided] = []
        self._parallel_devices: list[torch.device] = []
        self._stack = ExitStack()

    # -- where -------------------------------------------------------------------------------

    @property
    def parallel_devices(self) -> list[torch.device]:
        """The devices of the `Trainer`, set by it; empty before."""
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device]) -> None:
        self._parallel_devices = list(devices or [])
        given, count = self._options.get("devices"), len(self._parallel_devices)
        if count > 1 and given is not None and not self._ranks.several:
            own = given if isinstance(given, int) else len(list(given))
            if own != count:
                raise InputError(
                    f"Trainer has {count} devices and the strategy devices={given!r}: give "
                    "devices= to one of them"
                )

    @property
    def root_device(self) -> torch.device:
        """Where batches are put: the device of the last stage, where the results come out."""
        if self._ranks.several:
            local = self._parallel_devices or [torch.device("cpu")]
            return local[_local_rank() % len(local)]
        given = self._options.get("devices")
        if given is not None:
            return existing_devices(given)[-1]
        return self._parallel_devices[-1] if self._parallel_devices else torch.device("cpu")

    @property
    def is_global_zero(self) -> bool:
        """Whether this process writes files and logs."""
        return self.global_rank == 0

    @property
    def global_rank(self) -> int:
        """The rank of this process under torchrun, otherwise 0."""
        return self._ranks.rank

    def setup_environment(self) -> None:
        self._ranks.begin()
        super().setup_environment()

    def model_to_device(self) -> None:
        """Move what is not in a pipeline; a pipeline's stages are moved when it is built."""
        assert self.lightning_module is not None
        split = {id(m) for late in self._late.values() for m in late.model.modules()}
        for module in self.lightning_module.modules():
            if id(module) not in split:
                _move_own(module, self.root_device)
        _update_properties(self.lightning_module, device=self.root_device)

    # -- pipelines ---------------------------------------------------------------------------

    @property
    def pipelines(self) -> dict[str, Pipeline]:
        """The pipelines that there are, by the names of their modules."""
        return {name: late.pipe for name, late in self._late.items() if late.pipe is not None}

    def train_step(self, *args: Any, **kwargs: Any) -> Any:
        """Forward and backward at once, for manual optimization; see `Pipeline.train_step`.

        The backwards of the first micro-batches run while others are still in their forward, which
        is faster and needs less memory than `self.net(x)` and `self.manual_backward(loss)`. The
        loss is scaled if the precision plugin has a scaler.

        Raises:
            InputError: optimization is automatic, or there are several pipelines.
        """
        module = self.lightning_module
        if module is not None and module.automatic_optimization:
            raise InputError(
                "train_step computes the gradients, which automatic optimization clears after "
                "training_step. Set self.automatic_optimization = False and call the optimizer's "
                "zero_grad and step, or call the module as usual and return the loss"
            )
        if len(self._late) != 1:
            raise InputError(
                f"there are pipelines of {_listed(self._late)}; train_step is that of a single one"
            )
        (late,) = self._late.values()
        return late.train_step(*args, **kwargs)

    def setup(self, trainer: pl.Trainer) -> None:
        module = self.lightning_module
        assert module is not None
        options = self._options
        if isinstance(self.accelerator, CPUAccelerator):
            check_cpus('Trainer(accelerator="cpu")', options)
        if "devices" not in options and len(self._parallel_devices) > 1 and not self._ranks.several:
            options = {**options, "devices": self._parallel_devices}
        found = _found(module, self._chosen)
        for name, part in found.items():
            if name not in self._late or self._late[name].model is not part:
                self._late[name] = LatePipeline(part, options)
        self._late = {name: self._late[name] for name in found}
        for late in self._late.values():
            late.home, late.optimizers = self.root_device, lambda: self.optimizers
            late.scaler = self._scaler
        self._load_states()
        super().setup(trainer)

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        super().setup_optimizers(trainer)
        if self._ranks.several:
            self._divided = [Divided(each, self._pipeline_of) for each in self.optimizers]

    def setup_precision_plugin(self) -> None:
        super().setup_precision_plugin()
        if self._ranks.several:
            self._stack.enter_context(self._clipping())

    @contextmanager
    def _clipping(self) -> Iterator[None]:
        """While open, gradients are clipped by all ranks, as none has all of them."""
        plugin = self.precision_plugin

        def by_norm(optimizer: Optimizer, clip_val: float) -> None:
            parameters = list(plugin.main_params(optimizer))
            self._pipeline_of(parameters).clip_grad_norm_(clip_val, parameters=parameters)

        def by_value(optimizer: Optimizer, clip_val: float) -> None:
            parameters = list(plugin.main_params(optimizer))
            self._pipeline_of(parameters).clip_grad_value_(clip_val, parameters=parameters)

        vars(plugin).update(clip_grad_by_norm=by_norm, clip_grad_by_value=by_value)
        try:
            yield
        finally:
            for name in ("clip_grad_by_norm", "clip_grad_by_value"):
                vars(plugin).pop(name, None)

    def _pipeline_of(self, parameters: Sequence[torch.Tensor]) -> Pipeline:
        return _pipeline_of(self._late, parameters)

    # -- steps -------------------------------------------------------------------------------

    @contextmanager
    def _routed(self, is_split: bool = True) -> Iterator[None]:
        """While open, calls of the modules are calls of their pipelines, or run them whole."""
        with ExitStack() as stack:
            for late in self._late.values():
                stack.enter_context(late.routed(is_split))
            yield

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._routed():
            result = super().training_step(*args, **kwargs)
        if not self.pipelines:
            raise InputError(
                f"training_step did not call {_listed(self._late)}, so nothing ran in a pipeline. "
                "Call it as a function, self.net(x), not self.net.forward(x) and not its parts; or "
                "name the module that is called, PenstockStrategy(module=...)"
            )
        return result

    def _scaler(self) -> PipelineScaler | None:
        return _scaler_of(self.precision_plugin, self._late, self._stack)

    def backward(self, closure_loss: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self._ranks.several:
            self._scaler()
        with ExitStack() as stack:
            for late in self._late.values():  # in manual optimization it is within a step
                stack.enter_context(late.direct())
            return super().backward(closure_loss, *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._evaluating():
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._evaluating():
            return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._evaluating():
            return super().predict_step(*args, **kwargs)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Route calls to the pipelines, or run the models whole before the first training batch.

        So the first training batch builds the pipeline, not one of Lightning's sanity check. A
        model whose weights are on several devices, or on none yet, cannot be run whole.
        """
        module = self.lightning_module
        assert module is not None
        is_early = module.trainer.state.fn == TrainerFn.FITTING and not self.pipelines
        is_whole = is_early and all(place_of(late.model) for late in self._late.values())
        with self._routed(is_split=not is_whole):
            yield

    # -- checkpoints -------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        self._fetch()
        return super().lightning_module_state_dict()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        states = {name: late.state() for name, late in self._late.items()}
        known = {name: state for name, state in states.items() if state is not None}
        if known:
            checkpoint[_KEY] = known
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(*args, **kwargs)
        self._states = checkpoint.get(_KEY, {})
        self._load_states()
        return checkpoint

    def _load_states(self) -> None:
        for name, state in self._states.items():
            if name in self._late:
                self._late[name].load(state)
        if self._late:
            self._states = {}

    def _fetch(self) -> None:
        if self._ranks.several:
            for late in self._late.values():
                late.fetch()

    def on_train_end(self) -> None:
        """Leave everything in every rank, for what the script does after `fit`."""
        self._fetch()
        for optimizer in self._divided:
            optimizer.gather()
        self._divided = []
        super().on_train_end()

    def teardown(self) -> None:
        self._stack.close()
        for late in self._late.values():
            late.close()
        super().teardown()

    # -- other processes ---------------------------------------------------------------------

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """The value itself: all ranks have the same."""
        return tensor

    def all_gather(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The value itself: all ranks have the same."""
        return tensor

    def barrier(self, name: str | None = None) -> None:
        self._ranks.barrier()

    def broadcast(self, obj: T, src: int = 0) -> T:
        return self._ranks.broadcast(obj, src)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return self._ranks.decide(decision, all)


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", 0))


def _found(module: pl.LightningModule, chosen: str | Sequence[str] | None) -> dict[str, nn.Module]:
    """The modules that are to be split, by name.

    Raises:
        InputError: there is no such module, or it has to be named.
    """
    kind = type(module).__name__
    if chosen is None:
        children = {
            n: c for n, c in module.named_children() if next(c.parameters(), None) is not None
        }
        if len(children) == 1:
            return children
        if not children:
            raise InputError(f"{kind} has no child with parameters, so there is nothing to split")
        first = next(iter(children))
        raise InputError(
            f"{kind} has several children with parameters, {_listed(children)}: say which is split "
            f'over the devices, PenstockStrategy(module="{first}"), or module="" for {kind} itself '
            "if its steps call self(x)"
        )
    names = [chosen] if isinstance(chosen, str) else list(chosen)
    known = dict(module.named_modules())
    for name in names:
        if name not in known:
            raise InputError(
                f"{kind} has no module {name!r}; its children are "
                f"{_listed(dict(module.named_children()))}"
            )
    for name, other in itertools.permutations(names, 2):
        if any(part is known[name] for part in known[other].modules()):
            raise InputError(f"{name!r} is a part of {other!r}: only one of them can be split")
    return {name: known[name] for name in names}


def _pipeline_of(known: Mapping[Any, LatePipeline], parameters: Sequence[torch.Tensor]) -> Pipeline:
    """The pipeline that has all of these parameters.

    Raises:
        InputError: there is none.
    """
    for late in known.values():
        if late.pipe is not None and late.has(parameters):
            return late.pipe
    raise InputError(
        f"under torchrun each optimizer belongs to one pipeline, and the {len(parameters)} "
        "parameters of this one are not all in one that has been called: give every pipelined "
        "module an optimizer of its own, and freeze or move into the module what is outside; or "
        'use workers="processes"'
    )


def _scaler_of(
    plugin: Any, known: Mapping[Any, LatePipeline], stack: ExitStack
) -> PipelineScaler | None:
    """The loss scaler of a precision plugin, which is replaced by one of the pipeline.

    With it all ranks leave out the same steps, and `Pipeline.train_step` scales the loss.

    Args:
        plugin: any precision plugin.
        known: the pipelines.
        stack: puts the plugin's own scaler back when it is closed, with the scale of then.

    Returns:
        `None` if the plugin has no scaler, or there is no pipeline yet.

    Raises:
        InputError: there are several pipelines.
    """
    scaler = getattr(plugin, "scaler", None)
    if scaler is None or isinstance(scaler, PipelineScaler):
        return scaler
    if len(known) != 1:
        raise InputError(
            "16-mixed precision under torchrun works with one pipeline, and there are "
            f'{_listed(map(str, known))}; use "bf16-mixed", which needs no scaler'
        )
    (late,) = known.values()
    if late.pipe is None:
        return None
    own = late.pipe.scaler(enabled=scaler.is_enabled())
    own.load_state_dict(scaler.state_dict())
    plugin.scaler = own

    def put_back() -> None:
        scaler.load_state_dict(own.state_dict())
        plugin.scaler = scaler

    stack.callback(put_back)
    return own


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names) or "none"


def _move_own(module: nn.Module, device: torch.device) -> None:
    """Move a module's own parameters and buffers, without those of its children."""
    module._apply(lambda tensor: tensor.to(device), recurse=False)


class FabricPenstockStrategy(SingleDeviceStrategy):
    """Runs the modules that `Fabric.setup` is given through pipelines.

    Each pipeline is built by the first call of its module, whose arguments are its example.

    Args:
        accelerator, checkpoint_io, precision: as of any strategy of Fabric.
        **options: of `penstock.Pipeline`, such as `devices=`, `num_microbatches=` and `workers=`.

    Raises:
        InputError: `Pipeline` has no such option.
    """

    def __init__(
        self,
        *,
        accelerator: Any = None,
        checkpoint_io: Any = None,
        precision: Any = None,
        **options: Any,
    ) -> None:
        check_options(options)
        self._ranks = _Ranks(options)
        self._options = options
        self._modules: list[PipelinedModule] = []
        self._optimizers: list[Optimizer] = []
        self._stack = ExitStack()
        super().__init__(self._home(), accelerator, checkpoint_io, precision)
        self.global_rank = self._ranks.rank

    @property
    def is_global_zero(self) -> bool:
        """Whether this process writes files and prints."""
        return self._ranks.rank == 0

    def _home(self) -> torch.device:
        """Where batches are put: the device of the last stage, where the results come out."""
        given = self._options.get("devices")
        if not self._ranks.several and given is not None:
            return existing_devices(given)[-1]
        if given is not None or "plan" in self._options:
            return torch.device("cpu")
        own = device_choices(None)[-1]
        return own[_local_rank() % len(own)] if self._ranks.several else own[-1]

    def setup_environment(self) -> None:
        self._ranks.begin()
        super().setup_environment()

    def module_to_device(self, module: nn.Module) -> None:
        """Nothing: stages are moved when a pipeline is built."""

    def setup_module(self, module: nn.Module) -> nn.Module:
        wrapped = PipelinedModule(module, **self._options)
        wrapped.late.home, wrapped.late.optimizers = self.root_device, lambda: self._optimizers
        self._modules.append(wrapped)
        return wrapped

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        self._optimizers.append(optimizer)
        if self._ranks.several:
            Divided(optimizer, self._pipeline_of)
        return optimizer

    @property
    def _late(self) -> dict[str, LatePipeline]:
        return {str(k): module.late for k, module in enumerate(self._modules)}

    def _pipeline_of(self, parameters: Sequence[torch.Tensor]) -> Pipeline:
        return _pipeline_of(self._late, parameters)

    def backward(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        if self._ranks.several:
            _scaler_of(self.precision, self._late, self._stack)
        super().backward(tensor, *args, **kwargs)

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        if not self._ranks.several:
            return super().clip_gradients_norm(
                module, optimizer, max_norm, norm_type, error_if_nonfinite
            )
        parameters = list(self.precision.main_params(optimizer))
        pipe = self._pipeline_of(parameters)
        return pipe.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite, parameters=parameters)

    def clip_gradients_value(
        self, module: nn.Module, optimizer: Optimizer, clip_val: float
    ) -> None:
        if not self._ranks.several:
            super().clip_gradients_value(module, optimizer, clip_val)
            return
        parameters = list(self.precision.main_params(optimizer))
        self._pipeline_of(parameters).clip_grad_value_(clip_val, parameters=parameters)

    def save_checkpoint(self, path: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        states = {name: late.state() for name, late in self._late.items()}
        known = {name: state for name, state in states.items() if state is not None}
        super().save_checkpoint(path, {**state, _KEY: known}, *args, **kwargs)

    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> Any:
        rest = super().load_checkpoint(path, state, *args, **kwargs)
        if state and isinstance(state, dict):
            late = self._late
            for name, own in rest.pop(_KEY, {}).items():
                if name in late:
                    late[name].load(own)
        return rest

    def teardown(self) -> None:
        self._stack.close()
        for module in self._modules:
            module.close()
        super().teardown()

    def all_reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """The value itself: all ranks have the same."""
        return tensor

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        self._ranks.barrier()

    def broadcast(self, obj: T, src: int = 0) -> T:
        return self._ranks.broadcast(obj, src)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return self._ranks.decide(decision, all)
