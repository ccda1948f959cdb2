"""Trains GPT-2 on the sources of Python's standard library, on all devices of this machine.

    python examples/train_gpt2.py [--steps 60] [--devices cpu,cpu] [--workers processes]
                                  [--plan FILE] [--out out/demo]
                                  [--save DIR [--every 20] [--resume]]
    torchrun --nproc-per-node 2 examples/train_gpt2.py [--steps 60] [--plan FILE]

A byte-level language model of 3.3 million parameters from transformers' own configuration class,
planned and trained by Penstock. First comes the plan with all that was considered, then the proof
that it computes the bits of one device, and then the training. It ends with what was measured, the
step beside one device's among it, a figure of who was busy when, and a report of where the time
went. Under torchrun, on one machine or several, it trains, and leaves the comparison out. With
`--save` it writes a checkpoint every few steps, and with `--resume` it goes on from there, with the
same bits.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch.nn import functional as F

import penstock as ps
from penstock.comparison.reference import run_with_threads
from penstock.display.progress import Progress, callback
from penstock.loading import tolerate_missing_torchvision_operators
from penstock.observe.timeline import save_figure

RANK, RANKS = (int(os.environ.get(name, k)) for k, name in enumerate(("RANK", "WORLD_SIZE")))
NOWHERE = open(os.devnull, "w") if RANK else None  # noqa: SIM115 - under torchrun, rank 0 prints
SCREEN, TALK = Console(file=NOWHERE), Console(file=NOWHERE, stderr=True)
TOKENS = 128  # bytes of context
ROUNDS = 5  # of the comparison with one device


def build_model(width: int = 256, layers: int = 4, heads: int = 4) -> torch.nn.Module:
    """GPT-2 with four blocks of width 256 over bytes, with its usual dropout."""
    tolerate_missing_torchvision_operators()  # transformers imports torchvision where it is there
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=256,
        n_positions=TOKENS,
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return GPT2LMHeadModel(config)


def language_loss(output: Any, target: torch.Tensor) -> torch.Tensor:
    """The mean cross-entropy of the next byte, in nats."""
    return F.cross_entropy(output.logits.flatten(0, 1), target.flatten())


class Text:
    """The standard library's sources as bytes; every twentieth file is held out."""

    def __init__(self, seed: int) -> None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        random.Random(seed).shuffle(files)
        held_out = len(files) // 20
        self.train = _read(files[held_out:])
        self.held_out = _read(files[:held_out])
        self.generator = torch.Generator().manual_seed(seed)

    def batch(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Random windows (rows, TOKENS) of the training text, and the same one byte later."""
        starts = torch.randint(len(self.train) - TOKENS - 1, (rows,), generator=self.generator)
        return _windows(self.train, starts)

    def evaluation(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Windows spread evenly over the held-out text, always the same."""
        return _windows(self.held_out, torch.linspace(0, len(self.held_out) - TOKENS - 2, rows))


class Keep(NamedTuple):
    """Where checkpoints are, every how many steps, and whether to go on from the last one."""

    folder: Path
    every: int
    resume: bool


def _read(files: list[Path]) -> torch.Tensor:
    return torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)


