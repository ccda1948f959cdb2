"""Plain functions that are closed in place of the modules whose forward calls them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from inspect import signature
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock as ps

X = torch.randn(8, 10, 4, generator=torch.Generator().manual_seed(3))
LENGTHS = torch.tensor([3, 10, 2, 7, 7, 1, 10, 4])
OTHERS = torch.tensor([9, 2, 2, 7, 1, 1, 8, 4])


def longest(lengths: torch.Tensor) -> int:
    """A number, which no program can have."""
    return int(lengths.max())


def mask_of(lengths: torch.Tensor, size: int | None = None) -> torch.Tensor:
    """Whether an entry is one of so many, up to the longest."""
    size = int(lengths.max().item()) if size is None else size
    return torch.arange(size)[None] < lengths[:, None]


def mask_by_list(lengths: torch.Tensor) -> torch.Tensor:
    """The same by Python's numbers."""
    numbers = lengths.tolist()
    return torch.tensor([[k < n for k in range(10)] for n in numbers])


def mask_by_another(lengths: torch.Tensor) -> torch.Tensor:
    """The same, for which another function gives a number."""
    return torch.arange(longest(lengths))[None] < lengths[:, None]


def mask_and_number(lengths: torch.Tensor) -> tuple[torch.Tensor, int]:
    """A tensor and a number."""
    return mask_of(lengths), longest(lengths)


