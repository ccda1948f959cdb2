"""Runs the scripts of `examples/ports`, and compares what they have saved."""

from __future__ import annotations

import contextlib
import difflib
import io
import random
import runpy
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

import penstock as ps
from penstock.bench.record import ROOT
from penstock.loading import tolerate_missing_torchvision_operators
from tests.ports.one_device import OneDevice

FOLDER = ROOT / "examples" / "ports"
MICROBATCHES = 3  # of unequal sizes, for no batch divides by three

SCRIPTS = {
    "gpt": "a GPT, with accumulation, autocast, generation",
    "image": "an image classifier of timm, with a moving average, autocast, validation",
    "masked_language": "BERT of transformers on masked tokens, with lengths that vary",
    "seq2seq": "T5 of transformers, with lengths that vary, and generation",
    "diffusion": "a UNet of diffusers that predicts noise, and sampling",
    "contrastive": "SimCLR, with a ResNet of torchvision",
    "gan": "DCGAN, two models",
    "lora": "LoRA of peft on a Llama of transformers",
    "speech": "CTC on sounds of several lengths, with a packed LSTM",
    "segmentation": "a U-Net with BatchNorm and pixels without labels",
}
DRAWS = ("masked_language", "seq2seq", "lora", "speech")  # dropout in training
NEEDS = {
    "image": "timm",
    "masked_language": "transformers",
    "seq2seq": "transformers",
    "diffusion": "diffusers",
    "contrastive": "torchvision",
    "lora": "peft",
}

WHOLE = ("speech",)  # models that cannot be cut
STAGES: Mapping[str, Any] = {"replicas": 1}
ALONE: Mapping[str, Any] = {"devices": 1}
REPLICAS: Mapping[str, Any] = {"replicas": 2}


@dataclass(frozen=True)
class Run:
    """What a script has left.

    Attributes:
        saved: what it has saved.
        printed: its output.
        plans: of its pipelines.
    """

    saved: Any
    printed: str
    plans: tuple[ps.Plan, ...] = ()


def plain(name: str) -> Run:
    """The script as it is without Penstock."""
    return _run(FOLDER / f"{name}.py")


def ported(name: str, count: int = MICROBATCHES, **options: Any) -> Run:
    """The ported script, on two CPU workers of one thread each.

    Args:
        name: of the script.
        count: of micro-batches.
        **options: further ones of `Pipeline`.
    """
    made: list[ps.Pipeline] = []
    fixed = {"threads_per_worker": 1, "num_microbatches": count, "progress": None, **options}

    def pipeline(*args: Any, **given: Any) -> ps.Pipeline:
        settings = given | fixed
        devices = ["cpu"] * settings.pop("devices")
        made.append(ps_pipeline(*args, devices=devices, **settings))
        return made[-1]

    ps_pipeline = ps.Pipeline
    try:
        run = _run(FOLDER / f"{name}_penstock.py", pipeline)
        return Run(run.saved, run.printed, tuple(pipe.plan for pipe in made))
    finally:
        for pipe in made:
            pipe.close()


def reference(name: str, count: int = MICROBATCHES) -> Run:
    """The ported script, whose micro-batches one device runs in plain PyTorch."""
    one_device = partial(OneDevice, num_microbatches=count)
    return _run(FOLDER / f"{name}_penstock.py", one_device)


def differences(ours: Any, theirs: Any, path: str = "") -> list[str]:
    """The places where two saved objects do not have the same bits."""
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping) and ours.keys() == theirs.keys():
        return [d for k in ours for d in differences(ours[k], theirs[k], f"{path}.{k}".lstrip("."))]
    if isinstance(ours, list | tuple) and type(ours) is type(theirs) and len(ours) == len(theirs):
        pairs = enumerate(zip(ours, theirs, strict=True))
        return [d for k, (a, b) in pairs for d in differences(a, b, f"{path}[{k}]")]
    if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
        return [] if ours.dtype == theirs.dtype and torch.equal(ours, theirs) else [path]
    return [] if type(ours) is type(theirs) and ours == theirs else [path]


def diff(name: str) -> list[str]:
    """The lines of the unified diff from the plain script to the ported one."""
    before, after = (FOLDER / f"{n}.py" for n in (name, f"{name}_penstock"))
    texts = (path.read_text().splitlines() for path in (before, after))
    return list(difflib.unified_diff(*texts, before.name, after.name, n=2, lineterm=""))


def changed(name: str) -> tuple[int, int]:
    """How many lines the port adds and removes, empty ones left out."""
    lines = [line for line in diff(name)[2:] if line[1:].strip()]
    return sum(line[0] == "+" for line in lines), sum(line[0] == "-" for line in lines)


def _run(path: Path, pipeline: Callable[..., Any] | None = None) -> Run:
    printed = io.StringIO()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(_as_alone())
        stack.enter_context(contextlib.redirect_stdout(printed))
        if pipeline is not None:
            stack.enter_context(mock.patch.object(ps, "Pipeline", pipeline))
        stack.enter_context(mock.patch.object(sys, "argv", [str(path), "--output", f"{folder}/w"]))
        runpy.run_path(str(path), run_name="__main__")
        saved = torch.load(folder / "w")
    return Run(saved, printed.getvalue())


@contextlib.contextmanager
def _as_alone() -> Iterator[None]:
    """One intra-op thread; afterwards random generators are as before."""
    tolerate_missing_torchvision_operators()
    threads, states = torch.get_num_threads(), (random.getstate(), np.random.get_state())
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
            yield
    finally:
        torch.set_num_threads(threads)
        random.setstate(states[0])
        np.random.set_state(states[1])
