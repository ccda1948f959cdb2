"""A batch goes down the house once, and up once: no layer calls one that is above it."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import pytest
import torch
from torch.nn import functional as F

import penstock as ps
from tests.house.test_house import HEIGHT, ROOT
from tests.support.models import mlp
from tests.support.pool import pooled

X, Y = torch.randn(6, 6), torch.randn(6, 6)
DESIGN = ROOT.parent / "docs" / "design.md"
Place = tuple[str, str]
"""A file below `penstock/` and the qualified name of a function in it."""


@contextmanager
def watched() -> Iterator[list[tuple[Place, Place]]]:
    """Every call from one of our functions to another, in all threads, in order."""
    found: list[tuple[Place, Place]] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or (callee := place(frame)) is None:
            return
        above = frame.f_back
        while above is not None and place(above) is None:
            above = above.f_back
        if above is not None:
            found.append((place(above), callee))  # type: ignore[arg-type]
        else:
            found.append((("", ""), callee))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def place(frame: FrameType) -> Place | None:
    """Where a frame is, if it is in Penstock."""
    file = frame.f_code.co_filename
    if not file.startswith(f"{ROOT}/"):
        return None
    return file.removeprefix(f"{ROOT}/"), frame.f_code.co_qualname


# What is unpacked is made by its own class, whichever that is: this is no call of a layer's work.
UNPACKS = ("links/pickling.py", "unpack")


# Those that run what they were handed, as `docs/design.md` says, and what torch calls as hooks.
RUN_WHAT_IS_HANDED = {
    ("runner.py", "Runner.surviving"),  # again if workers have died, which `Running` replaces
    ("training/optimizer.py", "PipelineOptimizer"),  # hands its steps to that
    ("comparison/reference.py", "run_with_threads"),
}
HOOKS = {
    ("steps.py", "note_optimizers"),
    ("steps.py", "_kept_here"),
    ("running.py", "_sampling"),  # asked every few seconds what workers hold
}


def height(where: Place) -> int:
    return HEIGHT[where[0].split("/")[0].removesuffix(".py")]


def goes_up(caller: Place, callee: Place) -> bool:
    """Whether a call goes to a higher layer, and was not handed down from there."""
    if caller in (("", ""), UNPACKS) or height(callee) <= height(caller):
        return False
    is_iterator = callee[1].endswith("<genexpr>")  # it was handed down, and is read
    return not (is_iterator or _is_of(caller, RUN_WHAT_IS_HANDED) or _is_of(callee, HOOKS))


def _is_of(where: Place, named: set[Place]) -> bool:
    file, function = where
    return any(file == own and f"{function}.".startswith(f"{name}.") for own, name in named)


def steps(pipe: ps.Pipeline) -> list[Callable[[], Any]]:
    """What users do with batches."""
    return [
        lambda: pipe.train_step(X, target=Y, loss_fn=F.mse_loss),
        lambda: pipe(X).sum().backward(),
        lambda: pipe.eval_step(X, target=Y, loss_fn=F.mse_loss, outputs=True),
        lambda: list(pipe.map([X, X])),
        lambda: pipe.train_microbatches([(X,), (X,)], targets=[Y, Y], loss_fn=F.mse_loss),
    ]


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_no_call_goes_up(kind: str, replicas: int, tmp_path: Path) -> None:
    upward: set[str] = set()
    with pooled(), watched() as calls, pipeline(kind, replicas, "auto") as pipe:
        optimizer = pipe.optimizer(torch.optim.Adam, lr=1e-3)
        between = [
            lambda: pipe.clip_grad_norm_(1.0),
            optimizer.step,
            optimizer.zero_grad,
            lambda: pipe.save(tmp_path / "saved", optimizer=optimizer),
            pipe.status,
        ]
        for step in [*steps(pipe), *between]:
            step()
            calls.clear()
            step()
            upward |= {f"{a[0]}:{a[1]} calls {b[0]}:{b[1]}" for a, b in calls if goes_up(a, b)}
    assert not upward, "\n".join(sorted(upward))


def pipeline(kind: str, replicas: int = 1, audit: Literal["auto"] | None = None) -> ps.Pipeline:
    return ps.Pipeline(
        mlp(6, 6, 6),
        (X,),
        devices=["cpu"] * 2,
        workers=kind,
        num_microbatches=2,
        audit=audit,
        replicas=replicas,
    )


def hops(title: str, text: str) -> dict[int, Place]:
    """The table under this title: files and functions, by number."""
    after = text.partition(f"\n{title}")[2].partition("\n\n|")[2]
    row = re.compile(r"^\|? ?(\d+) \| `(.+?)` \| `(.+?)` \|", re.M)
    rows = row.findall(after.partition("\n\n")[0])
    return {int(number): (file, function) for number, file, function in rows}


def test_the_way_of_a_batch_is_as_design_says() -> None:
    text = DESIGN.read_text()
    way = hops("Threads:", text)
    assert sorted(way) == list(range(1, 13))
    with watched() as calls, pipeline("threads") as pipe:
        step = steps(pipe)[0]
        step()
        calls.clear()
        step()
        first: dict[Place, int] = {}
        for number, (_, callee) in enumerate(calls):
            first.setdefault(callee, number)
    found = [first.get(way[number], -1) for number in (*range(1, 11), 12)]
    assert found == sorted(found), [way[k] for k in way]
    assert found[0] >= 0, found
    assert way[11] in first


@pytest.mark.parametrize("title", ["Processes:", "Ranks:", "Actors of a Ray cluster:"])
def test_what_other_kinds_do_instead_exists(title: str) -> None:
    instead = hops(title, DESIGN.read_text())
    assert sorted(instead) == [7, 8, 11]
    for file, function in instead.values():
        owner, name = function.split(".")
        code = (ROOT / file).read_text()
        assert re.search(rf"^class {owner}\b.*?^    def {name}\(", code, re.M | re.S), function


def test_everything_is_where_design_says() -> None:
    """Each name of "Where to look" is defined in the file that stands beside it."""
    table = DESIGN.read_text().partition("## Where to look")[2].partition("\n## ")[0]
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 20
    for _, file, names in rows:
        (path,) = re.findall(r"`(.+?)`", file)
        code = (ROOT / path).read_text()
        for name in re.findall(r"`(.+?)`", names):
            owner, _, method = name.partition(".")
            defined = rf"^(class|def) {owner}\b" if not method else rf"^    def {method}\("
            is_there = re.search(rf"{defined}|^{owner}\b.*=", code, re.M)
            assert is_there, f"{name} is not in {path}"


def test_the_table_of_layers_has_all() -> None:
    table = DESIGN.read_text().partition("checks that every layer imports only")[2]
    rows = [line.split(" | ")[0] for line in table.partition("\n## ")[0].splitlines()]
    named = {name for cell in rows for name in re.findall(r"`(.+?)`", cell)}
    assert set(HEIGHT) - named <= {"names", "torch_internals", "changing", "__main__"}
