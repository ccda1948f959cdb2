"""Closed modules that look at values, and decide by them what they give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import penstock as ps

X = torch.randn(8, 10, 4, generator=torch.Generator().manual_seed(3))
SAME = torch.full((8,), 7)
VARIED = torch.tensor([3, 7, 2, 7, 7, 1, 7, 7])
SHORT = torch.tensor([3, 5, 2, 4, 1, 1, 5, 5])

READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda lengths: lengths.max().item(),
    "index": lambda lengths: lengths.max(),
    "format": lambda lengths: int(f"{lengths.max()}"),
    "tolist": lambda lengths: max(lengths.tolist()),
    "numpy": lambda lengths: int(lengths.numpy().max()),
    "array": lambda lengths: int(max(lengths.__array__())),
    "yes or no": lambda lengths: 7 if (lengths > 5).any() else 5,
}

Give = Callable[[torch.Tensor, int], Any]
Use = Callable[[torch.Tensor, Any], torch.Tensor]

GIVES: dict[str, tuple[Give, Use]] = {
    "a number": (lambda x, n: (x * 1, n), lambda x, n: x / n),
    "a name": (lambda x, n: (x * 1, "a" if n > 5 else "b"), lambda x, n: x if n == "a" else -x),
    "a tensor or none": (
        lambda x, n: (x * 1, None if n > 5 else x + 1),
        lambda x, n: x if n is None else -x,
    ),
    "none or a tensor": (
        lambda x, n: (x * 1, x + 1 if n > 5 else None),
        lambda x, n: x if n is None else -x,
    ),
    "as many": (lambda x, n: (x * 1, [x + k for k in range(n)]), lambda x, n: x * len(n)),
}


class Cutting(nn.Module):
    """Gives as much of its input as lengths say."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return x[:, : READS[self.how](lengths)]


class MeanOf(nn.Module):
    """Its Python asks how much that is."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.cutting = Cutting(how)
        self.layer, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        x = self.layer(self.cutting(x, lengths))
        result: torch.Tensor = self.last(x).sum(1) / x.shape[1]
        return result


class Deciding(nn.Module):
    """Gives something beside a tensor."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> Any:
        return GIVES[self.how][0](x, int(lengths.max()))


class Decided(nn.Module):
    """Its Python goes by that."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.deciding = Deciding(how)
        self.layer, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        x, n = self.deciding(self.layer(x), lengths)
        result: torch.Tensor = self.last(GIVES[self.how][1](x, n))
        return result


def models() -> list[Any]:
    """Of all kinds."""
    return [
        *(pytest.param(MeanOf, how, id=f"size, {how}") for how in READS),
        *(pytest.param(Decided, how, id=how) for how in GIVES),
    ]


@pytest.mark.parametrize(("kind", "how"), models())
def test_rows_that_differ_close_what_goes_by_it(kind: type[nn.Module], how: str) -> None:
    model = nn.ModuleList([kind(how)])[0]
    program = ps.capture(model, (X, VARIED))
    for lengths in (VARIED, SHORT, SAME):
        for rows in (slice(None), slice(0, 4), slice(4, 8)):
            given = X[rows], lengths[rows]
            assert torch.equal(program(*given), model(*given))


@pytest.mark.parametrize(("kind", "how"), models())
def test_what_the_example_does_not_show_is_refused(kind: type[nn.Module], how: str) -> None:
    model = kind(how)
    program = ps.capture(model, (X, SAME))
    assert torch.equal(program(X, SAME), model(X, SAME))
    with pytest.raises(ps.InputError, match="depends on values, which made no difference"):
        program(X, SHORT)


def test_the_error_names_what_to_keep_closed() -> None:
    model = nn.ModuleDict({"of": MeanOf("item"), "after": nn.Linear(4, 4)})
    model.forward = lambda x, lengths: model["after"](model["of"](x, lengths))  # type: ignore
    program = ps.capture(model, (X, SAME))
    with pytest.raises(ps.InputError, match=r"of\.layer gives the shape \(2, 5, 4\)") as raised:
        program(X[:2], SHORT[:2])
    assert "keep_closed=['of']" in str(raised.value)
    program = ps.capture(model, (X, SAME), keep_closed=["of"])
    assert torch.equal(program(X, SHORT), model(X, SHORT))


class Unasked(nn.Module):
    """Nobody asks how much it is."""

    def __init__(self) -> None:
        super().__init__()
        self.cutting = Cutting("item")
        self.layer, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.layer(self.cutting(x, lengths))).sum(1)
        return result


def test_sizes_that_nobody_asks_for_may_be_any() -> None:
    model = Unasked()
    program = ps.capture(model, (X, SAME))
    assert not program.closed
    for lengths in (SAME, SHORT):
        assert torch.equal(program(X, lengths), model(X, lengths))


def test_a_pipeline_refuses_them_too() -> None:
    model = MeanOf("tolist")
    with ps.Pipeline(model, (X, SAME), devices=["cpu"] * 2, num_microbatches=2, audit=None) as pipe:
        assert torch.equal(pipe(X, SAME), model(X, SAME))
        with pytest.raises(ps.InputError, match=r"layer gives the shape \(4, 5, 4\)"):
            pipe(X, SHORT)


class Cut(torch.autograd.Function):
    """As many entries as a number in a tensor says, or as a yes or no says."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, lengths: torch.Tensor, how: str) -> torch.Tensor:
        ctx.length = x.shape[1]
        return x[:, : READS[how](lengths)].clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        rest = ctx.length - gradient.shape[1]
        return nn.functional.pad(gradient, (0, 0, 0, rest)), None, None


