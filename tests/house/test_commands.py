"""Every command in README and the docs exists, with its options."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import shlex
import tomllib
from pathlib import Path

import click
import pytest
from torch.distributed.run import get_args_parser

from penstock.bench.__main__ import NAMES
from penstock.cli import main
from tests.house.snippets import HOME, PAGES, commands

TARGETS = set(re.findall(r"^([\w-]+):", (HOME / "Makefile").read_text(), re.MULTILINE))
EXTRAS = tomllib.loads((HOME / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def problem(line: str) -> str:
    """What is wrong with a command; empty if nothing is, or if it is not one of the project's."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError:
        return ""
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    if not words:
        return ""
    program, words = words[0].removeprefix(".venv/bin/"), words[1:]
    check = {"penstock": of_penstock, "python": of_python, "make": of_make, "pip": of_pip}
    if program == "torchrun":
        return of_torchrun(words)
    return check[program](words) if program in check and words else ""


def of_penstock(words: list[str]) -> str:
    words = [word for word in words if word not in ("|", "…", "...")]
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            main.main([*words, "--help"], standalone_mode=False)
        except click.ClickException as error:
            return error.format_message()
    return ""


def of_python(words: list[str]) -> str:
    while words and words[0] == "-W":
        words = words[2:]
    if words[:2] == ["-m", "penstock.bench"]:
        return "" if not words[2:] or words[2] in NAMES else "no such benchmark"
    if words[:1] == ["-m"]:
        return "" if importlib.util.find_spec(words[1]) else "no such module"
    if words and words[0].endswith(".py") and "/" in words[0]:
        return "" if (HOME / words[0]).exists() else "no such file"
    return ""


def of_make(words: list[str]) -> str:
    missing = {word for word in words if "=" not in word} - TARGETS
    return f"no target {sorted(missing)}" if missing else ""


def of_pip(words: list[str]) -> str:
    asked = re.findall(r"(?:penstock|\.)\[([\w,]+)\]", " ".join(words))
    missing = {extra for found in asked for extra in found.split(",")} - set(EXTRAS)
    return f"no extra {sorted(missing)}" if missing else ""


def of_torchrun(words: list[str]) -> str:
    if not words:
        return ""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            get_args_parser().parse_args(words if words[-1][0] != "-" else [*words, "train.py"])
        except SystemExit:
            return said.getvalue()
    return ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(HOME)))
def test_the_commands_of_a_page_exist(page: Path) -> None:
    found = [(line, problem(line)) for line in commands(page)]
    assert not [each for each in found if each[1]]


@pytest.mark.parametrize(
    "line",
    [
        "penstock planet --input 8x3",
        "penstock plan gpt2 --devicez cpu",
        "python -m penstock.bench nothing",
        "python -m tests.nothing --runs 3",
        ".venv/bin/python examples/nothing.py",
        "make nothing",
        "pip install 'penstock[nothing]'",
        "PENSTOCK_METRICS=1 torchrun --nproc 2 --nothing train.py",
    ],
)
def test_commands_that_do_not_exist_are_found(line: str) -> None:
    assert problem(line)
