"""`loss.backward()` through a pipeline: two autograd nodes between the results and the inputs.

The results hang on `_Deliver`, which only notes their gradients and hands an empty tensor on to
`_Drive`, and that one runs the workers' backward. The empty tensor lives on the CPU, so `_Drive`
runs in the thread that called `backward()`. A node of a CUDA tensor would run in, and block, the
one thread that autograd has per CUDA device, which the workers' own backwards need.

`_Drive` hangs on the inputs and on the parameters. So autograd itself knows which of them
`autograd.grad` and `backward(inputs=...)` ask for, and `_Drive` asks autograd. Workers add up
gradients in `.grad` themselves, so for parameters it hands on nothing, unless `autograd.grad`
wants them: those are added up beside what is in `.grad`, and handed on as one sum.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.forward_ad import unpack_dual
from torch.autograd.graph import Node, increment_version

from penstock.capture.attributes import memory_of
from penstock.capture.calls import ambient
from penstock.capture.trees import tree_leaves, versions
from penstock.engine.orders import Order
from penstock.errors import InputError, PenstockError
from penstock.links.link import Gradients
from penstock.runner import Runner
from penstock.torch_internals import (
    has_tangents,
    is_batched,
    is_transformed,
    keeps_graph,
    modes_around,
    saving,
    will_run,
)


def check_context(given: object, parameters: Iterable[torch.Tensor]) -> None:
    """Raise if something is at work around a call that does not reach into workers.

    Args:
        given: containers with the tensors that enter.
        parameters: the model's.

    Raises:
        InputError: derivatives are wanted that stages do not compute: a transform of `torch.func`
            is at work, or a tensor has a forward-mode tangent. Or operators are intercepted by a
            mode, or what autograd saves by hooks.
    """
    if modes := modes_around():
        raise InputError(
            f"{', '.join(modes)} would see nothing of what the pipeline's workers do. Use it on "
            "the model itself, pipe.model(x), or within the forward of a module, or of the loss"
        )
    if torch.is_grad_enabled() and saving() is not None:
        raise InputError(
            "saved_tensors_hooks around a pipeline's call, as those of save_on_cpu or of a "
            "checkpoint with use_reentrant=False, would not see what its workers save. To save "
            'memory, use recompute="all" or "boundaries"; or use the hooks within '
            "the forward of a module, or on the model itself: pipe.model(x)"
        )
    if is_transformed():
        raise InputError(
            "a pipeline cannot be transformed by torch.func (grad, vmap, jvp and the like), which "
            "do not reach into its workers. Transform the model itself, pipe.model; gradients in "
            "reverse mode are available by torch.autograd.grad(pipe(x).sum(), x)"
        )
    if not has_tangents():
        return
    tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)]
    if any(unpack_dual(tensor).tangent is not None for tensor in [*tensors, *parameters]):
        raise InputError(
            "a tensor that enters the pipeline has a forward-mode tangent, which stages do not "
            "carry. Run the model itself for a derivative in forward mode: pipe.model(x)"
        )


_INSTEAD = "add up the losses, and call backward() on the sum, or call the pipeline again"
_OVER = f"whose activations are gone: call it with retain_graph=True before; or {_INSTEAD}"
_NOWHERE = -1  # in place of a micro-batch's number, for inputs that get no gradient here


class WrittenInputs:
    """Lets autograd see that the script has written to inputs of a pass.

    The micro-batches' slices have version counters of their own, as the model may write to one of
    them while others are in flight. So autograd would not notice there what the script writes.

    Args:
        given: containers with the tensors that the script has given.
    """

    def __init__(self, given: object) -> None:
        tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)]
        self._tensors = [tensor for tensor in tensors if not tensor.is_inference()]
        self._first = self._versions = versions(self._tensors)

    def note(self, values: Sequence[Sequence[Any]]) -> bool:
        """Count what was written since this was last called; returns whether anything ever was.

        Args:
            values: of every micro-batch.
        """
        before, self._versions = self._versions, versions(self._tensors)
        pairs = zip(self._tensors, before, self._versions, strict=True)
        written = [tensor for tensor, old, new in pairs if new != old]
        tensors = (v for part in values for v in part if written and isinstance(v, torch.Tensor))
        for value in tensors:
            if any(_is_part(value, tensor) for tensor in written) and not value.is_inference():
                increment_version(value)
        return self._versions != self._first


def _is_part(value: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether it is in the memory of another tensor, and has another version counter."""
    is_apart = not value.requires_grad and value is not tensor
    return is_apart and memory_of(value) == memory_of(tensor)


