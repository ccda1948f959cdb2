"""Shares of the slow tests: all of them together are all tests, and each has the core."""

from __future__ import annotations

import os
import shutil
import subprocess
from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest

from tests.support import shares

ROOT = Path(__file__).parents[2]


class Point(NamedTuple):
    """Two of a case's settings."""

    workers: int
    schedule: str


class Spec:
    """Parameters of a case."""

    def __init__(self, params: dict[str, Any]) -> None:
        self.params = params


class Case:
    """A test as pytest has collected it."""

    def __init__(self, nodeid: str, limit: float = 0, **params: Any) -> None:
        self.nodeid, self.limit = nodeid, limit
        self.callspec = Spec(params)
        self.keywords: set[str] = set()

    def get_closest_marker(self, name: str) -> Any:
        return pytest.mark.timeout(self.limit).mark if self.limit else None


def cases() -> list[pytest.Item]:
    """A product, some long tests, and some that stand alone."""
    found = [
        Case(
            f"a.py::product[{name}-{workers}-{schedule}]", name=name, point=Point(workers, schedule)
        )
        for name, workers, schedule in product("abcdef", range(4), ["gpipe", "1f1b", "zero"])
    ]
    found += [Case(f"b.py::long[{seed}]", 3600, seed=seed) for seed in range(5)]
    found += [Case(f"c.py::alone_{k}") for k in range(7)]
    return cast(list[pytest.Item], found)


def test_all_shares_are_all_tests_and_have_about_as_many() -> None:
    items = cases()
    dealt = shares.dealt(items, 8)
    core = shares.core_of(items)
    together = [item.nodeid for hand in (*dealt, core) for item in hand]
    assert sorted(together) == sorted(item.nodeid for item in items)
    sizes = [len(hand) for hand in dealt]
    assert max(sizes) - min(sizes) <= 1
    assert [sum("long" in item.nodeid for item in hand) for hand in dealt] == [1] * 5 + [0] * 3
    for share in range(1, 9):
        chosen = shares.chosen(items, share, 8)
        assert set(core) < set(chosen)
        assert len(chosen) == len(core) + sizes[share - 1]


def test_any_two_values_of_a_product_meet_in_the_core() -> None:
    core = shares.core_of(cases())
    assert {item.nodeid.partition("[")[0] for item in core} == {"a.py::product"}
    assert len(core) < 72 / 2
    met = {pair for item in core for pair in combinations(shares.values_of(item).values(), 2)}
    assert met >= {
        *product("abcdef", "0123"),
        *product("abcdef", ["gpipe", "1f1b", "zero"]),
        *product("0123", ["gpipe", "1f1b", "zero"]),
    }


def test_shares_do_not_depend_on_the_order() -> None:
    there = [[i.nodeid for i in hand] for hand in shares.dealt(cases()[::-1], 8)]
    assert [[i.nodeid for i in hand] for hand in shares.dealt(cases(), 8)] == there


@pytest.mark.parametrize("text", ["0/8", "9/8", "8", "a/b", "1/8/2"])
def test_what_is_no_share(text: str) -> None:
    with pytest.raises(pytest.UsageError, match="such as 3/8"):
        shares.parsed(text)


@pytest.mark.parametrize("kind", ["commits", "shallow", "no git"])
def test_ci_runs_the_share_of_the_commit(tmp_path: Path, kind: str) -> None:
    """With a make that only says what it was asked for."""
    tools, here = tmp_path / "tools", tmp_path / "here"
    tools.mkdir()
    (here / ".ci").mkdir(parents=True)
    (here / ".ci/run").write_text((ROOT / ".ci/run").read_text())
    (tools / "make").write_text("#!/bin/sh\necho make $@\n")
    (tools / "make").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "GIT_DIR": "nowhere"}
    environment.pop("PENSTOCK_SHARE", None)
    expected = "1/10"
    if kind != "no git":
        environment["GIT_DIR"] = str(here / ".git")
        environment |= {
            f"GIT_{who}_{what}": "a@b"
            for who in ("AUTHOR", "COMMITTER")
            for what in ("NAME", "EMAIL")
        }
        git = lambda *words: subprocess.run(  # noqa: E731
            ["git", *words], cwd=here, env=environment, check=True, capture_output=True, text=True
        ).stdout.strip()
        git("init", "-q")
        for _ in range(13):
            git("commit", "-q", "--allow-empty", "-m", "one more")
        expected = "4/10"
        if kind == "shallow":
            head = git("rev-parse", "HEAD")
            (here / ".git/shallow").write_text(head + "\n")
            expected = f"{int(head[:7], 16) % 10 + 1}/10"
    run = subprocess.run(
        ["bash", ".ci/run"], cwd=here, env=environment, check=True, capture_output=True, text=True
    )
    browsers = map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))
    in_browser = ["make test-browser"] * any(browsers)
    share = f"make test-share SHARE={expected}"
    assert run.stdout.splitlines() == ["make test", "make docs", *in_browser, share]
