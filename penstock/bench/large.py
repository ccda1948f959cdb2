"""A language model of 7 billion parameters, captured, profiled and planned without its weights.

    python -m penstock.bench large [--layers 32] [--devices 8] [--length 64] [--rows 4]
        [--json FILE]

Prints the plan, how long each part took, and the peak memory of the process.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

import penstock as ps
from penstock.bench import record
from penstock.loading import tolerate_missing_torchvision_operators

T = TypeVar("T")


def llama(layers: int = 32) -> nn.Module:
    """LLaMA 7B, of `transformers`, with its usual widths."""
    tolerate_missing_torchvision_operators()
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(num_hidden_layers=layers, use_cache=False)
    model: nn.Module = LlamaForCausalLM(config)
    return model


def tokens(rows: int, length: int) -> dict[str, Any]:
    """Keyword arguments of the model: random tokens with labels, and padding in the first row."""
    ids = torch.randint(0, 32000, (rows, length))
    mask = torch.ones_like(ids)
    mask[0, -3:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids, "use_cache": False}


def main(arguments: Sequence[str]) -> int:
    """Measure and print."""
    parser = record.parser("large", __doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--rows", type=int, default=4)
    options = parser.parse_args(arguments)
    seconds: dict[str, float] = {}

    def timed(what: str, work: Callable[[], T]) -> T:
        start = time.perf_counter()
        result = work()
        seconds[what] = time.perf_counter() - start
        print(f"{what}: {seconds[what]:.1f} s", file=sys.stderr)
        return result

    timed("import", llama_is_there)
    with ps.empty_weights():
        model = timed("build", lambda: llama(options.layers))
    given = tokens(options.rows, options.length)
    program = timed("capture", lambda: ps.capture(model, kwargs=given))
    profile = timed("profile", lambda: ps.profile(program, devices=["cpu"] * options.devices))
    plan = timed("plan", lambda: ps.plan(profile, replicas=1))
    print(program.explain(profile.call_seconds()))
    print(plan)
    summary = _summary(model, len(program), seconds)
    print(
        f"{summary['parameters'] / 1e9:.2f} billion parameters, {summary['calls']} calls: "
        f"{summary['total_seconds']:.1f} s in all, {summary['peak_gib']:.2f} GiB at most"
    )
    record.save("large", summary, options)
    return 0


def llama_is_there() -> None:
    """Build a model without layers, which imports everything that building needs."""
    with ps.empty_weights():
        llama(layers=0)


def _summary(model: nn.Module, calls: int, seconds: dict[str, float]) -> dict[str, Any]:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "calls": calls,
        "seconds": seconds,
        "total_seconds": sum(seconds.values()),
        "peak_gib": peak,
    }