class Passage:
    """A batch that has gone forward and may come back.

    Args:
        runner: runs the backward pass.
        order: of the forward.
        differentiable: which results of a micro-batch a backward can start from.
        given: containers with the tensors that the script has given.

    Attributes:
        loss: of the batch, if it is known before the backward.
    """

    loss: torch.Tensor | None = None

    def __init__(
        self, runner: Runner, order: Order, differentiable: Sequence[bool], given: object
    ) -> None:
        self._runner = runner
        self._order: Order | None = order
        self._written: WrittenInputs | None = WrittenInputs(given)
        self._why_over = _OVER  # if no backward can come from it any more
        self.differentiable = differentiable
        self.gradients: list[list[torch.Tensor | None]] = []

    @property
    def leaves_gradients(self) -> bool:
        """Whether parameters have their gradients in this process afterwards."""
        return self._runner.workers.has_gradients

    def chosen(self, values: Sequence[Any]) -> list[Any]:
        """Those of a micro-batch's results that a backward can start from."""
        return [v for v, d in zip(values, self.differentiable, strict=True) if d]

    def backward(self, wanted: Sequence[nn.Parameter] | None) -> dict[int, Gradients]:
        """Run the backward; returns the gradients of the inputs of every micro-batch.

        If autograd keeps its graph for another backward, the forward is run again for that one.

        Args:
            wanted: the parameters whose gradients are computed; `None` for all.

        Raises:
            PenstockError: a backward ran before, and autograd did not keep its graph, or the
                forward cannot be run again.
            InputError: a backward ran before, and parameters or inputs have changed since.
        """
        if self._order is None:
            raise PenstockError(
                f"backward ran a second time through the same pipeline call, {self._why_over}"
            )
        order = self._order
        back = order.back(dict(enumerate(self.gradients)), ambient(), wanted)
        runner, forward = self._runner, self._runner.awaiting_backward(order)
        is_written = self._written is not None and self._written.note(order.values)
        if is_written and forward is not None and forward.is_retained:
            raise InputError(
                "backward ran a second time through the same pipeline call, which goes forward "
                f"again for it, and its inputs have been written to since: {_INSTEAD}"
            )
        with runner.reserved(back), runner.steps.failing():
            self._order = None  # unless it was refused
            gradients = runner.run(back).gradients
            if forward is not None and keeps_graph():
                why = runner.retain(forward)
                self._order = None if why else order
                self._why_over = f"which cannot go forward again, as {why}: {_INSTEAD}"
            if self._order is None:  # whoever keeps the loss need not keep the inputs
                self._written = None
            runner.steps.call_hooks(self.loss)
        return gradients


