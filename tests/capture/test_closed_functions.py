"""Plain functions that are closed in place of the modules whose forward calls them."""

from __future__ import annotations

import functools
from collections.abc import Callable
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
    "other name": ("", lambda m, x, n: x + OTHER_NAMES["mask"](n).sum(1)[:, None, None]),
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
    before = dict(globals())
    model = Model(how).eval() if how == "trained" else Model(how)
    program = ps.capture(model, (X, LENGTHS))
    assert dict(globals()) == before  # no stand-in is left
    names = [f"{__name__}.{name}()" for name in USES[how][0].split()]
    assert list(program.closed) == (names or [""])
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
