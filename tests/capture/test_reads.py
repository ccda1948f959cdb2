"""Reads of a forward that are easily missed: steps of numbers, helpers in containers, aliases."""

from __future__ import annotations

import copy
import math
from collections import UserDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import penstock as ps
from tests.support.models import uniform_plan

X, Y = torch.randn(8, 6, generator=torch.Generator().manual_seed(3)), torch.zeros(8, 4)


pytestmark = pytest.mark.usefixtures("pool")


@dataclass
class Config:
    """A number that hangs on a model."""

    scale: float = 1.0

    def get(self) -> float:
        """The number."""
        return self.scale


class Slotted:
    """The same without a dictionary."""

    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.0


class Table(dict[str, float]):
    """A dictionary with attributes of its own."""

    scale = 1.0


class Strict(dict[str, float]):
    """A dictionary whose attributes are its items."""

    __getattr__ = dict.__getitem__


class Block(nn.Module):
    """Reads a configuration that others may have, too."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).relu() * self.config.scale


class Model(nn.Module):
    """Calls a function of itself in between."""

    def __init__(self, read: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 4)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.blocks = nn.ModuleList()
        self.read = read
        self.t, self.k = 0.01, 1
        self.held: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.between(self.a(x)).tanh())

    def between(self, h: torch.Tensor) -> torch.Tensor:
        """What the test is about."""
        return self.read(self, h)


def compare(pipe: ps.Pipeline, model: nn.Module) -> None:
    """A step must be that of a loop of plain PyTorch."""
    model.zero_grad()
    loss = pipe.train_step(X, target=Y, loss_fn=nn.functional.mse_loss)
    found = [p.grad for p in model.parameters()]
    model.zero_grad()
    total = torch.zeros(())
    for x, y in zip(torch.tensor_split(X, 4), torch.tensor_split(Y, 4), strict=True):
        part = nn.functional.mse_loss(model(x), y)
        (part / 4).backward()
        total = total + part.detach() / 4
    assert torch.equal(loss, total)
    for one, p in zip(found, model.parameters(), strict=True):
        assert (one is None) is (p.grad is None)
        assert one is None or p.grad is None or torch.equal(one, p.grad)


def built(model: Model) -> ps.Pipeline:
    """A pipeline without an audit, which would find what the guards do not see."""
    program = ps.capture(model, (X,))
    plan = uniform_plan(program, workers=2, microbatches=4)
    options: dict[str, Any] = {"program": program, "plan": plan, "workers": "threads"}
    return ps.Pipeline(model, (X,), devices=["cpu"] * 2, audit=None, **options, replicas=1)


FLOATS = (0.02, 0.03, 0.06, 0.11, 0.31, 0.51, 0.91, 1.3, 2.0)
WHOLES = (2, 3, 5, 7, 8, 9, 16, 17, 33)
OF_FLOATS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "int": lambda s, h: h * s.t + int(s.t * 10),
    "float": lambda s, h: h * s.t + max(float(s.t), 0.5),
    "round": lambda s, h: h * s.t + round(s.t, 1),
    "floor": lambda s, h: h * s.t + math.floor(s.t * 10),
    "ceil": lambda s, h: h * s.t + math.ceil(s.t),
    "format": lambda s, h: h * s.t + float(f"{s.t:.1f}"),
    "is_integer": lambda s, h: h * s.t + (s.t * 1.0).is_integer(),
    "copysign": lambda s, h: h * s.t + math.copysign(1, s.t - 0.3),
    "clip": lambda s, h: h * s.t + float(np.clip(s.t, 0.5, 0.8)),
    "interp": lambda s, h: h * s.t + float(np.interp(s.t, [0.1, 0.9], [0.0, 1.0])),
}
OF_WHOLES: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "shift": lambda s, h: h * s.k + (s.k >> 3),
    "and": lambda s, h: h * s.k + (s.k & 8),
    "divmod": lambda s, h: h * s.k + divmod(s.k, 8)[0],
    "str": lambda s, h: h * s.k + len(str(s.k)),
    "bit_length": lambda s, h: h * s.k + s.k.bit_length(),
    "range": lambda s, h: h * s.k + sum(1 for _ in range(s.k // 4)),
    "index": lambda s, h: h * s.k + [1, 2, 3, 4, 5, 6, 7][s.k // 8],
    "layer": lambda s, h: s.layers[s.k // 8](h) * s.k,
    "layers": lambda s, h: nn.Sequential(*s.layers[: s.k // 8 + 1])(h) * s.k,
}


@pytest.mark.parametrize("name", [*OF_FLOATS, *OF_WHOLES])
def test_steps_of_a_number_that_is_passed_in(name: str) -> None:
    """What Python makes of it in steps is the same for a while, and then is not."""
    model = Model((OF_FLOATS | OF_WHOLES)[name])
    attribute, values = ("t", FLOATS) if name in OF_FLOATS else ("k", WHOLES)
    with built(model) as pipe:
        for value in values:
            setattr(model, attribute, value)
            compare(pipe, model)


def test_a_comparison_that_cannot_be_made_any_more_is_another_way() -> None:
    model = Model(lambda s, h: h * s.t if s.t == 0 or 1 / s.t > 1e-9 else h)
    with built(model) as pipe:
        for value in (0.5, 0.25, 0.0, 0.125):
            model.t = value
            compare(pipe, model)


HELD: dict[str, tuple[Any, Callable[[Any], float], list[Callable[[Any], Any]]]] = {
    "in a list": (
        [Config(), Config()],
        lambda held: held[1].scale,
        [
            lambda held: setattr(held[1], "scale", 2.0),
            lambda held: setattr(held[1], "scale", 3.0),
            lambda held: held.__setitem__(1, Config(9.0)),
        ],
    ),
    "in a dictionary": (
        {"a": [Config()]},
        lambda held: held["a"][0].scale,
        [lambda held: setattr(held["a"][0], "scale", 3.0)],
    ),
    "behind a method": (
        (Config().get,),
        lambda held: held[0](),
        [lambda held: setattr(held[0].__self__, "scale", 3.0)],
    ),
    "in a slot": (
        Slotted(),
        lambda held: held.scale,
        [lambda held: setattr(held, "scale", 2.0), lambda held: setattr(held, "scale", 3.0)],
    ),
    "absent": (
        Config(),
        lambda held: getattr(held, "more", 1.0),
        [lambda held: setattr(held, "more", 2.0), lambda held: delattr(held, "more")],
    ),
    "of a dictionary": (
        Table(),
        lambda held: held.scale,
        [lambda held: setattr(held, "scale", 2.0), lambda held: setattr(held, "scale", 3.0)],
    ),
    "in a UserDict": (
        UserDict(scale=1.0),
        lambda held: held["scale"],
        [lambda held: held.update(scale=2.0)],
    ),
    "in a deque": (
        deque([1.0], maxlen=2),
        lambda held: held[0],
        [lambda held: held.appendleft(2.0), lambda held: held.appendleft(3.0)],
    ),
}


@pytest.mark.parametrize("name", HELD)
def test_what_containers_and_helpers_hold(name: str) -> None:
    held, read, changes = HELD[name]
    model = Model(lambda s, h: h * read(s.held))
    model.held = held
    with built(model) as pipe:
        compare(pipe, model)
        for change in changes:
            change(held)
            compare(pipe, model)


def test_an_object_that_several_modules_had_is_another_one_in_some() -> None:
    model = Model(lambda s, h: s.blocks[1](s.blocks[0](h)) * s.held.scale)
    model.held = Config()
    model.blocks.extend(Block(model.held) for _ in range(2))
    one, two = model.blocks
    with built(model) as pipe:
        compare(pipe, model)
        model.held.scale = 2.0
        compare(pipe, model)
        two.config = Config(7.0)
        compare(pipe, model)
        two.config.scale = 11.0
        compare(pipe, model)
        one.config = two.config = model.held
        compare(pipe, model)
        model.held = Config(5.0)
        compare(pipe, model)


def test_attributes_that_are_items_alone() -> None:
    """Asking such an object for another one raises a KeyError."""
    model = Model(lambda s, h: h * s.held.scale)
    model.held = Strict(scale=1.0)
    with ps.Pipeline(
        model, (X,), devices=["cpu"] * 2, num_microbatches=4, audit=None, replicas=1
    ) as pipe:
        compare(pipe, model)
        model.held["scale"] = 2.0
        compare(pipe, model)


class OfItsKind(nn.Module):
    """Reads the dtype of a weight in its Python; its inputs are whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.a, self.b = nn.Embedding(5, 6), nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.a(self.words(ids)).tanh() * (ids > 2).to(self.a.weight.dtype)[:, None] / 3
        return self.b(h + torch.full((6,), 0.1, dtype=h.dtype))


