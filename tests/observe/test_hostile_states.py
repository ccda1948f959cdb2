"""Whatever is served at an address, `penstock top` shows it or says that it is no state."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.board.runs import Run
from penstock.board.served import Remote, others_of, state_from, state_of
from penstock.observe.watch import Watch

VALUES: dict[type, list[Any]] = {
    int: [0, -1, 1, 100, 2**32, 10**18, -(10**18), 2**61, 2**70, -(2**63)],
    float: [0.0, -0.5, 1e-300, 1e18, -1e18, 1e300],
    str: ["", "[/x]", "[red]", "\x1b[2J", "a\nb", "\u202e", "x" * 5000, "running"],
    list: [[], [0], [-1], [10**6], [0, 0, 0, 0]],
}
EVERYTHING = [None, True, {}, [[]], *(value for values in VALUES.values() for value in values)]


class Hostile(Remote):
    """One that has answered with a state."""

    def __init__(self, data: bytes) -> None:
        self.url, self.problem = "http://a:9100/state", ""
        self.path = PurePosixPath(self.url)
        self._by, self._state = 0, state_from(data)


@pytest.fixture(scope="module")
def state() -> bytes:
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)), torch.ones(4, 3)
    given: dict[str, Any] = {"cuts": ["1"], "schedule": "1f1b", "num_microbatches": 2}
    with ps.Pipeline(model, (x,), devices=["cpu"] * 2, audit=None, **given) as pipe:
        for _ in range(3):
            pipe.train_step(x, target=x, loss_fn=F.mse_loss)
        board = pipe._workers.board
        return state_of(Run(pipe._running.description, board, board.path))


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where there are values in something, from the outside in."""
    keys: Any = value if isinstance(value, dict) else range(len(value))
    for key in keys:
        yield (*place, key)
        if isinstance(value[key], (dict, list)):
            yield from places(value[key], (*place, key))


def changed(data: bytes, rng: random.Random) -> bytes:
    """The state with another value somewhere, or a few."""
    state = json.loads(data)
    for _ in range(rng.choice([1, 1, 2, 4])):
        *way, last = rng.choice(list(places(state)))
        there = state
        for key in way:
            there = there[key]
        fitting = VALUES.get(type(there[last]), EVERYTHING)
        there[last] = rng.choice(fitting if rng.random() < 0.8 else EVERYTHING)
    return json.dumps(state).encode()


def shown(remote: Remote) -> str:
    """All that top shows of it, on screens of all widths, and what it prints as JSON."""
    watch = Watch(source=lambda: [remote])
    watch.find()
    for _ in range(2):
        watch.look()
        watch.reckon()
    text = io.StringIO()
    for width in (60, 120, 200):
        Console(file=text, width=width, force_terminal=True).print(watch.view(width, keys=True))
    return text.getvalue() + "".join(map(str, watch.statuses()))


def test_changed_states_are_shown_or_refused(state: bytes) -> None:
    rng, count = random.Random(0), {"shown": 0, "refused": 0}
    for number in range(300):
        data = changed(state, rng)
        try:
            remote = Hostile(data)
        except ValueError:
            count["refused"] += 1
            continue
        count["shown"] += 1
        text = shown(remote)
        assert "\x1b[2J" not in text, number
        assert "\u202e" not in text, number
        assert all(url.startswith("http://") for url in others_of(remote))
    assert min(count.values()) > 50


def test_cut_off_states_are_refused(state: bytes) -> None:
    for length in range(0, len(state), 37):
        with pytest.raises(ValueError, match=r"truncated|malformed|invalid"):
            state_from(state[:length])


@pytest.mark.parametrize(
    "data",
    [
        b"[" * (1 << 20),
        b'{"a":' * (1 << 19),
        b'{"penstock": 1e999}',
        b'{"penstock": ' + b"9" * 5000 + b"}",
        b"\x80\x04\x95",
        b"\xff" * 100,
    ],
)
def test_what_is_no_state(data: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        state_from(data)
