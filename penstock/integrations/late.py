"""A pipeline that is built by the first call of its model, whose arguments are its example."""

from __future__ import annotations

import difflib
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from penstock.capture.trees import map_leaves, tree_leaves
from penstock.devices.kinds import accelerator
from penstock.engine.ends import to_device
from penstock.errors import InputError, PlanError
from penstock.pipeline import Pipeline
from penstock.plan import Plan
from penstock.training.scaling import PipelineScaler
from penstock.workers.kinds import WorkerOptions
from penstock.workers.optimizer_parts import move_state
from penstock.workers.ray.options import Ray

_OWN = ("self", "model", "args", "kwargs", "program")
_DEFAULTS = {
    name: parameter.default
    for name, parameter in inspect.signature(Pipeline.__init__).parameters.items()
    if name not in _OWN
}
_OF_STEPS = {
    name
    for name, parameter in inspect.signature(Pipeline.train_step).parameters.items()
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY
}


_OF_PLANS = ("cuts", "tune")
"""Options that are not given with a plan, which has been chosen by them."""


class LatePipeline:
    """A pipeline that is built when its model is called for the first time.

    Args:
        model: of the pipeline.
        options: of `penstock.Pipeline`, without the model and its example.

    Attributes:
        model: of the pipeline.
        pipe: the pipeline; `None` before the first call, and after `close()`.
        home: the device that its results are put on; `None` leaves them with the last stage.
        optimizers: returns the optimizers whose states are moved along when the pipeline moves the
            parameters.
        scaler: returns the loss scaler of `train_step`, once there is a pipeline; or `None`.
        are_ranks: whether every process that runs the script is a worker, as under torchrun.

    Raises:
        InputError: `Pipeline` has no such option, or one has no meaning.
    """

    def __init__(self, model: nn.Module, options: Mapping[str, Any]) -> None:
        check_options(options)
        self.model = model
        self.pipe: Pipeline | None = None
        self.home: torch.device | None = None
        self.optimizers: Callable[[], Iterable[Optimizer]] = tuple
        self.scaler: Callable[[], PipelineScaler | None] = lambda: None
        self.are_ranks = are_ranks(options)
        self._options = dict(options)
        self._plan: Plan | None = None
        self._state: dict[str, Any] | None = None
        self._is_routed = False
        self._before: Callable[..., Any] | None = None  # what torch called before `routed`

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns, as from `Pipeline.__call__`."""
        with self.direct():
            return on_device(self._built(args, kwargs)(*args, **kwargs), self.home)

    def train_step(self, *args: Any, **kwargs: Any) -> Any:
        """Forward and backward of a batch, as `Pipeline.train_step` does."""
        example = {name: value for name, value in kwargs.items() if name not in _OF_STEPS}
        with self.direct():
            pipe = self._built(args, example)
            scaler = self.scaler()
            if scaler is not None:
                kwargs["scaler"] = scaler
            return on_device(pipe.train_step(*args, **kwargs), self.home)

    def whole(self, *args: Any, **kwargs: Any) -> Any:
        """What the model itself returns, which runs where its weights are."""
        there = place_of(self.model)
        with self.direct():
            result = self.model(*on_device(args, there), **on_device(kwargs, there))
        return on_device(result, self.home)

    @contextmanager
    def routed(self, is_split: bool = True) -> Iterator[None]:
        """While open, calls of the model in this thread, `model(...)`, run through the pipeline.

        The model is not changed otherwise: not its class, its `forward`, its hooks, or the names in
        its state dict. In other threads, which are workers, it is called as it is.

        Args:
            is_split: if not, the calls are `whole(...)`.
        """
        runs = self if is_split else self.whole
        thread, model = threading.get_ident(), self.model
        before = vars(model).get("_compiled_call_impl")

        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == thread:
                return runs(*args, **kwargs)
            return (before or model._call_impl)(*args, **kwargs)

        self._before, self._is_routed = before, True
        try:
            with _called(model, call):
                yield
        finally:
            self._before, self._is_routed = None, False

    @contextmanager
    def direct(self) -> Iterator[None]:
        """While open within `routed`, the model is called as it is in all threads."""
        with _called(self.model, self._before) if self._is_routed else nullcontext():
            yield

    def _built(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Pipeline:
        if self.pipe is None:
            with torch.inference_mode(False), torch.enable_grad():
                args, kwargs = beside(self.model, (args, kwargs))
                self.pipe = self._again(args, kwargs)
                if self.pipe is None:
                    self.pipe = self._new(args, kwargs)
            for optimizer in self.optimizers():
                move_state(optimizer.param_groups, optimizer.state)
            if self._state:
                self.pipe.load_random_state(self._state["random_state"])
        return self.pipe

    def _new(self, args: Any, kwargs: Any) -> Pipeline:
        """A pipeline with as many micro-batches as the run had that goes on, if that is possible.

        The first batch may have fewer rows, as in an evaluation; or there are more replicas now.
        """
        number = self._state["num_microbatches"] if self._state else "auto"
        options = with_microbatches(self._options, number)
        try:
            return Pipeline(self.model, args, kwargs, **options)
        except (InputError, PlanError):
            if options == self._options or number == "auto":
                raise
        return Pipeline(self.model, args, kwargs, **self._options)

    def _again(self, args: Any, kwargs: Any) -> Pipeline | None:
        """A pipeline on the plan that was used before `close()`, if it still fits the model."""
        if self._plan is None:
            return None
        options = {name: given for name, given in self._options.items() if name not in _OF_PLANS}
        try:
            return Pipeline(self.model, args, kwargs, **(options | {"plan": self._plan}))
        except PlanError:
            return None

    def has(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether all of these are the model's."""
        own = set(map(id, self.model.parameters()))
        return all(id(parameter) in own for parameter in parameters)

    def fetch(self) -> None:
        """Bring the weights that other ranks have trained here; all ranks have to call it."""
        if self.pipe is not None:
            self.pipe.fetch()

    def state(self) -> dict[str, Any] | None:
        """`state_of` the pipeline, or what was loaded before there is one."""
        return self._state if self.pipe is None else state_of(self.pipe)

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on as the run did of which this is the state.

        A pipeline that is there already keeps its number of micro-batches.
        """
        self._state = dict(state)
        if self._plan is not None and self._plan.num_microbatches != state["num_microbatches"]:
            self._plan = None
        if self.pipe is not None:
            self.pipe.load_random_state(state["random_state"])

    def close(self) -> None:
        """Stop the workers. The next call starts others, on the same plan."""
        if self.pipe is not None:
            self._state, self._plan = state_of(self.pipe), self.pipe.plan
            self.pipe.close()
            self.pipe = None


def state_of(pipe: Pipeline) -> dict[str, Any]:
    """What a run needs to go on with the same bits, besides what frameworks save."""
    return {"random_state": pipe.random_state(), "num_microbatches": pipe.plan.num_microbatches}


def with_microbatches(options: Mapping[str, Any], number: int | str) -> dict[str, Any]:
    """Options of a pipeline with this number of micro-batches, if they leave it open."""
    is_open = options.get("num_microbatches", "auto") == "auto" and options.get("plan") is None
    return {**options, "num_microbatches": number} if is_open else dict(options)


def check_options(options: Mapping[str, Any]) -> None:
    """Raise if a pipeline cannot be built with these.

    Raises:
        InputError: `Pipeline` has no such option, or the workers have weights of their own.
    """
    for name in options:
        if name in _OWN:
            raise InputError(
                f"{name}= is not given: the first batch is the example from which the pipeline is "
                "built"
            )
        if name not in _DEFAULTS:
            close = difflib.get_close_matches(name, _DEFAULTS, 1)
            hint = f"; did you mean {close[0]}=?" if close else f"; it has {', '.join(_DEFAULTS)}"
            raise InputError(f"penstock.Pipeline has no option {name}={options[name]!r}{hint}")
    workers = _worker_options(options).workers
    if workers == "ray" or isinstance(workers, Ray):
        raise InputError(
            "workers in a Ray cluster keep weights and gradients there, and frameworks read them "
            'in this process: use workers="threads" or "processes", or torchrun or Ray Train, '
            "whose ranks are workers"
        )


def check_cpus(what: str, options: Mapping[str, Any]) -> None:
    """Raise if a pipeline would use GPUs although the framework is set to use CPUs.

    Args:
        what: the framework's setting that selects CPUs, for the message.
        options: the options of the pipeline.

    Raises:
        InputError: the options have neither devices nor a plan, and there are GPUs.
    """
    is_given = options.get("devices") is not None or options.get("plan") is not None
    if not is_given and accelerator() is not None:
        raise InputError(
            f"{what} asks for CPUs, and a pipeline without devices= takes the GPUs: give "
            'devices=["cpu", "cpu"], one for each worker, or leave it out'
        )


def are_ranks(options: Mapping[str, Any]) -> bool:
    """Whether every process that runs the script is a worker, as under torchrun."""
    return _worker_options(options).are_ranks


def _worker_options(options: Mapping[str, Any]) -> WorkerOptions:
    chosen = {**_DEFAULTS, **options}
    return WorkerOptions(
        chosen["workers"],
        chosen["devices"],
        chosen["timeout"],
        chosen["allocator"],
        threads=chosen["threads_per_worker"] or 0,
        on_failure=chosen["on_failure"],
    )


def place_of(model: nn.Module) -> torch.device | None:
    """The device of all weights; `None` if they are on several, or have no values yet."""
    tensors = (*model.parameters(), *model.buffers())
    devices = {tensor.device for tensor in tensors}
    is_one = len(devices) == 1 and not any(tensor.is_meta for tensor in tensors)
    return devices.pop() if is_one else None


def beside(model: nn.Module, example: Any) -> Any:
    """The example on the device of the model, for recording the model with it.

    Frameworks put batches on the device of the results. If an earlier pipeline has left the weights
    on several devices, they are brought to the CPU first; the next pipeline moves them from there.
    """
    tensors = [*model.parameters(), *model.buffers()]
    if any(tensor.is_meta for tensor in tensors):
        return example
    if len({tensor.device for tensor in tensors}) > 1:
        model.cpu()
    return on_device(example, place_of(model))


def on_device(value: Any, device: torch.device | None) -> Any:
    """A value with its tensors on a device; the value itself if they are there.

    Args:
        value: a tensor, or containers of tensors and other things.
        device: `None` leaves all where it is.
    """
    tensors = (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
    if device is None or all(tensor.device == device for tensor in tensors):
        return value
    return map_leaves(lambda leaf: to_device(leaf, device), value)


@contextmanager
def _called(model: nn.Module, call: Callable[..., Any] | None) -> Iterator[None]:
    """While open, torch calls this instead of the module, as it does with a compiled forward."""
    own = vars(model)  # not by `setattr`, which a pipeline notices
    before = own.get("_compiled_call_impl")  # of `model.compile()`, if there is one
    try:
        _put(own, call)
        yield
    finally:
        _put(own, before)


def _put(own: dict[str, Any], call: Callable[..., Any] | None) -> None:
    if call is None:
        own.pop("_compiled_call_impl", None)
    else:
        own["_compiled_call_impl"] = call
