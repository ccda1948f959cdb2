"""The blocks of code in the docs, and the words of the project's commands in them.

A comment on the line before a block says what it needs, or why it is not run:

    <!-- given: classifier -->           a function of `tests/house/given.py`
    <!-- not run: why -->
    <!-- before not run: why -->         the side of a diff that is removed
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HOME = Path(__file__).parents[2]
PAGES = [HOME / "README.md", HOME / "CONTRIBUTING.md", *sorted((HOME / "docs").rglob("*.md"))]
_BLOCK = re.compile(
    r"(?P<comments>(?:^<!--[^\n]*-->\n)*)^```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    """A block of code of a page.

    Attributes:
        page: its file.
        line: the line before its first, from 0.
        language: what follows the backticks; empty for output and commands.
        code: its lines.
        given: the function of `given.py` that makes what it needs; empty to go on.
        not_run: why it is not run; empty if it is.
        before_not_run: why the removed side of a diff is not run.
    """

    page: Path
    line: int
    language: str
    code: str
    given: str
    not_run: str
    before_not_run: str

    def side(self, removed: bool) -> str:
        """One side of a diff, other lines empty, so that line numbers stay."""
        sign, other = ("-", "+") if removed else ("+", "-")
        lines = self.code.splitlines()
        kept = ["" if line[:1] == other else line[1:] for line in lines]
        assert all(line[:1] in (sign, other, " ", "") for line in lines), self.code
        return "\n".join(kept)


def blocks(page: Path) -> Iterator[Block]:
    """The blocks of a page, in order."""
    text = page.read_text()
    for found in _BLOCK.finditer(text):
        comments = found["comments"]

        def note(what: str, comments: str = comments) -> str:
            match = re.search(rf"<!-- {what}: (.*?) -->", comments)
            return match[1] if match else ""

        yield Block(
            page,
            text[: found.start("code")].count("\n"),
            *(found["language"], found["code"]),
            *(note("given"), note("not run"), note("before not run")),
        )


def commands(page: Path) -> Iterator[str]:
    """Every command in a page: lines of its blocks, indented lines, and what prose quotes."""
    for block in blocks(page):
        if block.language in ("", "sh", "console"):
            lines = block.code.replace("\\\n", " ").splitlines()
            yield from (line.removeprefix("$ ") for line in lines)
    prose = _BLOCK.sub("", page.read_text()).replace("\\\n", " ")
    yield from (line.strip() for line in prose.splitlines() if line.startswith("    "))
    yield from (" ".join(quoted.split()) for quoted in re.findall(r"`([^`]+)`", prose))


def hook(name: str) -> Any:
    """A module of docs/hooks, which is no package."""
    spec = importlib.util.spec_from_file_location(f"hook_{name}", HOME / f"docs/hooks/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
