"""A custom `autograd.Function` is a call as that of any other function."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.capture.functions import Applied
from penstock.torch_internals import APPLY_IS_IN_C
from tests.support.models import uniform_plan
from tests.zoo.check import check
from tests.zoo.entry import Entry

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))


class Double(torch.autograd.Function):
    """Its gradient is not that of what it computes, so that nobody can do without its backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, by: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * by

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        return gradient * x.sign() * 5, None


class Product(torch.autograd.Function):
    """Two results, of a weight as well."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(x, weight)
        return x @ weight, x.sum(1)

    @staticmethod
    def backward(ctx: Any, one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, weight = ctx.saved_tensors
        return one @ weight.T + other[:, None], 3 * (x.T @ one)


class Noisy(torch.autograd.Function):
    """Draws random numbers in both directions."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 4


class Nested(torch.autograd.Function):
    """Applies another one, and looks at values."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            found: torch.Tensor = Double.apply(x.detach().requires_grad_(), 2.0)
        return found.detach() if x.sum() > 0 else -found.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 3


class Applies(torch.autograd.Function):
    """Has an `apply` of its own."""

    @classmethod
    def apply(cls, x: torch.Tensor) -> Any:
        return super().apply(x * 2, 3.0)

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, by: float) -> torch.Tensor:
        return x * by

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * 7, None


class Scaled(torch.autograd.Function):
    """Reads an attribute of its class."""

    by = 2.0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * Scaled.by

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * Scaled.by


class Counting(torch.autograd.Function):
    """Writes into what it is given."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, state: dict[str, float]) -> torch.Tensor:
        ctx.state = state
        return x * state["by"]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.state["by"] *= 1.5
        return gradient, None


class Flagged(torch.autograd.Function):
    """Says something of values."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, bool]:
        return x * 2, bool(x.max() > 20)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, *_: Any) -> torch.Tensor:
        return gradient * 2


class Chosen(torch.autograd.Function):
    """Gives two rows for every row, as far as one can see."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([x.numpy(), x.numpy()])[np.arange(2 * len(x))])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient[: len(gradient) // 2]


