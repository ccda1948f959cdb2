"""Plain objects that hang on modules, and that a forward changes: they are the user's."""

from __future__ import annotations

import array
import random
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.capture import untouched

X, Y = torch.randn(8, 6, generator=torch.Generator().manual_seed(3)), torch.zeros(8, 4)


class Slotted:
    """Keeps its count in a slot."""

    __slots__ = ("n", "never")

    def __init__(self) -> None:
        self.n = 0

    def __repr__(self) -> str:
        return f"Slotted({self.n})"


class Table(dict[str, int]):
    """A dictionary with a state of its own."""

    reads = 0


@dataclass
class Nested:
    """An object that has others."""

    inner: SimpleNamespace
    log: deque[int]


class Counter(nn.Module):
    """Scales by what it has counted, in a place of a case's choice."""

    count = 0
    history: list[int] = []  # noqa: RUF012 - shared by all, as those of users sometimes are

    def __init__(self, start: Callable[[], Any], count: Callable[[Any], int]) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 6)
        self.st = start()
        self.counting = count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = self.counting(self)
        return self.lin(x) / (1 + 0.125 * n) + float(bool(x.sum() > n))  # closes it


def bump(owner: Any, name: str = "n") -> int:
    setattr(owner, name, getattr(owner, name) + 1)
    return int(getattr(owner, name))


def append(held: Any) -> int:
    held.append(1)
    return len(held)


def in_dictionary(held: Any) -> int:
    held["n"] = held.get("n", 0) + 1
    return int(held["n"])


def in_array(held: Any) -> int:
    held[0] += 1
    return int(held[0])


def in_table(held: Any) -> int:
    held.reads += 1
    return in_dictionary(held)


def by_class(module: Any) -> int:
    type(module).count += 1
    type(module).history.append(1)
    return int(type(module).count)


def in_tensor(held: Any) -> int:
    held.total.add_(1)
    return int(held.total)


def default(module: Any, seen: list[int] = []) -> int:  # noqa: B006 - as users do
    return append(seen)


def closure() -> Callable[[], int]:
    seen: list[int] = []
    return lambda: append(seen)


CASES: dict[str, tuple[Callable[[], Any], Callable[[Any], int]]] = {
    "namespace": (lambda: SimpleNamespace(n=0), lambda m: bump(m.st)),
    "new attribute": (SimpleNamespace, lambda m: in_dictionary(vars(m.st))),
    "slots": (Slotted, lambda m: bump(m.st)),
    "list": (list, lambda m: append(m.st)),
    "deque": (partial(deque, maxlen=5), lambda m: append(m.st)),
    "dictionary": (dict, lambda m: in_dictionary(m.st)),
    "ordered": (OrderedDict, lambda m: in_dictionary(m.st)),
    "derived from a dictionary": (Table, lambda m: in_table(m.st)),
    "list in a list": (lambda: [[]], lambda m: append(m.st[0])),
    "object in a dictionary": (lambda: {"a": [Slotted()]}, lambda m: bump(m.st["a"][0])),
    "nested": (
        lambda: Nested(SimpleNamespace(n=0), deque()),
        lambda m: bump(m.st.inner) + append(m.st.log),
    ),
    "numpy": (lambda: np.zeros(2), lambda m: in_array(m.st)),
    "numpy in an object": (lambda: SimpleNamespace(a=np.zeros(2)), lambda m: in_array(m.st.a)),
    "bytes": (lambda: bytearray(3), lambda m: in_array(m.st)),
    "array": (lambda: array.array("l", [0, 0]), lambda m: in_array(m.st)),
    "tensor in an object": (
        lambda: SimpleNamespace(total=torch.zeros(())),
        lambda m: in_tensor(m.st),
    ),
    "generator in an object": (
        lambda: SimpleNamespace(random=random.Random(3)),
        lambda m: m.st.random.randrange(5),
    ),
    "partial": (lambda: partial(append, []), lambda m: m.st()),
    "bound method": (lambda: [].append, lambda m: m.st(1) or 1),
    "closure": (closure, lambda m: m.st()),
    "class": (lambda: None, by_class),
    "default": (lambda: None, default),
}


