"""What Penstock costs on a GPU, beside a loop of plain PyTorch; what stages and replicas gain.

    python -m penstock.bench gpus [--devices cuda:0 cuda:1] [--models tiny gpt2 resnet50]
        [--rounds 7] [--steps 5] [--quick] [--json FILE] [--record]

All contestants train the same model on the same micro-batches with SGD, in float32 or under
autocast to bfloat16, with the same settings of PyTorch; the loop accumulates gradients over the
micro-batches. Two of them are PyTorch's own way to use several GPUs, with a process for each:
`DistributedDataParallel`, and `torch.distributed.pipelining` with stages that are cut where
Penstock cuts, with the schedules GPipe and 1F1B. Who cannot run says why.
A turn is `--steps` steps and ends when the GPU has finished them; the order of turns is drawn anew
for every round. The results are ratios to the loop whose batch is on the GPU: the median, the
smallest and the largest of all rounds.

*CUDA graphs* is Penstock with `cuda_graphs=True`. If there is a single GPU, two workers share it,
which gains nothing but shows the overhead of worker threads and processes. Batches are on the GPU,
on the CPU, or in pinned memory of the CPU; the loop copies each micro-batch without blocking.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock as ps
from penstock.bench import record
from penstock.bench.compare import penstock_cut
from penstock.bench.contestants import RATE
from penstock.bench.peers.data_parallel import data_parallel
from penstock.bench.peers.peer import Recipe, reason_of
from penstock.bench.peers.torch_pipelining import torch_pipelining
from penstock.bench.peers.workload import Workload
from penstock.bench.scouting import Make
from penstock.bench.subjects import (
    gpt2_like,
    gpt2_logits,
    labelled_images,
    language_loss,
    resnet50,
    tokens,
)
from penstock.bench.turns import AUDITED, Contestant, take_turns
from penstock.devices.kinds import accelerator, kind_of
from penstock.errors import InputError

MICROBATCHES = 4
_PROCESSES: dict[str, Any] = {"workers": "processes"}

Case = tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, Tensor]], Any, torch.dtype | None]
"""What makes the model, what makes its batch and target, the loss, and the dtype of autocast."""


def cases(quick: bool) -> dict[str, Case]:
    """What is trained, by its name."""
    rows = 8 if quick else 16
    gpt2 = partial(gpt2_logits, 2 if quick else 12, 128 if quick else 768, 512)
    text = partial(tokens, rows, 128 if quick else 512)
    pictures = partial(labelled_images, rows if quick else 128, 64 if quick else 224)
    return {
        "tiny": (partial(gpt2_like, 4, 128, 4, 64), partial(tokens, 32, 64), language_loss, None),
        "gpt2": (gpt2, text, language_loss, None),
        "gpt2, bfloat16": (gpt2, text, language_loss, torch.bfloat16),
        "resnet50": (resnet50, pictures, F.cross_entropy, None),
        "resnet50, bfloat16": (resnet50, pictures, F.cross_entropy, torch.bfloat16),
    }


class Course:
    """A case on some devices, and its contestants.

    Args:
        case: what is trained.
        devices: the devices of pipelines; the loop runs on the first.
        steps: the number of steps in a turn.

    Attributes:
        failed: the peers that could not run, and why.
    """

    def __init__(self, case: Case, devices: Sequence[torch.device], steps: int) -> None:
        self._build, data, self._loss, self._dtype = case
        self._devices, self._first = devices, devices[0]
        self._steps = steps
        self.failed: dict[str, str] = {}
        self._data = data
        x, y = data()
        kind = kind_of(self._first)
        self._given = {
            "on the GPU": (x.to(self._first), y.to(self._first)),
            "on the CPU": (x, y),
            "pinned": (kind.pinned(x), kind.pinned(y)),
        }

    def modes(self) -> AbstractContextManager[object]:
        """The context of every training step: autocast, or one that does nothing."""
        if self._dtype is None:
            return nullcontext()
        return torch.autocast(self._first.type, self._dtype)

    def loop(self, where: str) -> Contestant:
        """A loop of plain PyTorch on the first device; `where` says where the batch is."""
        model = self._build().to(self._first)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        x, y = self._given[where]

        def step() -> None:
            parts = zip(x.tensor_split(MICROBATCHES), y.tensor_split(MICROBATCHES), strict=True)
            for part, target in parts:
                here = part.to(self._first, non_blocking=True)
                target = target.to(self._first, non_blocking=True)
                with self.modes():
                    loss = self._loss(model(here), target) * (len(part) / len(x))
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return self._contestant(f"loop, {where}", step)

    @contextmanager
    def pipeline(self, name: str, where: str, **options: Any) -> Iterator[Contestant]:
        """A pipeline with these options; it is closed at the end of the context."""
        model = self._build().to(self._first)
        x, y = self._given[where]
        options = {"num_microbatches": MICROBATCHES, "progress": None, **options}
        with self.modes(), ps.Pipeline(model, (x.to(self._first),), **options) as pipe:
            optimizer = pipe.optimizer(torch.optim.SGD, lr=RATE)

            def step() -> None:
                with self.modes():
                    pipe.train_step(x, target=y, loss_fn=self._loss)
                optimizer.step()
                optimizer.zero_grad()

            made = self._contestant(f"{name}, {where}", step)
            made.facts.update(
                plan=pipe.plan.summary,
                predicted_step_seconds=pipe.plan.predicted_step_seconds,
            )
            yield made

    def peers(self) -> dict[str, Make]:
        """PyTorch's own ways to train on these devices, by name."""
        names = tuple(map(str, self._devices))
        work = Workload(
            self._build,
            self._data,
            self._loss,
            MICROBATCHES,
            learning_rate=RATE,
            devices=names,
            autocast=self._dtype,
        )

        @cache
        def measured() -> tuple[ps.Program, ps.Profile]:
            with self.modes():
                program = ps.capture(self._build(), (self._given["on the CPU"][0],))
                return program, ps.profile(program, devices=names)

        def staged(schedule: str) -> Recipe:
            if self._first.type != "cpu" and len(set(names)) < len(names):
                raise InputError("torch's pipeline needs a GPU for each rank")
            program, costs = measured()
            stages = penstock_cut(program, costs, MICROBATCHES, schedule)
            return torch_pipelining(work, stages, schedule, processes=len(names))

        ranks = f"DistributedDataParallel, {len(names)} ranks"
        made: dict[str, Make] = {ranks: partial(data_parallel, work, processes=len(names))}
        for schedule in ("GPipe", "1F1B"):
            made[f"torch.distributed.pipelining, {schedule}"] = partial(staged, schedule)
        return made

    @contextmanager
    def peer(self, name: str, recipe: Recipe) -> Iterator[Contestant]:
        """Processes that run a recipe; they end with the context."""
        with closing(recipe.start()) as peer:
            peer.step()  # what it cannot run shows here
            yield Contestant(name, lambda: peer.step(self._steps))

    def _contestant(self, name: str, step: Callable[[], None]) -> Contestant:
        def turn() -> float:
            kind = kind_of(self._first)
            begun = time.perf_counter()
            for _ in range(self._steps):
                step()
            for device in dict.fromkeys(self._devices):
                kind.synchronize(device)
            return (time.perf_counter() - begun) / self._steps

        return Contestant(name, turn)

    def everybody(self, stack: ExitStack) -> list[Contestant]:
        """All contestants; the first is what the others are compared with.

        Those that cannot run are in `failed`, each with why.
        """
        one, several = [str(self._first)], [str(device) for device in self._devices]
        made = [self.loop(where) for where in self._given]
        alone: dict[str, Any] = {"devices": one, "replicas": 1}
        ways = [("Penstock", alone)]
        if kind_of(self._first).can_record:
            ways.append(("Penstock, CUDA graphs", {**alone, "cuda_graphs": True}))
        if len(several) > 1:
            cut: dict[str, Any] = {"devices": several, "replicas": 1}
            ways.append((f"Penstock, {len(several)} stages", cut))
            ways.append((f"Penstock, {len(several)} stages in processes", {**cut, **_PROCESSES}))
            copies: dict[str, Any] = {"devices": several, "replicas": len(several)}
            ways.append((f"Penstock, {len(several)} replicas", copies))
        for name, options in ways:
            places = self._given if name == "Penstock" else ["on the GPU"]
            for where in places:
                made.append(stack.enter_context(self.pipeline(name, where, **options)))
        if len(several) > 1:
            for name, make in self.peers().items():
                try:
                    made.append(stack.enter_context(self.peer(name, make())))
                except Exception as error:
                    self.failed[name] = reason_of(error)
        return made


