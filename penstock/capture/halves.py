"""Backwards in two halves: the gradients of the inputs now, those of the weights later.

A call like a linear layer runs in an autograd graph of its own. When the gradient of its result
comes, only the gradient of its input is computed and handed on (`I`); the gradient of its weights
waits in a `Deferral` until somebody asks for it (`W`). Both halves are autograd's own formulas,
each computed once, so that every bit is that of a whole backward, and parameter hooks fire once.
(Splitting the graph of a whole stage, as `torch.distributed.pipelining` does, computes much of it
twice: 2 to 8 times a backward.)

It is done for calls whose backward is one kernel with a product for the input and one for the
weights, which do not share any work: linear layers, convolutions, embeddings, whatever class they
are of. Everything else, normalisations above all, computes both at once and stays whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from penstock.capture.calls import Attribute, Call, Ref, TensorInfo, Trace
from penstock.capture.functions import Whole
from penstock.capture.trees import tree_leaves

_PRODUCTS = {
    *("AddmmBackward0", "MmBackward0", "BmmBackward0", "BaddbmmBackward0", "AddbmmBackward0"),
    *("LinearBackward0", "MkldnnLinearBackward0"),
    *("ConvolutionBackward0", "EmbeddingBackward0"),
}
_FREE = {
    *("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "AliasBackward0"),
    *("TBackward0", "TransposeBackward0", "PermuteBackward0", "ExpandBackward0"),
    *("SqueezeBackward0", "SqueezeBackward1", "UnsqueezeBackward0"),
    *("AddBackward0", "ToCopyBackward0", "AccumulateGrad"),
}


class Pending(NamedTuple):
    """The weight half of one call: where to start, from which gradient, for which parameters."""

    edge: GradientEdge
    gradient: torch.Tensor
    parameters: Sequence[nn.Parameter]


class Deferral:
    """Collects the weight halves of a backward.

    Attributes:
        pending: the weight halves, in the order in which the backward has run the calls.
        anchor: an empty leaf that all halved calls take as an input, so that a backward which
            reaches it runs through all of them; `None` before the first such call.
    """

    def __init__(self) -> None:
        self.pending: list[Pending] = []
        self.anchor: torch.Tensor | None = None

    def anchored(self) -> torch.Tensor:
        """The anchor, for one more call to take as an input; created at the first use."""
        if self.anchor is None:
            self.anchor = torch.empty(0, requires_grad=True)
        return self.anchor

    def take(self) -> list[Pending]:
        """Return the weight halves that were collected, and forget them."""
        pending = list(self.pending)
        self.pending.clear()  # the list itself may be remembered by what has unpickled it
        return pending


def run_pending(pending: Sequence[Pending], wanted: Sequence[nn.Parameter] | None = None) -> None:
    """Compute the weight halves, of all parameters or of these; the gradients add up in `.grad`."""
    chosen = None if wanted is None else set(map(id, wanted))
    inputs = [p for half in pending for p in half.parameters if chosen is None or id(p) in chosen]
    if inputs:
        edges, gradients = [half.edge for half in pending], [half.gradient for half in pending]
        torch.autograd.backward(edges, gradients, inputs=inputs)


class Half:
    """What is known of one call that may be halved.

    Args:
        deferral: where its weight halves go.

    Attributes:
        is_one_product: whether its backward can be halved for free; `None` until it has run.
    """

    def __init__(self, deferral: Deferral) -> None:
        self.deferral = deferral
        self.is_one_product: bool | None = None


def may_be_halved(trace: Trace, model: nn.Module) -> list[bool]:
    """For every call, whether it uses parameters of its own, and does nothing but compute.

    A parameter that several calls use gets the sum of their gradients in one piece, so it has to
    come out of one backward.
    """
    uses: dict[str, int] = {}
    names = [_names(call) for call in trace.calls]
    for used in names:
        for name in used:
            uses[name] = uses.get(name, 0) + 1
    for leaf in trace.outputs:
        if isinstance(leaf, Attribute):
            uses[leaf.name] = uses.get(leaf.name, 0) + 1
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return [
        _is_plain(call, model)
        and any(name in parameters for name in used)
        and all(uses[name] == 1 for name in used)
        for call, used in zip(trace.calls, names, strict=True)
    ]


def _names(call: Call) -> set[str]:
    return {*call.hidden, *(v.name for v in call.reads() if isinstance(v, Attribute))}


def _is_plain(call: Call, model: nn.Module) -> bool:
    if call.is_seeded or call.ambient is not None or call.mutates or call.result is not None:
        return False
    if len(call.outputs) != 1 or not isinstance(call.outputs[0], TensorInfo):
        return False
    direct = {id(v) for v in (*call.args, *call.kwargs.values()) if isinstance(v, Ref)}
    if any(
        isinstance(v, Ref) and id(v) not in direct for v in tree_leaves((call.args, call.kwargs))
    ):
        return False
    if not isinstance(call.target, str):
        return not isinstance(call.target, Whole)  # whose backward may do anything
    module = model.get_submodule(call.target)
    return not [*module.children(), *module.buffers()]


def run_halved(half: Half, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call `function`, a module or a torch function, so that its backward comes in halves."""
    given = (*args, *kwargs.values())
    parameters = _parameters(function, given)
    if half.is_one_product is False or not (torch.is_grad_enabled() and parameters):
        return function(*args, **kwargs)
    entering = [
        v
        for v in given
        if isinstance(v, torch.Tensor) and v.requires_grad and not isinstance(v, nn.Parameter)
    ]
    if half.is_one_product is None:  # not halved the first time: if it is no one product,
        result = function(*args, **kwargs)  # gradients of its input would be summed otherwise
        half.is_one_product = is_one_product(result, entering)
        return result
    inside = {id(v): v.detach().requires_grad_() for v in entering}
    result = function(
        *(inside.get(id(v), v) for v in args),
        **{name: inside.get(id(v), v) for name, v in kwargs.items()},
    )
    if not isinstance(result, torch.Tensor) or result.grad_fn is None:
        return result
    own = _Own(get_gradient_edge(result), [inside[id(v)] for v in entering], parameters)
    return _Halve.apply(own, half, half.deferral.anchored(), result.detach(), *entering)


