"""Forwards that hold little: weights on the `meta` device, and graphs without saved tensors.

What is computed from a weight on `meta` has a shape and a dtype, but no values. What is computed
from the inputs alone keeps its values, so that Python may look at them. So models are captured
whose weights are not there. Models that have weights are recorded at further sizes by shapes alone,
for next to nothing: only one size costs the time and the memory of a forward. Where a forward asks
for values, an exception says so, and it is run with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from penstock.capture.attributes import named_tensors, put
from penstock.capture.calls import (
    Call,
    Ref,
    TensorInfo,
    Trace,
    Unrecordable,
    function_name,
    input_leaves,
)
from penstock.capture.cuts import Cuts
from penstock.capture.known_shapes import KnownShapes
from penstock.capture.lowering import lower
from penstock.capture.trees import flatten, map_leaves, tree_leaves, unflatten
from penstock.errors import CaptureError

META = torch.device("meta")

_READS = frozenset("item __bool__ __int__ __float__ __index__ tolist equal allclose".split())
_CPU = torch.device("cpu")


def is_on_meta(model: nn.Module) -> bool:
    """Whether any parameter of the model is on the `meta` device, where there are no values."""
    return any(parameter.is_meta for parameter in model.parameters())


def reads_values(call: Call) -> bool:
    """Whether the call gives Python values of its arguments."""
    return not isinstance(call.target, str) and function_name(call.target) in _READS


class Weightless:
    """Runs recorded calls of a model that is on `meta`.

    Args:
        model: the model.

    Attributes:
        known: the results of operators on `meta`, for reuse with the same shapes.
    """

    def __init__(self, model: nn.Module) -> None:
        self.known = KnownShapes()
        self._model = model
        self._inputs: list[Any] = []

    def begin(self, leaves: Sequence[Any]) -> None:
        """Take note of the inputs, before anything changes them."""
        self._inputs = [x.clone() if isinstance(x, torch.Tensor) else x for x in leaves]

    def run(self, call: Call, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a call, on `meta` if any tensor that it works on is there.

        Its other tensors are moved to `meta` then: operators may give anything for a mixture.

        Raises:
            Unrecordable: a function needs values that are not there, or changes a tensor that has
                values.
            CaptureError: a closed module needs values that are not there.
        """
        module = self._model.get_submodule(call.target) if isinstance(call.target, str) else None
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        held = [] if module is None else [t for _, t in named_tensors(module)]
        if not any(t.is_meta for t in (*tensors, *held)):
            return function(*args, **kwargs)
        moved = {id(t): t.to(META) for t in tensors if not t.is_meta}
        args, kwargs = map_leaves(lambda leaf: moved.get(id(leaf), leaf), (tuple(args), kwargs))
        try:
            with ExitStack() as stack:
                if module is not None:  # and what it makes itself
                    stack.enter_context(held_on_meta(module))
                    stack.enter_context(META)
                result = function(*args, **kwargs)
        except RuntimeError as error:
            if "meta tensors" not in str(error):
                raise
            if module is not None:
                raise CaptureError(
                    f"{call.label} reads values that its weights give, and there are no weights: "
                    "capture the model with its weights, and load a plan on the others"
                ) from error
            raise Unrecordable(
                call.path, f"its Python reads values ({call.label}), and there are no weights"
            ) from error
        if any(tensor._version for tensor in moved.values()):
            raise Unrecordable(
                call.path, f"it changes a tensor by what weights give ({call.label})"
            )
        return result

    def values(self, trace: Trace, value: Ref) -> torch.Tensor:
        """Compute a value that depends on nothing but the inputs."""
        questions = trace.leading_to((value,))
        inputs = Cuts(questions).boundary(0)
        everything = range(len(questions.calls))
        module = lower(self._model, questions, everything, inputs, questions.outputs, _CPU)
        given = input_leaves(inputs, self._inputs)
        with torch.no_grad():
            result: torch.Tensor = module({}, None, *given)[0]
        return result


@contextmanager
def held_on_meta(module: nn.Module) -> Iterator[None]:
    """While open, everything that the module holds is on `meta`."""
    real = [(name, tensor) for name, tensor in named_tensors(module) if not tensor.is_meta]
    twins: dict[int, torch.Tensor] = {}
    for name, tensor in real:
        put(module, name, twins.setdefault(id(tensor), _twin(tensor)))
    try:
        yield
    finally:
        for name, tensor in real:
            if twins[id(tensor)]._version:
                tensor.add_(0)  # so that it counts as written
            put(module, name, tensor)


def _twin(tensor: torch.Tensor) -> torch.Tensor:
    twin = tensor.detach().to(META)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(twin, requires_grad=tensor.requires_grad)
    return twin


def completed(shapes: Trace, real: Trace) -> Trace:
    """Complete a recording on shapes alone with what only a recording with values shows.

    This is what calls draw and write, the devices, and which results share memory: kernels for
    `meta` may lay out results otherwise than kernels that compute, and whether `contiguous()`
    copies depends on that.

    Args:
        shapes: the recording on shapes alone.
        real: a recording with values, perhaps at another size.

    Returns:
        the completed recording; `shapes` itself if the two differ in their number of calls.
    """
    if len(shapes.calls) != len(real.calls):
        return shapes
    calls = [_completed(*pair) for pair in zip(shapes.calls, real.calls, strict=True)]
    attributes = {
        attribute: _stored_as(info, real.attributes.get(attribute))
        for attribute, info in shapes.attributes.items()
    }
    return replace(
        shapes,
        calls=calls,
        attributes=attributes,
        changed=real.changed,
        rewritten=real.rewritten,
    )


def _completed(call: Call, real: Call) -> Call:
    leaves, structure = flatten((call.args, call.kwargs))
    others, other = flatten((real.args, real.kwargs))
    if structure == other:
        leaves = [_placed(*pair) for pair in zip(leaves, others, strict=True)]
    args, kwargs = unflatten(structure, leaves)
    outputs = call.outputs
    if len(outputs) == len(real.outputs):
        outputs = tuple(_stored_as(*pair) for pair in zip(outputs, real.outputs, strict=True))
    return replace(
        call,
        args=args,
        kwargs=kwargs,
        outputs=outputs,
        random=real.random,
        draws_in_python=real.draws_in_python,
        keeps_states=real.keeps_states,
        sets_states=real.sets_states,
        casts=real.casts,
        mutates=real.mutates,
    )


def _stored_as(info: Any, real: object) -> Any:
    """A tensor's description, with the storage of the real recording; anything else as it is."""
    if isinstance(info, TensorInfo) and isinstance(real, TensorInfo):
        return replace(info, storage=real.storage)
    return info


def _placed(leaf: object, real: object) -> Any:
    on_meta = isinstance(leaf, torch.device) and leaf.type == "meta"
    return real if on_meta and isinstance(real, torch.device) else leaf


class NoSavedTensors(saved_tensors_hooks):
    """While open, autograd builds graphs as ever, but saves no tensors for their backward.

    A forward that computes gradients itself cannot do so then.

    Attributes:
        was_needed: whether a backward has wanted what was not saved.
    """

    def __init__(self) -> None:
        super().__init__(_forget, self._refuse)
        self.was_needed = False

    def _refuse(self, _: None) -> torch.Tensor:
        self.was_needed = True
        raise RuntimeError("this graph was built without what its backward needs")


def _forget(_: torch.Tensor) -> None:
    """A hook for tensors that autograd saves, which keeps none of them."""