def test_a_model_that_gets_another_dtype() -> None:
    torch.manual_seed(0)
    model, ids = OfItsKind(), torch.tensor([0, 1, 2, 3, 4, 3, 2, 4])
    plain = copy.deepcopy(model)
    options = {"devices": ["cpu"] * 2, "num_microbatches": 2, "cuts": ["b"], "audit": None}
    with ps.Pipeline(model, (ids,), **options, replicas=1) as pipe:
        for kind in (torch.float32, torch.float64, torch.float32):
            for each in (model, plain):
                each.to(kind)
                each.zero_grad()
            pipe.train_step(ids, loss_fn=lambda out: out.square().mean())
            for part in ids.tensor_split(2):
                (plain(part).square().mean() * 0.5).backward()
            pairs = zip(model.parameters(), plain.parameters(), strict=True)
            assert all(torch.equal(a.grad, b.grad) for a, b in pairs)


class Labels:
    """What a classifier notes when it gets its first labels, as those of transformers do."""

    kind: str | None = None
    calls = 0


class NotesOnce(nn.Module):
    def __init__(self, counts: bool = False) -> None:
        super().__init__()
        self.config = Labels()
        self.counts = counts
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        logits = self.head(self.body(x).tanh())
        if labels is None:
            return logits  # type: ignore[no-any-return]
        if self.config.kind is None:
            self.config.kind = "whole" if labels.dtype == torch.long else "real"
        if self.counts:
            self.config.calls = self.config.calls + 1
        if self.config.kind == "whole":
            return logits + labels.unsqueeze(1)  # type: ignore[no-any-return]
        return logits - labels.unsqueeze(1)  # type: ignore[no-any-return]


