"""The experiments of PyTorch's distributed pipeline tutorial: a master drives two workers.

B1  the master holds no stage; each worker has half of the model, in a process of its own, and the
    batch comes in 1, 2, 4 and 8 micro-batches
B2  the master sees one loss, calls one backward, and steps one optimizer whose parameters live on
    the workers

Penstock does both with `pipe(x)`, `loss.backward()` and `pipe.optimizer`, as a user writes them,
and again with `train_step`. The tutorial's own way, written out with torch.distributed.rpc, takes
turns with it, and so does one device, whose time says what two could do at best.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from penstock.bench.charts import save_counts
from penstock.bench.peers.one_process import one_process
from penstock.bench.peers.peer import Peer
from penstock.bench.peers.rpc_pipeline import rpc_pipeline
from penstock.bench.peers.workload import Workload
from penstock.bench.record import machine
from penstock.bench.rpc_report import ALONE, PLAIN, STEPPED, TUTORIAL, WAYS, RpcReport
from penstock.bench.subjects import images, resnet50, tutorial_cut
from penstock.bench.turns import UNAUDITED, Contestant, Ticker, measure, timed, warm_up
from penstock.capture import capture
from penstock.devices.allocator import keep_freed_memory
from penstock.display.figures import require_matplotlib
from penstock.display.terminal import Progress
from penstock.pipeline import Pipeline
from penstock.plan import plan
from penstock.profile import Profile
from penstock.profile.measure import profile

_WORKERS = ("cpu", "cpu")
_RATE = 0.05


@dataclass(frozen=True)
class RpcSettings:
    """What to run.

    Attributes:
        rows: of a batch; every count divides it.
        image: height and width of an image.
        counts: of micro-batches; the first is 1.
        batches: steps in a repeat.
        repeats: that are measured, after a step that is not.
        output: where the figure and `rpc.json` go; `None` for nowhere.
        stages: builds the two halves for the tutorial's way; together they are `model`.
        model: builds the model that Penstock is given.
    """

    rows: int = 120
    image: int = 128
    counts: tuple[int, ...] = (1, 2, 4, 8)
    batches: int = 3
    repeats: int = 5
    output: Path | None = Path("out/bench")
    stages: Callable[[], list[nn.Module]] = tutorial_cut
    model: Callable[[], nn.Module] = resnet50

    @classmethod
    def quick(cls, output: Path | None) -> RpcSettings:
        """Smaller images in small batches: within about two minutes on two cores."""
        return cls(rows=16, image=96, batches=1, repeats=3, output=output)


def run_rpc(
    settings: RpcSettings,
    progress: Progress | None = None,
    talk: Callable[[str], None] | None = None,
) -> RpcReport:
    """Run B1 and B2, draw them, and return what was measured.

    The contestants with the same number of micro-batches take turns, so that two pipelines at a
    time hold memory. The tutorial's and every one of Penstock's start from the same weights;
    contestants of one pipeline go on training the same model. Every worker has one thread.

    Args:
        settings: what to run.
        progress: called as it goes on.
        talk: called with a line for the user, which says about how long it will take.

    Raises:
        PenstockError: matplotlib is missing.
        RuntimeError: torch.distributed.rpc failed.
    """
    if settings.output is not None:
        require_matplotlib()
        settings.output.mkdir(parents=True, exist_ok=True)
    progress, talk = progress or (lambda *_: None), talk or (lambda _: None)
    kept = keep_freed_memory()
    contestants: list[Contestant] = []
    most = _workload(settings, max(settings.counts))
    with (
        closing(rpc_pipeline(most, settings.stages())) as peer,
        closing(one_process(most).start()) as device,
    ):
        costs = _profiled(settings, progress)
        tick = Ticker(settings.repeats * (len(WAYS) + 1) * len(settings.counts), progress)
        for count in settings.counts:
            with ExitStack() as stack:
                same = one_process(_workload(settings, count))
                device.become(same.name, same.builds)
                group = [
                    _alone(device, count),
                    _tutorial(peer, count),
                    *_penstock(settings, costs, count, stack),
                ]
                warm_up(group, lambda name: progress(0, 1, f"warming up: {name}"))
                if not contestants:
                    one_round = settings.batches * sum(c.warm_up for c in group)
                    seconds = len(settings.counts) * settings.repeats * one_round
                    talk(
                        f"{len(settings.counts)} numbers of micro-batches, {len(group)} contestants"
                        f" each, {settings.repeats} rounds: about {seconds:.0f} s to go"
                    )
                measure(group, settings.repeats, settings.batches, tick)
            contestants += group
    report = RpcReport(_described(settings, kept), machine(), contestants)
    if settings.output is not None:
        (settings.output / "rpc.json").write_text(json.dumps(report.to_dict(), indent=2) + "\n")
        save_counts(report.lines, report.limits, settings.output / "rpc.png", _title(settings))
    return report


def _described(settings: RpcSettings, kept: bool) -> dict[str, Any]:
    return {
        "rows": settings.rows,
        "image": settings.image,
        "batches": settings.batches,
        "repeats": settings.repeats,
        "workers": len(_WORKERS),
        "optimizer": f"SGD, lr {_RATE}",
        "penstock_workers_keep_freed_memory": kept,
    }


def _title(settings: RpcSettings) -> str:
    many = f"{settings.batches} batches" if settings.batches > 1 else "one batch"
    return (
        f"{many} of {settings.rows} images of {settings.image}x{settings.image}, a master and "
        "two worker processes"
    )


def _workload(settings: RpcSettings, count: int) -> Workload:
    data = partial(images, settings.rows, settings.image)
    return Workload(settings.model, data, nn.functional.mse_loss, count, _RATE)


def _alone(device: Peer, count: int) -> Contestant:
    """One device, with as many micro-batches as the others of its rounds."""
    facts: dict[str, Any] = {"way": ALONE, "num_microbatches": count}
    return Contestant(f"{ALONE}, m={count}", device.step, facts)


def _tutorial(peer: Peer, count: int) -> Contestant:
    """The tutorial's way: one master and two workers that take any number of micro-batches."""
    facts: dict[str, Any] = {"way": TUTORIAL, "num_microbatches": count}

    def step() -> None:
        peer.step(count)
        facts.setdefault("first_loss", peer.loss)

    return Contestant(f"{TUTORIAL}, m={count}", timed(step), facts)