class Backwards(torch.autograd.Function):
    """Adds to the gradients of leaves itself."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        x, weight = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            torch.autograd.backward(x @ weight, gradient)
        return x.grad, None


class Behind(torch.autograd.Function):
    """Writes where nobody sees it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x.data.mul_(2)
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class Half(torch.autograd.Function):
    """Gives a view."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x[:, :]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 5


double = Double.apply
KNOWN = [Double.apply]
BY = {Double.apply: 2.0}


class Hidden(torch.autograd.Function):
    """Uses what it is not given."""

    weights: ClassVar[list[torch.Tensor]] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x @ Hidden.weights.pop()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 3


class Block(nn.Module):
    """Layers with a function between them."""

    of_class = staticmethod(Double.apply)

    def __init__(self, how: str) -> None:
        super().__init__()
        self.before, self.after, self.how = nn.Linear(4, 4), nn.Linear(4, 4), how
        self.weight = nn.Parameter(torch.eye(4) * 0.7)
        self.by, self.state = 3.0, {"by": 2.0}
        self.double, self.kept = Double.apply, [Double.apply]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = HOW[self.how](self, self.before(x))
        result: torch.Tensor = self.after(x).relu()
        return result


def two_results(block: Block, x: torch.Tensor) -> Any:
    one, other = Product.apply(x, block.weight)
    return one * other[:, None]


def under_autocast(block: Block, x: torch.Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return Product.apply(x @ block.weight, block.weight.bfloat16())[0].float()


def looked_up(block: Block, x: torch.Tensor) -> Any:
    """Python that looks at what applies a function, not only applies it."""
    assert double == Double.apply
    assert double.__self__ is Double
    assert isinstance(double, type(KNOWN[0]))
    return double(x, BY[double])


def lazy(block: Block, x: torch.Tensor) -> Any:
    return kept_when_it_is_asked_for()(x, 2.0)


@cache
def kept_when_it_is_asked_for() -> Any:
    return Double.apply


def caught(block: Block, x: torch.Tensor) -> Any:
    """Python that does something else if it is stopped."""
    try:
        return made_there(block, x)
    except Exception:
        return x * 7


def without_gradients(block: Block, x: torch.Tensor) -> Any:
    with torch.no_grad():
        view = Half.apply(x)
    return x + view


def made_there(block: Block, x: torch.Tensor) -> Any:
    class Local(Double):
        pass

    return Local.apply(x, 2.0)


def hidden(block: Block, x: torch.Tensor) -> Any:
    Hidden.weights.append(block.weight)
    return Hidden.apply(x)


def attribute(block: Block, x: torch.Tensor) -> Any:
    Scaled.by = block.by
    return Scaled.apply(x)


HOW: dict[str, Callable[[Block, torch.Tensor], Any]] = {
    "constant": lambda block, x: Double.apply(x, 2.0),
    "weight": two_results,
    "random": lambda block, x: Noisy.apply(x),
    "in place": lambda block, x: InPlace.apply(x * 1),
    "nested": lambda block, x: Nested.apply(x),
    "autocast": under_autocast,
    "alias": lambda block, x: double(x, 2.0),
    "of a module": lambda block, x: block.double(x, 2.0),
    "of its class": lambda block, x: block.of_class(x, 2.0),
    "in a list": lambda block, x: block.kept[0](x, 2.0),
    "looked up": looked_up,
    "lazy": lazy,
    "own apply": lambda block, x: Applies.apply(x),
    "without gradients": without_gradients,
    "torch.func": lambda block, x: x + torch.func.grad(lambda v: (v**3).sum())(x),
    "local": made_there,
    "caught": caught,
    "hidden": hidden,
    "attribute": attribute,
    "state": lambda block, x: Counting.apply(x, block.state),
    "flag": lambda block, x: Flagged.apply(x)[0],
    "chosen": lambda block, x: Chosen.apply(x)[: len(x)],
    "nested backward": lambda block, x: Backwards.apply(x, block.weight),
    "data": lambda block, x: Behind.apply(x + 1),
}
OPENED = (
    *("constant", "weight", "random", "in place", "nested", "autocast"),
    *("alias", "of a module", "of its class", "looked up", "lazy", "own apply"),
    "without gradients",
    *(() if APPLY_IS_IN_C else ("in a list",)),
)
CLOSED = {
    "local": "applies Local, an autograd.Function of its own, which may be another one",
    "caught": "applies Local, an autograd.Function of its own, which may be another one",
    "hidden": "applies Hidden, an autograd.Function of its own, which uses 0.weight",
    "attribute": "assigns to Scaled.by",
    "state": "applied to a dict, which its backward may use",
    "flag": "which gives a bool beside tensors",
    "chosen": "asks for the size of a tensor that depends on values",
    "nested backward": "whose backward runs another one",
    "data": r"which uses \.data",
} | ({"in a list": "by a method that was stored where nobody sees"} if APPLY_IS_IN_C else {})


def build(how: str) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(Block(how), nn.Linear(4, 4), Block(how))


@pytest.mark.parametrize("how", OPENED)
def test_it_is_opened_and_exact(how: str) -> None:
    def inputs(rows: int) -> tuple[tuple[torch.Tensor], dict[str, object]]:
        return (torch.randn(rows, 4),), {}

    program = ps.capture(build(how), (X,))
    assert not program.closed
    assert sum(isinstance(call.target, Applied) for call in program.train.calls) == 2
    result = check(Entry(how, "plain", lambda: build(how), inputs))
    assert result.status == "exact", result


def test_it_runs_in_worker_processes() -> None:
    model, twin = build("weight"), build("weight")
    program = ps.capture(model, (X,))
    plan = uniform_plan(program, 2, 3)
    with ps.Pipeline(
        model, plan=plan, program=program, devices=["cpu"] * 2, workers="processes"
    ) as pipe:
        pipe.train_step(X, target=X, loss_fn=F.mse_loss)
        for part in range(3):
            rows = slice(2 * part, 2 * part + 2)
            (F.mse_loss(twin(X[rows]), X[rows]) / 3).backward()
        for one, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]


def test_a_forward_that_transforms_functions_is_recorded() -> None:
    model = build("torch.func")
    assert torch.equal(ps.capture(model, (X,))(X), model(X))


def test_what_a_capture_leaves_with_the_models_python_goes_on() -> None:
    """A cache may keep what the recording has put in the place of `apply`."""
    kept_when_it_is_asked_for.cache_clear()
    model = build("lazy")
    for _ in range(2):
        program = ps.capture(model, (X,))
        assert not program.closed
        assert torch.equal(program(X), model(X))
    x = X.clone().requires_grad_()
    kept_when_it_is_asked_for()(x, 2.0).sum().backward()
    assert torch.equal(x.grad, X.sign() * 5)  # type: ignore[arg-type]
    assert pickle.loads(pickle.dumps(kept_when_it_is_asked_for())) == Double.apply


def test_names_that_came_after_an_earlier_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    ps.capture(build("alias"), (X,))
    monkeypatch.setitem(globals(), "late", Double.apply)
    monkeypatch.setitem(HOW, "late", lambda block, x: globals()["late"](x, 2.0))
    model = build("late")
    program = ps.capture(model, (X,))
    assert not program.closed
    assert torch.equal(program(X), model(X))


@pytest.mark.parametrize(("how", "why"), list(CLOSED.items()))
def test_what_cannot_be_repeated_stays_closed_and_right(how: str, why: str) -> None:
    model = build(how)
    program = ps.capture(model, (X,))
    assert set(program.closed) == {"0", "2"}
    assert re.search(why, program.closed["0"])
    assert torch.equal(program(X), model(X))
