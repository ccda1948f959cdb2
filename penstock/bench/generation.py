"""Generation and inference beside peers, on two CPU workers, in one run.

    python -m penstock.bench generation [--models gpt2,llama] [--rounds 9] [--rows 36] [--quick]
        [--json FILE] [--record]

There are five measurements, in each of which the contestants take turns:

*A step of decoding*: the overhead of a pass of a session, see `penstock.bench.decoding`. It is
measured once, with two small models; the others are made for every model.

*Generation*: `pipe.generate` in threads and in processes; the stages in turn, as with
`device_map="auto"` (the model's own `generate` in one thread, with accelerate's hooks and without);
and transformers' own pipeline parallelism (`DistributedConfig(pp_size=2)`), on two ranks over gloo.
All run with the same number of groups, with which Penstock in threads is fastest, and each also
with the number with which it is fastest itself. The tokens of all are compared with those of the
model's own `generate`.

*Latency*: one sequence, for which a pipeline cannot make a token faster.

*The limit*: the same calls of the stages without any part of Penstock between them, handed on from
thread to thread and side by side, see `penstock.bench.limits`.

*Inference*: `pipe.map` over batches, and accelerate's `prepare_pippy` on two ranks over gloo, each
with the number of micro-batches with which it is fastest, and `prepare_pippy` with its fastest cut;
and one device, which runs whole batches. The logits of all are compared with those of the model.

All have one intra-op thread per worker, and an allocator that keeps freed memory. A peer that
cannot run a model is left out, and the report says why. `--json` is written after every part.
"""

from __future__ import annotations

import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import torch

import penstock as ps
from penstock.bench import record
from penstock.bench.decoding import KINDS, Decoder, cells, costs, small_gpt2
from penstock.bench.limits import IN_TURN as IN_ONE_THREAD
from penstock.bench.limits import WARM_UP as LIMITS_WARM_UP
from penstock.bench.limits import limits
from penstock.bench.peers.generating import in_turn, saved, transformers_pipeline
from penstock.bench.peers.peer import Peer, Recipe
from penstock.bench.peers.pippy import pippy, plain
from penstock.bench.peers.writing import Inference, Writing, last_logits
from penstock.bench.scouting import Make, Scouted, fastest, scout, tries
from penstock.bench.turns import Ratio, Ticker, Timed, take_turns
from penstock.bench.writers import writers
from penstock.devices.allocator import keep_freed_memory
from penstock.devices.cores import use_threads
from penstock.display.progress import callback
from penstock.display.tables import aligned
from penstock.plan.request import Request
from penstock.planning.planner import profiles_for
from penstock.workers.backend import WorkerKind

DEVICES = ("cpu", "cpu")
WARM_UP = 1  # rounds that do not count
REFUSALS = (RuntimeError, ValueError)

OURS: dict[WorkerKind, str] = {kind: f"Penstock, {kind}" for kind in KINDS}
IN_TURN = {False: "stages in turn", True: "stages in turn, accelerate's hooks"}
TRANSFORMERS = "transformers' pipeline"
PIPPY = "prepare_pippy"
ONE_DEVICE = "one device"


@dataclass(frozen=True)
class Settings:
    """How much is tried and measured.

    Attributes:
        rounds: the number of measured rounds.
        scout: the number of measured steps of a configuration in the search for the fastest.
        counts: the numbers of groups, and of micro-batches, that are tried.
        further: how many layers after the middle one the second stage of `prepare_pippy` may begin
            at most. It is tried with later cuts, as the last stage has the head as well.
        passes: the number of passes of a session in a round, for a step of decoding.
    """

    rounds: int
    scout: int = 2
    counts: tuple[int, ...] = (1, 2, 3, 4, 6, 8)
    further: int = 3
    passes: int = 50

    @classmethod
    def quick(cls) -> Settings:
        """Enough to see that everything runs."""
        return cls(2, 1, (1, 2), 0, 10)

    def divisors(self, rows: int) -> list[int]:
        """Those of `counts` that divide this number of rows."""
        return [count for count in self.counts if rows % count == 0]


