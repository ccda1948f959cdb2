"""What stays exact when a model is trained on several devices: Penstock and others, same cases.

    python -m penstock.bench contract [--output docs/exactness] [--only CASE ...]

writes docs/exactness.md and docs/exactness.json. Every case (in `penstock/bench/cases`) is a small
training script. One device runs it, accumulating the micro-batches in order. The contenders run it
on two workers each (two replicas of two stages: on four), and the tensors that they end with are
compared with those of the one device. To add a case, write one function there.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import cloudpickle
import torch
from torch import Tensor

from penstock.bench.cases import scripts, steps  # noqa: F401 - their functions are the cases
from penstock.bench.cases.case import CASES, Case
from penstock.bench.cases.trainers import (
    Found,
    OneDevice,
    Penstock,
    PenstockProcesses,
    PenstockReplicaProcesses,
    PenstockReplicas,
    PenstockTwoByTwo,
    Trainer,
)
from penstock.bench.peers.peer import PeerProcesses, reason_of
from penstock.bench.peers.scripted import DataParallel, ScriptRank, TorchPipelining
from penstock.bench.record import origin
from penstock.comparison.compare import gap
from penstock.devices.cores import use_threads
from penstock.errors import InputError, PlanError

_OURS: dict[str, type[Trainer]] = {
    "Penstock": Penstock,
    "Penstock, processes": PenstockProcesses,
    "2 replicas": PenstockReplicas,
    "2 replicas, processes": PenstockReplicaProcesses,
    "2 × 2, processes": PenstockTwoByTwo,
}
_PEERS: dict[str, type[Trainer]] = {
    "torch.distributed.pipelining": TorchPipelining,
    "data parallelism": DataParallel,
}
OURS, OTHERS = tuple(_OURS), tuple(_PEERS)
_PATIENCE = 60.0  # seconds: enough for a start on a busy machine; a peer that hangs takes as long
_WORDS = 160  # characters of an error message at most


@dataclass(frozen=True)
class Verdict:
    """The result of a contender in a case.

    Attributes:
        largest: the largest absolute difference; `None` where nothing could be compared.
        where: the name of the tensor that differs by that; empty if none differs.
        reason: why nothing could be compared; empty if something was.
        applies: whether the case applies to the contender.
        refused: whether the error is one by which Penstock refuses a model, an input or a plan.
    """

    largest: float | None = None
    where: str = ""
    reason: str = ""
    applies: bool = True
    refused: bool = False

    @property
    def is_exact(self) -> bool:
        """Whether all tensors have the same bits."""
        return self.largest == 0 and not self.where

    def __str__(self) -> str:
        if self.reason:
            return self.reason
        if self.is_exact:
            return "exact"
        if self.largest == float("inf"):
            return f"differs: {self.where} is missing, infinite or of another shape"
        return f"differs by {self.largest:.1e} ({self.where})"


class Contenders:
    """Runs cases with every contender; a context, at whose end the peers' processes end.

    These processes are kept from case to case.
    """

    def __init__(self) -> None:
        self._processes: dict[str, PeerProcesses] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for processes in self._processes.values():
            processes.close()

    def verdict(self, case: Case, name: str) -> Verdict:
        """Run a case with one contender, and compare its tensors with those of one device."""
        reason = dict(case.without).get(name)
        if reason:
            return Verdict(reason=f"does not apply: {reason}", applies=False)
        if name in _PEERS:
            self._processes_of(name)  # a failure to start is raised: the case is not at fault
        expected = run(case, OneDevice)
        try:
            found = self._found(case, name)
        except Exception as error:
            refused = isinstance(error, InputError | PlanError)
            return Verdict(reason=f"not supported: {in_a_few_words(error)}", refused=refused)
        return compared(found, expected)

    def _found(self, case: Case, name: str) -> Found:
        if name in _OURS:
            return run(case, _OURS[name])
        ranks = self._processes_of(name).call("run", cloudpickle.dumps((case.setup, case.script)))
        found: Found = {}
        for rank in reversed(ranks):  # of several tensors of one name, the first rank's counts
            found |= rank
        return found

    def _processes_of(self, name: str) -> PeerProcesses:
        """The processes of a peer; new ones after a failure."""
        processes = self._processes.get(name)
        if processes is None or not processes.pids:
            build = partial(ScriptRank, _PEERS[name])
            processes = PeerProcesses(name, [build] * 2, timeout=_PATIENCE)
            self._processes[name] = processes
        return processes


def run(case: Case, kind: type[Trainer]) -> Found:
    """Run a case with a trainer in this process; returns the tensors that it ends with, by name."""
    trainer = kind(case.setup)
    try:
        return case.script(trainer)
    finally:
        trainer.close()


def compared(found: Found, expected: Found) -> Verdict:
    """Compare tensors by name; the verdict has the largest difference, and where it is.

    Differences of integers, such as counters, are named only if no other tensor differs.
    """
    gaps = {name: _gap(found.get(name), tensor) for name, tensor in expected.items()}
    gaps |= {name: float("inf") for name in found.keys() - expected.keys()}
    different = {name: gap for name, gap in gaps.items() if gap is not None}
    if not different:
        return Verdict(0.0)
    counters = {name for name, tensor in expected.items() if not tensor.is_floating_point()}
    chosen = {n: g for n, g in different.items() if n not in counters} or different
    where = max(chosen, key=chosen.__getitem__)
    return Verdict(chosen[where], where)


def _gap(ours: Tensor | None, theirs: Tensor) -> float | None:
    if ours is not None and ours.dtype == theirs.dtype and torch.equal(ours, theirs):
        return None
    return gap(ours, theirs)


def in_a_few_words(error: BaseException) -> str:
    """The message of an error, or of a peer's process at fault, in at most `_WORDS` characters."""
    text = reason_of(error)
    return text if len(text) <= _WORDS else text[: _WORDS - 1].rstrip() + "…"


