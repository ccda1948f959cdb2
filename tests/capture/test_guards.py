"""What a forward reads besides tensors, and what becomes of a change of it between two steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook

import penstock as ps
from penstock.capture import guards
from tests.support.models import uniform_plan

X, Y = torch.randn(8, 6, generator=torch.Generator().manual_seed(3)), torch.zeros(8, 4)
MICROBATCHES = 4


pytestmark = pytest.mark.usefixtures("pool")


class Adapter(nn.Module):
    """A linear layer with a low-rank addition that can be switched off, as PEFT's have."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)
        self._disabled = False
        self.base.requires_grad_(False)

    @property
    def is_on(self) -> bool:
        return not self._disabled

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x)) if self.is_on else self.base(x)


class Config:
    """Numbers that hang on a model."""

    scale = 1.5

    def __init__(self) -> None:
        self.temp = 2.0
        self.more = {"power": 2, "names": ["tanh"]}


class Aliased:
    """Finds attributes by code of its own, as the configurations of transformers do."""

    def __init__(self) -> None:
        self.temp = 2.0

    def __getattribute__(self, name: str) -> Any:
        return super().__getattribute__({"heat": "temp"}.get(name, name))


class Block(nn.Module):
    """What every case uses some of."""

    gain = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
        self.drop = nn.Dropout(0.25)
        self.adapter = Adapter()
        self.flag, self.mode, self.temp, self.depth, self.alpha = True, "tanh", 1.0, 2, 0.5
        self.coefs, self.table = [1.0, 2.0], {"a": 1.0}
        self.cfgs: dict[str, Any] = {"a": Config(), "b": [Config()]}
        self.active = "a"
        self.cfg, self.space, self.alias = Config(), SimpleNamespace(temp=1.0), Aliased()
        self.maybe: Any = None
        self.function: Callable[..., Any] = torch.tanh

    @property
    def heat(self) -> float:
        return self.temp * 2

    @property
    def active_cfg(self) -> Any:
        return self.cfgs[self.active]

    def __getattr__(self, name: str) -> Any:
        if name == "odd":
            return self.table["a"]
        return super().__getattr__(name)