def saying(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapped


@saying
def mask_in_a_wrapper(lengths: torch.Tensor) -> torch.Tensor:
    """The same within another function."""
    return torch.arange(int(lengths.max()))[None] < lengths[:, None]


def dropped(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """What is trained goes through it, in place, with random numbers."""
    x = F.dropout(x.sin(), 0.5)
    for row, length in enumerate(lengths.tolist()):
        x[row, length:] *= 0.5
    return x


def of_a_module(layer: nn.Linear, lengths: torch.Tensor) -> torch.Tensor:
    """Is given a module."""
    return layer.weight[:, : int(lengths.max())]


def counting(lengths: torch.Tensor, into: list[int]) -> torch.Tensor:
    """Changes a list."""
    into.append(int(lengths.max()))
    return lengths.float()


HELD: list[nn.Parameter] = []
OTHER_NAMES = {"mask": mask_of}


def by_a_global(lengths: torch.Tensor) -> torch.Tensor:
    """Uses what it is not given."""
    return HELD[-1][: longest(lengths)].sum() * lengths


def padded(mask: torch.Tensor) -> torch.Tensor:
    """A mask of ten entries."""
    return F.pad(mask, (0, 10 - mask.shape[1]))


def padded_whole(lengths: torch.Tensor) -> torch.Tensor:
    """The same, made in one function."""
    return padded(mask_of(lengths))


def masked(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x.masked_fill(~mask[:, :, None], 0.0)


FUNCTIONS = (mask_of, mask_by_list, mask_by_another, mask_and_number, dropped, padded, longest)

# By name: which functions are closed, none if the module is; and what its forward does.
USES: dict[str, tuple[str, Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]]] = {
    "read": ("mask_of", lambda m, x, n: x[:, :1] + mask_of(n).float().sum(1)[:, None, None]),
    "list": ("mask_by_list", lambda m, x, n: masked(x, mask_by_list(n))),
    "inner": ("mask_by_another", lambda m, x, n: x + mask_by_another(n).sum(1)[:, None, None]),
    "wrapper": (
        "mask_in_a_wrapper",
        lambda m, x, n: x + mask_in_a_wrapper(n).sum(1)[:, None, None],
    ),
    "trained": ("dropped", lambda m, x, n: dropped(x, n)),
    "padded": ("mask_of padded", lambda m, x, n: masked(x, padded_whole(n))),
    "number beside": ("", lambda m, x, n: x * mask_and_number(n)[1]),
    "module": ("", lambda m, x, n: x + of_a_module(m.odd, n).sum()),
    "changes": ("", lambda m, x, n: x + counting(n, [])[:, None, None]),
    "global": ("", lambda m, x, n: x + by_a_global(n)[:, None, None]),
    "other name": ("mask_of", lambda m, x, n: x + OTHER_NAMES["mask"](n).sum(1)[:, None, None]),
    "asks": ("", lambda m, x, n: x / mask_of(n).shape[1]),
}


class Model(nn.Module):
    """Layers around what uses a helper."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first, self.last, self.odd = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(12, 4)
        HELD[:] = [nn.Parameter(torch.ones(12))]
        if how == "global":
            self.held = HELD[0]

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        x = USES[self.how][1](self, self.first(x).tanh(), lengths)
        result: torch.Tensor = self.last(x)
        return result


@pytest.mark.parametrize("how", USES)
def test_bits(how: str) -> None:
    before, codes = dict(globals()), [f.__code__ for f in FUNCTIONS]
    model = Model(how).eval() if how == "trained" else Model(how)
    program = ps.capture(model, (X, LENGTHS))
    assert (dict(globals()), codes) == (before, [f.__code__ for f in FUNCTIONS])
    names = [f"{__name__}.{name}()" for name in USES[how][0].split()]
    assert list(program.closed_functions) == names
    assert list(program.closed) == ([] if names else [""])
    assert all(name in str(program.explain()) for name in names)
    if how == "trained":
        return  # other random numbers
    for x, lengths in ((X, LENGTHS), (X, OTHERS), (X[:3], OTHERS[:3])):
        assert torch.equal(program(x, lengths), model(x, lengths))


@pytest.mark.parametrize("workers", ["threads", "processes"])
@pytest.mark.parametrize("how", [how for how, (name, _) in USES.items() if name])
def test_training(how: str, workers: str) -> None:
    """Every step is audited: results and gradients are the model's own, and so is what it draws."""
    torch.manual_seed(2)
    model = Model(how)
    with ps.Pipeline(
        model,
        (X, LENGTHS),
        devices=["cpu", "cpu"],
        num_microbatches=2,
        cuts=["last"],
        workers=workers,
        audit=1,
    ) as pipe:
        for lengths in (LENGTHS, OTHERS):
            loss = pipe.train_step(X, lengths, target=X, loss_fn=lambda y, x: ((y - x) ** 2).mean())
            assert loss.isfinite()
        assert model.first.weight.grad is not None


def test_a_function_is_open_where_it_reads_nothing() -> None:
    class Sized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.layer(masked(x, mask_of(lengths, x.shape[1])))
            return result

    model = nn.ModuleList([Sized()])[0]
    program = ps.capture(model, (X, LENGTHS))
    assert not program.closed
    assert torch.equal(program(X, OTHERS), model(X, OTHERS))


def scaled(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """What it is given, or something else."""
    return x if int(lengths.max()) > 9 else x * 0.5


def the_same_twice(x: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One tensor or two."""
    y = x * int(lengths.max())
    return y, y if int(lengths.max()) > 9 else x + 1


def cut_or_not(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """What it is given where there is nothing to do."""
    n = int(lengths.max())
    return x if n == x.shape[1] else x[:, :n]


def maybe_none(lengths: torch.Tensor) -> torch.Tensor | None:
    return lengths.float() if int(lengths.max()) > 9 else None


def of_a_type(lengths: torch.Tensor) -> torch.Tensor:
    return lengths.float() if int(lengths.max()) > 9 else lengths.double()


def of_dimensions(lengths: torch.Tensor) -> torch.Tensor:
    return lengths.float() if int(lengths.max()) > 9 else lengths.float()[:, None]


def halved(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Sometimes writes what it is given."""
    if int(lengths.max()) <= 9:
        with torch.no_grad():
            x.mul_(0.5)
    return lengths.float()


def raising(lengths: torch.Tensor) -> torch.Tensor:
    if int(lengths.max()) > 9:
        raise ValueError("long")
    return lengths.float()


def tagged(lengths: torch.Tensor) -> torch.Tensor:
    result = lengths.float()
    result.tag = int(lengths.max())  # type: ignore[attr-defined]
    return result


STATE: dict[str, Any] = {}


def keeping(lengths: torch.Tensor) -> torch.Tensor:
    STATE["longest"] = int(lengths.max())
    return lengths.float()


def with_memory(lengths: torch.Tensor, seen: list[int] = []) -> torch.Tensor:  # noqa: B006
    seen.append(int(lengths.max()))
    return lengths.float() * seen[-1]


def on_itself(lengths: torch.Tensor) -> torch.Tensor:
    on_itself.longest = int(lengths.max())  # type: ignore[attr-defined]
    return lengths.float()


def renaming(given: dict[str, Any], lengths: torch.Tensor) -> torch.Tensor:
    given["long" if int(lengths.max()) > 9 else "short"] = given.pop("x")
    return lengths.float()


def of_the_state(x: torch.Tensor) -> torch.Tensor:
    return x * int(STATE["lengths"].max())


def arguments(function: Callable[..., Any]) -> int:
    return len(signature(function).parameters)


TABLE = {mask_of: 3}
PUSHED: list[int] = []
push = PUSHED.append


def importing(lengths: torch.Tensor) -> torch.Tensor:
    from sys import modules

    modules[__name__].STATE[int(lengths.max())] = True
    return lengths.float()


def pushing(lengths: torch.Tensor) -> torch.Tensor:
    push(int(lengths.max()))
    return lengths.float()


def setting(lengths: torch.Tensor) -> torch.Tensor:
    result = lengths.float()
    result.__setattr__("tag", int(lengths.max()))
    return result


def without_gradients(lengths: torch.Tensor) -> torch.Tensor:
    if int(lengths.max()) > 90:
        torch.set_grad_enabled(False)
    return lengths.float()


def caught(lengths: torch.Tensor, function: Callable[..., Any]) -> torch.Tensor:
    try:
        result: torch.Tensor = function(lengths)
    except ValueError:
        return lengths * 3
    return result


def set_and_used(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    STATE["lengths"] = lengths
    return of_the_state(x)


def put(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return x + values[:, None, None]


def cut_mean(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    y = cut_or_not(x, lengths)
    return x + y.sum(1, keepdim=True) / y.shape[1]


def renamed(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    given = {"x": x}
    return put(x * (2 if "long" in given else 1), renaming(given, lengths)) * len(given)


def held_against(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    is_known = OTHER_NAMES["mask"] is mask_of and callable(mask_of)
    return put(x, mask_of(lengths).sum(1)) * (TABLE[mask_of] if is_known else 1)


# What a forward does; and whether it must be right, or may be refused, for other lengths.
ODD: dict[str, tuple[bool, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = {
    "as it is": (True, lambda x, n: x + scaled(x, n)),
    "as it is, first": (True, lambda x, n: scaled(x, n) + x),
    "twice": (True, lambda x, n: the_same_twice(x, n)[0] - the_same_twice(x, n)[1]),
    "cut": (True, cut_mean),
    "none": (False, lambda x, n: x * 2 if maybe_none(n) is None else x),
    "type": (False, lambda x, n: x * (2 if of_a_type(n).dtype is torch.float32 else 1)),
    "dimensions": (False, lambda x, n: x * of_dimensions(n).dim()),
    "writes": (False, lambda x, n: put(x, halved(x, n))),
    "raises": (True, lambda x, n: put(x, caught(n, raising))),
    "tag": (True, lambda x, n: put(x, tagged(n)) * tagged(n).tag),  # type: ignore[attr-defined]
    "keeps": (True, lambda x, n: put(x, keeping(n)) * STATE["longest"]),
    "default": (True, lambda x, n: put(x, with_memory(n))),
    "itself": (True, lambda x, n: put(x, on_itself(n)) * on_itself.longest),  # type: ignore
    "renames": (True, renamed),
    "state": (True, set_and_used),
    "identity": (True, held_against),
    "is it": (True, lambda x, n: x * (2 if scaled(x, n) is x else 1)),
    "signature": (
        True,
        lambda x, n: put(x, mask_of(n).sum(1)) * len(signature(mask_of).parameters),
    ),
    "code": (True, lambda x, n: put(x, mask_of(n).sum(1)) * mask_of.__code__.co_argcount),
    "imports": (True, lambda x, n: put(x, importing(n)) * len(STATE)),
    "pushes": (True, lambda x, n: put(x, pushing(n)) * PUSHED[-1]),
    "sets": (True, lambda x, n: put(x, setting(n)) * setting(n).tag),  # type: ignore[attr-defined]
    "mode": (True, lambda x, n: put(x, without_gradients(n))),
    "same size": (True, lambda x, n: x * (2 if mask_of(n).is_same_size(x[:, :, 0]) else 1)),
}


class Odd(nn.Module):
    """Layers around one of them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(ODD[self.how][1](self.first(x), lengths))
        return result


@pytest.mark.parametrize("how", ODD)
def test_what_values_may_decide(how: str) -> None:
    """The example's lengths are alike in what they decide, so that nothing shows."""
    torch.manual_seed(1)
    model = Odd(how)
    same = torch.full((8,), 10)
    program = ps.capture(model, (X, same))
    with torch.no_grad():
        assert torch.equal(program(X, same), model(X, same))
        if ODD[how][0]:
            assert torch.equal(program(X, OTHERS), model(X, OTHERS))
        else:
            with pytest.raises(ps.InputError, match="depends on values"):
                program(X, OTHERS)


def test_what_is_raised_for_other_values_only() -> None:
    model = Odd("raises")
    short = torch.full((8,), 3)
    program = ps.capture(model, (X, short))
    assert torch.equal(program(X, short), model(X, short))
    with pytest.raises(ValueError, match="long"):
        program(X, LENGTHS)
