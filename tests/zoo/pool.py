"""Checking many models, some at a time, in processes that may die without harm."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from types import FrameType

import torch

from tests.zoo.check import Result, check
from tests.zoo.entry import Entry

FAMILIES = ("plain", "torchvision", "timm", "transformers")
_SECONDS = 90  # for one model
_TOGETHER = 10  # models that share a process


def entries(families: Sequence[str]) -> list[Entry]:
    """All models of these families."""
    modules = [importlib.import_module(f"tests.zoo.{family}_models") for family in families]
    return [entry for module in modules for entry in module.entries()]


def run(found: Sequence[Entry], jobs: int) -> list[Result]:
    """Check these models, some at a time, and tell how it goes."""
    groups = []
    for family, members in groupby(found, key=lambda entry: entry.family):
        names = [entry.name for entry in members]
        groups += [(family, names[k : k + _TOGETHER]) for k in range(0, len(names), _TOGETHER)]
    results: list[Result] = []

    def one_group(group: tuple[str, list[str]]) -> None:
        for result in _in_a_process(*group):
            results.append(result)
            line = f"{len(results)}/{len(found)} {result.name}: {result.status} {result.line}"
            print(line, file=sys.stderr, flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one_group, groups))
    return sorted(results, key=lambda r: (FAMILIES.index(r.family), r.name))


def _in_a_process(family: str, names: Sequence[str]) -> Iterator[Result]:
    """Check these in a new process, and go on in another if it dies."""
    left = list(names)
    while left:
        command = [sys.executable, "-W", "ignore", "-m", "tests.zoo", "--child", family, *left]
        child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith("{"):
                result = Result(**json.loads(line))
                left.remove(result.name)
                yield result
        if child.wait() and left:
            yield Result(
                left.pop(0), family, "refused", f"the process ended with {child.returncode}"
            )


class _TooLongError(BaseException):
    """No `Exception`: whatever is being checked must not catch it and go on."""


def check_here(family: str, names: Sequence[str]) -> None:
    """Check these in this process; prints a line of JSON for each."""
    torch.set_num_threads(1)

    def too_long(_: int, __: FrameType | None) -> None:
        raise _TooLongError

    signal.signal(signal.SIGALRM, too_long)
    by_name = {entry.name: entry for entry in entries([family])}
    for name in names:
        signal.alarm(_SECONDS)
        try:
            result = check(by_name[name])
        except _TooLongError:
            result = Result(name, family, "refused", f"not done after {_SECONDS} s")
        finally:
            signal.alarm(0)
        print(json.dumps(result.to_dict()), flush=True)
        if "not done after" in result.line:
            os._exit(0)  # its threads may go on for a while, and draw random numbers
