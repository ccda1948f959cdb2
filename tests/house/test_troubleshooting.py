"""Every message of an error is found in docs/troubleshooting.md."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps
from tests.house.snippets import HOME, hook

found = hook("messages")
PAGE = (HOME / "docs" / "troubleshooting.md").read_text()
OF_PYTORCH = "element 0 of tensors does not require grad"
# Errors that pass on what was said elsewhere, in a message that is listed there.
PASS_ON = {
    *("board/control.py", "board/served.py", "capture/signatures.py", "checkpoint/saver.py"),
    *("cli/simulate_command.py", "integrations/module.py", "plan/partition.py", "plan/stages.py"),
    *("profile/hardware.py", "runner.py", "running.py", "storage/folder.py", "training/hints.py"),
    *("weights.py", "workers/pool.py", "workers/ranks/rendezvous.py"),
}


@cache
def patterns() -> list[re.Pattern[str]]:
    """What is listed and has several words, with anything in place of `…`, and after it."""
    texts = [m.text for m in [*found.WORDED, *found.messages()] if len(m.text.split()) > 4]
    return [re.compile(".*?".join(map(re.escape, text.split("…"))), re.DOTALL) for text in texts]


def test_no_error_is_left_out() -> None:
    places = {m.place.removeprefix("penstock/").partition(":")[0] for m in found.passed_on()}
    assert places <= PASS_ON, "what these raise is not a text that can be read from the source"


def test_what_is_explained_is_a_message() -> None:
    explained = PAGE.partition("## Every message")[0]
    headings = re.findall(r"^### (.*)$", explained, re.MULTILINE)
    texts = "\n".join(message.text for message in [*found.WORDED, *found.messages()])
    missing = []
    for heading in headings:
        pattern = r"[^\n]*?".join(map(re.escape, heading.split("…")))
        if not re.search(pattern, texts) and not heading.startswith(OF_PYTORCH):
            missing.append(heading)
    assert not missing
    assert len(headings) > 20


def test_all_messages_are_on_the_page() -> None:
    assert "<!-- every message -->" in PAGE
    listed = found.markdown()
    for message in found.messages():
        assert f"<li>{html.escape(message.text)}</li>" in listed


def test_messages_are_read_from_the_source(tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "parts.py").write_text(
        "LIMIT = 'at most three'\n"
        "def words(x):\n    return f'there are {x} of them'\n"
        "def check(x, many):\n"
        "    why = 'because of this' if many else 'because of that'\n"
        "    if x:\n        raise InputError(f'{x} is odd: {why}, '\n"
        "                         + LIMIT)\n"
        "    error = errors.PlanError(words(x))\n"
        "    warnings.warn('this is a warning')\n"
        "    raise ClosedError(x)\n"
    )
    listed = {(m.error, m.subject, m.text) for m in found.messages(tmp_path)}
    subject = "Batches, losses and results"
    assert listed == {
        ("InputError", subject, "… is odd: because of this, at most three"),
        ("InputError", subject, "… is odd: because of that, at most three"),
        ("PlanError", subject, "there are … of them"),
        ("warning", subject, "this is a warning"),
    }
    assert [m.error for m in found.passed_on(tmp_path)] == ["ClosedError"]


Mistake = Callable[[Any, torch.Tensor, torch.Tensor], object]
MISTAKES: dict[str, Mistake] = {
    "target": lambda pipe, x, y: pipe.train_step(x, target=y[:3], loss_fn=F.cross_entropy),
    "no rows": lambda pipe, x, y: pipe.train_step(x[:0], target=y[:0], loss_fn=F.cross_entropy),
    "loss of rows": lambda pipe, x, y: pipe.train_step(
        x, target=y, loss_fn=lambda output, y: F.cross_entropy(output, y, reduction="none")
    ),
    "detached loss": lambda pipe, x, y: pipe.train_step(
        x, target=y, loss_fn=lambda output, y: F.cross_entropy(output.detach(), y)
    ),
    "no loss": lambda pipe, x, y: pipe.train_step(x, target=y),
    "weight": lambda pipe, x, y: pipe.train_step(
        x, target=y, loss_fn=F.cross_entropy, weight="tokens"
    ),
    "no model": lambda pipe, x, y: ps.Pipeline(F.relu, (x,), devices=2),
    "schedule": lambda pipe, x, y: ps.Pipeline(pipe.model, (x,), devices=2, schedule="1F1B"),
    "device": lambda pipe, x, y: ps.Pipeline(pipe.model, (x,), devices=["cuda:99"]),
    "cuts": lambda pipe, x, y: ps.Pipeline(pipe.model, (x,), devices=2, cuts=["layer9"]),
    "LBFGS": lambda pipe, x, y: pipe.optimizer(torch.optim.LBFGS),
    "checkpoint": lambda pipe, x, y: ps.load("nowhere"),
    "plan": lambda pipe, x, y: ps.Pipeline(pipe.model, (x,), plan="nowhere.json"),
    "twice": lambda pipe, x, y: [out.sum().backward() for out in [pipe(x)] * 2],
    "width": lambda pipe, x, y: pipe(x[:, :3]),
}


@pytest.fixture(scope="module")
def pipe() -> Any:
    with ps.Pipeline(
        nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)),
        (torch.randn(8, 6),),
        devices=2,
        num_microbatches=2,
        schedule="1f1b",
    ) as made:
        yield made


@pytest.mark.parametrize("name", MISTAKES)
def test_errors_of_a_user_are_found_there(name: str, pipe: Any) -> None:
    with pytest.raises((ps.PenstockError, TypeError)) as caught:
        MISTAKES[name](pipe, torch.randn(8, 6), torch.randint(0, 4, (8,)))
    said = " ".join(str(caught.value).split())
    assert any(p.match(said) for p in patterns()), said


def test_errors_that_are_closed_are_found_there() -> None:
    made = ps.Pipeline(nn.Linear(6, 4), (torch.randn(8, 6),), devices=["cpu"])
    made.close()
    with pytest.raises(ps.ClosedError) as caught:
        made(torch.randn(8, 6))
    assert any(p.match(str(caught.value)) for p in patterns() if "closed" in p.pattern)
