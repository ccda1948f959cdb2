"""Autograd through `pipe(x)` is that of PyTorch, or says what it cannot do.

The model has small integers for weights and inputs, in double precision, and computes nothing but
sums, products and comparisons. So every sum is exact in whatever order it is made, and the plain
model on the whole batch is the oracle: no bit may differ.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.comparison.reference import run_with_threads
from tests.support.models import uniform_plan

Tensors = list[torch.Tensor | None]
Call = Callable[..., tuple[torch.Tensor, torch.Tensor]]
Use = Callable[[Call, nn.Module, torch.Tensor], Tensors]


pytestmark = pytest.mark.usefixtures("pool")


def integers(*shape: int) -> torch.Tensor:
    return torch.randint(-2, 3, shape).double()


class Whole(nn.Module):
    """Linear layers of whole numbers, which return what comes out and something on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 5).double(), nn.Linear(5, 5).double()
        self.c, self.unused = nn.Linear(5, 3).double(), nn.Linear(2, 2).double()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(integers(*parameter.shape))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.b(self.a(x).relu())
        return self.c(hidden.relu()), hidden


def make(model: nn.Module, x: torch.Tensor, workers: str, **options: Any) -> ps.Pipeline:
    """A pipeline of three micro-batches, for which nothing is measured."""
    program = ps.capture(model, (x,))
    asked = {k: options.pop(k) for k in ("schedule", "recompute") if k in options}
    plan = uniform_plan(program, 2, 3, **asked)
    options |= {"program": program, "plan": plan, "workers": workers}
    return ps.Pipeline(model, (x,), devices=["cpu", "cpu"], **options, replicas=1)


def backward(call: Call, model: nn.Module, x: torch.Tensor) -> Tensors:
    call(x)[0].square().sum().backward()
    return []


def backward_of_both_results(call: Call, model: nn.Module, x: torch.Tensor) -> Tensors:
    z, h = call(x)
    (z.square().sum() + 3 * h.sum()).backward()
    return []


def backward_of_the_second_result(call: Call, model: nn.Module, x: torch.Tensor) -> Tensors:
    call(x)[1].square().sum().backward()
    return []


def one_result_detached(call: Call, model: nn.Module, x: torch.Tensor) -> Tensors:
    z, h = call(x)
    (z.sum(1) * h.detach().sum(1)).sum().backward()
    return []


def backward_with_a_gradient(call: Call, model: nn.Module, x: torch.Tensor) -> Tensors:
    z = call(x)[0]
    z.backward(torch.arange(z.numel()).view_as(z).double())
    return []


def grad_of_the_input(call: Call, model: nn.Module, x: torch.Tensor) -> Tensors:
    return list(torch.autograd.grad(call(x)[0].square().sum(), x))


def grad_of_the_input_then_a_step(call: Call, model: nn.Module, x: torch.Tensor) -> Tensors:
    (found,) = torch.autograd.grad(call(x)[0].sum(), x)
    backward(call, model, (x + found.sign()).detach())  # as an adversarial example is trained on
    return [found]


def grad_of_a_tensor_before(call: Call, model: nn.Module, x: torch.Tensor) -> Tensors:
    twice = x * 2
    return list(torch.autograd.grad(call(twice)[0].sum(), twice))


def grad_of_the_result(call: Call, model: nn.Module, x: torch.Tensor) -> Tensors:
    z = call(x)[0]
    return list(torch.autograd.grad(z.square().sum(), z))


def grad_of_all_parameters(call: Call, model: nn.Module, x: torch.Tensor) -> Tensors:
    every = list(model.parameters())
    return list(torch.autograd.grad(call(x)[0].square().sum(), every, allow_unused=True))


def grad_of_parameters_beside_grad(call: Call, model: nn.Module, x: torch.Tensor) -> Tensors:
    backward(call, model, x)
    found = torch.autograd.grad(call(x)[0].sum(), [model.c.weight, model.a.bias, x])
    again = torch.autograd.grad(call(x)[0].sum(), [model.c.weight])
    backward(call, model, x)
    return [*found, *again]


def grad_of_parameters_of_one_stage(call: Call, model: nn.Module, x: torch.Tensor) -> Tensors:
    return list(torch.autograd.grad(call(x)[0].square().sum(), [model.a.weight]))


def grad_of_parameters_of_the_last_stage(call: Call, model: nn.Module, x: torch.Tensor) -> Tensors:
    return list(torch.autograd.grad(call(x)[0].square().sum(), [model.c.weight, model.c.bias]))