def deliver(
    passage: Passage,
    slices: Sequence[Sequence[Any]],
    results: Sequence[Sequence[Any]],
    parameters: Iterable[nn.Parameter],
    unfed: Sequence[torch.Tensor] = (),
) -> list[list[Any]]:
    """The results, so that a backward from them runs the passage's.

    Args:
        passage: what to run.
        slices: the first stage's values, of every micro-batch; gradients flow on through them.
        results: the last stage's, of every micro-batch.
        parameters: whose gradients the passage may leave in this process.
        unfed: inputs that were given where the first stage is not. They get no gradient, but may
            be wanted, so that all ranks run the same script.
    """
    if not any(passage.differentiable):
        return [list(part) for part in results]
    places = [
        (microbatch, k)
        for microbatch, part in enumerate(slices)
        for k, value in enumerate(part)
        if isinstance(value, torch.Tensor) and value.requires_grad
    ]
    anchor = torch.empty(0, requires_grad=True)
    inputs = [*(slices[microbatch][k] for microbatch, k in places), *unfed]
    places += [(_NOWHERE, 0)] * len(unfed)
    reached = [parameter for parameter in parameters if parameter.requires_grad]
    token = _Drive.apply(passage, places, anchor, *inputs, *reached)
    chosen = [r for part in results for r in passage.chosen(part)]
    delivered = iter(_Deliver.apply(passage, token, *chosen))
    return [
        [next(delivered) if d else r for r, d in zip(part, passage.differentiable, strict=True)]
        for part in results
    ]


class _Drive(torch.autograd.Function):
    """From the inputs and the parameters to the token; its backward is the pipeline's."""

    @staticmethod
    def forward(
        ctx: Any,
        passage: Passage,
        places: Sequence[tuple[int, int]],
        anchor: torch.Tensor,
        *leaves: torch.Tensor,
    ) -> torch.Tensor:
        ctx.passage, ctx.places, ctx.parameters = passage, places, leaves[len(places) :]
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        anchor, *nodes = (node for node, _ in ctx.next_functions)
        wanted = _wanted(anchor, nodes[len(ctx.places) :], ctx.parameters)
        if wanted.apart and not ctx.passage.leaves_gradients:
            raise InputError(
                "autograd.grad asks for gradients of parameters, which are with workers in a Ray "
                "cluster: call backward(), and pipe.gradients() if you need to see them"
            )
        with _beside(wanted.apart) as taken:
            gradients = ctx.passage.backward(wanted.parameters)
        _guard(ctx.parameters)
        found = [gradients[m][k] if m in gradients else None for m, k in ctx.places]
        return (None, None, None, *found, *(taken.get(id(p)) for p in ctx.parameters))


