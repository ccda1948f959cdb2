"""Every snippet of README and the docs runs, and every command in them exists."""

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

RUN_ELSEWHERE = "recipes.md"  # test_recipes.py
WITH_CODE = [
    page
    for page in PAGES
    if page.name != RUN_ELSEWHERE
    and any(block.language in ("python", "diff") for block in blocks(page))
]


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
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    names.clear()
    gc.collect()


def begin(block: Block, names: dict[str, Any]) -> None:
    close(names)
    names |= {"__name__": "snippets"} | getattr(given, block.given)()


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: str(page.relative_to(HOME)))
def test_the_snippets_of_a_page_run_in_order(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    try:
        for block in blocks(page):
            if block.language not in ("python", "diff") or block.not_run:
                continue
            if block.language == "diff" and not block.before_not_run:
                begin(block, names)
                run(block.side(removed=True), block, names)
            if block.given:
                begin(block, names)
            code = block.side(removed=False) if block.language == "diff" else block.code
            run(code, block, names)
    finally:
        close(names)