def grad_of_what_the_loss_uses_too(call: Call, model: nn.Module, x: torch.Tensor) -> Tensors:
    loss = call(x)[0].square().sum() + model.a.weight.square().sum()
    return list(torch.autograd.grad(loss, [model.a.weight, model.b.weight]))


def backward_into_the_input(call: Call, model: nn.Module, x: torch.Tensor) -> Tensors:
    call(x)[0].square().sum().backward(inputs=[x])
    return []


def backward_into_one_parameter(call: Call, model: nn.Module, x: torch.Tensor) -> Tensors:
    backward(call, model, x)
    call(x)[0].square().sum().backward(inputs=[model.b.weight])
    return []


def backward_into_some(call: Call, model: nn.Module, x: torch.Tensor) -> Tensors:
    call(x)[0].square().sum().backward(inputs=[model.a.bias, model.c.weight, x])
    return []


def the_loss_uses_parameters(call: Call, model: nn.Module, x: torch.Tensor) -> Tensors:
    (call(x)[0].square().sum() + model.a.weight.square().sum() + model.c.bias.sum()).backward()
    return []


def two_steps_add_up(call: Call, model: nn.Module, x: torch.Tensor) -> Tensors:
    backward(call, model, x)
    backward(call, model, x)
    return []


def two_calls_in_one_loss(call: Call, model: nn.Module, x: torch.Tensor) -> Tensors:
    one, other = call(x)[0], call(x.detach() - 1)[0]
    (one @ other.T).square().sum().backward()
    return []


def two_calls_and_grad(call: Call, model: nn.Module, x: torch.Tensor) -> Tensors:
    one, other = call(x)[0], call(x - 1)[0]
    return list(torch.autograd.grad((one * other).sum(), [x, *model.b.parameters()]))


def a_call_upon_a_call(call: Call, model: nn.Module, x: torch.Tensor) -> Tensors:
    first = call(x)[0].sum(1, keepdim=True)
    call(x + first)[0].sum().backward()
    return []


def a_call_under_no_grad(call: Call, model: nn.Module, x: torch.Tensor) -> Tensors:
    with torch.no_grad():
        z, h = call(x)
    assert not z.requires_grad
    assert not h.requires_grad
    backward(call, model, x)
    return [z, h]


def a_call_in_inference_mode(call: Call, model: nn.Module, x: torch.Tensor) -> Tensors:
    with torch.inference_mode():
        z, h = (value.clone() for value in call(x))
    backward(call, model, x)
    return [z, h]


def a_call_with_gradients_set_off(call: Call, model: nn.Module, x: torch.Tensor) -> Tensors:
    with torch.set_grad_enabled(False):
        z, h = call(x)
        with torch.enable_grad():
            backward(call, model, x)
    return [z, h]


def two_backwards_of_one_call(call: Call, model: nn.Module, x: torch.Tensor) -> Tensors:
    z, h = call(x)
    z.square().sum().backward(retain_graph=True)
    (z.sum() * 2 + h.square().sum()).backward()
    return []


def three_backwards_of_one_loss(call: Call, model: nn.Module, x: torch.Tensor) -> Tensors:
    loss = call(x)[0].square().sum()
    for keeps in (True, True, False):
        loss.backward(retain_graph=keeps)
    return []


def grads_of_one_call_and_its_backward(call: Call, model: nn.Module, x: torch.Tensor) -> Tensors:
    """As methods do that balance the gradients of several losses."""
    z, h = call(x)
    losses = [z.square().sum(), h.sum()]
    found = [torch.autograd.grad(each, model.a.weight, retain_graph=True)[0] for each in losses]
    (losses[0] + 2 * losses[1]).backward()
    return list(found)


def another_pass_between_two_backwards(call: Call, model: nn.Module, x: torch.Tensor) -> Tensors:
    z, _ = call(x)
    z.square().sum().backward(retain_graph=True)
    backward(call, model, x + 1)
    with torch.no_grad():
        call(x - 1)
    z.sum().backward()
    return []


def one_backward_more_than_is_needed(call: Call, model: nn.Module, x: torch.Tensor) -> Tensors:
    """It may keep its graph for nothing."""
    call(x)[0].square().sum().backward(retain_graph=True)
    backward(call, model, x)
    return []


def backward_under_no_grad(call: Call, model: nn.Module, x: torch.Tensor) -> Tensors:
    loss = call(x)[0].square().sum()
    with torch.no_grad():
        loss.backward()
    return []