def planner(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Planner:
    """Profile a model; returns a function that plans its inference with a stage on each device.

    Args:
        model: the model.
        args: positional arguments of an example call.
        kwargs: keyword arguments of an example call.
    """
    program = ps.capture(model, args, kwargs)
    devices = [torch.device(device) for device in DEVICES]
    request = Request(inference=True)
    with callback("profiling") as progress:
        (found,) = profiles_for(
            program, choices=[devices], request=request, fresh=True, progress=progress
        )
    return partial(ps.plan, found, replicas=1, inference=True)


Planner = Callable[..., ps.Plan]
"""Takes `num_microbatches=`, and returns the plan."""


class Writer(Protocol):
    """A contestant that generates texts."""

    def step(self, rows: int, groups: int) -> float:
        """Generate texts for the first `rows` prompts in groups of equal size; returns the seconds.

        Args:
            rows: the number of sequences.
            groups: the number of groups; it divides `rows`.
        """

    def tokens(self) -> list[list[int]]:
        """The token ids of the texts of the last step, with their prompts."""


class Penstock:
    """`pipe.generate` as a contestant.

    Args:
        writing: the model, the prompts and the number of new tokens.
        workers: the kind of workers.
        stack: closes the pipeline.
        plan: the plan of the pipeline.
    """

    def __init__(
        self, writing: Writing, workers: WorkerKind, stack: ExitStack, plan: ps.Plan
    ) -> None:
        self._writing = writing
        self._pipe = ps.Pipeline(
            *(writing.build(), (), writing.example),
            devices=DEVICES,
            workers=workers,
            threads_per_worker=1,
            plan=plan,
            progress=None,
        )
        stack.callback(self._pipe.close)
        self._texts: torch.Tensor = torch.empty(0)

    def step(self, rows: int, groups: int) -> float:
        """Generate so many sequences in so many groups; the seconds."""
        (prompts,) = self._writing.prompts(rows, 1)
        mask = torch.ones_like(prompts)
        start = time.perf_counter()
        self._texts = self._pipe.generate(
            prompts, attention_mask=mask, group_size=rows // groups, **self._writing.options
        )
        return time.perf_counter() - start

    def tokens(self) -> list[list[int]]:
        """The texts of the last step."""
        texts: list[list[int]] = self._texts.tolist()
        return texts


@dataclass(frozen=True)
class PeerWriter:
    """A peer that generates, in processes of its own."""

    peer: Peer

    def step(self, rows: int, groups: int) -> float:
        """Generate so many sequences in so many groups; the seconds."""
        return self.peer.step(rows, groups)

    def tokens(self) -> list[list[int]]:
        """The texts of the last step; every rank has them."""
        texts: list[list[int]] = self.peer.call("tokens")[0]
        return texts


@dataclass(frozen=True)
class Turn:
    """A writer with a number of sequences and of groups, as a contestant.

    Attributes:
        who: the name of the writer.
        writer: the writer.
        rows: the number of sequences.
        groups: the number of groups.
    """

    who: str
    writer: Writer
    rows: int
    groups: int

    @property
    def name(self) -> str:
        """What it is called in this setting."""
        return f"{self.who}, {self.groups} groups"

    def step(self) -> float:
        """Generate once; the seconds."""
        return self.writer.step(self.rows, self.groups)


def started(recipe: Recipe, stack: ExitStack) -> Peer:
    """A peer in its own processes; `stack` closes them."""
    peer = recipe.start()
    stack.callback(peer.close)
    return peer


def all_writers(
    writing: Writing, plan: ps.Plan, stack: ExitStack
) -> tuple[dict[str, Writer], dict[str, str]]:
    """Start all writers.

    Args:
        writing: the model, the prompts and the number of new tokens.
        plan: the plan of Penstock's pipelines.
        stack: closes them.

    Returns:
        the writers that run, and why the others do not, both by name.
    """
    refused: dict[str, str] = {}
    found: dict[str, Writer] = {
        name: Penstock(writing, kind, stack, plan) for kind, name in OURS.items()
    }
    path = saved(writing, stack.enter_context(TemporaryDirectory()))
    recipes = {name: in_turn(writing, hooks=hooks) for hooks, name in IN_TURN.items()}
    for name, recipe in (*recipes.items(), (TRANSFORMERS, transformers_pipeline(writing, path))):
        try:
            found[name] = PeerWriter(started(recipe, stack))
        except REFUSALS as error:
            refused[name] = str(error).splitlines()[-1]
    return found, refused


class Expected:
    """The texts that the model's own `generate` writes, in this process with one thread."""

    def __init__(self, writing: Writing) -> None:
        self._writing = writing
        self._model = writing.build()
        self._texts: dict[tuple[int, int], list[list[int]]] = {}

    def texts(self, rows: int, groups: int) -> list[list[int]]:
        """The texts of the first `rows` prompts, generated in so many groups."""
        if (rows, groups) not in self._texts:
            written = self._writing.write(self._model, rows, groups)
            self._texts[rows, groups] = [row for group in written for row in group.tolist()]
        return self._texts[rows, groups]


def scouted_groups(
    found: dict[str, Writer], writing: Writing, settings: Settings
) -> dict[str, dict[int, float]]:
    """The median seconds of every writer, by its name and the number of groups."""
    counts = settings.divisors(writing.rows)
    seconds: dict[str, dict[int, float]] = {name: {} for name in found}
    with callback("finding everybody's best number of groups") as progress:
        tick = Ticker(len(found) * len(counts), progress)
        for name, writer in found.items():
            for count in counts:
                tick(f"{name}, {count} groups")
                writer.step(writing.rows, count)
                taken = [writer.step(writing.rows, count) for _ in range(settings.scout)]
                seconds[name][count] = statistics.median(taken)
    return seconds


def generation(
    writing: Writing, found: dict[str, Writer], expected: Expected, settings: Settings
) -> dict[str, Any]:
    """Measure all writers with the same number of groups, and each with its own best number.

    The same number is the one with which Penstock in threads is fastest, of those that are not
    less than the number of devices.
    """
    scouted = scouted_groups(found, writing, settings)
    best = {name: min(own, key=lambda count: own[count]) for name, own in scouted.items()}
    same = min(
        (count for count in scouted[OURS["threads"]] if count >= len(DEVICES)),
        key=lambda count: scouted[OURS["threads"]][count],
    )
    turns = [Turn(name, w, writing.rows, same) for name, w in found.items()]
    turns += [
        Turn(name, w, writing.rows, best[name]) for name, w in found.items() if best[name] != same
    ]
    rows = in_turns(turns, expected, settings.rounds, "generating")
    tokens = writing.rows * writing.new_tokens
    return {"same_groups": same, "best_groups": best, "tokens": tokens, "rows": rows}


def latency(
    found: dict[str, Writer], expected: Expected, settings: Settings, new_tokens: int
) -> dict[str, Any]:
    """Measure the generation of one sequence, by Penstock and by the stages in turn."""
    names = (IN_TURN[False], IN_TURN[True], *OURS.values())
    turns = [Turn(name, found[name], 1, 1) for name in names if name in found]
    rows = in_turns(turns, expected, settings.rounds, "generating one sequence")
    return {"new_tokens": new_tokens, "rows": rows}


def in_turns(
    turns: Sequence[Turn], expected: Expected, rounds: int, what: str
) -> list[dict[str, Any]]:
    """Let writers take turns; a row of results for each, compared with the first.

    A row also says whether the tokens are those of the model's own `generate`.
    """
    same = []
    for turn in turns:
        turn.step()
        same.append(turn.writer.tokens() == expected.texts(turn.rows, turn.groups))
    taken = _in_turns(turns, rounds, what)
    return [
        {**row(turn.who, seconds, taken[0]), "groups": turn.groups, "same_tokens": is_same}
        for turn, seconds, is_same in zip(turns, taken, same, strict=True)
    ]


def _in_turns(contestants: Sequence[Timed], rounds: int, what: str) -> list[list[float]]:
    with callback(what) as progress:
        tick = Ticker((rounds + WARM_UP) * len(contestants), progress)
        return take_turns(contestants, rounds, tick, warm_up=WARM_UP)


def row(name: str, seconds: list[float], first: list[float]) -> dict[str, Any]:
    """A contestant's result, with the ratio of its seconds to those of the first contestant."""
    ratio = Ratio.of(seconds, first)
    return {
        "name": name,
        "median": statistics.median(seconds),
        "to_first": ratio.median,
        "spread": ratio.spread,
        "seconds": seconds,
    }


def limit(
    writing: Writing, plan: ps.Plan, groups: int, settings: Settings
) -> dict[str, list[dict[str, Any]]]:
    """Measure the stages without Penstock, for one sequence and for one of `groups` groups."""
    passes = writing.new_tokens - 1
    found = {}
    for what, rows in (("one sequence", 1), ("a group", writing.rows // groups)):
        with callback(f"what the machine allows, {what}") as progress:
            tick = Ticker(3 * (settings.rounds + LIMITS_WARM_UP), progress)
            taken = limits(decoder_of(writing, rows), plan, settings.rounds, passes, tick)
        found[what] = [row(name, seconds, taken[IN_ONE_THREAD]) for name, seconds in taken.items()]
    return found


def decoder_of(writing: Writing, rows: int) -> Decoder:
    """Greedy decoding of the first `rows` prompts, pass by pass."""

    def then(result: Any) -> dict[str, Any]:
        token = result.logits[:, -1:].argmax(-1)
        return {"input_ids": token, "past_key_values": result.past_key_values}

    (prompts,) = writing.prompts(rows, 1)
    name = f"{writing.name}, {rows} rows"
    return Decoder(name, writing.build, {"input_ids": prompts}, (), then)


# -- inference ----------------------------------------------------------------------------------


class Mapping:
    """`pipe.map` over batches, as a contestant.

    Args:
        work: the batches, and the model.
        workers: the kind of workers.
        plan: the plan of the pipeline.
        stack: closes the pipeline.
    """

    def __init__(
        self, work: Inference, workers: WorkerKind, plan: ps.Plan, stack: ExitStack
    ) -> None:
        self.name = f"{OURS[workers]}, m={plan.num_microbatches}"
        self._batches = [(batch,) for batch in work.batches]
        self._pipe = ps.Pipeline(
            *(work.build(), self._batches[0]),
            devices=DEVICES,
            workers=workers,
            threads_per_worker=1,
            plan=plan,
            progress=None,
        )
        stack.callback(self._pipe.close)
        self._results: list[torch.Tensor] = []

    def step(self) -> float:
        """Run all batches; the seconds."""
        start = time.perf_counter()
        self._results = list(self._pipe.map(self._batches))
        return time.perf_counter() - start

    def logits(self) -> torch.Tensor:
        """The logits of the last token of every row: (batches, rows, words)."""
        return last_logits(self._results)


@dataclass
class PeerMapping:
    """A peer that runs all batches."""

    name: str
    peer: Peer

    def step(self) -> float:
        """Run all batches; the seconds."""
        return self.peer.step()

    def logits(self) -> torch.Tensor:
        """The logits of the last token of every row; the last rank has them."""
        found: Any = self.peer.call("logits")[-1]
        return torch.from_numpy(found)


def inference(work: Inference, settings: Settings) -> dict[str, Any]:
    """Measure inference with `pipe.map`, with `prepare_pippy` and on one device."""
    counts = settings.divisors(work.rows)
    planned = planner(work.build(), (work.batches[0],), {})
    plans = [planned(num_microbatches=count) for count in counts]
    chosen = {kind: _best_plan(work, kind, plans, settings.scout) for kind in KINDS}
    makes = pippy_makes(work, counts, settings.further)
    with callback("finding the best configuration of prepare_pippy") as progress:
        scouted: Scouted = scout(makes, settings.scout, Ticker(tries(makes), progress))
    best = fastest(scouted)
    with ExitStack() as stack:
        contestants: list[Any] = [Mapping(work, kind, plan, stack) for kind, plan in chosen.items()]
        recipes: dict[str, Make] = {ONE_DEVICE: partial(plain, work)}
        if best is not None:
            recipes[f"{PIPPY}, {best}"] = makes[best]
        for name, make in recipes.items():
            contestants.append(PeerMapping(name, started(make(), stack)))
        expected = _expected_logits(work)
        for contestant in contestants:
            contestant.step()
        taken = _in_turns(contestants, settings.rounds, "inference")
        rows = []
        for contestant, seconds in zip(contestants, taken, strict=True):
            difference = (contestant.logits() - expected).abs().max().item()
            rows.append({**row(contestant.name, seconds, taken[0]), "difference": difference})
    largest = expected.abs().max().item()
    texts = [plan.summary for plan in chosen.values()]
    return {"rows": rows, "largest": largest, "scouted": scouted, "plans": texts}


def pippy_makes(work: Inference, counts: Iterable[int], further: int) -> dict[str, Make]:
    """The configurations of `prepare_pippy`, by name.

    Accelerate's own cut is tried with as many chunks as ranks, for which it is made. The other cuts
    are before the middle layer, and up to `further` layers later.
    """
    count = len(work.writing.build().get_submodule(work.writing.layers))
    middle = count // 2
    makes: dict[str, Make] = {
        f"m={m}, cut at layer {first}": partial(pippy, work, m, first)
        for first in range(middle, min(count, middle + further + 1))
        for m in counts
    }
    makes[f"m={len(DEVICES)}, its own cut"] = partial(pippy, work, len(DEVICES))
    return makes


def _best_plan(work: Inference, kind: WorkerKind, plans: Sequence[ps.Plan], steps: int) -> ps.Plan:
    """The plan with which `pipe.map` is fastest."""
    seconds: list[float] = []
    for plan in plans:
        with ExitStack() as stack:
            own = Mapping(work, kind, plan, stack)
            own.step()
            seconds.append(statistics.median([own.step() for _ in range(steps)]))
    return plans[seconds.index(min(seconds))]


@torch.no_grad()
def _expected_logits(work: Inference) -> torch.Tensor:
    model = work.build()
    return last_logits([model(batch) for batch in work.batches])


# -- all of it ----------------------------------------------------------------------------------


def measure(
    writing: Writing, work: Inference, settings: Settings
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Measure a model; yields the name and the results of each part."""
    count = settings.divisors(writing.rows)[-1]
    plan = planner(writing.build(), (), writing.example)(num_microbatches=count)
    with ExitStack() as stack:
        found, refused = all_writers(writing, plan, stack)
        expected = Expected(writing)
        together = generation(writing, found, expected, settings)
        yield "generation", {**together, "plan": plan.summary, "refused": refused}
        yield "latency", latency(found, expected, settings, writing.new_tokens)
    yield "limit", limit(writing, plan, together["same_groups"], settings)
    yield "inference", inference(work, settings)


def tables(model: str, part: str, found: dict[str, Any]) -> list[str]:
    """The printed lines of a part."""
    if part == "limit":
        of_each = [show(f"{model}: stages alone, {what}", rows) for what, rows in found.items()]
        return [line for table in of_each for line in (*table, "")]
    refused = [f"{peer} does not run: {why}" for peer, why in found.get("refused", {}).items()]
    return [*show(f"{model}: {part}", found["rows"]), *refused, ""]


def show(title: str, rows: Iterable[dict[str, Any]]) -> list[str]:
    """A table of results, with the number of groups, and whether they are right."""
    cells = [(title, "seconds", "of the first's", "±", "")]
    for found in rows:
        groups = f", {found['groups']} groups" if "groups" in found else ""
        note = f"differs by {found['difference']:.1e}" if "difference" in found else ""
        if not found.get("same_tokens", True):
            note = "OTHER TOKENS"
        cells.append(
            (
                f"{found['name']}{groups}",
                f"{found['median']:.4g}",
                f"{found['to_first']:.3f}x",
                f"{found['spread']:.3f}",
                note,
            )
        )
    return aligned(cells)


def show_costs(found: dict[str, Any]) -> list[str]:
    """A table of the overhead of passes, in microseconds."""
    cells = [(found["model"], "us above the work", "±")]
    for each in found["rows"]:
        cells.append((each["name"], f"{1e6 * each['above']:.0f}", f"{1e6 * each['spread']:.0f}"))
    return [*aligned(cells), f"the work: {1e6 * found['work']:.0f} us"]


TOLERANCE = 1e-4
"""How far logits may differ, as a share of the largest one: with other splits of the rows, kernels
may round differently."""


def wrong(model: str, found: dict[str, Any]) -> list[str]:
    """A line for every contestant whose tokens or logits are not those of the model."""
    texts = [
        f"{model}: {each['name']} has other tokens than the model's own generate"
        for part in ("generation", "latency")
        for each in found[part]["rows"]
        if not each["same_tokens"]
    ]
    largest = found["inference"]["largest"]
    return texts + [
        f"{model}: logits of {each['name']} differ by {each['difference']:.2e}, where the largest "
        f"is {largest:.2e}"
        for each in found["inference"]["rows"]
        if not each["difference"] <= TOLERANCE * largest
    ]


def main(arguments: Sequence[str]) -> int:
    """Measure and print; returns 1 if tokens or logits of a contestant are wrong."""
    parser = record.parser("generation", __doc__)
    parser.add_argument("--models", default=",".join(writers(quick=True)))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rows", type=int, help="sequences; by default 36, or 8 with --quick")
    parser.add_argument("--quick", action="store_true", help="small models, few rounds")
    options = parser.parse_args(arguments)
    record.check_whole(parser, options, "quick")
    if options.rounds < 2:
        parser.error(f"--rounds {options.rounds}: a spread needs two rounds at least")
    settings = Settings.quick() if options.quick else Settings(options.rounds)
    known = writers(options.quick)
    chosen = options.models.split(",")
    if missing := [name for name in chosen if name not in known]:
        parser.error(f"--models: there is no {missing[0]!r}; there are {', '.join(known)}")
    kept = keep_freed_memory()
    use_threads(1)
    with callback("what a step of decoding costs") as progress:
        decoders = [cells(), small_gpt2()]
        tick = Ticker(len(decoders) * 5 * (settings.rounds + 2), progress)
        steps = [costs(each, settings.rounds, settings.passes, tick) for each in decoders]
    for each in steps:
        print(*show_costs(each), "", sep="\n", flush=True)
    allocator = "every process keeps freed memory (mallopt)" if kept else "the system's"
    failures: list[str] = []
    measured: dict[str, dict[str, Any]] = {}
    partly = Namespace(json=options.json, record=False)  # docs/data gets whole models only
    for name in chosen:
        writing = known[name] if options.rows is None else replace(known[name], rows=options.rows)
        work = batches_of(writing, options.quick)
        how = {
            "rounds": settings.rounds,
            "warm_up": WARM_UP,
            "scout": settings.scout,
            "allocator": allocator,
            "sequences": writing.rows,
            "prompt": writing.length,
            "new_tokens": writing.new_tokens,
            "batches": [work.count, work.rows, work.length],
        }
        found = measured[writing.name] = {"steps": steps, "settings": how}
        for part, result in measure(writing, work, settings):
            found[part] = result
            print(*tables(writing.name, part, result), sep="\n", flush=True)
            report = record.save_models("generation", measured, partly)
        failures += wrong(writing.name, found)
        report = record.save_models("generation", measured, options)
    print(report["machine"], *failures, sep="\n")
    return int(bool(failures))


def batches_of(writing: Writing, quick: bool) -> Inference:
    """The batches for inference with the same model."""
    return Inference(writing, 3, 8, 8) if quick else Inference(writing, 6, 8, 64)
