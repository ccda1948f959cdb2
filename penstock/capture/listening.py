"""The results of every call, in the model's own forward and in a replay: where do they part?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from penstock.capture.calls import Call, Ref, Sizes, Trace, Unrecordable
from penstock.capture.cuts import Cuts
from penstock.capture.interception import intercepted
from penstock.capture.lowering import lower
from penstock.capture.program import Program
from penstock.capture.randomness import Key, python_kept
from penstock.capture.recorder import Recorder
from penstock.capture.trees import flatten

Heard = dict[int, list[torch.Tensor]]
"""Copies of the tensors that calls gave, by the calls' identities."""


def forward_heard(
    program: Program, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], key: Key
) -> Heard:
    """What every call of the model's own forward gives, its random calls seeded by `key`.

    Args:
        program: captured from a copy of `model`.
        model: what is run.
        args: positional arguments of a micro-batch.
        kwargs: keyword arguments of a micro-batch.
        key: the random key.
    """
    recorder = _Listener(model, program.is_open, key)
    with intercepted(recorder), python_kept():
        recorder.begin(args, dict(kwargs))
        with recorder:
            model(*args, **kwargs)
    return recorder.heard


def heard_forward(
    program: Program, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], key: Key
) -> tuple[Heard, list[Call], str]:
    """The same of a forward that may not be what was recorded: what it gives, and its calls.

    Returns:
        what calls give, the calls, and why no more could be recorded, if something stopped it.
    """
    recorder = _Listener(model, program.is_open, key)
    why = ""
    with intercepted(recorder), python_kept():
        recorder.begin(args, dict(kwargs))
        try:
            with recorder:
                model(*args, **kwargs)
        except Unrecordable as error:
            why = error.why
        except Exception as error:
            why = f"it raises {type(error).__name__}: {error}"
    return recorder.heard, recorder.trace.calls, why


def replay_heard(
    program: Program,
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    key: Key,
    trace: Trace | None = None,
) -> Heard:
    """The same of a replay of the program, which is what the stages run, on `model`'s weights.

    Args:
        program, model, args, kwargs, key: as above.
        trace: the way through the program, if it is known.
    """
    leaves = program.flatten_inputs(args, kwargs)
    trace = trace or program.trace_for(leaves, model.training)
    crossing = Cuts(trace)
    inputs = crossing.boundary(0)
    whole = range(len(trace.calls))
    module = lower(model, trace, whole, inputs, crossing.results)
    given = [leaves[value.leaf] for value in inputs if isinstance(value, Ref)]
    replay = _Replay(module, trace)
    sizes = {**leaves.signature.varying.sizes(leaves), **trace.reads.passed_in(model, leaves)}
    replay.run_all(sizes, key, given)
    return replay.heard


class _Listener(Recorder):
    """A recorder that keeps copies of what the calls give."""

    def __init__(self, model: nn.Module, is_open: Callable[[str], bool], key: Key) -> None:
        super().__init__(model, is_open, key)
        self.heard: Heard = {}

    def _append(self, call: Call, result: Any, dynamic: bool) -> None:
        self.heard[call.identity] = _copies(result)
        super()._append(call, result, dynamic)


class _Replay(fx.Interpreter):
    """Runs a lowered program node by node, and keeps copies of what its calls give."""

    def __init__(self, module: fx.GraphModule, trace: Trace) -> None:
        super().__init__(module)
        self.heard: Heard = {}
        self._trace = trace

    def run_all(self, sizes: Sizes, key: Key, values: Sequence[Any]) -> None:
        """Run the lowered program on these leaves, and hear what every call gives."""
        self.run(sizes, key, *values)

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if "result_of" in n.meta:
            self.heard[self._trace.calls[n.meta["result_of"]].identity] = _copies(result)
        return result


def _copies(result: Any) -> list[torch.Tensor]:
    tensors = [leaf for leaf in flatten(result)[0] if isinstance(leaf, torch.Tensor)]
    with torch.no_grad(), torch._C.DisableTorchFunction():
        return [tensor.detach().clone() for tensor in tensors]
