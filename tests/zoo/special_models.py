"""Plain PyTorch models: what Python and PyTorch offer besides layers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

WIDTH = 16


class Checkpointed(nn.Module):
    """`torch.utils.checkpoint` around half of it, dropout inside."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.2)) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for k, layer in enumerate(self.layers):
            x = checkpoint(layer, x, use_reentrant=False) if k % 2 else layer(x)
        return x


class Hooked(nn.Module):
    """Forward hooks that change what goes in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.layers[0].register_forward_hook(_doubled)
        self.layers[2].register_forward_pre_hook(_negated)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def _doubled(module: nn.Module, args: Any, result: torch.Tensor) -> torch.Tensor:
    return result * 2


def _negated(module: nn.Module, args: Any) -> Any:
    return (-args[0],)


class Scripted(nn.Module):
    """A submodule that `torch.jit.script` compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.middle = torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x)))


class Compiled(nn.Module):
    """A submodule that `torch.compile` wraps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
        self.middle = torch.compile(inner, backend="eager")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x)))


class Normed(nn.Module):
    """Weight norm and spectral norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.second = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.third = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(self.second(self.first(x).relu()).relu())


def lazy() -> nn.Module:
    """Lazily initialised modules, used once."""
    model = nn.Sequential(nn.LazyLinear(WIDTH), nn.ReLU(), nn.LazyLinear(4))
    with torch.no_grad():
        model(torch.randn(1, WIDTH))
    return model


class ByShape(nn.Module):
    """Branches on a shape, and loops as often as its configuration says."""

    def __init__(self, loops: int = 3) -> None:
        super().__init__()
        self.config = {"loops": loops}
        self.layer, self.wide = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] > 8:
            x = self.wide(x)
        for _ in range(self.config["loops"]):
            x = self.layer(x).tanh() + x
        return x


class ByValue(nn.Module):
    """A block that branches on a value that it computed."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.one(x)
            return y if y.mean() > 0 else self.other(y)

    def __init__(self) -> None:
        super().__init__()
        self.before, self.inner, self.after = (
            nn.Linear(WIDTH, WIDTH),
            self.Inner(),
            nn.Linear(WIDTH, 3),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.inner(self.before(x)))


class Attributes(nn.Module):
    """Tensors that are plain attributes, of the root and of a child."""

    class Child(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.linspace(0.5, 1.5, WIDTH)
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) * self.scale

    def __init__(self) -> None:
        super().__init__()
        self.offset = torch.arange(WIDTH) / WIDTH
        self.child, self.last = self.Child(), nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.child(x + self.offset))


class TwoPaths(nn.Module):
    """One module under two names, and children that are in plain lists and dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.same = self.first
        self.known = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.by_name = {"a": self.known[0], "b": self.known[1]}
        self.listed = list(self.known)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.by_name["b"](self.by_name["a"](self.first(x).tanh()))
        for layer in self.listed:
            x = layer(x).tanh()
        return self.same(x)


class Methods(nn.Module):
    """A forward that calls other methods of its own and of its children."""

    class Child(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up = nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH)

        def encode(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(x).tanh()

        def decode(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, self.up.weight, self.up.bias)

    def __init__(self) -> None:
        super().__init__()
        self.child, self.last = self.Child(), nn.Linear(WIDTH, 3)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.child.decode(self.child.encode(x)) + x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last.forward(self.features(x))


class Operators(nn.Module):
    """Every operator of Python, reflected and in place too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        y = x**2 + 2**x + (1 - x) * 2 + 1 / (x.abs() + 1) - x.detach() // 1 + x % 2
        y = y + 5 % (x.detach().abs() + 2) + 7 // (abs(x.detach()) + 1)
        y = y + (-x) + x @ self.layer.weight
        numbers = (3 - (x.long() << 1)) ^ 1
        flags = ((x > 0) & True) | ~(x <= 0.5)
        x = x * 1
        x += 1
        x *= 2
        x -= y
        x /= 3
        x **= 2
        return x + y + numbers + flags


class Stored(nn.Module):
    """Blocks that keep what they have seen as attributes."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)
            self.register_buffer("largest", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.largest = torch.max(self.largest, x.detach().max())
            self.seen = x.detach()
            return self.layer(x) / (1 + self.largest)

    def __init__(self) -> None:
        super().__init__()
        self.block, self.last = self.Block(), nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.block(self.block(x)))


class Replaced(nn.Module):
    """A forward that puts another module in the place of one, when it is first called."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Sequential(nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, 3)
        self.act = nn.Sequential(nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.act[0], nn.ReLU):
            self.act = nn.Sequential(nn.Tanh())
        return self.last(self.act(self.inner(x)))


class Doubled(nn.Module):
    """A block that gives the same tensor twice, scaled by a number of numpy's."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            y = self.layer(x) / np.sqrt(WIDTH)
            return [y, y]

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = self.Block(), self.Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.first(x)
        c, d = self.second(a + b)
        return c * d


class Closed(nn.Module):
    """The same in a block that hooks close."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.last = Doubled.Block(), nn.Linear(WIDTH, 3)
        self.block.register_forward_hook(_unchanged)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.block(x)
        return self.last(a * b)


def _unchanged(module: nn.Module, args: Any, result: Any) -> None:
    """A hook that only looks."""


class Rescaled(nn.Module):
    """Divides its own weights in evaluation, and puts them back in training."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.table = nn.Embedding(10, WIDTH, max_norm=0.5)
        self.scaled = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.scaled == self.training:
            with torch.no_grad():
                self.inner.weight.mul_(2.0 if self.training else 0.5)
            self.scaled = not self.training
        x = x + self.table(x[:, 0].abs().long() % 10)
        return self.last(self.inner(x))