class Model(nn.Module):
    """Two linear layers around a block that does what a case wants."""

    def __init__(self, does: Callable[[Block, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.block, self.last = nn.Linear(6, 8), Block(), nn.Linear(8, 4)
        self.does = does

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.does(self.block, self.first(x).tanh()).tanh())


Change = Callable[[Block], Any]


def put(name: str, value: Any) -> Change:
    def change(block: Block) -> None:
        owner: Any = block
        *path, last = name.split(".")
        for part in path:
            owner = getattr(owner, part)
        setattr(owner, last, value)

    return change


def halved(b: Block, h: torch.Tensor) -> torch.Tensor:
    for _ in range(b.depth):
        h = h * 0.5
    return h


def clamped(b: Block, h: torch.Tensor) -> torch.Tensor:
    return h * 2 if b.temp > 1.25 else h + b.temp


def skipped(b: Block, h: torch.Tensor) -> torch.Tensor:
    if "other" in b.__dict__.get("chosen", ()):
        h = b.other(h)
    return b.lin(h)


# What the block does, and what is done to it between steps.
CASES: dict[str, tuple[Callable[[Block, torch.Tensor], torch.Tensor], list[Change]]] = {
    "flag": (lambda b, h: b.lin(h) if b.flag else h, [put("flag", False), put("flag", True)]),
    "text": (lambda b, h: getattr(torch, b.mode)(h), [put("mode", "sin"), put("mode", "tanh")]),
    "number": (lambda b, h: h / b.temp, [put("temp", 2.0), put("temp", 0.3), put("temp", 1.0)]),
    "expression": (
        lambda b, h: h * (1 - b.alpha) + b.other(h) * b.alpha**2,
        [put("alpha", 0.4), put("alpha", 0.3)],
    ),
    "two numbers": (
        lambda b, h: h * b.alpha / b.temp,
        [put("temp", 2.0), put("alpha", 0.1), lambda b: (put("temp", 3.0)(b), put("alpha", 7)(b))],
    ),
    "compared": (clamped, [put("temp", 1.1), put("temp", 2.0), put("temp", 3.0), put("temp", 1.2)]),
    "not followed": (
        lambda b, h: h * math.sqrt(b.temp),
        [put("temp", 2.0), put("temp", 3.0), put("temp", 2.0)],
    ),
    "loop": (halved, [put("depth", 3), put("depth", 1), put("depth", 2)]),
    "whole number": (lambda b, h: h * b.depth, [put("depth", 3), put("depth", 3.0)]),
    "zero": (lambda b, h: h * b.temp, [put("temp", 0.0), put("temp", -0.0)]),
    "class attribute": (lambda b, h: h * b.gain, [put("gain", 2.0), lambda b: delattr(b, "gain")]),
    "class": (lambda b, h: h * b.cfg.scale, [lambda b: setattr(Config, "scale", 2.5)]),
    "property": (lambda b, h: h * b.heat, [put("temp", 0.7), put("temp", 0.8)]),
    "__getattr__": (lambda b, h: h * b.odd, [lambda b: b.table.update(a=3.0)]),
    "list": (lambda b, h: h * b.coefs[0], [lambda b: b.coefs.insert(0, 5.0), put("coefs", [7.0])]),
    "dictionary": (lambda b, h: h * b.table["a"], [put("table", {"a": 2.0, "b": 1})]),
    "config": (lambda b, h: h / b.cfg.temp, [put("cfg.temp", 3.0), put("cfg.temp", 4.0)]),
    "config replaced": (lambda b, h: h / b.cfg.temp, [put("cfg", SimpleNamespace(temp=5.0))]),
    "nested config": (
        lambda b, h: h ** b.cfg.more["power"] if b.cfg.more["names"] else h,
        [lambda b: b.cfg.more.update(power=3), lambda b: b.cfg.more["names"].clear()],
    ),
    "config in a dictionary": (
        lambda b, h: h / b.cfgs["a"].temp,
        [lambda b: put("temp", 3.0)(b.cfgs["a"]), lambda b: b.cfgs.update(a=Config())],
    ),
    "config in a list in it": (
        lambda b, h: h / b.cfgs["b"][0].temp,
        [
            lambda b: put("temp", 3.0)(b.cfgs["b"][0]),
            lambda b: b.cfgs["b"].insert(0, SimpleNamespace(temp=4.0)),
        ],
    ),
    "config by a property": (
        lambda b, h: h / b.active_cfg.temp,
        [lambda b: put("temp", 3.0)(b.active_cfg), lambda b: put("temp", 4.0)(b.active_cfg)],
    ),
    "namespace": (lambda b, h: h * b.space.temp, [put("space.temp", 2.0), put("space.temp", 3.0)]),
    "alias": (lambda b, h: h * b.alias.heat, [put("alias.temp", 3.0), put("alias.temp", 4.0)]),
    "None": (lambda b, h: h if b.maybe is None else h * b.maybe, [put("maybe", 3.0)]),
    "absent": (lambda b, h: h * getattr(b, "late", 1), [put("late", 3.0), put("late", 4.0)]),
    "__dict__": (skipped, [put("chosen", ["other"])]),
    "function": (lambda b, h: b.function(h), [put("function", torch.sigmoid)]),
    "method": (lambda b, h: b.adapter(h), [put("adapter.forward", torch.sin)]),
    "training": (lambda b, h: F.dropout(h, 0.0) * 2 if b.training else h, [Block.eval]),
    "one in training": (
        lambda b, h: h * 2 if b.drop.training else h,
        [lambda b: b.drop.eval(), lambda b: b.eval(), lambda b: b.drop.train()],
    ),
    "closed child": (lambda b, h: h * b.drop.p, [put("drop.p", 0.5), put("drop.p", 0.75)]),
    "adapter": (
        lambda b, h: b.adapter(h),
        [put("adapter._disabled", True), put("adapter._disabled", False)],
    ),
    "gradients": (lambda b, h: b.lin(h) * (2 if torch.is_grad_enabled() else 1), []),
    "frozen": (
        lambda b, h: b.lin(h) * (2 if b.lin.weight.requires_grad else 1),
        [lambda b: b.lin.requires_grad_(False), lambda b: b.lin.requires_grad_(True)],
    ),
    "of what is made": (
        lambda b, h: b.lin(h) * (2 if h.requires_grad else 1),
        [lambda b: b.lin.requires_grad_(False)],
    ),
}


def parts() -> tuple[torch.Tensor, ...]:
    return X.tensor_split(MICROBATCHES)


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    found = [p.grad for p in model.parameters()]
    model.zero_grad()
    return found


def same(one: list[torch.Tensor | None], other: list[torch.Tensor | None]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in pairs)


def compare(pipe: ps.Pipeline, model: nn.Module) -> None:
    """Every way to use a pipeline, and a plain loop over the micro-batches."""
    outputs = [model(part) for part in parts()]
    for part, output in zip(parts(), outputs, strict=True):
        (F.mse_loss(output, Y[: len(part)]) * (len(part) / len(X))).backward()
    expected = gradients(model)
    pipe.train_step(X, loss_fn=F.mse_loss, target=Y)
    assert same(gradients(model), expected)
    result = pipe(X)
    assert torch.equal(result, torch.cat(outputs))
    F.mse_loss(result, Y).backward()
    plain = [model(part) for part in parts()]
    F.mse_loss(torch.cat(plain), Y).backward()
    assert len(gradients(model)) == len(expected)
    with torch.no_grad():
        assert torch.equal(pipe(X), torch.cat([model(part) for part in parts()]))
    model.eval()
    with torch.no_grad():
        assert torch.equal(pipe(X), torch.cat([model(part) for part in parts()]))


@contextmanager
def trained(model: nn.Module, workers: str = "threads", **options: Any) -> Iterator[ps.Pipeline]:
    program = ps.capture(model, (X,), **options)
    plan = uniform_plan(program, 2, MICROBATCHES)
    with ps.Pipeline(
        model, (X,), devices=["cpu", "cpu"], program=program, plan=plan, workers=workers
    ) as pipe:
        yield pipe


@pytest.mark.parametrize("name", CASES)
def test_what_is_changed_between_steps_takes_effect(name: str) -> None:
    does, changes = CASES[name]
    model = Model(does)
    scale = Config.scale
    try:
        with trained(model) as pipe:
            compare(pipe, model)
            for change in changes:
                model.train()
                change(model.block)
                compare(pipe, model)
    finally:
        Config.scale = scale


@pytest.mark.parametrize("name", ["expression", "adapter", "config", "closed child", "compared"])
def test_it_does_in_worker_processes(name: str) -> None:
    does, changes = CASES[name]
    model = Model(does)
    with trained(model, "processes") as pipe:
        for change in [lambda _: None, *changes]:
            model.train()
            change(model.block)
            expected = torch.cat([model(part) for part in parts()])
            assert torch.equal(pipe(X), expected)
            with torch.no_grad():
                assert torch.equal(pipe(X), torch.cat([model(part) for part in parts()]))


def recordings(pipe: ps.Pipeline) -> int:
    return sum(map(len, pipe.program.recordings._of.values()))


def test_a_number_that_changes_at_every_step_is_passed_in() -> None:
    model = Model(lambda b, h: h / b.temp * (1 - b.alpha))
    with trained(model) as pipe:
        for step in range(40):
            model.block.temp, model.block.alpha = 1.0 + step / 7, 1 / (step + 1)
            assert torch.equal(pipe(X), torch.cat([model(part) for part in parts()]))
            if step == 1:
                recorded = recordings(pipe)
        assert recordings(pipe) == recorded


def test_going_back_records_nothing() -> None:
    model = Model(CASES["adapter"][0])
    with trained(model) as pipe:
        for _ in range(2):
            for off in (True, False):
                model.block.adapter._disabled = off
                pipe(X)
            recorded = recordings(pipe)
        for off in (True, False):
            model.block.adapter._disabled = off
            pipe(X)
        assert recordings(pipe) == recorded == 3


def test_a_number_that_cannot_be_followed_is_refused_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(guards, "MOST_WAYS", 8)
    model = Model(CASES["not followed"][0])

    def go_on(pipe: ps.Pipeline) -> None:
        for step in range(70):
            model.block.temp = 1.0 + step
            assert torch.equal(pipe(X), torch.cat([model(part) for part in parts()]))

    with trained(model) as pipe:
        with pytest.raises(ps.InputError, match=r"block\.temp.*keep_closed="):
            go_on(pipe)
        model.block.temp = 1.0
        assert torch.equal(pipe(X), torch.cat([model(part) for part in parts()]))


REPLACED: dict[str, Callable[[nn.Sequential], Any]] = {
    "1.weight": lambda m: setattr(m[1], "weight", nn.Parameter(torch.zeros(8, 8))),
    "1": lambda m: m.__setitem__(1, nn.Linear(8, 8)),
    "2.0": lambda m: m[2].__setitem__(0, nn.Linear(8, 8)),
    "0.weight": lambda m: m.load_state_dict(
        {k: v.clone() for k, v in m.state_dict().items()}, assign=True
    ),
    "4": lambda m: m.append(nn.Linear(4, 4)),
    "1.bias": lambda m: setattr(m[1], "bias", None),
    "2.0.mask": lambda m: m[2][0].register_buffer("mask", torch.ones(1)),
    "2.1": lambda m: m[2].add_module("1", nn.ReLU()),
}


@pytest.mark.parametrize("workers", ["threads", "processes"])
@pytest.mark.parametrize("name", REPLACED)
def test_what_is_replaced_is_refused(name: str, workers: str) -> None:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), inner, nn.Linear(8, 4))
    with trained(model, workers) as pipe:
        pipe(X)
        REPLACED[name](model)
        with pytest.raises(ps.InputError, match=f"{name!r} was replaced.*new pipeline"):
            pipe.train_step(X, loss_fn=F.mse_loss, target=Y)
        assert all(p.grad is None for p in model.parameters())