def is_one_product(result: object, entering: Iterable[torch.Tensor] = ()) -> bool:
    """Whether a backward computes one product besides what costs nothing, such as views.

    It is `False` as well if the result has hooks, which would see both halves.

    Args:
        result: the value from which the backward starts.
        entering: the tensors at which it ends, besides leaves; it has to reach all of them.
    """
    if not isinstance(result, torch.Tensor) or result.grad_fn is None or result._backward_hooks:
        return False
    products, waiting = 0, [_edge(result)]
    ends = set(map(_edge, entering))
    reached: set[tuple[Node, int]] = set()
    seen: set[Node] = set()
    while waiting:
        node, output = waiting.pop()
        if (node, output) in ends:
            reached.add((node, output))
            continue
        if node in seen:
            continue
        seen.add(node)
        if node.name() in _PRODUCTS:
            products += 1
        elif node.name().rpartition("::")[2] not in _FREE:
            return False
        waiting += _next(node)
    return products == 1 and reached == ends


def _edge(tensor: torch.Tensor) -> tuple[Node, int]:
    """Where the gradient of a tensor goes: one node may have those of several, as of `chunk`."""
    edge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def _next(node: Node) -> Iterable[tuple[Node, int]]:
    return ((to, output) for to, output in node.next_functions if to is not None)


def _parameters(function: Callable[..., Any], given: Sequence[Any]) -> list[nn.Parameter]:
    """The parameters of a call that require gradients; none if hooks would notice the halves."""
    if isinstance(function, nn.Module):
        if function._backward_hooks or function._backward_pre_hooks or function._forward_hooks:
            return []  # a forward hook may hang one on the result, which would see both halves
        return [p for p in function.parameters() if p.requires_grad]
    return [v for v in given if isinstance(v, nn.Parameter) and v.requires_grad]


class _Own(NamedTuple):
    """The autograd graph of one call: where it ends, what entered it, whose gradients it makes."""

    edge: GradientEdge
    inputs: list[torch.Tensor]
    parameters: list[nn.Parameter]


class _Halve(torch.autograd.Function):
    """Joins the call's own graph to the one around it; its backward is the input half."""

    @staticmethod
    def forward(
        ctx: Any,
        own: _Own,
        half: Half,
        anchor: torch.Tensor,
        result: torch.Tensor,
        *entering: torch.Tensor,
    ) -> torch.Tensor:
        ctx.own, ctx.half = own, half
        return result.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        own, (gradient,) = ctx.own, gradients
        found: Sequence[torch.Tensor | None] = ()
        if own.inputs:
            found = torch.autograd.grad(own.edge, own.inputs, gradient, retain_graph=True)
        ctx.half.deferral.pending.append(Pending(own.edge, gradient, own.parameters))
        return (None, None, None, None, *found)
