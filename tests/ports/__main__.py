"""Runs the ported scripts, compares them, and writes the page: `python -m tests.ports`."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from penstock.bench import record
from penstock.bench.record import ROOT
from tests.ports.running import (
    ALONE,
    DRAWS,
    MICROBATCHES,
    REPLICAS,
    SCRIPTS,
    STAGES,
    WHOLE,
    changed,
    diff,
    differences,
    plain,
    ported,
    reference,
)

PAGE, DATA = ROOT / "docs/ports.md", record.DATA / "ports.json"

HEAD = """# Ten training scripts, ported

Written by `python -m tests.ports`, at commit {commit} with torch {torch}.

Each script in `examples/ports` is of the usual shape of such trainers, written for this page, and
small: it trains for a few seconds, on data that it draws or on Python's own sources. Beside it is
its port. *Lines* counts the lines that the port adds and removes, without empty ones, as `difflib`
finds them.

`python -m tests.ports gan` runs one of them and compares it again. They need the packages that they
import; diffusers is not among those that `make setup` installs.

The ports run on two CPU workers, as pipelines of stages and as two replicas, with {count}
micro-batches of unequal sizes. Everything that they save in the end is compared with `torch.equal`:
weights, running statistics, moving averages and the state of optimizers. *Exact* means that it has
the bits of one device that runs the same script and the same micro-batches in plain PyTorch, with
the random numbers that Penstock defines. The last column compares the port, with a single
micro-batch and in stages, with the plain script itself. Where the model has dropout, its masks are
not those of torch's generator, so there is nothing to compare.

The ports keep the optimizers, schedulers, clipping and moving averages of the scripts, which work
on the model's own parameters. This is possible with threads and worker processes. Under torchrun
and on Ray, use `pipe.optimizer`, `pipe.clip_grad_norm_` and `pipe.state_dict`.

| script | lines | in stages | on 2 replicas | the plain script |
|---|---|---|---|---|
"""

NOTES = """
## What to know before you port a script

- **Clear the gradients before `train_step`.** It runs the backward as well. Scripts that call
  `optimizer.zero_grad()` between the loss and `loss.backward()` have to move it, as the contrastive
  one does; otherwise `optimizer.step()` warns that it finds no gradient.
- **Call the pipeline, or `train_step`?** `model = ps.Pipeline(model, (x,))` is enough if the model
  returns rows: the rest of the loop stays, as in the diffusion script and the GAN. `train_step`
  can start backwards before all forwards are done, so stages wait less and hold fewer activations.
  It is needed if the model returns a loss.
- **Say what a mean is over.** Padded tokens and pixels without labels do not count, so
  `weight=` has to count those that do. Otherwise the mean is one of means.
- **Take the example from the data set.** An example from the data loader, or `torch.randn`, draws
  random numbers, and the batches that follow are others than without Penstock.
- **Lengths that vary** are named with `dynamic=`, by the names in the model's forward.
- **Give the model, not the pipeline**, to what looks into modules: `create_optimizer_v2`,
  `ModelEmaV3`, `save_pretrained`, `get_peft_model_state_dict`. It stays `pipe.model`.
- **What reads values stays whole.** `pack_padded_sequence` does, in the forward of the recogniser,
  which therefore cannot be cut. It runs on replicas. With the packed LSTM in a module of its own,
  what is before and behind it could be cut.

## The changes
"""


@dataclass(frozen=True)
class Row:
    """What was found of a script.

    Attributes:
        stages: how many there were, of each model.
        by_stages, by_replicas: the places that differ from one device.
        by_plain: those that differ from the plain script; `None` if it draws.
    """

    stages: tuple[int, ...]
    by_stages: tuple[str, ...]
    by_replicas: tuple[str, ...]
    by_plain: tuple[str, ...] | None


def row(name: str) -> Row:
    """Run a script in all ways."""
    expected = reference(name).saved
    run = ported(name, **(ALONE if name in WHOLE else STAGES))
    by_plain = None
    if name not in DRAWS:
        alone = ported(name, count=1, **STAGES).saved
        by_plain = tuple(differences(alone, plain(name).saved))
    return Row(
        tuple(len(plan.stages) for plan in run.plans),
        tuple(differences(run.saved, expected)),
        tuple(differences(ported(name, **REPLICAS).saved, expected)),
        by_plain,
    )


def page(rows: Mapping[str, dict[str, Any]]) -> str:
    """The page, of what `row` has found of the scripts."""
    origins = [found["at"] for found in rows.values()]
    commits, versions = ({origin[k] for origin in origins} for k in ("commit", "torch"))
    text = HEAD.format(
        count=MICROBATCHES, commit=", ".join(sorted(commits)), torch=", ".join(sorted(versions))
    )
    for name, found in rows.items():
        added, removed = changed(name)
        cells = [
            f"[{name}](#{name}): {SCRIPTS[name]}",
            f"+{added} -{removed}",
            f"{_verdict(found['by_stages'])}, {_counted(found['stages'])}",
            _verdict(found["by_replicas"]),
            "has dropout" if found["by_plain"] is None else _verdict(found["by_plain"]),
        ]
        text += f"| {' | '.join(cells)} |\n"
    text += NOTES
    for name in rows:
        what, lines = SCRIPTS[name], "\n".join(diff(name))
        text += f"\n### {name}\n\n{what[0].upper()}{what[1:]}.\n\n```diff\n{lines}\n```\n"
    return text


def main() -> None:
    """Run all, or some, keep what was found, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="of scripts; all of them by default")
    parser.add_argument("--page", action="store_true", help="only write the page")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in SCRIPTS]
    if unknown:
        parser.error(f"there is no script {unknown[0]!r}; there are {', '.join(SCRIPTS)}")
    kept: dict[str, Any] = json.loads(DATA.read_text()) if DATA.exists() else {}
    for name in () if options.page else options.names or SCRIPTS:
        started = time.perf_counter()
        kept[name] = asdict(row(name)) | {"at": record.origin()}
        print(f"{name}: {kept[name]} ({time.perf_counter() - started:.0f} s)", flush=True)
        DATA.write_text(json.dumps({n: kept[n] for n in SCRIPTS if n in kept}, indent=1) + "\n")
    PAGE.write_text(page(kept))


def _verdict(places: Sequence[str]) -> str:
    return f"differs in {len(places)}: {places[0]}" if places else "**exact**"


def _counted(stages: Sequence[int]) -> str:
    """How many stages, of each model."""
    if set(stages) == {1}:
        return "cannot be cut"
    return f"{' and '.join(map(str, stages))} stages"


if __name__ == "__main__":
    main()
