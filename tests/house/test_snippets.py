"""Every snippet of README and the docs runs."""

from __future__ import annotations

import gc
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock as ps
from tests.house import given
from tests.house.snippets import HOME, PAGES, Block, blocks

RUN_ELSEWHERE = ("recipes.md", "ports.md")  # by test_recipes.py and tests/ports
WITH_CODE = [
    page
    for page in PAGES
    if page.name not in RUN_ELSEWHERE
    and any(block.language in ("python", "diff") for block in blocks(page))
]
NOT_RUN = 10  # at most; those that need a cluster, or packages that the tests do not have, and
# parts of scripts that other tests run


def on_this_machine(code: str) -> str:
    """On machines without GPUs, CPUs stand in for them."""
    return re.sub(r'"cuda(:\d+)?"', '"cpu"', code)


def run(code: str, block: Block, names: dict[str, Any]) -> None:
    if code.startswith(">>> "):  # as in a terminal: what is typed runs, what is printed is not read
        code = re.sub(r"^(?!>>> |\.\.\. ).*$", "", code, flags=re.MULTILINE)
        code = re.sub(r"^(>>> |\.\.\. )", "", code, flags=re.MULTILINE)
    code = "\n" * block.line + on_this_machine(code)  # errors have the right line
    exec(compile(code, str(block.page), "exec"), names)


def close(names: dict[str, Any]) -> None:
    for value in list(names.values()):
        if isinstance(value, ps.Pipeline):
            value.close()
    names.clear()
    gc.collect()
    if torch.distributed.is_initialized():  # of which nobody has anything any more
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: str(page.relative_to(HOME)))
def test_the_snippets_of_a_page_run_in_order(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.planning.planner.PROMPT", 0.5)  # seconds of measuring; is faster
    names: dict[str, Any] = {}
    folders = (tmp_path / str(number) for number in range(1000))

    def begin(block: Block) -> None:
        """What a reader has before the block, in a folder of its own."""
        close(names)
        folder = next(folders)
        folder.mkdir()
        monkeypatch.chdir(folder)
        names.update({"__name__": "snippets"}, **getattr(given, block.given)())

    try:
        for block in blocks(page):
            if block.language not in ("python", "diff") or block.not_run:
                continue
            if block.language == "diff" and not block.before_not_run:
                begin(block)
                run(block.side(removed=True), block, names)
            if block.given:
                begin(block)
            code = block.side(removed=False) if block.language == "diff" else block.code
            run(code, block, names)
    finally:
        close(names)


def test_few_snippets_are_not_run() -> None:
    found = [block for page in PAGES for block in blocks(page)]
    assert len([block for block in found if block.not_run or block.before_not_run]) <= NOT_RUN


def test_blocks_are_read_with_their_comments(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A page\n\n<!-- given: model -->\n<!-- before not run: why not -->\n```diff\n"
        "-a = 1\n+a = 2\n b = a\n```\n\n```\n$ make demo\n```\n\n```python\nc = b\n```\n"
    )
    diff, output, code = blocks(page)
    assert (diff.given, diff.before_not_run, diff.not_run) == ("model", "why not", "")
    assert diff.side(removed=True) == "a = 1\n\nb = a"
    assert diff.side(removed=False) == "\na = 2\nb = a"
    assert (output.language, output.code) == ("", "$ make demo\n")
    assert (code.language, code.code, code.given, code.line) == ("python", "c = b\n", "", 15)