Results = Mapping[Case, Mapping[str, Verdict]]

_HEAD = """# What stays exact

Written by `python -m penstock.bench contract`, at commit {commit} with torch
{torch}, on two CPU workers each (*2 × 2*: four). Every case
is a small training script, a function in `penstock/bench/cases`. One device runs it in
plain PyTorch and accumulates the micro-batches in order; then Penstock runs it, and two that come
with PyTorch. Everything that is there in the end is compared: gradients, parameters, buffers,
losses and results. *Exact* is the same bits; otherwise the largest absolute difference, and where
it is.

- **Penstock** cuts the model in two stages by itself, or where the case says so, on worker threads
  and on worker processes. **2 replicas** are two of the whole model, in threads and in processes,
  which share the micro-batches; **2 × 2** are two replicas of two stages each. If there are fewer
  micro-batches than replicas, one has nothing to do.
- **torch.distributed.pipelining** has stages that were written by hand, over gloo, with 1F1B. It
  is given what an expert would give it: the shapes between the stages, a schedule for every batch
  size, the weights of micro-batches in the loss instead of its own scaling of gradients, a norm of
  gradients that is summed over the processes by hand.
- **data parallelism** is `DistributedDataParallel` on two ranks, each with half of the
  micro-batches, which it accumulates under `no_sync`, its losses weighted so that the mean over
  ranks is that of the batch. It sums in another order than one device, so small differences
  are rounding; statistics of BatchNorm are those of the rank's own rows.
- What plain PyTorch does not define on one device is no case here: dropout, whose masks depend on
  who draws when, and what Penstock alone offers. Their tests are among the others.

"""


def as_markdown(results: Results) -> str:
    """The results as a page for the docs, with a row for each case and a column per contender."""
    names = list(next(iter(results.values())))
    lines = [f"| | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for case, verdicts in results.items():
        cells = [_cell(verdict) for verdict in verdicts.values()]
        lines.append(f"| {case.title} | {' | '.join(cells)} |")
    counts = []
    for name in names:
        asked = [verdicts[name] for verdicts in results.values() if verdicts[name].applies]
        counts.append(f"{name} {sum(verdict.is_exact for verdict in asked)} of {len(asked)}")
    lines += ["", f"Exact, of the cases that apply: {'; '.join(counts)}."]
    head = _HEAD.format(torch=torch.__version__, commit=origin()["commit"])
    return head + "\n".join(lines) + "\n"


def _cell(verdict: Verdict) -> str:
    text = str(verdict).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
    return f"**{text}**" if verdict.is_exact else text


def as_data(results: Results) -> dict[str, Any]:
    """The results as plain data; infinite differences become `None`."""
    return {
        **origin(),
        "cases": [
            {
                "case": case.name,
                "title": case.title,
                "microbatches": case.setup.microbatches,
                "results": {
                    name: {
                        "exact": verdict.is_exact,
                        "applies": verdict.applies,
                        "largest": None if verdict.largest == float("inf") else verdict.largest,
                        "where": verdict.where,
                        "said": str(verdict),
                    }
                    for name, verdict in verdicts.items()
                },
            }
            for case, verdicts in results.items()
        ],
    }


def main(arguments: Sequence[str]) -> int:
    """Run the cases and write both files; 1 if Penstock is inexact where it does not refuse."""
    parser = ArgumentParser("python -m penstock.bench contract", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("docs/exactness"))
    parser.add_argument("--only", nargs="*", help="only these cases, by their functions' names")
    options = parser.parse_args(arguments)
    if options.only and options.output == parser.get_default("output"):
        parser.error("--only would leave some cases out of docs/exactness: give --output as well")
    known = {case.name: case for case in CASES}
    unknown = sorted(set(options.only or ()) - known.keys())
    if unknown:
        parser.error(f"there is no case {', '.join(unknown)}; there are {', '.join(known)}")
    warnings.simplefilter("ignore")
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])  # a core for each worker
    use_threads(1)
    chosen = [known[name] for name in options.only or known]
    start, found = time.monotonic(), {}
    with Contenders() as contenders:
        for case in chosen:
            found[case] = {name: contenders.verdict(case, name) for name in (*OURS, *OTHERS)}
            verdicts = "; ".join(f"{name}: {verdict}" for name, verdict in found[case].items())
            print(f"{case.title}: {verdicts}", file=sys.stderr, flush=True)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.with_suffix(".md").write_text(as_markdown(found))
    options.output.with_suffix(".json").write_text(json.dumps(as_data(found), indent=2) + "\n")
    print(f"{len(chosen)} cases in {time.monotonic() - start:.0f} s", file=sys.stderr)
    ours = [verdict for v in found.values() for name, verdict in v.items() if name in OURS]
    return 0 if all(verdict.is_exact or verdict.refused for verdict in ours) else 1
