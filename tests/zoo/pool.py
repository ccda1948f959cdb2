"""Checking many models, some at a time, in processes that may die without harm."""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from itertools import groupby
from types import FrameType

import torch

from tests.zoo.check import Result, check
from tests.zoo.entry import Entry

OWN = ("plain", "torchvision", "timm", "transformers")
"""Families of the packages that the other tests need as well."""

OTHERS = {
    "diffusers": "diffusers",
    "forecasting": "pytorch_forecasting",
    "graphs": "torch_geometric",
    "kornia": "kornia",
    "lightly": "lightly",
    "lucidrains": "local_attention",
    "monai": "monai",
    "open_clip": "open_clip",
    "peft": "peft",
    "series": "tsai",
    "smp": "segmentation_models_pytorch",
    "speechbrain": "speechbrain",
    "torchaudio": "torchaudio",
    "unseen": "tabm",
    "vit_pytorch": "vit_pytorch",
    "x_transformers": "x_transformers",
}
"""Families of other authors' packages, and a module of each; requirements-zoo.txt installs them."""

FAMILIES = (*OWN, *OTHERS)
_SECONDS = 600  # for one model; a machine that does other work too is much slower
_TOGETHER = 10  # models that share a process
_MEMORY = 9 << 30  # bytes that such a process may have


def available() -> list[str]:
    """The families whose packages are installed."""
    return [*OWN, *(family for family, module in OTHERS.items() if find_spec(module))]


def entries(families: Sequence[str]) -> list[Entry]:
    """All models of these families."""
    modules = [importlib.import_module(f"tests.zoo.{family}_models") for family in families]
    return [entry for module in modules for entry in module.entries()]


def run(
    found: Sequence[Entry],
    jobs: int,
    note: Callable[[Result], None],
    replicas: Sequence[int] = (),
    device: str = "cpu",
) -> list[Result]:
    """Check these models, some at a time, and tell how it goes.

    Args:
        found: the models.
        jobs: how many processes there are at a time.
        note: is given each result when it is there.
        replicas, device: see `check`.
    """
    groups = []
    for family, members in groupby(found, key=lambda entry: entry.family):
        names = [entry.name for entry in members]
        groups += [(family, names[k : k + _TOGETHER]) for k in range(0, len(names), _TOGETHER)]
    models = {(entry.family, entry.name): entry.counted for entry in found}
    results: list[Result] = []

    def one_group(group: tuple[str, list[str]]) -> None:
        for result in _in_a_process(*group, replicas, device):
            result.model = models[result.family, result.name]
            results.append(result)
            note(result)
            line = f"{len(results)}/{len(found)} {result.name}: {result.status} {result.line}"
            print(line, file=sys.stderr, flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one_group, groups))
    return results


def _in_a_process(
    family: str, names: Sequence[str], replicas: Sequence[int], device: str
) -> Iterator[Result]:
    """Check these in a new process, and go on in another if it dies."""
    left = list(names)
    options = [f"--device={device}", *(f"--replicas={count}" for count in replicas)]
    while left:
        command = [sys.executable, "-W", "ignore", "-m", "tests.zoo", *options]
        command += ["--child", family, *left]
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
            words = f"the process ended with {child.returncode}"
            yield Result(left.pop(0), family, "crash", line=words)


class _TooLongError(BaseException):
    """No `Exception`: whatever is being checked must not catch it and go on."""


def check_here(
    family: str, names: Sequence[str], replicas: Sequence[int] = (), device: str = "cpu"
) -> None:
    """Check these in this process; prints a line of JSON for each."""
    torch.set_num_threads(1)
    if device == "cpu":  # drivers of others reserve more than they use
        resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, _MEMORY))

    def too_long(_: int, __: FrameType | None) -> None:
        raise _TooLongError

    signal.signal(signal.SIGALRM, too_long)
    by_name = {entry.name: entry for entry in entries([family])}
    for name in names:
        signal.alarm(_SECONDS)
        try:
            result = check(by_name[name], replicas=replicas, device=device)
        except _TooLongError:
            result = Result(name, family, "crash", line=f"not done after {_SECONDS} s")
        finally:
            signal.alarm(0)
        print(json.dumps(result.to_dict()), flush=True)
        if "not done after" in result.line:
            os._exit(0)  # its threads may go on for a while, and draw random numbers