def peaks(case: Case, device: torch.device) -> dict[str, int]:
    """Peak bytes on a device in the second step: of the loop, of Penstock, and with CUDA graphs."""
    found, kind = {}, kind_of(device)
    course = Course(case, [device], 1)
    ways: dict[str, dict[str, Any]] = {"Penstock": {}, "CUDA graphs": {"cuda_graphs": True}}
    for name in ("loop", *ways):
        with ExitStack() as stack:
            if name == "loop":
                one = course.loop("on the GPU")
            else:
                options = {"devices": [device], "audit": None, **ways[name]}
                one = stack.enter_context(course.pipeline(name, "on the GPU", **options))
            one.step()
            torch.accelerator.reset_peak_memory_stats(device)
            one.step()
            found[name] = kind.allocated(device)[1]
            del one
    return found


def main(arguments: Sequence[str]) -> int:
    """Measure and print."""
    parser = record.parser("gpus", __doc__)
    parser.add_argument(
        "--devices", nargs="+", help="by default all accelerators, or a single one twice"
    )
    parser.add_argument("--models", nargs="+", default=list(cases(False)))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=5, help="steps in a turn")
    parser.add_argument("--quick", action="store_true", help="small models")
    options = parser.parse_args(arguments)
    record.check_whole(parser, options, "models", "quick")
    kind = accelerator()
    if kind is None and not options.devices:
        raise InputError(
            "there is no accelerator here that pipelines can use; penstock doctor says why"
        )
    names = options.devices or [str(device) for device in (kind.devices() if kind else ())]
    devices = [torch.device(name) for name in (names if len(names) > 1 else names * 2)]
    found = []
    for name in options.models:
        case = cases(options.quick)[name]
        with ExitStack() as stack:
            course = Course(case, devices, options.steps)
            made = course.everybody(stack)
            seconds = take_turns(made, options.rounds, warm_up=1 + AUDITED // options.steps)
        row = {
            "model": name,
            "devices": [str(device) for device in devices],
            "contestants": [
                {"name": each.name, "seconds": times, **each.facts}
                for each, times in zip(made, seconds, strict=True)
            ],
            "failed": course.failed,
            "peaks": peaks(case, devices[0]) if kind_of(devices[0]).has_streams else {},
        }
        found.append(row)
        report(row)
    record.save("gpus", {"models": found}, options)
    return 0


def report(row: dict[str, Any]) -> None:
    """Print what was measured of a model."""
    base = row["contestants"][0]["seconds"]
    print(f"{row['model']} on {', '.join(row['devices'])}")
    for each in row["contestants"]:
        ratios = [own / other for own, other in zip(each["seconds"], base, strict=True)]
        predicted = each.get("predicted_step_seconds")
        prediction = f"  predicted {1e3 * predicted:.2f} ms" if predicted else ""
        print(
            f"  {each['name']:34} {1e3 * statistics.median(each['seconds']):8.2f} ms  "
            f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}){prediction}",
            flush=True,
        )
    for name, reason in row["failed"].items():
        print(f"  {name:34} could not run: {reason}")
    peaks = {name: f"{size / 2**20:.0f} MiB" for name, size in row["peaks"].items()}
    print(f"  peak memory of a step: {peaks}", flush=True)