class _Deliver(torch.autograd.Function):
    """From the token to the results; its backward notes their gradients."""

    @staticmethod
    def forward(
        ctx: Any, passage: Passage, token: torch.Tensor, *results: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.passage = passage
        ctx.set_materialize_grads(False)
        return tuple(result.detach() for result in results)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            raise InputError(
                "create_graph=True needs a graph of the backward itself, for a gradient penalty "
                "or a second derivative, and stages do not make one. Run the model itself for "
                "that term: out = pipe.model(x) has the same parameters, and its gradients add "
                "up in the same .grad"
            )
        if any(is_batched(gradient) for gradient in gradients if gradient is not None):
            raise InputError(
                "is_grads_batched=True, or vmap over a backward, does not reach into the workers "
                "of a pipeline. Ask for one gradient at a time, each of a call of its own, or run "
                "the model itself, pipe.model"
            )
        passage = ctx.passage
        remaining = iter(gradients)
        passage.gradients = [
            [next(remaining) if d else None for d in passage.differentiable]
            for _ in range(len(gradients) // sum(passage.differentiable))
        ]
        return (None, torch.empty(0), *(None for _ in gradients))


class _Wanted(NamedTuple):
    """What the backward that is running is to compute.

    Attributes:
        parameters: whose gradients; `None` for all.
        apart: those of them that `autograd.grad` returns, which leaves `.grad` alone.
    """

    parameters: Sequence[nn.Parameter] | None
    apart: Sequence[nn.Parameter] = ()


def _wanted(anchor: Node, nodes: Sequence[Node], parameters: Sequence[nn.Parameter]) -> _Wanted:
    """What autograd asks for, in the midst of a backward.

    Args:
        anchor: the node of a leaf that the script cannot name, so it runs only in a backward of
            everything.
        nodes: the nodes of the parameters.
        parameters: the parameters, in the order of `nodes`.

    Raises:
        InputError: `autograd.grad` asks for a parameter with hooks.
    """
    if will_run(anchor):
        return _Wanted(None)
    added, apart = [], []
    for node, parameter in zip(nodes, parameters, strict=True):
        try:
            runs = will_run(node)
        except RuntimeError:  # so it says that autograd.grad asks for this leaf
            apart.append(parameter)
        else:
            added += [parameter] if runs else []
    hooked = next((p for p in apart if _hooks(p)), None)
    if hooked is not None:
        raise InputError(
            f"autograd.grad asks for the gradient of a parameter of shape {tuple(hooked.shape)} "
            "that has hooks. They are called by workers for every micro-batch as its gradient is "
            "added up, which only backward() does: call backward(inputs=[...]) and read .grad, or "
            "remove the hooks"
        )
    return _Wanted([*added, *apart], apart)


@contextmanager
def _beside(parameters: Sequence[nn.Parameter]) -> Iterator[dict[int, torch.Tensor]]:
    """While open, the parameters' `.grad` is set aside, so that new gradients add up apart from it.

    Gives a dictionary that has the new gradients at the end, by the ids of the parameters.
    """
    before = [parameter.grad for parameter in parameters]
    found: dict[int, torch.Tensor] = {}
    try:
        for parameter in parameters:
            parameter.grad = None
        yield found
        found |= {id(p): p.grad for p in parameters if p.grad is not None}
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient


def _hooks(parameter: nn.Parameter) -> list[dict[int, Any]]:
    """The hooks of its gradient: those that see it, and those that see it added up."""
    registries = (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)
    return [registry for registry in registries if registry]


def _guard(parameters: Iterable[nn.Parameter]) -> None:
    """Keep hooks of parameters from being called with no gradient.

    Workers have called them for every micro-batch. Autograd calls them once more as `_Drive` hands
    it nothing for their parameters, unless other parts of the graph have a gradient for them.
    """
    for parameter in parameters:
        for registry in _hooks(parameter):
            kind = _Seeing if registry is parameter._backward_hooks else _SeeingSum
            for number, hook in registry.items():
                if not isinstance(hook, kind):
                    registry[number] = hook = kind(hook)
                if isinstance(hook, _SeeingSum):
                    hook.note(parameter)


class _Seeing:
    """A hook of `register_hook`, called only where there is a gradient."""

    def __init__(self, hook: Callable[[torch.Tensor], Any]) -> None:
        self._hook = self.__wrapped__ = hook

    def __call__(self, gradient: torch.Tensor | None) -> Any:
        return None if gradient is None else self._hook(gradient)


class _SeeingSum:
    """A hook of `register_post_accumulate_grad_hook`, called only if something was added."""

    def __init__(self, hook: Callable[[nn.Parameter], Any]) -> None:
        self._hook = hook
        self._noted: tuple[weakref.ref[torch.Tensor] | None, int] | None = None

    def note(self, parameter: nn.Parameter) -> None:
        """The next call has nothing to say if `.grad` is then as it is now."""
        gradient = parameter.grad
        self._noted = (None, 0)
        if gradient is not None:
            self._noted = weakref.ref(gradient), gradient._version

    def __call__(self, parameter: nn.Parameter) -> None:
        noted, self._noted = self._noted, None
        gradient = parameter.grad
        if noted is not None:
            known, version = noted
            if gradient is None or (known and known() is gradient and gradient._version == version):
                return
        self._hook(parameter)

    def __reduce__(self) -> Any:
        return type(self), (self._hook,)


def backward_into_inputs(
    slices: Sequence[Sequence[Any]], gradients: Mapping[int, Gradients]
) -> None:
    """Pass what the first stage's values got on to inputs that require a gradient."""
    order = sorted(gradients)
    for microbatch in order:
        pairs = [
            (value, gradient)
            for value, gradient in zip(slices[microbatch], gradients[microbatch], strict=True)
            if gradient is not None
        ]
        torch.autograd.backward(
            [v for v, _ in pairs],
            [g for _, g in pairs],
            retain_graph=microbatch != order[-1],  # they may come from one graph
        )
