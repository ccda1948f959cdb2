"""The model's own forward beside a replay of its program, to compare what their calls give.

Both draw the same random numbers, so the first call with other results is where they part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn

from penstock.capture.calls import Call, Trace, input_leaves
from penstock.capture.cuts import Cuts
from penstock.capture.interception import intercepted
from penstock.capture.lowering import lower
from penstock.capture.program import Program
from penstock.capture.randomness import Key, draw, draw_in_python, python_kept
from penstock.capture.recorder import Recorder
from penstock.capture.sizing import Sizing
from penstock.capture.trees import flatten, tree_leaves
from penstock.torch_internals import without_functions

CallResults = dict[int, list[torch.Tensor]]
"""Copies of the tensors that calls gave, by the calls' identities."""


@contextmanager
def seeded(program: Program, key: Key, model: nn.Module | None = None) -> Iterator[None]:
    """While open, the random calls of a forward of the model draw what a replay with `key` draws.

    Everything else runs as it is; where the program has no random calls, there is nothing open.

    Args:
        program: says which calls draw random numbers.
        key: the random key.
        model: a copy of the program's model, if that is what runs.
    """
    if not program.random:
        yield
        return
    seeding = _Seeding(program, model or program.model, key)
    with intercepted(seeding), seeding:
        yield


class _Seeding(Recorder):
    """A recorder that records nothing: it counts calls, and seeds those that draw.

    Args:
        program: captured from `model`, or from a copy of it.
        model: whose forward runs.
        key: the random key.
    """

    def __init__(self, program: Program, model: nn.Module, key: Key) -> None:
        super().__init__(model, program.is_open, None, functions=program.functions)
        self._random = program.random
        self._drawn = key

    def _check_function(self, function: object, leaves: object) -> None:
        """Does nothing: outside of a recording any `autograd.Function` may be applied."""

    def _check_registered(self, path: str, module: object) -> None:
        """Does nothing: outside of a recording modules may be lent any tensors."""

    def _check_hooks(self, name: str) -> None:
        """Does nothing: outside of a recording hooks may be hung on anything."""

    def _check_given(self, function: object, args: object, kwargs: object) -> None:
        """Does nothing: outside of a recording any function may be given anything."""

    def check_unseen_application(self, function: object) -> None:
        """Does nothing: outside of a recording functions may be applied in any way."""

    def check_assignment(self, owner: nn.Module | type, name: str) -> None:
        """Does nothing: outside of a recording any attribute may be assigned to."""

    def _check_values(self, name: str, leaves: object) -> None:
        """Does nothing: outside of a recording any value may be read."""

    def _check_sizes(self, name: str, args: object, kwargs: object) -> None:
        """Does nothing: outside of a recording any size may be read."""

    def _note_gradients(self, leaves: object) -> None:
        """Does nothing: nothing is recorded."""

    def _check_strides(self, leaves: object) -> None:
        """Does nothing: outside of a recording any stride may be read."""

    def _check_layout(self, name: str, leaves: object) -> None:
        """Does nothing: outside of a recording any layout may be read."""

    def _record(
        self,
        target: str | Callable[..., Any],
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        hidden: tuple[str, ...] = (),
    ) -> Any:
        self._inside += 1
        try:
            identity = self._identify(Call(target, (), {}, self._open[-1]))
            in_python = self._random.get(identity)
            if in_python is None:
                return function(*args, **kwargs)
            drawing = draw_in_python if in_python else draw
            return drawing(self._drawn, identity, function, *args, **kwargs)
        finally:
            self._inside -= 1


class ForwardResults(Recorder):
    """Keeps what every call of the model's own forward gives, its random calls seeded.

    Args:
        program: captured from `model`, or from a copy of it.
        model: what is run.
        key: the random key.

    Attributes:
        results: what calls gave; if the forward fails, those before that.
    """

    def __init__(self, program: Program, model: nn.Module, key: Key) -> None:
        super().__init__(model, program.is_open, key, functions=program.functions)
        self.results: CallResults = {}

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CallResults:
        """Run the forward on a micro-batch.

        Raises:
            Unrecordable: an open module does something that cannot be recorded.
        """
        with intercepted(self), python_kept():
            self.begin(*flatten((tuple(args), dict(kwargs))))
            with self:
                self.model(*args, **kwargs)
        return self.results

    def _append(self, call: Call, result: object, sizing: Sizing = Sizing.SHAPES) -> None:
        self.results[call.identity] = _copies(result)
        super()._append(call, result, sizing)


def replay_results(
    program: Program,
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    key: Key,
    trace: Trace | None = None,
) -> CallResults:
    """What every call gives in a replay of the program, which is what the stages run.

    Args:
        program: what is replayed.
        model: whose weights are used.
        args: positional arguments of a micro-batch.
        kwargs: keyword arguments of a micro-batch.
        key: the random key.
        trace: the way through the program, if it is known.
    """
    leaves = program.flatten_inputs(args, kwargs)
    trace = trace or program.trace_for(leaves, model.training)
    crossing = Cuts(trace)
    inputs = crossing.boundary(0)
    module = lower(model, trace, range(len(trace.calls)), inputs, crossing.results)
    replay = _Replay(module, trace)
    sizes = {**leaves.signature.varying.sizes(leaves), **trace.reads.passed_in(model, leaves)}
    replay.run(sizes, key, *input_leaves(inputs, leaves))
    return replay.results


class _Replay(fx.Interpreter):
    """Runs a lowered program node by node, and keeps copies of what its calls give."""

    def __init__(self, module: fx.GraphModule, trace: Trace) -> None:
        super().__init__(module)
        self.results: CallResults = {}
        self._trace = trace

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if "result_of" in n.meta:
            self.results[self._trace.calls[n.meta["result_of"]].identity] = _copies(result)
        return result


def _copies(result: object) -> list[torch.Tensor]:
    tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    with torch.no_grad(), without_functions():
        return [tensor.detach().clone() for tensor in tensors]
