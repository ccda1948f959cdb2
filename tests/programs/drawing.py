"""Programs drawn at random: what their modules read is changed between the steps.

A program is a model of a few blocks, each of which reads something besides tensors (an attribute,
a flag, the grad mode, a size), ties a weight, writes in place or draws random numbers, a head whose
result has some shape, and a list of steps with what is changed before each.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional as F

from penstock.capture.trees import flatten
from penstock.schedule import SCHEDULES
from penstock.workers.backend import WorkerKind as Workers

WIDTH = 6

Change = Callable[[nn.Module, random.Random], None]


# -- blocks: each gives (rows, WIDTH) for (rows, WIDTH), and says how it can be changed ----------


class Block(nn.Module):
    """Something that reads more than tensors.

    `changes` are functions that change what it reads, between steps; `hidden` says whether nobody
    can see that but by running it: a module-level variable, say.
    """

    hidden = False

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x).relu()

    def changes(self) -> list[Change]:
        """Ways to change what it reads."""
        return []


class Tempered(Block):
    """Divides by a float."""

    def __init__(self) -> None:
        super().__init__()
        self.temp = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x).tanh() / self.temp

    def changes(self) -> list[Change]:
        return [_set("temp", lambda r: r.choice([0.5, 2.0, 1.25, 3.0]))]


class Annealed(Tempered):
    """The float changes at every step."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x) * self.temp + x * (1 - self.temp)

    def changes(self) -> list[Change]:
        return [_set("temp", lambda r: round(r.uniform(0.1, 2.0), 3))] * 4


class Switched(Block):
    """A yes or no decides whether a layer is used."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(WIDTH, WIDTH)
        self.on = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.lin(x).relu()
        return self.extra(x) + x if self.on else x

    def changes(self) -> list[Change]:
        return [_toggle("on")]


class Options:
    """What a model has its settings in."""

    def __init__(self) -> None:
        self.mode, self.gain, self.table = "tanh", 1.0, {"shift": 0.0}


class Configured(Block):
    """Reads an object with settings, and a dictionary in it."""

    def __init__(self) -> None:
        super().__init__()
        self.config = Options()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.lin(x) * self.config.gain + self.config.table["shift"]
        return x.tanh() if self.config.mode == "tanh" else x.sigmoid()

    def changes(self) -> list[Change]:
        def mode(m: Any, r: random.Random) -> None:
            m.config.mode = r.choice(["tanh", "sigmoid"])

        def gain(m: Any, r: random.Random) -> None:
            m.config.gain = r.choice([1.0, 2.0, 0.5])

        def shift(m: Any, r: random.Random) -> None:
            m.config.table["shift"] = r.choice([0.0, 0.5])

        return [mode, gain, shift]


class Listed(Block):
    """Reads numbers from a list and from a dictionary of its own, through a property."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = [0.5, 2.0]
        self.names = {"a": 1.0}

    @property
    def first(self) -> float:
        return self.weights[0] + self.names["a"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x) * self.first + x * self.weights[-1]

    def changes(self) -> list[Change]:
        def put(m: Any, r: random.Random) -> None:
            m.weights[r.randrange(2)] = r.choice([0.5, 2.0, 1.5])

        def name(m: Any, r: random.Random) -> None:
            m.names["a"] = r.choice([1.0, 0.0])

        def replace(m: Any, r: random.Random) -> None:
            m.weights = [r.choice([0.25, 4.0]), 1.0]

        return [put, name, replace]


class Flagged(Block):
    """Reads its own `training`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.lin(x)
        return x.tanh() if self.training else x * 0.5

    def changes(self) -> list[Change]:
        return [lambda m, r: m.train(r.random() < 0.5) and None]


class Graded(Block):
    """Reads the grad mode."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.lin(x)
        return x.relu() if torch.is_grad_enabled() else x * 3


class Frozen(Block):
    """Reads whether a weight of its own is trained."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x).tanh() + (x if self.lin.weight.requires_grad else -x)

    def changes(self) -> list[Change]:
        def freeze(m: Any, r: random.Random) -> None:
            m.lin.weight.requires_grad_(not m.lin.weight.requires_grad)

        return [freeze]


class Sized(Block):
    """Uses the number of rows, and decides by it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.lin(x) * x.shape[0] / x.size(-1)
        return x.view(x.shape[0], 2, -1).flip(1).reshape(len(x), WIDTH)


