"""The cost of splitting a backward into an input half and a weight half, beside a whole backward.

    python -m penstock.bench halves [--rounds 15] [--json FILE]

Every model is one stage on one core. Whole and halved backwards take turns, with activations that
are kept and with activations that are recomputed, and compute the same gradients. The result is the
ratio of the time of both halves to that of a whole backward; the target is 1.1. Splitting the graph
of a whole stage, as `torch.distributed.pipelining` does, takes 2 to 8 times as long as a whole
backward.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import penstock as ps
from penstock.bench import record
from penstock.bench.subjects import gpt2, resnet50
from penstock.capture import ROWS, Key
from penstock.capture.halves import Deferral, run_pending
from penstock.capture.lowering import lower
from penstock.devices.allocator import keep_freed_memory
from penstock.devices.cores import use_threads
from penstock.engine.span import Passed, Rerun, Span, run_backward, run_span
from penstock.links.link import edges

KEY = Key(0, 0, 0)
Inputs = tuple[nn.Module, torch.Tensor]


def linear() -> Inputs:
    """Linear layers 1024 wide and LayerNorm, 128 rows."""
    layers = [layer for _ in range(4) for layer in (nn.Linear(1024, 1024), nn.LayerNorm(1024))]
    return nn.Sequential(*layers), torch.randn(128, 1024)


def convolutions() -> Inputs:
    """Convolutions of 64 channels with BatchNorm and ReLU in place, 8 images of 32x32."""
    layers: list[nn.Module] = []
    for _ in range(6):
        layers += [nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers), torch.randn(8, 64, 32, 32)


def embedding() -> Inputs:
    """An embedding of 8,192 words, a linear layer, and logits, 8 rows of 128 words."""
    model = nn.Sequential(nn.Embedding(8192, 256), nn.Linear(256, 256), nn.Linear(256, 8192))
    return model, torch.randint(8192, (8, 128))


def pictures() -> Inputs:
    """ResNet-50, 8 images of 128x128."""
    return resnet50(), torch.randn(8, 3, 128, 128)


class Logits(nn.Module):
    """A language model that gives nothing but logits."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.inner(input_ids=tokens).logits


def language() -> Inputs:
    """Four layers of GPT-2, half as wide, 8 rows of 128 tokens."""
    return Logits(gpt2(4, 384, 4096, 128)), torch.randint(4096, (8, 128))


MODELS: dict[str, Callable[[], Inputs]] = {
    "linear, LayerNorm": linear,
    "convolution, BatchNorm": convolutions,
    "embedding": embedding,
    "ResNet-50": pictures,
    "GPT-2": language,
}


class Stage:
    """A model as one stage, whose backward is whole or halved."""

    def __init__(self, program: ps.Program, x: torch.Tensor, halved: bool, recompute: bool) -> None:
        self.deferral = Deferral()
        inputs, outputs = program.cuts.boundary(0), program.cuts.results
        everything = range(len(program))
        module = lower(
            program.model,
            program.train,
            everything,
            inputs,
            outputs,
            None,
            self.deferral if halved else None,
        )
        self.span = Span(module, recompute)
        self.x = x.clone().requires_grad_(x.is_floating_point())

    def step(self) -> tuple[float, float]:
        """Run a forward and a backward, and time the backward.

        Returns:
            the seconds of the input half, or of a whole backward, in either case with the
            recomputation; and those of the weight half.
        """
        sizes = {ROWS: len(self.x)}
        start, results = run_span(self.span, (self.x,), sizes, KEY)
        roots = edges(results)
        gradients = [torch.ones_like(result) for result in results]
        del results
        clock = [time.perf_counter()]
        passed = start.run() if isinstance(start, Rerun) else Passed(start, roots)
        run_backward(passed.roots, gradients)
        clock.append(time.perf_counter())
        run_pending(self.deferral.take())
        clock.append(time.perf_counter())
        return clock[1] - clock[0], clock[2] - clock[1]


def measured(name: str, rounds: int) -> dict[str, Any]:
    """Measure one model: median seconds, and the ratios of all rounds in ascending order."""
    torch.manual_seed(0)
    model, x = MODELS[name]()
    program = ps.capture(model.train(), (x,))
    result: dict[str, Any] = {"model": name}
    for recompute in (False, True):
        whole = Stage(program, x, False, recompute)
        halved = Stage(program, x, True, recompute)
        times: list[tuple[float, float, float]] = []
        for turn in range(rounds + 2):
            one, two = whole.step(), halved.step()
            if turn >= 2:
                times.append((sum(one), *two))
        columns = [statistics.median(column) for column in zip(*times, strict=True)]
        ratios = sorted((i + w) / b for b, i, w in times)
        result["recomputed" if recompute else "kept"] = {
            "whole_seconds": columns[0],
            "input_seconds": columns[1],
            "weight_seconds": columns[2],
            "ratio": statistics.median(ratios),
            "ratios": ratios,
        }
    return result


def main(arguments: Sequence[str]) -> int:
    """Measure and print."""
    parser = record.parser("halves", __doc__)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args(arguments)
    use_threads(1)
    keep_freed_memory()
    results = []
    print(f"{'':24} {'B':>9} {'I':>9} {'W':>9}  (I + W) / B")
    for name in MODELS:
        results.append(measured(name, options.rounds))
        for kept in ("kept", "recomputed"):
            row = results[-1][kept]
            low, high = row["ratios"][0], row["ratios"][-1]
            print(
                f"{name if kept == 'kept' else '  ' + kept:24} "
                f"{1e3 * row['whole_seconds']:6.1f} ms {1e3 * row['input_seconds']:6.1f} ms "
                f"{1e3 * row['weight_seconds']:6.1f} ms  "
                f"{row['ratio']:.2f} ({low:.2f} to {high:.2f})"
            )
    record.save("halves", {"results": results}, options)
    return 0