def held(name: str, module: Counter) -> Any:
    """All that a case may count in, as plain data."""
    st = module.st
    if name in ("partial", "bound method"):
        return list(st.args[0] if name == "partial" else st.__self__)
    if name == "closure":
        return list(st.__closure__[0].cell_contents)
    if name == "generator in an object":
        return st.random.getstate()
    if name == "default":
        return list(default.__defaults__[0])  # type: ignore[index]
    return str(st), str(vars(st)) if isinstance(st, Table) else "", Counter.count


def model(name: str) -> nn.Sequential:
    """The same each time."""
    Counter.count, default.__defaults__ = 0, ([],)
    Counter.history.clear()
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 6), Counter(*CASES[name]), nn.Linear(6, 4))


@pytest.mark.parametrize("name", CASES)
def test_capture_leaves_plain_objects_as_they_are(name: str) -> None:
    module = model(name)
    before, things = held(name, module[1]), module[1].st
    program = ps.capture(module, (X,))
    assert "1" in program.closed
    assert module[1].st is things
    assert held(name, module[1]) == before
    assert len(Counter.history) == 0
    ps.profile(program, devices=["cpu"])
    assert held(name, module[1]) == before
    module(X)
    assert held(name, module[1]) != before


def train(module: nn.Module, recompute: str, audit: Any, steps: int = 3) -> tuple[Any, Any]:
    """Gradients after some steps in a pipeline, and what the audit has found."""
    options: Any = {"recompute": recompute, "audit": audit, "schedule": "gpipe"}
    with ps.Pipeline(
        module, (X,), devices=["cpu", "cpu"], cuts=["2"], num_microbatches=2, **options, replicas=1
    ) as pipe:
        for _ in range(steps):
            pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
        return [p.grad for p in module.parameters()], pipe.audit


@pytest.mark.parametrize("name", [n for n in CASES if n not in ("bytes",)])
@pytest.mark.parametrize("recompute", ["none", "all"])
def test_the_audit_gives_no_false_alarm(name: str, recompute: str) -> None:
    if recompute == "all" and name in ("class", "default"):
        pytest.skip("what classes hold is not put back in every micro-batch")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        plain = model(name)
        for _ in range(3):
            for x, y in zip(X.tensor_split(2), Y.tensor_split(2), strict=True):
                (F.mse_loss(plain(x), y) / 2).backward()
        counted = held(name, plain[1])
        module = model(name)
        grads, audit = train(module, recompute, 1)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(p.grad, g) for p, g in zip(plain.parameters(), grads, strict=True))
    assert held(name, module[1]) == counted
    assert (audit.microbatches, audit.why_not) == (3, "")


def test_worker_processes_count_for_themselves() -> None:
    module = model("nested")
    with ps.Pipeline(
        *(module, (X,)),
        devices=["cpu", "cpu"],
        cuts=["2"],
        num_microbatches=2,
        workers="processes",
        audit=1,
        replicas=1,
    ) as pipe:
        for _ in range(3):
            pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
        assert "1.st" in pipe.audit.why_not


def test_what_was_not_changed_is_not_written() -> None:
    class Forbidding(SimpleNamespace):
        def __setattr__(self, name: str, value: Any) -> None:
            raise TypeError("frozen")

    module = nn.Linear(2, 2)
    module.config = Forbidding(table={"a": [1]}, scale=2)  # type: ignore[assignment]
    table = module.config.table
    with untouched(module):
        assert module.config.table is table
        table["a"].append(2)
        table["b"] = 3
        vars(module.config)["scale"] = 3
    assert table == {"a": [1]}
    assert module.config.scale == 2


def test_objects_that_lead_to_themselves() -> None:
    module = nn.Linear(2, 2)
    loop = SimpleNamespace(n=0, owner=module)
    loop.itself, loop.table = loop, {"loop": loop, 1: [loop]}
    module.loop = loop  # type: ignore[assignment]
    with untouched(module):
        loop.n, loop.table[2] = 1, 3
    assert loop.n == 0
    assert list(loop.table) == ["loop", 1]