def _windows(text: torch.Tensor, starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    index = starts.long()[:, None] + torch.arange(TOKENS + 1)
    window = text[index].long()
    return window[:, :-1].contiguous(), window[:, 1:].contiguous()


def all_devices() -> list[str]:
    """Every CUDA device if there are several, else one CPU worker per core, at least two.

    Under torchrun every rank has its own.
    """
    if RANKS > 1:
        return []
    if torch.cuda.device_count() > 1:
        return [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    return ["cpu"] * max(2, min(4, len(os.sched_getaffinity(0))))


@torch.no_grad()
def held_out_loss(pipe: ps.Pipeline, text: Text, rows: int) -> float:
    """The loss on text that was not trained on, in evaluation mode."""
    tokens, target = text.evaluation(rows)
    pipe.eval()
    try:
        return language_loss(pipe(input_ids=tokens), target).item()
    finally:
        pipe.train()


def train(
    pipe: ps.Pipeline, text: Text, batch: int, steps: int, keep: Keep | None = None
) -> list[tuple[int, float]]:
    """Train, and evaluate now and then; returns the held-out losses by step."""
    optimizer = pipe.optimizer(torch.optim.AdamW, lr=1e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.5e-3, total_steps=steps + 1)
    things = {"optimizer": optimizer, "schedule": schedule, "text": text.generator}
    done, losses = 0, []
    if keep is not None and keep.resume:
        data = ps.load(keep.folder).restore(pipe, **things)
        done, losses = data["done"], data["losses"]
    losses = losses or [(0, held_out_loss(pipe, text, batch))]
    with Progress(total=(steps - done) * batch, unit="samples", console=TALK) as bar:
        for step in range(done + 1, steps + 1):
            tokens, target = text.batch(batch)
            optimizer.zero_grad()
            loss = pipe.train_step(input_ids=tokens, target=target, loss_fn=language_loss)
            pipe.clip_grad_norm_(1.0)
            optimizer.step()
            schedule.step()
            bar.advance(batch, loss=loss.item())
            if step % max(1, steps // 4) == 0:
                losses.append((step, held_out_loss(pipe, text, batch)))
            if keep is not None and step % keep.every == 0:
                pipe.save(keep.folder, background=True, **things, done=step, losses=losses)
    return losses


def timed(function: Callable[[], Any]) -> float:
    """How many seconds a call takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def compare(pipe: ps.Pipeline, text: Text, batch: int) -> tuple[list[float], list[float]]:
    """Seconds of a step on all devices and on one, taking turns, without the optimizer.

    The one device is a worker like the others; it takes the micro-batches one after the other, or
    the whole batch at once if it is faster that way.
    """
    tokens, target = text.batch(batch)
    pieces = pipe.plan.num_microbatches

    def split_step() -> None:
        pipe.train_step(input_ids=tokens, target=target, loss_fn=language_loss)

    def one_device(count: int) -> Callable[[], None]:
        def run() -> None:
            parts = zip(tokens.tensor_split(count), target.tensor_split(count), strict=True)
            for part, labels in parts:
                (language_loss(pipe.model(input_ids=part), labels) / count).backward()

        return lambda: run_with_threads(run, pipe.threads_per_worker)

    split: list[float] = []
    alone: dict[int, list[float]] = {1: [], pieces: []}
    for turn in range(ROUNDS + 1):
        pipe.zero_grad()
        seconds = timed(split_step), {n: timed(one_device(n)) for n in alone}
        if turn:  # the first one warms up
            split.append(seconds[0])
            for count, taken in seconds[1].items():
                alone[count].append(taken)
    pipe.zero_grad()
    return split, min(alone.values(), key=statistics.median)


def report(
    pipe: ps.Pipeline,
    losses: list[tuple[int, float]],
    times: tuple[list[float], list[float]],
    exact: ps.VerifyReport,
    out: Path,
) -> None:
    """The table at the end."""
    split = statistics.median(times[0])
    plan = pipe.plan
    rows = [
        ("held-out loss, nats per byte", " -> ".join(f"{x:.3f}" for _, x in losses)),
        ("  after step", ", ".join(str(step) for step, _ in losses)),
        ("a step", faster(pipe, times)),
        ("predicted", f"{1e3 * plan.predicted_step_seconds:.0f} ms"),
        ("share of the bound", f"{plan.bound_seconds / split:.0%}"),
        ("same bits as one device", "yes, all of them" if exact.ok else "NO"),
        ("who was busy when", str(out / "step.png")),
        ("where the time went", str(out / "report.html")),
    ]
    table = Table(title="What was measured", show_header=False)
    for row in rows:
        table.add_row(*row)
    SCREEN.print(table)


def faster(pipe: ps.Pipeline, times: tuple[list[float], list[float]]) -> str:
    """How long a step takes, and how much faster that is than one device, with the spread."""
    ours, alone = (
        f"{1e3 * statistics.median(t):.0f} ms ({1e3 * min(t):.0f} to {1e3 * max(t):.0f})"
        for t in times
    )
    ratios = [one / all_ for all_, one in zip(*times, strict=True)]
    workers = len(pipe.plan.devices)
    return (
        f"{ours} with {workers} worker{'s' * (workers > 1)}, {alone} on one device: "
        f"{statistics.median(ratios):.2f}x as fast ({min(ratios):.2f} to {max(ratios):.2f})"
    )


def main() -> None:
    """The demo."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--devices", default=",".join(all_devices()))
    parser.add_argument("--workers", default="auto", choices=("auto", "threads", "processes"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plan", help="follow this plan, of this model, instead of planning")
    parser.add_argument("--save", type=Path, help="a folder for checkpoints")
    parser.add_argument("--every", type=int, default=20, help="steps between two of them")
    parser.add_argument(
        "--resume", action="store_true", help="go on from there, with the same --steps"
    )
    parser.add_argument("--out", type=Path, default=Path("out/demo"))
    options = parser.parse_args()
    if options.resume and not options.save:
        parser.error("--resume goes on from a checkpoint: give its folder with --save")
    keep = Keep(options.save, options.every, options.resume) if options.save else None

    torch.manual_seed(options.seed)
    text, model = Text(options.seed), build_model()
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    SCREEN.print(
        f"GPT-2 with {millions:.1f}M parameters, {len(text.train) / 1e6:.1f} MB of Python's own "
        f"sources, batches of {options.batch} x {TOKENS} bytes, on {options.devices or RANKS}"
    )
    tokens, target = text.batch(options.batch)
    with callback("profiling") as progress:
        pipe = ps.Pipeline(
            model,
            kwargs={"input_ids": tokens},
            devices=options.devices.split(",") if options.devices else None,
            plan=options.plan,
            workers=options.workers,
            progress=progress,
        )
    with pipe:
        SCREEN.print("\nThe plan", style="bold")
        SCREEN.print(str(pipe.plan), soft_wrap=True, highlight=False)
        if RANKS > 1:
            losses = train(pipe, text, options.batch, options.steps, keep)
            SCREEN.print(f"links: {', '.join(pipe.links)}; held-out loss by step: {losses}")
            return
        exact = ps.verify(
            model,
            kwargs={"input_ids": tokens},
            target=target,
            loss_fn=language_loss,
            devices=pipe.plan.devices,
            plan=pipe.plan,
            workers="processes" if options.workers == "processes" else "threads",
        )
        SCREEN.print(f"\n{exact}\n", soft_wrap=True, highlight=False)
        losses = train(pipe, text, options.batch, options.steps, keep)
        times = compare(pipe, text, options.batch)  # the first steps are audited, these are not
        with pipe.recording() as timelines:
            pipe.train_step(input_ids=tokens, target=target, loss_fn=language_loss)
        options.out.mkdir(parents=True, exist_ok=True)
        pipe.plan.save(options.out / "plan.json")
        save_figure(timelines[0], options.out / "step.png")
        pipe.report(options.out / "report.html")
    report(pipe, losses, times, exact, options.out)


if __name__ == "__main__":
    main()
