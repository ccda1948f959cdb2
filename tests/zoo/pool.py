"""Checking many models, some at a time, each in a process that may die without harm."""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from types import FrameType

import torch

from tests.zoo.check import Result, check
from tests.zoo.entry import Entry

FAMILIES = ("plain", "torchvision", "timm", "transformers")
_SECONDS = 240  # for one model


def entries(families: Sequence[str]) -> list[Entry]:
    """All models of these families."""
    modules = [importlib.import_module(f"tests.zoo.{family}_models") for family in families]
    return [entry for module in modules for entry in module.entries()]


def check_named(family: str, name: str) -> Result:
    """Check one model, in a process of the pool."""
    torch.set_num_threads(1)

    def too_long(_: int, __: FrameType | None) -> None:
        raise TimeoutError(f"not done after {_SECONDS} s")

    signal.signal(signal.SIGALRM, too_long)
    signal.alarm(_SECONDS)
    try:
        found = [entry for entry in entries([family]) if entry.name == name]
        return check(found[0])
    finally:
        signal.alarm(0)


def run(found: Sequence[Entry], jobs: int) -> list[Result]:
    """Check these models, some at a time, and tell how it goes."""
    results = []
    context = get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, max_tasks_per_child=12) as pool:
        futures = {pool.submit(check_named, e.family, e.name): e for e in found}
        for done, future in enumerate(as_completed(futures), 1):
            try:
                result = future.result()
            except Exception as error:  # the process died: out of memory, for one
                entry = futures[future]
                result = Result(entry.name, entry.family, "refused", f"{type(error).__name__}")
            results.append(result)
            print(
                f"{done}/{len(found)} {result.name}: {result.status} {result.line}", file=sys.stderr
            )
    return sorted(results, key=lambda r: (FAMILIES.index(r.family), r.name))