class Dropped(Block):
    """Dropout, whose probability is changed."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.lin(x))

    def changes(self) -> list[Change]:
        def probability(m: Any, r: random.Random) -> None:
            m.drop.p = r.choice([0.2, 0.7])

        return [probability, _mode("drop")]


class Normed(Block):
    """BatchNorm, whose momentum or mode is changed."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.lin(x))

    def changes(self) -> list[Change]:
        def momentum(m: Any, r: random.Random) -> None:
            m.norm.momentum = r.choice([0.1, 0.5])

        return [momentum, _mode("norm")]


class Averaging(Block):
    """Writes a buffer, and uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.lin(x)
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x - self.mean


class Normalising(Averaging):
    """Writes a buffer, and uses it so that autograd saves it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("std", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.lin(x)
        if self.training:
            with torch.no_grad():
                self.std.lerp_(x.abs().mean(0) + 0.1, 0.1)
        return x / self.std


class InPlace(Block):
    """Writes into views."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.lin(x)
        y = x.clone()
        y[:, 0].mul_(0.5)
        y[:, 1:3] = x[:, 3:5]
        return y.relu_() + x


class Tied(Block):
    """Uses its weight twice, once as a plain tensor, and a slice of it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.lin(x).tanh()
        return x @ self.lin.weight.t() + F.linear(x[:, :3], self.lin.weight[:, :3])


class Aliased(Block):
    """One module under two names, and a weight that is also an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.same = self.lin
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.also = self.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.same(self.lin(x).relu()) * self.scale + self.also

    def changes(self) -> list[Change]:
        def replace(m: Any, r: random.Random) -> None:
            m.scale = nn.Parameter(torch.full((WIDTH,), 2.0))

        return [replace]


class Replaced(Block):
    """A layer of it, or a weight, is replaced by another; or a part of the list is."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Tanh()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def changes(self) -> list[Change]:
        def module(m: Any, r: random.Random) -> None:
            torch.manual_seed(r.randrange(99))
            m.layers[0] = nn.Linear(WIDTH, WIDTH)

        def activation(m: Any, r: random.Random) -> None:
            m.layers[1] = r.choice([nn.ReLU, nn.Sigmoid])()

        def more(m: Any, r: random.Random) -> None:
            m.layers.append(nn.ReLU())

        def weight(m: Any, r: random.Random) -> None:
            m.layers[0].bias = nn.Parameter(torch.full((WIDTH,), 0.5))

        def assigned(m: Any, r: random.Random) -> None:
            state = {k: v.clone() + 0.5 for k, v in m.layers[0].state_dict().items()}
            m.layers[0].load_state_dict(state, assign=True)

        def copied(m: Any, r: random.Random) -> None:
            state = {k: v.clone() * 0.5 for k, v in m.layers[0].state_dict().items()}
            m.layers[0].load_state_dict(state)

        def gone(m: Any, r: random.Random) -> None:
            m.layers[0].bias = None

        return [module, activation, more, weight, assigned, copied, gone]


class Acting(Block):
    """Keeps its activation in an attribute, and has a `__getattr__` of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.act = torch.tanh
        self.extras = {"shift": 0.25}

    def __getattr__(self, name: str) -> Any:
        if name == "shift":
            return self.extras["shift"]
        return super().__getattr__(name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.lin(x)) + self.shift

    def changes(self) -> list[Change]:
        def shift(m: Any, r: random.Random) -> None:
            m.extras["shift"] = r.choice([0.25, 0.75])

        return [_set("act", lambda r: r.choice([torch.tanh, torch.relu, F.silu])), shift]


class Hooked(Block):
    """Gets hooks between the steps."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x).tanh()

    def changes(self) -> list[Change]:
        def before(m: Any, r: random.Random) -> None:
            m.register_forward_pre_hook(lambda module, args: (args[0] * 2,))

        def after(m: Any, r: random.Random) -> None:
            m.lin.register_forward_hook(lambda module, args, out: out * 1.5)

        return [before, after]


class Gated(Block):
    """Decides by a parameterless attribute of another module, and by an integer."""

    def __init__(self) -> None:
        super().__init__()
        self.depth = 2
        self.inner = nn.Identity()
        self.inner.level = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.depth):
            x = self.lin(x).tanh()
        return x * self.inner.level if self.inner.level > 1 else x

    def changes(self) -> list[Change]:
        def level(m: Any, r: random.Random) -> None:
            m.inner.level = r.choice([0, 1, 2, 3])

        return [_set("depth", lambda r: r.choice([1, 2, 3])), level]