# Where the dictionaries themselves are replaced, what is in the new ones counts.
REGISTRIES: dict[str, Callable[[Model], Any]] = {
    "block.lin.weight": lambda m: put("_parameters", dict(m.block.lin._parameters))(m.block.lin),
    "block.lin": lambda m: put("_modules", dict(m.block._modules))(m.block),
}


@pytest.mark.parametrize("name", REGISTRIES)
def test_a_registry_that_is_replaced_is_looked_at_from_then_on(name: str) -> None:
    model = Model(lambda b, h: b.lin(h) if b.flag else b.adapter(h))
    *path, last = name.split(".")
    owner: Any = model.get_submodule(".".join(path))
    with trained(model) as pipe:
        pipe(X)
        REGISTRIES[name](model)
        for _ in range(2):
            assert torch.equal(pipe(X), torch.cat([model(part) for part in parts()]))
        new = nn.Linear(8, 8)
        setattr(owner, last, new if last == "lin" else new.weight)
        with pytest.raises(ps.InputError, match=f"{name!r} was replaced.*new pipeline"):
            pipe(X)


def test_a_module_that_is_initialized_again_is_refused() -> None:
    model = Model(lambda b, h: b.lin(h) if b.flag else h)
    with trained(model) as pipe:
        pipe(X)
        nn.Module.__init__(model.block)
        model.block.lin, model.block.flag = nn.Linear(8, 8), True
        with pytest.raises(ps.InputError, match=r"'block\.lin' was replaced.*new pipeline"):
            pipe(X)