@pytest.mark.parametrize("labelled", [True, False])
def test_what_a_first_forward_sets_once_does_not_close_the_model(labelled: bool) -> None:
    """Capture leaves it alone, and the first pass sets it as the first forward does."""
    labels = torch.randint(0, 4, (8,))
    model, plain = NotesOnce(), NotesOnce()
    plain.load_state_dict(model.state_dict())
    program = ps.capture(model, (X[:, :4], labels) if labelled else (X[:, :4],))
    assert program.closed == {}
    assert model.config.kind is None
    plan = uniform_plan(program, 2, 2)
    with ps.Pipeline(model, program=program, plan=plan, devices=["cpu"] * 2, audit=1) as pipe:
        for _ in range(2):
            result = pipe(X[:, :4], labels)
            parts = zip(X[:, :4].split(4), labels.split(4), strict=True)
            assert torch.equal(result, torch.cat([plain(*part) for part in parts]))
            assert model.config.kind == plain.config.kind == "whole"
        for kind in ("real", None):  # what the user sets counts
            model.config.kind = plain.config.kind = kind
            parts = zip(X[:, :4].split(4), labels.split(4), strict=True)
            wanted = [plain(*part) for part in parts]
            assert torch.equal(pipe(X[:, :4], labels), torch.cat(wanted))
            assert model.config.kind == plain.config.kind


def test_what_every_forward_changes_closes_the_model() -> None:
    program = ps.capture(NotesOnce(counts=True), (X[:, :4], torch.randint(0, 4, (8,))))
    assert "config.calls" in program.closed[""]