class CutByFunction(nn.Module):
    """Its Python asks how large the result of a custom function is."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.layer, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        x = Cut.apply(self.layer(x), lengths, self.how)
        result: torch.Tensor = self.last(x).sum(1) / x.shape[1]
        return result


@pytest.mark.parametrize("how", READS)
def test_custom_functions_that_look_at_values(how: str) -> None:
    model = CutByFunction(how)
    program = ps.capture(model, (X, SAME))
    assert torch.equal(program(X, SAME), model(X, SAME))
    if how != "yes or no":
        assert torch.equal(program(X, SHORT), model(X, SHORT))
        return
    with pytest.raises(ps.InputError, match="depends on values, which made no difference"):
        program(X, SHORT)


class SumOfCut(nn.Module):
    """Its Python asks how large something is that is made of what lengths decide, and is not."""

    def __init__(self) -> None:
        super().__init__()
        self.cutting = Cutting("item")
        self.layer, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        x = self.layer(self.cutting(x, lengths)).sum(1)
        return self.last(x).reshape(x.shape[0], 2, x.shape[1] // 2)


def test_a_size_that_values_do_not_decide_may_be_asked_for() -> None:
    model = SumOfCut()
    program = ps.capture(model, (X, SAME))
    assert not program.closed
    for lengths in (SAME, SHORT):
        assert torch.equal(program(X, lengths), model(X, lengths))


@torch.library.custom_op("penstock_tests::cut", mutates_args=())
def cut_by_operator(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """An operator whose tags do not say that it looks at values."""
    return x[:, : int(lengths.max())].clone()


def long(lengths: torch.Tensor) -> bool:
    return bool((lengths > 5).any())


def filled(given: dict[str, int], x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    given["n"] = int(lengths.max())
    return x * 2


def written(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    return x * 2 if long(lengths) else x.mul_(0.5)


MODULES: dict[str, Callable[..., Any]] = {
    "as it is": lambda x, n: x if long(n) else x * 0.5,
    "twice": lambda x, n: (x + 1, x + 1) if not long(n) else (lambda y: (y, y))(x * 2),
    "none": lambda x, n: x * 2 if long(n) else None,
    "a tuple": lambda x, n: x * 2 if long(n) else (x * 2, x),
    "type": lambda x, n: x * 2 if long(n) else (x * 2).double(),
    "layout": lambda x, n: x * 2 if long(n) else (x * 2).to_sparse(),
    "dimensions": lambda x, n: x * 2 if long(n) else x.sum(1),
    "flagged": lambda x, n: (long(n), setattr(x, "flag", 7), x)[2],
    "sparse": lambda x, n: x if float(torch.sparse.sum(x)) < 1e9 else x * 2,
    "entries": lambda n: n.clamp(max=8).sub(5).relu().to_sparse().indices()[0].float(),
    "random": lambda x, n: x if torch.rand(()).item() < 0.5 else x * 2,
    "class": lambda x, n: nn.Parameter(x.detach()) if long(n) else x * 2,
    "gradient": lambda x, n: x * 2 if long(n) else x.detach(),
    "strides": lambda x, n: x * 1 if long(n) else x.transpose(0, 1).contiguous().transpose(0, 1),
    "cut": lambda x, n: x[:, : int(n.max())],
    "one of two": lambda x, n: (x[:, : int(n.max())], x.sum(1)),
    "pair": lambda q, x: (q * 2, q.sum(0) + x.sum()),
    "fills": lambda x, n, given: filled(given, x, n),
    "writes": written,
    "operator": lambda x, n: cut_by_operator(x, n),
}


class Doing(nn.Module):
    """One of them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, *args: Any) -> Any:
        return MODULES[self.how](*args)


