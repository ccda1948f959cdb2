"""The table that the cases make, as text and as data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.contract.cases import Case
from benchmarks.contract.measured import Verdict
from benchmarks.record import origin

Results = Mapping[Case, Mapping[str, Verdict]]

_HEAD = """# What stays exact

Written by `python -m benchmarks.contract`, at commit {commit} with torch
{torch}, on two CPU workers each. Every case
is a small training script, a function in `benchmarks/contract/cases`. One device runs it in
plain PyTorch and accumulates the micro-batches in order; then Penstock runs it, and two that come
with PyTorch. Everything that is there in the end is compared: gradients, parameters, buffers,
losses and results. *Exact* is the same bits; otherwise the largest absolute difference, and where
it is.

- **Penstock** cuts the model by itself, or where the case says so, on worker threads and on worker
  processes.
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
    """A page for the docs."""
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
    """The same for programs."""
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