class Decides(nn.Module):
    """Sets what depends on something else that it reads the first time only."""

    def __init__(self, acts: str = "") -> None:
        super().__init__()
        self.config, self.acts = Labels(), acts
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.body(x)
        if self.config.kind is None:
            self.config.kind = "a" if self.config.calls < 2 else "b"
            if self.acts == "computes":
                h = h * 7
            if self.acts == "writes":
                with torch.no_grad():
                    self.scale.copy_(1 / x.std(0))
        h = h.tanh() if self.config.kind == "a" else h.sigmoid()
        return self.head(h * self.scale)  # type: ignore[no-any-return]


def test_what_is_set_once_may_depend_on_other_reads() -> None:
    model, plain = Decides(), Decides()
    plain.load_state_dict(model.state_dict())
    with ps.Pipeline(
        model, (X[:, :4],), devices=["cpu"] * 2, cuts=["head"], num_microbatches=1, audit=None
    ) as pipe:
        for kind, calls in ((None, 0), ("a", 0), (None, 5), ("b", 5), (None, 0), ("b", 0)):
            for each in (model, plain):
                each.config.kind, each.config.calls = kind, calls
            assert torch.equal(pipe(X[:, :4]), plain(X[:, :4])), (kind, calls)
            assert model.config.kind == plain.config.kind


@pytest.mark.parametrize("acts", ["computes", "writes"])
def test_a_first_forward_that_does_more_closes_the_model(acts: str) -> None:
    program = ps.capture(Decides(acts), (X[:, :4],))
    assert "config.kind" in program.closed[""]


class NotesTwice(NotesOnce):
    """Marks itself the first time, too."""

    marked = False

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        if not self.marked:
            self.marked = True
        return super().forward(x, labels)


def test_marks_of_a_first_forward_and_what_it_sets() -> None:
    labels = torch.randint(0, 4, (8,))
    model = NotesTwice()
    with ps.Pipeline(model, (X[:, :4], labels), devices=["cpu"] * 2, cuts=["head"]) as pipe:
        assert model.config.kind is None
        pipe(X[:, :4], labels)
        assert model.config.kind == "whole"


class SetsSize(Decides):
    """What is set once depends on the sizes of the inputs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.config.kind is None:
            self.config.kind = "many" if x.shape[0] > 4 else "few"
        h = self.body(x)
        return self.head(h.tanh() if self.config.kind == "many" else h.sigmoid())  # type: ignore


def test_what_is_set_once_may_depend_on_the_batch() -> None:
    for rows in (2, 8):
        model, plain = SetsSize(), SetsSize()
        plain.load_state_dict(model.state_dict())
        program = ps.capture(model, (X[:2, :4],))
        x = X[:rows, :4]
        assert torch.equal(program(x), plain(x))
        assert model.config.kind == plain.config.kind


class SetsMode(Decides):
    """What is set once depends on the mode."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.config.kind is None:
            self.config.kind = "train" if self.training else "eval"
        h = nn.functional.dropout(self.body(x), 0.5, self.training)
        return self.head(h * (2 if self.config.kind == "train" else 3))  # type: ignore


def test_what_is_set_once_may_depend_on_the_mode() -> None:
    model, plain = SetsMode(), SetsMode()
    plain.load_state_dict(model.state_dict())
    program = ps.capture(model, (X[:, :4],))
    model.eval(), plain.eval()
    assert torch.equal(program(X[:, :4]), plain(X[:, :4]))
    assert model.config.kind == "eval"


class MarksAndSets(Decides):
    """A mark of the first forward stands for what it has set."""

    marked = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.marked:
            self.marked, self.config.kind = True, "set"
        return self.head(self.body(x)) * (2.0 if self.config.kind == "set" else 1.0)  # type: ignore


def test_a_mark_that_stands_for_what_was_set() -> None:
    model, plain = MarksAndSets(), MarksAndSets()
    plain.load_state_dict(model.state_dict())
    program = ps.capture(model, (X[:, :4],))
    assert torch.equal(program(X[:, :4]), plain(X[:, :4]))
