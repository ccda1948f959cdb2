"""How long capturing takes, for transformers of several depths and for ResNet-50.

    python -m benchmarks.capture_time [--rounds 3] [--json FILE]

Prints seconds and calls; the first capture of the process, which imports much, is left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import penstock as ps
from penstock.bench.turns import machine
from penstock.loading import tolerate_missing_torchvision_operators

DEPTHS = (4, 12, 24, 48)


def gpt2(layers: int) -> tuple[nn.Module, dict[str, Any]]:
    """A narrow GPT-2 and 32 tokens for each of four rows."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=layers, n_embd=64, n_head=4, vocab_size=256, n_positions=64, use_cache=False
    )
    config.bos_token_id = config.eos_token_id = 0
    model: nn.Module = GPT2LMHeadModel(config)
    return model, {"kwargs": {"input_ids": torch.randint(0, 256, (4, 32))}}


def resnet50() -> tuple[nn.Module, dict[str, Any]]:
    """ResNet-50 and four images of 128x128."""
    from torchvision.models import resnet50 as build

    return build(weights=None), {"args": (torch.randn(4, 3, 128, 128),)}


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    tolerate_missing_torchvision_operators()
    cases: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
        f"GPT-2, {n} layers": lambda n=n: gpt2(n)
        for n in DEPTHS  # type: ignore[misc]
    }
    cases["ResNet-50"] = resnet50
    built = {name: build() for name, build in cases.items()}
    ps.capture(*gpt2(1)[:1], **gpt2(1)[1])
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    calls: dict[str, int] = {}
    for _ in range(options.rounds):
        for name, (model, given) in built.items():
            start = time.perf_counter()
            program = ps.capture(model, **given)
            program.cuts.reasons  # noqa: B018 - where it can be cut is part of it
            seconds[name].append(time.perf_counter() - start)
            calls[name] = len(program)
    for name, times in seconds.items():
        median = statistics.median(times)
        print(
            f"{name}: {median:.2f} s ({min(times):.2f} to {max(times):.2f}), {calls[name]} calls, "
            f"{1000 * median / calls[name]:.1f} ms each"
        )
    if options.json:
        data = {"seconds": seconds, "calls": calls, "machine": machine()}
        options.json.write_text(json.dumps(data, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