def _profiled(settings: RpcSettings, progress: Progress) -> Profile:
    """What the model costs on the workers, for all numbers of micro-batches."""
    inputs, _ = _workload(settings, 1).data()
    program = capture(settings.model().train(), (inputs,))
    return profile(program, devices=_WORKERS, progress=progress)


def _penstock(
    settings: RpcSettings, costs: Profile, count: int, stack: ExitStack
) -> Iterator[Contestant]:
    """Penstock with two worker processes, which `stack` closes."""
    inputs, target = _workload(settings, count).data()
    model = settings.model().train()
    chosen = plan(costs, num_microbatches=count, replicas=1)
    pipe = Pipeline(
        model, (inputs,), devices=_WORKERS, plan=chosen, workers="processes", audit=UNAUDITED
    )
    stack.callback(pipe.close)
    optimizer = pipe.optimizer(torch.optim.SGD, lr=_RATE)
    for way in (PLAIN, STEPPED):
        facts = {
            "way": way,
            "num_microbatches": count,
            "schedule": chosen.schedule,
            "cuts": [stage.first for stage in chosen.stages[1:]],
        }
        step = partial(_STEPS[way], pipe, optimizer, inputs, target, facts)
        yield Contestant(f"{way}, m={count}", timed(step), facts)


def _plain(
    pipe: Pipeline,
    optimizer: torch.optim.Optimizer,
    images: torch.Tensor,
    target: torch.Tensor,
    facts: dict[str, Any],
) -> None:
    """One training step in the plain style: one loss, one backward, one optimizer."""
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(pipe(images), target)
    loss.backward()
    optimizer.step()
    facts.setdefault("first_loss", loss.item())


def _stepped(
    pipe: Pipeline,
    optimizer: torch.optim.Optimizer,
    images: torch.Tensor,
    target: torch.Tensor,
    facts: dict[str, Any],
) -> None:
    """One training step by `train_step`, in which forwards and backwards may interleave."""
    optimizer.zero_grad()
    loss = pipe.train_step(images, target=target, loss_fn=nn.functional.mse_loss)
    optimizer.step()
    facts.setdefault("first_loss", loss.item())


_STEPS: dict[str, Callable[..., None]] = {PLAIN: _plain, STEPPED: _stepped}