def hooks_of_results(call: Call, model: nn.Module, x: torch.Tensor) -> Tensors:
    z, h = call(x)
    z.register_hook(lambda gradient: gradient * 3)
    z.retain_grad()
    (z.square().sum() + h.sum()).backward()
    return [z.grad]


def hooks_of_inputs(call: Call, model: nn.Module, x: torch.Tensor) -> Tensors:
    seen: Tensors = []
    x.register_hook(lambda gradient: gradient * 2)
    before = x * 3
    before.register_hook(seen.append)
    call(before)[0].square().sum().backward()
    return seen


def results_changed_in_place(call: Call, model: nn.Module, x: torch.Tensor) -> Tensors:
    z = call(x)[0] * 1
    z.mul_(2).add_(1)
    z.square().sum().backward()
    return [z.detach()]


def a_frozen_half(call: Call, model: nn.Module, x: torch.Tensor) -> Tensors:
    model.a.requires_grad_(False)
    try:
        backward(call, model, x)
        return list(torch.autograd.grad(call(x)[0].sum(), [x, model.c.weight]))
    finally:
        model.a.requires_grad_(True)


def frozen_before_the_backward(call: Call, model: nn.Module, x: torch.Tensor) -> Tensors:
    model.requires_grad_(False)
    try:
        return list(torch.autograd.grad(call(x)[0].square().sum(), x))
    finally:
        model.requires_grad_(True)


def in_evaluation_mode(call: Call, model: nn.Module, x: torch.Tensor) -> Tensors:
    model.eval()
    try:
        return list(torch.autograd.grad(call(x)[0].square().sum(), [x, model.b.bias]))
    finally:
        model.train()


USES = [
    *(backward, backward_of_both_results, backward_of_the_second_result, one_result_detached),
    *(backward_with_a_gradient, grad_of_the_input, grad_of_the_input_then_a_step),
    *(grad_of_a_tensor_before, grad_of_the_result, grad_of_all_parameters),
    *(grad_of_parameters_beside_grad, grad_of_parameters_of_one_stage),
    *(grad_of_parameters_of_the_last_stage, grad_of_what_the_loss_uses_too),
    *(backward_into_the_input, backward_into_one_parameter, backward_into_some),
    *(the_loss_uses_parameters, two_steps_add_up, two_calls_in_one_loss, two_calls_and_grad),
    *(a_call_upon_a_call, a_call_under_no_grad, a_call_in_inference_mode),
    *(a_call_with_gradients_set_off, backward_under_no_grad, hooks_of_results, hooks_of_inputs),
    *(two_backwards_of_one_call, three_backwards_of_one_loss, grads_of_one_call_and_its_backward),
    *(another_pass_between_two_backwards, one_backward_more_than_is_needed),
    *(results_changed_in_place, a_frozen_half, frozen_before_the_backward, in_evaluation_mode),
]
OPTIONS: dict[str, dict[str, Any]] = {
    "1f1b": {"workers": "threads", "schedule": "1f1b"},
    "halved": {"workers": "threads", "schedule": "zero-bubble"},
    "recomputed": {"workers": "threads", "schedule": "1f1b", "recompute": "all"},
    "processes": {"workers": "processes", "schedule": "1f1b"},
    "processes halved": {"workers": "processes", "schedule": "zero-bubble"},
}


@pytest.fixture(scope="module", params=list(OPTIONS))
def pipe(request: pytest.FixtureRequest) -> Iterator[ps.Pipeline]:
    torch.manual_seed(3)
    with make(Whole(), integers(7, 4), **OPTIONS[request.param]) as made:
        backward(made, made.model, integers(7, 4))  # what can be halved is known after one pass
        yield made


def same(ours: Tensors, theirs: Tensors) -> bool:
    """The same bits, and missing where the others are."""
    pairs = list(zip(ours, theirs, strict=True))
    return all((a is None) == (b is None) and (a is None or torch.equal(a, b)) for a, b in pairs)


def grads(model: nn.Module, x: torch.Tensor) -> Tensors:
    return [*(parameter.grad for parameter in model.parameters()), x.grad]


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_as_the_plain_model(pipe: ps.Pipeline, use: Use) -> None:
    pipe.model.zero_grad()
    twin, x = copy.deepcopy(pipe.model), integers(7, 4)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected = use(twin, twin, theirs)
    assert same(use(pipe, pipe.model, ours), expected)
    assert same(grads(pipe.model, ours), grads(twin, theirs))