@pytest.mark.parametrize("gone", [None, "deleted"])
def test_a_registry_that_is_gone_is_noticed(gone: Any) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
    with trained(model) as pipe:
        pipe(X)
        if gone:
            del model[1]._parameters
        else:
            vars(model[1])["_parameters"] = None
        with pytest.raises(ps.InputError, match="was replaced, added or removed"):
            pipe(X)


class Closed(nn.Module):
    """Reads attributes when it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.cfg, self.shift = 1.0, SimpleNamespace(power=1), torch.zeros(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x**self.cfg.power * self.scale + self.shift


@pytest.mark.parametrize("workers", ["threads", "processes"])
def test_attributes_of_closed_modules_follow(workers: str) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), Closed(), nn.Linear(8, 4))
    closed: Any = model[2]

    def check() -> None:
        expected = torch.cat([model(part) for part in parts()])
        for _ in range(2):
            assert torch.equal(pipe(X), expected)

    with trained(model, workers) as pipe:
        model[1].p = 0.0  # type: ignore[assignment]
        check()
        closed.scale = 3.0
        check()
        closed.cfg.power = 2
        check()
        closed.shift.add_(1.0)
        check()
        closed.shift, closed.late = torch.full((8,), 2.0), 1
        check()


def test_an_attribute_that_cannot_be_sent_is_refused() -> None:
    model = nn.Sequential(nn.Linear(6, 8), Closed(), nn.Linear(8, 4))
    with trained(model, "processes") as pipe:
        pipe(X)
        closed: Any = model[1]
        closed.stream = (n for n in range(3))
        with pytest.raises(ps.InputError, match=r"Closed\.stream.*cannot be sent"):
            pipe(X)
        del closed.stream
        pipe(X)


@pytest.mark.parametrize("workers", ["threads", "processes"])
def test_adapters_that_are_switched_off_around_a_call(workers: str) -> None:
    model = nn.Sequential(nn.Linear(6, 8), Adapter(), nn.Tanh(), Adapter(), nn.Linear(8, 4))
    adapters: list[Any] = [model[1], model[3]]

    @contextmanager
    def disabled() -> Iterator[None]:
        for adapter in adapters:
            adapter._disabled = True
            adapter.down.requires_grad_(False)
        yield
        for adapter in adapters:
            adapter._disabled = False
            adapter.down.requires_grad_(True)

    with trained(model, workers) as pipe:
        for _ in range(2):
            pipe.train_step(X, loss_fn=F.mse_loss, target=Y)
            with disabled(), torch.no_grad():
                assert torch.equal(pipe(X), torch.cat([model(part) for part in parts()]))
            assert torch.equal(pipe(X), torch.cat([model(part) for part in parts()]))


@pytest.mark.parametrize("workers", ["threads", "processes"])
def test_adapters_of_peft_that_are_switched_off_around_a_call(workers: str) -> None:
    """The reference pass of DPO and KL penalties."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    config = peft.LoraConfig(r=2, target_modules=["0", "2"], init_lora_weights=False)
    model = peft.get_peft_model(base, config)
    x = torch.randn(8, 6)
    with torch.no_grad():
        on = torch.cat([model(part) for part in x.tensor_split(4)])
        with model.disable_adapter():
            off = torch.cat([model(part) for part in x.tensor_split(4)])
    assert not torch.equal(on, off)
    plan = uniform_plan(ps.capture(model, (x,)), 2, 4)
    with ps.Pipeline(model, (x,), plan=plan, workers=workers, progress=None) as pipe:
        pipe.train_step(x, loss_fn=lambda out: out.square().mean())
        for _ in range(2):
            with torch.no_grad():
                assert torch.equal(pipe(x), on)
                with model.disable_adapter():
                    assert torch.equal(pipe(x), off)