def chosen(m: Any, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    """Two results, one as large as values say, which is asked for by the other's size."""
    first, second = m.doing(x[n > -50], x)
    result: torch.Tensor = x * first.shape[0] + second.sum()
    return result


def counted(m: Any, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    given: dict[str, int] = {}
    return m.doing(x, n, given) / given["n"]  # type: ignore[no-any-return]


def squeezed(m: Any, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    y = x[:, 0, 0][n > n.float().mean() * 1.1].squeeze()
    return x + (y[None] * 3 if y.dim() == 0 else y).sum()


# By what its Python does: the closed module, whether it must be right for other lengths, and more.
ODD: dict[str, tuple[str, bool, Callable[..., Any]]] = {
    "as it is": ("as it is", True, lambda m, x, n: x + m.doing(x, n)),
    "as it is, first": ("as it is", True, lambda m, x, n: m.doing(x, n) + x),
    "as it is alone": ("as it is", True, lambda m, x, n: m.doing(x * 2, n)),
    "is it": ("as it is", False, lambda m, x, n: x if m.doing(x, n) is x else x * 3),
    "offset": ("strides", True, lambda m, x, n: x + m.doing(x, n).storage_offset()),
    "entries": ("entries", False, lambda m, x, n: x * m.doing(n).shape[0]),
    "id": ("as it is", False, lambda m, x, n: x * (1 + (id(m.doing(x, n)) == id(x)))),
    "attribute": ("flagged", True, lambda m, x, n: x * getattr(m.doing(x, n), "flag", 5)),
    "layout kept": ("sparse", True, lambda m, x, n: x + m.doing(x.to_sparse(), n).to_dense()),
    "detached": ("as it is", False, lambda m, x, n: m.doing(x * 1, n).detach_()),
    "random": ("random", True, lambda m, x, n: x + 0 * m.doing(x, n)),
    "twice": ("twice", True, lambda m, x, n: m.doing(x, n)[0] * m.doing(x, n)[1]),
    "none": ("none", False, lambda m, x, n: x if m.doing(x, n) is None else x * 2),
    "tuple": ("a tuple", False, lambda m, x, n: x * (2 if type(m.doing(x, n)) is tuple else 1)),
    "type": ("type", False, lambda m, x, n: x * m.doing(x, n).dtype.itemsize),
    "class": ("class", False, lambda m, x, n: x * (1 + isinstance(m.doing(x, n), nn.Parameter))),
    "gradient": ("gradient", False, lambda m, x, n: x * (1 + m.doing(x, n).requires_grad)),
    "derived": ("gradient", False, lambda m, x, n: x * (1 + (m.doing(x, n) * 2).requires_grad)),
    "strides": ("strides", True, lambda m, x, n: x * m.doing(x, n).stride(0)),
    "contiguous": ("strides", True, lambda m, x, n: x * (m.doing(x, n) * 1).is_contiguous()),
    "layout": ("layout", False, lambda m, x, n: x * (2 if m.doing(x, n).is_sparse else 1)),
    "dimensions": ("dimensions", False, lambda m, x, n: x * m.doing(x, n).dim()),
    "shape": ("dimensions", False, lambda m, x, n: x * len(m.doing(x, n).shape)),
    "writes": ("writes", False, lambda m, x, n: (m.doing(x, n), x)[1] * 3),
    "fills": ("fills", True, counted),
    "operator": ("operator", False, lambda m, x, n: m.doing(x, n).sum(1) / m.doing(x, n).shape[1]),
    "open operator": (
        "cut",
        False,
        lambda m, x, n: cut_by_operator(x, n).sum(1) / cut_by_operator(x, n).shape[1],
    ),
    "same size": ("cut", False, lambda m, x, n: x * (2 if m.doing(x, n).is_same_size(x) else 1)),
    "unsafe": ("cut", False, lambda m, x, n: x * len(m.doing(x, n).unsafe_chunk(20, 1))),
    "pair": ("pair", True, chosen),
    "squeezed": ("cut", True, squeezed),
    "for its size": ("cut", True, lambda m, x, n: x * torch.where(x > 50, x, x[n > -9]).shape[0]),
    "sections": ("cut", True, lambda m, x, n: x * x.tensor_split(n[:1], 1)[0].shape[1]),
    "sparse": ("cut", True, lambda m, x, n: x * n.clamp(max=8).to_sparse().indices().shape[1]),
    # what does not depend on them
    "rows": ("cut", True, lambda m, x, n: (y := m.doing(x, n)).reshape(y.shape[0], -1, 2).sum(1)),
    "by size": ("cut", True, lambda m, x, n: (y := m.doing(x, n)).reshape(y.size(0), -1).sum(1)),
    "last": ("cut", True, lambda m, x, n: (m.doing(x, n) / m.doing(x, n).shape[-1]).sum(1)),
    "parts": ("cut", True, lambda m, x, n: sum(m.doing(x, n).chunk(2, dim=-1)).sum(1)),
    "other leaf": ("one of two", True, lambda m, x, n: (y := m.doing(x, n)[1]) / y.shape[1]),
}


class OddAround(nn.Module):
    """Layers around it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.doing = Doing(ODD[how][0])
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = ODD[self.how][2](self, self.layer(x), lengths)
        return result


@pytest.mark.parametrize("how", ODD)
def test_what_values_may_decide(how: str) -> None:
    torch.manual_seed(1)
    model = OddAround(how)
    same = torch.full((8,), 10)
    program = ps.capture(model, (X, same))
    with torch.set_grad_enabled(how in ("gradient", "derived")):
        assert torch.equal(program(X, same), model(X, same))
        if ODD[how][1]:
            assert torch.equal(program(X, SHORT), model(X, SHORT))
        else:
            with pytest.raises(ps.InputError, match="depends on values"):
                program(X, SHORT)


class Inside(nn.Module):
    """One that is in a container of torch's, and one that is compiled by torch.jit."""

    def __init__(self, how: str) -> None:
        super().__init__()
        kept = nn.Sequential(OneCut())
        self.inner = torch.jit.script(OneCut()) if how == "script" else kept
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        y = self.inner(self.layer(x) + 0 * lengths[:, None, None])
        result: torch.Tensor = y.sum(1) / y.shape[1]
        return result


class OneCut(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, : int((x[0, :, 0] > -50).sum())]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*is deprecated:DeprecationWarning")
@pytest.mark.parametrize("how", ["kept", "script"])
def test_modules_that_nobody_looks_into(how: str) -> None:
    model = Inside(how)
    program = ps.capture(model, (X, SAME), keep_closed=["inner"])
    assert torch.equal(program(X, SAME), model(X, SAME))
    other = X.clone()
    other[0, 5:] = -1e6 * model.layer.weight[0].sign().detach()
    assert model(other, SAME).isfinite().all()
    with pytest.raises(ps.InputError, match="depends on values"):
        program(other, SAME)