def test_gradients_that_are_returned_are_the_callers(pipe: ps.Pipeline) -> None:
    """The next passes write elsewhere."""
    model, x = pipe.model, integers(7, 4)
    model.zero_grad()
    backward(pipe, model, x)
    found = torch.autograd.grad(pipe(x)[0].square().sum(), [model.a.weight, model.c.weight])
    copies = [gradient.clone() for gradient in found]
    kept, replaced = model.b.weight.grad, model.b.weight.grad.clone()
    model.b.weight.grad = torch.zeros_like(replaced)
    for _ in range(3):
        backward(pipe, model, x)
    assert same(list(found), list(copies))
    assert torch.equal(kept, replaced)


def test_bits_of_the_plain_loop() -> None:
    """With numbers that round: gradients of parameters are added up micro-batch by micro-batch."""
    torch.manual_seed(5)
    model, x = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)), torch.randn(8, 6)
    twin, given = copy.deepcopy(model), x.clone().requires_grad_()
    with make(model, x, "threads") as pipe:
        found = torch.autograd.grad(pipe(given).square().sum(), [*model.parameters(), given])

    def loop() -> Tensors:
        totals: list[torch.Tensor] = []
        rows = []
        for part in given.tensor_split(3):
            *each, row = torch.autograd.grad(twin(part).square().sum(), [*twin.parameters(), part])
            totals = [a + b for a, b in zip(totals, each, strict=True)] if totals else each
            rows.append(row)
        return [*totals, torch.cat(rows)]

    assert same(list(found), run_with_threads(loop, 1))
    assert all(parameter.grad is None for parameter in model.parameters())


