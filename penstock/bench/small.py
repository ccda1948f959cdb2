"""The errors of predictions for small models: of the plan, and after ten recorded steps.

    python -m penstock.bench small [--rounds 2] [--only NAME] [--json FILE] [--record]

Every model is trained in a process of its own, on two CPU workers, with the plan that Penstock
chooses and an empty cache of profiles. `predicted` is the relative error of the step time that the
plan predicts, compared with the median of the steps that are measured. `calibrated` is that of a
second prediction, from the accounts of the steps before them: ten are recorded, of which the latest
six count. In every round each model is profiled again, as a shared machine is faster in one minute
than in the next. Nothing was adjusted to these models.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.account.drift import drift
from penstock.bench import record
from penstock.bench.subjects import Block
from penstock.loading import tolerate_missing_torchvision_operators

Example = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]

_WARM_UPS = 4  # first steps, which do not count
_CALIBRATING = 10  # recorded steps; `drift` uses the latest six
_SECONDS = 3.0  # of steps that are measured, at least
_LEAST = 20  # such steps


def _layers(width: int, count: int, rows: int) -> Example:
    layers = [layer for _ in range(count) for layer in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*layers), (torch.randn(rows, width),), {}


def _convolutions(rows: int) -> Example:
    widths = (3, 32, 64, 64, 128, 128)
    layers: list[nn.Module] = []
    for k, (a, b) in enumerate(pairwise(widths)):
        layers += [nn.Conv2d(a, b, 3, 1 + k % 2, 1), nn.BatchNorm2d(b), nn.ReLU()]
    return nn.Sequential(*layers), (torch.randn(rows, 3, 48, 48),), {}


def _decoder(layers: int, width: int, rows: int, length: int) -> Example:
    blocks = [Block(width, width // 32) for _ in range(layers)]
    model = nn.Sequential(nn.Embedding(1000, width), *blocks, nn.Linear(width, 1000))
    return model, (torch.randint(1000, (rows, length)),), {}


class _UNet(nn.Module):
    """A U-Net of two levels, with skip connections."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down = nn.ModuleList([_double(3, width), _double(width, 2 * width)])
        self.inside = _double(2 * width, 2 * width)
        self.up = nn.ModuleList([_double(4 * width, width), _double(2 * width, width)])
        self.out = nn.Conv2d(width, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images (rows, 3, height, width), of the same size as those that enter."""
        skips = []
        for down in self.down:
            x = down(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.inside(x)
        for up, skip in zip(self.up, reversed(skips), strict=True):
            x = up(torch.cat([F.interpolate(x, scale_factor=2.0), skip], 1))
        result: torch.Tensor = self.out(x)
        return result


def _double(a: int, b: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(a, b, 3, padding=1), nn.ReLU(), nn.Conv2d(b, b, 3, padding=1), nn.ReLU()
    )


def _timm(name: str, rows: int, size: int = 64, **options: Any) -> Example:
    tolerate_missing_torchvision_operators()
    import timm

    return timm.create_model(name, **options), (torch.randn(rows, 3, size, size),), {}


def _transformer(name: str, rows: int, length: int, **options: Any) -> Example:
    tolerate_missing_torchvision_operators()
    import transformers

    config = getattr(transformers, f"{name}Config")(vocab_size=1000, use_cache=False, **options)
    model = getattr(transformers, f"{name}Model")(config)
    return model, (), {"input_ids": torch.randint(1000, (rows, length))}


_GPT = {"n_layer": 6, "n_embd": 128, "n_head": 4}
_BERT = {"num_hidden_layers": 6, "hidden_size": 128, "num_attention_heads": 4}
_LLAMA = {**_BERT, "intermediate_size": 512}

MODELS: dict[str, Callable[[], Example]] = {
    "MLP, narrow": lambda: _layers(256, 16, 256),
    "MLP, wide": lambda: _layers(1024, 8, 128),
    "MLP, deep": lambda: _layers(128, 48, 256),
    "convolutions": lambda: _convolutions(32),
    "decoder, shallow": lambda: _decoder(4, 256, 8, 64),
    "decoder, deep": lambda: _decoder(12, 128, 8, 64),
    "U-Net, narrow": lambda: (_UNet(16), (torch.randn(8, 3, 64, 64),), {}),
    "U-Net, wide": lambda: (_UNet(32), (torch.randn(4, 3, 64, 64),), {}),
    "timm resnet10t": lambda: _timm("resnet10t", 16),
    "timm mobilenetv3_small_050": lambda: _timm("mobilenetv3_small_050", 16),
    "timm regnetx_002": lambda: _timm("regnetx_002", 16),
    "timm convnext_atto": lambda: _timm("convnext_atto", 8),
    "timm efficientnet_lite0": lambda: _timm("efficientnet_lite0", 8),
    "timm vit_tiny_patch16_224": lambda: _timm("vit_tiny_patch16_224", 16, img_size=64),
    "timm mixer_s32_224": lambda: _timm("mixer_s32_224", 16, img_size=64),
    "transformers GPT2": lambda: _transformer("GPT2", 8, 64, **_GPT),
    "transformers Bert": lambda: _transformer("Bert", 8, 64, **_BERT),
    "transformers Llama": lambda: _transformer("Llama", 8, 64, **_LLAMA),
    "transformers OPT": lambda: _transformer("OPT", 8, 64, **_BERT, ffn_dim=512),
    "transformers GPTNeoX": lambda: _transformer("GPTNeoX", 8, 64, **_LLAMA),
}


def _loss(output: Any) -> torch.Tensor:
    """The mean square of the first tensor of a result."""
    value = output if isinstance(output, torch.Tensor) else output[0]
    return value.float().square().mean()


def measured(name: str) -> dict[str, Any]:
    """Train one model in this process.

    Args:
        name: of one of `MODELS`.

    Returns:
        the summary of the plan, the seconds of a step as `measured`, `predicted` and `calibrated`,
        the ratio of measured to planned time of `actions`, and the seconds of the `parts` of a
        step.
    """
    torch.manual_seed(0)
    model, args, kwargs = MODELS[name]()
    pipe = ps.Pipeline(model, args, kwargs, devices=["cpu", "cpu"], audit=None, progress=None)
    with pipe:

        def step() -> float:
            begun = time.perf_counter()
            pipe.train_step(*args, **kwargs, loss_fn=_loss)
            taken = time.perf_counter() - begun
            pipe.zero_grad()
            return taken

        for _ in range(_WARM_UPS):
            step()
        steps = pipe._runner.steps
        steps.kept.records.clear()
        for _ in range(_CALIBRATING):
            steps.is_asked = True
            step()
        accounts = pipe.accounts()
        found = drift(accounts, pipe.plan)
        if found is None:
            raise RuntimeError(f"{name}: none of the recorded steps ran as planned")
        times: list[float] = []
        while len(times) < _LEAST or sum(times) < _SECONDS:
            times.append(step())
    parts = {
        part: statistics.median(account.total().get(part, 0.0) for account in accounts)
        for part in accounts[0].total()
    }
    return {
        "plan": pipe.plan.summary,
        "measured": statistics.median(times),
        "predicted": pipe.plan.predicted_step_seconds,
        "calibrated": found.calibrated_seconds,
        "actions": found.machine,
        "parts": parts,
    }


def _in_a_process(name: str) -> dict[str, Any]:
    """Run `measured` in a process of its own, with an empty cache of profiles."""
    with tempfile.TemporaryDirectory() as cache:
        found: dict[str, Any] = record.in_own_process(
            "penstock.bench", "small", "--one", name, PENSTOCK_CACHE=cache
        )
    return found


def _error(runs: Sequence[dict[str, Any]], what: str) -> float:
    """The relative error of a prediction, positive if it is too long; the median of the rounds."""
    ratios: list[float] = [run[what] / run["measured"] - 1 for run in runs]
    return statistics.median(ratios)


def main(arguments: Sequence[str]) -> int:
    """Measure and print."""
    parser = record.parser("small", __doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", default="", help="models whose names contain this")
    parser.add_argument("--one", help="train this model here, and print what was found as JSON")
    options = parser.parse_args(arguments)
    record.check_whole(parser, options, "only")
    if options.one:
        print(json.dumps(measured(options.one)))
        return 0
    rows: list[dict[str, Any]] = []
    chosen = [name for name in MODELS if options.only in name]
    if not chosen or (options.record and len(chosen) < len(MODELS)):
        parser.error("--only: no model has this in its name, or --record is given, which needs all")
    for name in chosen:
        runs = [_in_a_process(name) for _ in range(options.rounds)]
        errors = {what: _error(runs, what) for what in ("predicted", "calibrated")}
        rows.append({"model": name, "runs": runs, "errors": errors})
        took = 1e3 * statistics.median(run["measured"] for run in runs)
        print(
            f"{name:28} {took:7.1f} ms  predicted {errors['predicted']:+7.1%}  calibrated "
            f"{errors['calibrated']:+7.1%}  {runs[0]['plan'].split(':')[0]}",
            flush=True,
        )
    for what in ("predicted", "calibrated"):
        sizes = sorted(abs(row["errors"][what]) for row in rows)
        print(f"{what}: median {statistics.median(sizes):.1%}, largest {sizes[-1]:.1%}")
    record.save("small", {"models": rows}, options)
    return 0