def itself(x: torch.Tensor) -> torch.Tensor:
    """What it is given, or something else."""
    return x if x.sum().item() > 0 else x / 2


def cut(x: torch.Tensor) -> torch.Tensor:
    """As many columns as a value says."""
    return x[:, : 2 + int(x.sum().item() > 0)]


def number(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """A number beside a tensor."""
    return x * 2, max((x.sum(0) > 0).tolist()) + 1


def nothing(x: torch.Tensor) -> torch.Tensor | None:
    """Sometimes nothing."""
    return x * 2 if x.sum().item() > 0 else None


def wider(x: torch.Tensor) -> torch.Tensor:
    """Of another type, sometimes."""
    return x * 2 if x.sum().item() > 0 else (x * 2).double()


def mask(x: torch.Tensor) -> torch.Tensor:
    """The columns up to one that a value says."""
    return (torch.arange(WIDTH) < 1 + int((x.sum(0) > 0).sum())).expand(len(x), WIDTH)


def halving(x: torch.Tensor) -> torch.Tensor:
    """Writes what it is given, sometimes."""
    if x.sum().item() > 0:
        with torch.no_grad():
            x.mul_(0.5)
    return x * 1


Use = Callable[[torch.Tensor, Any], torch.Tensor]

LOOKS: tuple[tuple[Callable[[torch.Tensor], Any], Use], ...] = (
    (itself, lambda x, y: x + y),
    (itself, lambda x, y: y * 2),
    (cut, lambda x, y: x * y.shape[1]),
    (cut, lambda x, y: F.pad(y, (0, WIDTH - y.size(1)))),
    (cut, lambda x, y: x + y.sum(1)[:, None] / y.shape[0]),
    (number, lambda x, y: y[0] / y[1]),
    (nothing, lambda x, y: x if y is None else y),
    (wider, lambda x, y: (x * y.dtype.itemsize + y).to(x.dtype)),
    (mask, lambda x, y: x.masked_fill(y, 0.0)),
    (mask, lambda x, y: torch.where(y, x, x / 2).view(x.shape[0], -1)),
    (halving, lambda x, y: x + y),
)
"""What may look at values, and what the Python around it does with what it gives."""


class Chooser(nn.Module):
    """Looks at values, as one call."""

    def __init__(self, function: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


class Looking(Block):
    """A module of its own looks at values."""

    def __init__(self) -> None:
        super().__init__()
        function, self.use = LOOKS[int(torch.randint(len(LOOKS), ()))]
        self.inner = Chooser(function)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.lin(x).tanh()
        return self.use(x, self.inner(x))


class Helped(Block):
    """A function looks at values."""

    def __init__(self) -> None:
        super().__init__()
        self.function, self.use = LOOKS[int(torch.randint(len(LOOKS), ()))]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.lin(x).tanh()
        return self.use(x, self.function(x))


OUTSIDE = {"gain": 1.0}


class Global(Block):
    """Reads a module-level variable."""

    hidden = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x) * OUTSIDE["gain"]

    def changes(self) -> list[Change]:
        def gain(m: Any, r: random.Random) -> None:
            OUTSIDE["gain"] = r.choice([0.5, 2.0, 3.0])

        return [gain]


def _set(name: str, value: Callable[[random.Random], Any]) -> Change:
    return lambda m, r: setattr(m, name, value(r))


def _mode(name: str) -> Change:
    return lambda m, r: getattr(m, name).train(r.random() < 0.5) and None


def _toggle(name: str) -> Change:
    return lambda m, r: setattr(m, name, not getattr(m, name))


BLOCKS: tuple[type[Block], ...] = (
    *(Tempered, Annealed, Switched, Configured, Listed, Flagged, Graded, Frozen, Sized, Dropped),
    *(Normed, Averaging, Normalising, InPlace, Tied, Aliased, Replaced, Acting, Hooked, Gated),
    *(Looking, Helped, Block),
)


# -- heads: results of some shape, and how those of micro-batches make that of the batch ----------

Head = Callable[[nn.Module, torch.Tensor], Any]


@dataclass(frozen=True)
class Result:
    """A head.

    Attributes:
        make: the result of the model for the last block's value.
        merge: how the results of micro-batches make the batch's; `None` if they do not.
    """

    make: Head
    merge: Callable[[list[Any]], Any] | None = None


def _rows(parts: list[Any]) -> Any:
    return torch.cat(parts)


HEADS: dict[str, Result] = {
    "rows": Result(lambda m, z: z, _rows),
    "columns": Result(lambda m, z: z.t(), lambda parts: torch.cat(parts, 1)),
    "dictionary": Result(
        lambda m, z: {"z": z, "mean": z.mean(-1), "kind": "x"},
        lambda parts: {
            "z": torch.cat([p["z"] for p in parts]),
            "mean": torch.cat([p["mean"] for p in parts]),
            "kind": "x",
        },
    ),
    "no number": Result(
        lambda m, z: {"z": z, "odd": (z * 0) / (z * 0)},
        lambda parts: {k: torch.cat([p[k] for p in parts]) for k in ("z", "odd")},
    ),
    "with a parameter": Result(
        lambda m, z: (z, m.scale),
        lambda parts: (torch.cat([p[0] for p in parts]), parts[0][1]),
    ),
    "with the count": Result(
        lambda m, z: (z, z.shape[0]),
        lambda parts: (torch.cat([p[0] for p in parts]), sum(p[1] for p in parts)),
    ),
    "both views": Result(lambda m, z: torch.cat([z, -z])),
    "all pairs": Result(lambda m, z: z @ z.t()),
    "flattened": Result(lambda m, z: z.view(len(z), 2, 3).transpose(0, 1).reshape(2 * len(z), 3)),
    "range": Result(lambda m, z: (z, torch.arange(z.shape[0]))),
    "count": Result(lambda m, z: (z, torch.tensor(z.shape[0]))),
    "backwards": Result(lambda m, z: z.flip(0)),
    "sums": Result(lambda m, z: z.cumsum(0)),
    "loss": Result(lambda m, z: z.square().mean()),
}


class Model(nn.Module):
    """Some blocks in a row, and a head."""

    def __init__(self, blocks: Sequence[Block], head: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))
        self.head = head

    def forward(self, x: torch.Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return HEADS[self.head].make(self, x * self.scale)


# -- steps ----------------------------------------------------------------------------------------

Kind = Literal["train_step", "call", "no_grad", "evaluation"]


@dataclass(frozen=True)
class Step:
    """What is changed, and what is run then.

    Attributes:
        kind: a training step, `pipe(x)` with a backward, or one of two without gradients.
        changes: for each the number of the block, that of the change, and a seed.
        rows: of the batch.
    """

    kind: Kind
    changes: tuple[tuple[int, int, int], ...]
    rows: int


OPTIMIZERS: tuple[tuple[type[torch.optim.Optimizer], dict[str, Any]], ...] = (
    (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (torch.optim.AdamW, {"lr": 0.01}),
    (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    (torch.optim.NAdam, {"lr": 0.01}),
    (torch.optim.RAdam, {"lr": 0.01}),
    (torch.optim.Adamax, {"lr": 0.01}),
    (torch.optim.Adagrad, {"lr": 0.05}),
    (torch.optim.Adadelta, {}),
    (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
    (torch.optim.ASGD, {"lr": 0.01}),
    (torch.optim.Rprop, {"lr": 0.01}),
)


@dataclass(frozen=True)
class Drawn:
    """A program.

    Attributes:
        number: what it was drawn with.
        blocks, head: what the model is made of.
        steps: what is done with it.
        microbatches, schedule, recompute: how it is run.
        cuts: where it is cut, as shares of the places where that is possible.
        hidden: whether it reads a module-level variable, too.
        replicas, workers: how many replicas, on which kind of workers.
        optimizer: which of `OPTIMIZERS` trains it; `None` for gradient descent by hand.
        clips: whether gradients are clipped before.
        delayed: whether stages in threads now and then take their time.
    """

    number: int
    blocks: tuple[type[Block], ...]
    head: str
    steps: tuple[Step, ...]
    microbatches: int
    schedule: str
    recompute: str
    cuts: tuple[float, ...]
    hidden: bool = False
    replicas: int = 1
    workers: Workers = "threads"
    optimizer: int | None = None
    clips: bool = False
    delayed: bool = False

    def model(self) -> Model:
        """The model, the same each time."""
        torch.manual_seed(self.number)
        return Model([kind() for kind in self.blocks], self.head)


def drawn(number: int, hidden: bool = False, steps: int = 5) -> Drawn:
    """The program of this number.

    Args:
        number: seeds it.
        hidden: whether it reads a module-level variable, too.
        steps: how many.
    """
    r = random.Random(number)
    blocks = [r.choice(BLOCKS) for _ in range(r.randint(2, 5))]
    if hidden:
        blocks[r.randrange(len(blocks))] = Global
    heads = list(HEADS)
    head = r.choice([*heads[:6], *heads[:3], r.choice(heads[6:])])
    listed = []
    kinds: list[Kind] = ["train_step", "train_step", "call", "no_grad", "evaluation"]
    if Dropped in blocks:  # outside of training, masks are not promised to anybody
        kinds.remove("no_grad")
    for k in range(steps):
        changes = tuple(
            (r.randrange(len(blocks)), r.randrange(99), r.randrange(999))
            for _ in range(0 if k == 0 else r.choice([0, 0, 1, 1, 2]))
        )
        listed.append(Step(r.choice(kinds), changes, r.choice([8, 8, 8, 7, 11])))
    return Drawn(
        number,
        tuple(blocks),
        head,
        tuple(listed),
        r.choice([1, 2, 3, 4]),
        r.choice(["gpipe", "1f1b", "eager-1f1b", "zero-bubble"]),
        r.choice(["none", "none", "all", "boundaries"]),
        (r.random(),),
        hidden,
    )


def drawn_for_replicas(number: int) -> Drawn:
    """The model of this number, trained by an optimizer, on 1 to 4 replicas of 1 to 4 stages."""
    r = random.Random(f"replicas {number}")
    model = drawn(number)
    # what values decide may be refused, which would say nothing of replicas
    blocks = tuple(Block if block in (Looking, Helped) else block for block in model.blocks)
    model = dataclasses.replace(model, blocks=blocks)
    replicas, stages = r.randint(1, 4), r.choice([1, 2, 2, 3, 4])
    microbatches = r.randint(replicas, 8)
    sizes = [2 * microbatches, 2 * microbatches + 1, 3 * microbatches - 1]
    if not any(issubclass(block, Normed) for block in model.blocks):  # it takes no single row
        sizes += [microbatches + 1, r.randint(1, replicas)]  # which leaves some with nothing to do
    other: Kind = r.choice(["call", "evaluation", "train_step"])
    kinds: list[Kind] = ["train_step", "train_step", other, "train_step"]
    refused = {k for k, block in enumerate(model.blocks) if block in (Aliased, Hooked, Replaced)}
    steps = tuple(
        Step(kind, tuple(c for c in step.changes if c[0] not in refused), r.choice(sizes))
        for kind, step in zip(kinds, model.steps, strict=False)
    )
    remembers = any(issubclass(block, Normed | Averaging) for block in model.blocks)
    recompute = r.choice(["none", "none", "none", "all", "boundaries"])
    if remembers and replicas > 1 and r.random() < 0.8:  # replicas do not recompute these
        recompute = "none"
    fitting = [
        name
        for name, recipe in SCHEDULES.items()
        if replicas == 1 or not recipe.splits_backward  # which replicas do not
    ]
    return dataclasses.replace(
        model,
        steps=steps,
        microbatches=microbatches,
        schedule=r.choice(fitting),
        recompute=recompute,
        cuts=tuple(r.random() for _ in range(stages - 1)),
        replicas=replicas,
        workers="processes" if replicas * stages <= 4 and r.random() < 0.4 else "threads",
        optimizer=r.randrange(len(OPTIMIZERS)),
        clips=r.random() < 0.3,
        delayed=r.random() < 0.5,
    )


def loss_of(result: Any) -> torch.Tensor:
    """A loss over whatever a head gives, a mean over rows where there are some."""
    leaves = [v for v in flatten(result)[0] if isinstance(v, torch.Tensor)]
    parts = [v.nan_to_num().square().mean() for v in leaves if v.is_floating_point()]
    return torch.stack(parts).sum()