def test_what_an_input_requires_is_read() -> None:
    model = Model(lambda b, h: h)
    inner = model.forward

    class Asking(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return inner(x) * (2 if x.requires_grad else 1)

    asking = Asking(lambda b, h: h)
    inner = super(Asking, asking).forward
    with trained(asking) as pipe:
        for wanted in (False, True, False):
            x = X.clone().requires_grad_(wanted)
            parts = x.tensor_split(MICROBATCHES)
            assert torch.equal(pipe(x), torch.cat([asking(part) for part in parts]))


def test_hooks_of_all_modules_are_refused() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
    with trained(model) as pipe:
        pipe(X)
        handle = register_module_forward_hook(lambda module, args, output: output * 2)
        try:
            with pytest.raises(ps.InputError, match="global module hooks"):
                pipe(X)
            with pytest.raises(ps.InputError, match="global module hooks"), trained(model):
                pass
        finally:
            handle.remove()
        pipe(X)


class Counting(nn.Module):
    """Counts its calls, where another module reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x


class Reader(nn.Module):
    """Reads what a module inside leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.lin = Counting(), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(self.inner(x)) * self.inner.calls


def test_what_a_closed_module_leaves_closes_the_one_that_reads_it() -> None:
    model = nn.Sequential(nn.Linear(6, 8), Reader(), nn.Linear(8, 4))
    program = ps.capture(model, (X,))
    assert "inner.calls" in program.closed["1"]
    assert model[1].inner.calls == 0  # type: ignore[union-attr]


def test_nothing_of_the_noting_stays() -> None:
    model = Model(CASES["config"][0])
    ps.capture(model, (X,))
    assert "__getattribute__" not in vars(nn.Module)
    assert "__getattribute__" not in vars(Config)
    assert type(model.block.cfg.temp) is float
    assert torch.is_grad_enabled.__module__ != "penstock.capture.interception"