class Draws(nn.Module):
    """Dropout and a BatchNorm, in double precision."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(4, 5), nn.BatchNorm1d(5)
        self.drop, self.b = nn.Dropout(0.5), nn.Linear(5, 3)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.b(self.drop(self.norm(self.a(x)).relu()))
        return found


@pytest.mark.parametrize("workers", ["threads", "processes"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_backwards_of_one_call_draw_the_same_and_count_rows_once(
    workers: Any, replicas: int
) -> None:
    """The forward that is run again has the same masks, and moves no running statistics."""
    torch.manual_seed(3)
    model, x = Draws(), torch.randn(6, 4).double()
    twin = copy.deepcopy(model)
    options: dict[str, Any] = {"devices": ["cpu", "cpu"], "num_microbatches": 2, "audit": None}
    if replicas == 1:
        options |= {"cuts": ["drop"]}
    with (
        ps.Pipeline(model, (x,), workers=workers, replicas=replicas, **options) as ours,
        ps.Pipeline(twin, (x,), workers=workers, replicas=replicas, **options) as theirs,
    ):
        out = ours(x)
        for keeps in (True, False):
            out.square().sum().backward(retain_graph=keeps)
        state = theirs.random_state()
        theirs(x).square().sum().backward()
        moved = [buffer.clone() for buffer in twin.buffers()]
        theirs.load_random_state(state)
        theirs(x).square().sum().backward()
        assert ours.random_state() == theirs.random_state()
        assert same([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])
        assert all(map(torch.equal, model.buffers(), moved))


@pytest.mark.parametrize("workers", ["threads", "processes"])
@pytest.mark.parametrize("own", [True, False])
def test_weights_that_change_between_two_backwards(workers: Any, own: bool) -> None:
    x = integers(7, 4)
    with make(Whole(), x, workers) as pipe:
        kind, lr = torch.optim.SGD, 1.0
        optimizer = pipe.optimizer(kind, lr=lr) if own else kind(pipe.parameters(), lr=lr)
        loss = pipe(x)[0].sum()
        loss.backward(retain_graph=True)
        before = [p.grad.clone() for p in pipe.parameters() if p.grad is not None]
        optimizer.step()
        with pytest.raises(ps.InputError, match="parameters have changed since the backward"):
            loss.backward()
        assert same(before, [p.grad for p in pipe.parameters() if p.grad is not None])
        backward(pipe, pipe.model, x)


class Reads(nn.Module):
    """Reads a buffer that it changes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 3)
        self.count: torch.Tensor
        self.register_buffer("count", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        found: torch.Tensor = self.b(self.a(x) * self.count)
        return found


def test_a_forward_that_would_find_another_buffer_goes_back_once() -> None:
    x = torch.randn(6, 4)
    with make(Reads(), x, "threads") as pipe:
        loss = pipe(x).sum()
        loss.backward(retain_graph=True)
        with pytest.raises(ps.PenstockError, match=r"forward changes 'count'.*add up the losses"):
            loss.backward()


def hooked() -> tuple[nn.Module, list[str]]:
    """A model with hooks of both kinds on its parameters, and what they have noted."""
    model, seen = Whole(), []

    def note(gradient: torch.Tensor) -> torch.Tensor:
        seen.append("seen")
        return gradient * 2

    model.a.weight.register_hook(note)
    model.c.bias.register_post_accumulate_grad_hook(lambda parameter: seen.append("added"))
    return model, seen


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_hooks_of_parameters(schedule: str) -> None:
    """For every micro-batch, and for those parameters alone that a gradient is added to."""
    model, seen = hooked()
    x = integers(7, 4).requires_grad_()
    with make(model, x.detach(), "threads", schedule=schedule) as pipe:
        torch.autograd.grad(pipe(x)[0].sum(), [x, model.a.bias])
        pipe(x)[0].sum().backward(inputs=[model.b.weight, x])
        assert seen == []
        pipe(x)[0].sum().backward()
        assert sorted(seen) == ["added"] * 3 + ["seen"] * 3
        seen.clear()
        pipe(x)[0].sum().backward(inputs=[model.a.weight])
        assert seen == ["seen"] * 3
        seen.clear()
        (pipe(x)[0].sum() + model.a.weight.sum() + model.c.bias.sum()).backward()
        assert sorted(seen) == ["added"] * 4 + ["seen"] * 4
        seen.clear()
        before = [parameter.grad.clone() for parameter in model.c.parameters()]
        for hooked_one in (model.a.weight, model.c.bias):
            with pytest.raises(ps.InputError, match=r"that has hooks.*backward\(inputs="):
                torch.autograd.grad(pipe(x)[0].sum(), hooked_one)
        assert seen == []
        assert same(before, [p.grad for p in model.c.parameters()])


def test_hooks_of_parameters_in_processes() -> None:
    """The driver's own ones are not called besides those in the workers."""
    model, seen = hooked()
    twin, _ = hooked()
    twin.load_state_dict(model.state_dict())
    x = integers(7, 4)
    with make(model, x, "processes") as pipe:
        pipe(x)[0].sum().backward()
        assert seen == []
        twin(x)[0].sum().backward()
        assert same(grads(model, x), grads(twin, x))


def change_a_saved_weight(pipe: ps.Pipeline, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        pipe.model.c.weight.mul_(2)


def change_a_weight_of_the_first_stage(pipe: ps.Pipeline, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        pipe.model.b.weight.copy_(torch.zeros(5, 5))


def load_other_weights(pipe: ps.Pipeline, optimizer: torch.optim.Optimizer) -> None:
    pipe.model.load_state_dict(Whole().state_dict())


def step_on_the_workers(pipe: ps.Pipeline, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


CHANGES = [
    *(change_a_saved_weight, change_a_weight_of_the_first_stage, load_other_weights),
    step_on_the_workers,
]
KINDS = pytest.mark.parametrize("workers", ["threads", "processes"])


@KINDS
def test_weights_that_change_before_the_backward(workers: str) -> None:
    """PyTorch raises where the backward needs the old ones, and nothing is added to `.grad`."""
    model, x = Whole(), integers(7, 4)
    state = copy.deepcopy(model.state_dict())
    with make(model, x, workers) as pipe:
        optimizer = pipe.optimizer(torch.optim.SGD, lr=1.0)
        for change in CHANGES:
            model.load_state_dict(state)
            model.zero_grad()
            backward(pipe, model, x)
            before = [None if g is None else g.clone() for g in grads(model, x)]
            result = pipe(x)[0]
            change(pipe, optimizer)
            with pytest.raises(ps.WorkerError, match="modified by an inplace operation"):
                result.sum().backward()
            assert same(grads(model, x), before), change.__name__
            twin = copy.deepcopy(model)
            model.zero_grad()
            assert same(backward(pipe, model, x), backward(twin, twin, x))
            assert same(grads(model, x), grads(twin, x)), change.__name__


@KINDS
def test_weights_that_the_backward_does_not_need_may_change(workers: str) -> None:
    model, x = Whole(), integers(7, 4)
    twin = copy.deepcopy(model)
    with make(model, x, workers) as pipe:
        for call, own in ((pipe, model), (twin, twin)):
            result = call(x)[0]
            with torch.no_grad():
                own.c.bias.add_(1)
                own.a.weight.mul_(2)  # whose input needs no gradient
            result.square().sum().backward()
        assert same(grads(model, x), grads(twin, x))


@KINDS
def test_a_graph_of_ones_own_sees_the_steps_of_workers(workers: str) -> None:
    model, x = Whole(), integers(7, 4)
    with make(model, x, workers) as pipe:
        optimizer = pipe.optimizer(torch.optim.SGD, lr=1.0)
        backward(pipe, model, x)
        penalty = model.a.weight.square().sum()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            penalty.backward()


def second_derivative(pipe: ps.Pipeline, x: torch.Tensor) -> None:
    torch.autograd.grad(pipe(x)[0].square().sum(), x, create_graph=True)


def backward_with_a_graph(pipe: ps.Pipeline, x: torch.Tensor) -> None:
    pipe(x)[0].square().sum().backward(create_graph=True)


def hessian(pipe: ps.Pipeline, x: torch.Tensor) -> None:
    torch.autograd.functional.hessian(lambda x: pipe(x)[0].square().sum(), x.detach())


def many_gradients_at_once(pipe: ps.Pipeline, x: torch.Tensor) -> None:
    z = pipe(x)[0]
    torch.autograd.grad(z, x, torch.eye(z.numel()).view(-1, *z.shape).double(),
                        is_grads_batched=True)  # fmt: skip


def forward_mode(pipe: ps.Pipeline, x: torch.Tensor) -> None:
    with torch.autograd.forward_ad.dual_level():
        pipe(torch.autograd.forward_ad.make_dual(x.detach(), torch.ones_like(x)))


def forward_mode_of_a_step(pipe: ps.Pipeline, x: torch.Tensor) -> None:
    with torch.autograd.forward_ad.dual_level():
        target = torch.autograd.forward_ad.make_dual(integers(7, 3), torch.ones(7, 3).double())
        step_towards(pipe, x, target)


def func_grad(pipe: ps.Pipeline, x: torch.Tensor) -> None:
    torch.func.grad(lambda x: pipe(x)[0].sum())(x.detach())


def func_vmap(pipe: ps.Pipeline, x: torch.Tensor) -> None:
    torch.func.vmap(lambda x: pipe(x)[0])(x.detach()[None])


def func_jvp(pipe: ps.Pipeline, x: torch.Tensor) -> None:
    torch.func.jvp(lambda x: pipe(x)[0], (x.detach(),), (torch.ones_like(x),))


def func_grad_of_a_step(pipe: ps.Pipeline, x: torch.Tensor) -> None:
    torch.func.grad(lambda x: step_towards(pipe, x, integers(7, 3)))(x.detach())


def step_towards(pipe: ps.Pipeline, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = pipe.train_step(x, target=y, loss_fn=lambda output, y: (output[0] - y).square().sum())
    assert isinstance(loss, torch.Tensor)
    return loss


REFUSED = {
    second_derivative: "create_graph=True",
    backward_with_a_graph: "create_graph=True",
    hessian: "create_graph=True",
    many_gradients_at_once: "is_grads_batched=True",
    forward_mode: "forward-mode tangent",
    forward_mode_of_a_step: "forward-mode tangent",
    func_grad: r"transformed by torch\.func",
    func_vmap: r"transformed by torch\.func",
    func_jvp: r"transformed by torch\.func",
    func_grad_of_a_step: r"transformed by torch\.func",
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch's own use
@pytest.mark.parametrize("use", list(REFUSED), ids=lambda use: use.__name__)
def test_what_stages_do_not_compute_is_refused(
    pipe: ps.Pipeline, use: Callable[[ps.Pipeline, torch.Tensor], None]
) -> None:
    """Where it is asked for, and it leaves nothing behind."""
    pipe.model.zero_grad()
    x = integers(7, 4).requires_grad_()
    backward(pipe, pipe.model, x)
    twin, other = copy.deepcopy(pipe.model), x.detach().clone().requires_grad_()
    pipe.model.zero_grad()
    x.grad = None
    with pytest.raises(ps.InputError, match=REFUSED[use]):
        use(pipe, x)
    assert same(grads(pipe.model, x), [None] * len(grads(twin, x)))
    backward(pipe, pipe.model, x)
    twin.zero_grad()
    backward(twin, twin, other)
    assert same(grads(pipe.model, x), grads(twin, other))
