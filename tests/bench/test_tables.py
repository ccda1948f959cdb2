"""Tables of the docs are what the data in docs/data say, which say where they come from."""

from __future__ import annotations

import importlib
import json
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.bench import contract, record, tables
from penstock.bench.scouting import fastest, scout, tries

ORIGIN = {
    "commit": "0123456789ab",
    "date": "2026-01-02",
    "torch": "2.13.0",
    "machine": {"processor": "A Processor", "cores": 2},
    "settings": {
        "rounds": 9,
        "warm_up": 2,
        "scout": 5,
        "allocator": "every process keeps freed memory",
        "threads": "one a worker",
    },
}
COMPARED = {
    "models": [
        {
            **ORIGIN,
            "model": "ResNet-50",
            "rows": [
                {
                    "name": "Penstock, threads",
                    "median": 1.2,
                    "slower": 1.0,
                    "slower_spread": 0.0,
                    "plan": "2 replicas",
                },
                {
                    "name": "Penstock, threads, stages",
                    "median": 1.3,
                    "slower": 1.08,
                    "slower_spread": 0.02,
                    "plan": "p",
                },
                {
                    "name": "torch pipelining, cut by hand: 1F1B, m=4",
                    "median": 1.5,
                    "slower": 1.25,
                    "slower_spread": 0.3,
                },
                {
                    "name": "FSDP2: m=2, whole",
                    "median": 1.4,
                    "slower": 1.17,
                    "slower_spread": 0.001,
                },
            ],
        }
    ],
}


def test_the_docs_say_what_the_data_say() -> None:
    for page in tables.PAGES:
        text = (tables.ROOT / page).read_text()
        assert tables.filled(text) == text, "run python -m penstock.bench tables"


def test_the_docs_have_a_place_for_every_table() -> None:
    text = "".join((tables.ROOT / page).read_text() for page in tables.PAGES)
    assert [found[2] for found in tables._TABLE.finditer(text)] == list(tables.TABLES)


def test_a_page_is_filled(tmp_path: Path) -> None:
    page = "before\n<!-- table: compare -->\nold\n<!-- end of table -->\nafter\n"
    assert tables.filled(page, tmp_path) == page  # nothing was measured
    (tmp_path / "compare.json").write_text(json.dumps(COMPARED))
    found = tables.filled(page, tmp_path)
    assert "old" not in found
    assert (
        "| ResNet-50 | 1.2 s | not run | 1.08x ± 0.02 | not run | 1.25x ± 0.30 | not run | 1.17x"
        in found
    )
    assert "- ResNet-50: Penstock, threads: 2 replicas" in found
    assert "commit 0123456789ab" in found
    assert found.startswith("before\n")
    assert found.endswith("\nafter\n")
    assert tables.filled(found, tmp_path) == found
    with pytest.raises(ValueError, match="no table nothing"):
        tables.filled(page.replace("compare", "nothing"), tmp_path)


def test_models_that_were_measured_apart_have_their_own_origin() -> None:
    (one,) = COMPARED["models"]
    other = {**one, "model": "ViT", "commit": "fedcba987654"}
    assert "\n- ResNet-50" in (found := tables.compare({"models": [one, other]}))
    assert "ResNet-50: Medians of 9 rounds" in found
    assert "commit 0123456789ab" in found
    assert "ViT: Medians of 9 rounds" in found
    assert "commit fedcba987654" in found
    both = tables.compare({"models": [one, {**one, "model": "ViT"}]})
    assert both.count("Medians of 9 rounds") == 1


def test_a_model_measured_again_takes_the_place_of_the_former(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "DATA", tmp_path)
    options: Any = SimpleNamespace(json=None, record=True)
    record.save_models("compare", {"a": {"rows": [1]}, "b": {"rows": [2]}}, options)
    record.save_models("compare", {"a": {"rows": [3]}}, options)
    found = json.loads((tmp_path / "compare.json").read_text())["models"]
    assert {model["model"]: model["rows"] for model in found} == {"a": [3], "b": [2]}
    assert all(model["commit"] == record.commit() for model in found)


def test_sums_are_shown_beside_the_ordered_one() -> None:
    rows = [
        {"name": "in order", "median": 0.1, "to_ordered": 1.0, "spread": 0.0},
        {"name": "no order", "median": 0.099, "to_ordered": 0.99, "spread": 0.01},
        {"name": "DDP, buckets of 1 MB", "median": 0.13, "to_ordered": 1.3, "spread": 0.02},
    ]
    results = [
        {"model": "MLP", "where": "2 threads", "rows": rows[:2]},
        {"model": "MLP", "where": "4 ranks", "rows": rows},
    ]
    found = tables.sums({**ORIGIN, "results": results, "rounds": 15})
    assert "| MLP, 2 threads | 100 ms | 0.990x ± 0.010 | |" in found
    assert "| MLP, 4 ranks | 100 ms | 0.990x ± 0.010 | 1.300x ± 0.020 (buckets of 1 MB) |" in found
    assert "commit 0123456789ab" in found


def test_generation_is_beside_others_with_the_same_groups_and_at_their_best() -> None:
    ours = {"name": "Penstock, threads", "median": 2.0, "to_first": 1.0, "spread": 0.0}
    turn = {"name": "stages in turn", "median": 4.0, "to_first": 1.9, "spread": 0.1}
    batch = {"name": "prepare_pippy, m=4", "median": 3.0, "to_first": 1.5, "spread": 0.2}
    rows = [
        {**ours, "groups": 2},
        {**turn, "groups": 2},
        {**turn, "groups": 1, "median": 3.0, "to_first": 1.5},
    ]
    model = {
        **ORIGIN,
        "model": "GPT-2",
        "settings": {
            **ORIGIN["settings"],
            "sequences": 8,
            "prompt": 4,
            "new_tokens": 5,
            "batches": [3, 8, 16],
        },
        "generation": {"same_groups": 2, "tokens": 40, "rows": rows},
        "latency": {"new_tokens": 5, "rows": [turn, ours]},
        "limit": {
            "one sequence": [turn, {"name": "handed on", "to_first": 1.125, "spread": 0.02}],
            "a group": [turn, {"name": "side by side", "to_first": 0.625, "spread": 0.02}],
        },
        "inference": {"rows": [{**ours, "name": "Penstock, threads, m=2"}, batch]},
        "steps": [
            {
                "model": "cells",
                "work": 2e-5,
                "rows": [{"name": "threads", "above": 1.5e-4, "spread": 1e-6}],
            }
        ],
    }
    found = tables.generation({"models": [model]})
    turns = "1.90x ± 0.10; at best 1.50x, 1 group"
    allowed = "1.60x of the stages in turn"
    row = f"| GPT-2 | 20 tokens/s, 2 groups | does not run | {turns} | does not run | {allowed} |"
    assert row in found
    assert "| GPT-2 | 800 ms a token | 1.00x ± 0.00 | 1.12x ± 0.02 |" in found
    assert "| GPT-2 | 2e+03 ms, m=2 | does not run | 1.50x ± 0.20, m=4 | does not run |" in found
    assert "| cells | 20 us | 150 ± 1 us |" in found
    assert "commit 0123456789ab" in found


def test_a_start_ends_with_the_first_step() -> None:
    plain = {"torch": 1.0, "model": 0.5, "first step": 0.25, "second step": 9.0}
    ours = {**plain, "penstock": 1.0, "pipeline": 4.0}
    ways = {"plain PyTorch": [plain] * 3, "threads, first": [ours, ours, {**ours, "torch": 99.0}]}
    model = {**ORIGIN, "model": "MLP", "ways": ways, "settings": {"rounds": 3}}
    found = tables.starting({**ORIGIN, "models": [model]})
    assert "| MLP | 1.8 s | 6.8 s (4.0) |" in found
    assert "Medians of 3 starts in turns" in found
    later = {**model, "model": "GPT", "commit": "89abcdef0123"}
    found = tables.starting({**ORIGIN, "models": [model, later]})
    assert re.search(r"MLP: .*\n.*0123456789ab.*\nGPT: .*\n.*89abcdef0123", found)


def test_a_framework_is_compared_with_itself_on_one_core() -> None:
    plain = {"median": 0.4, "to_one_core": 1.0, "to_one_core_spread": 0.0, "plan": ""}
    ours = {**plain, "to_one_core": 0.6, "to_one_core_spread": 0.01, "plan": "2 replicas"}
    rows = [{"name": "one core", **plain}, {"name": "threads", **ours}]
    model = {**ORIGIN, "model": "transformers", "rows": rows, "settings": {"rounds": 3}}
    found = tables.frameworks({**ORIGIN, "models": [model]})
    assert "| Trainer | 400 ms | 0.60x ± 0.01 |" in found
    assert "- Trainer, threads: 2 replicas." in found


def test_memory_is_in_mebibytes() -> None:
    sizes = [{"live": k << 20, "resident": (k + 1) << 20} for k in (3, 5, 7)]
    row = dict(zip(("capture", "step", "row"), sizes, strict=True))
    row["capture"]["calls"] = 52
    found = tables.capture_time({**ORIGIN, "rows": [{"model": "U-Net", **row}]})
    assert "| U-Net | 52 | 3 (4) | 5 (6) | 7 (8) |" in found


def test_data_have_an_origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "DATA", tmp_path / "data")
    options = record.parser("some", None).parse_args(
        ["--json", f"{tmp_path}/here.json", "--record"]
    )
    whole = record.save("some", {"rows": [1]}, options)
    for path in (tmp_path / "here.json", tmp_path / "data/some.json"):
        assert json.loads(path.read_text()) == whole
    assert {"commit", "date", "torch", "machine", "rows"} == whole.keys()
    record.main([f"{tmp_path}/here.json", "other"])
    assert json.loads((tmp_path / "data/other.json").read_text()) == whole
    monkeypatch.setattr(record, "ROOT", tmp_path)
    assert record.commit() == "unknown"


class Clock:
    """A peer whose steps take what it is told."""

    def __init__(self, *seconds: float) -> None:
        self.seconds, self.closed, self.lives = iter(seconds), 0, 1

    def step(self) -> float:
        return next(self.seconds)

    def become(self, name: str, builds: Any) -> None:
        self.lives += 1

    def close(self) -> None:
        self.closed += 1


def test_scouting_tries_the_fastest_again_and_names_what_does_not_run() -> None:
    slow, fast = Clock(9.0, 2.0, 1.5, 9.0, 9.0, 8.0, 8.0), Clock(9.0, 1.0, 9.0, 9.0, 3.0, 4.0, 5.0)

    def recipe(clock: Clock, threads: int) -> Any:
        found: Any = SimpleNamespace(threads=threads, name="", builds=[], start=lambda: clock)
        found.has_processes_of = lambda other: other.threads == threads
        return found

    def refused() -> Any:
        raise ValueError("a batch of 8 is not 16 equal micro-batches")

    makes = {
        "m=2, slow": partial(recipe, slow, 2),
        "m=2, no": refused,
        "m=2": partial(recipe, fast, 1),
    }
    ticks: list[str] = []
    found = scout(makes, 3, ticks.append)
    assert (
        found["m=2, no"] == "does not run: ValueError: a batch of 8 is not 16 equal micro-batches"
    )
    assert found["m=2"] == [3.0, 4.0, 5.0]
    assert ticks == ["m=2, slow", "m=2, no", "m=2", "m=2", "m=2, slow"]
    assert len(ticks) <= tries(makes)
    assert (slow.closed, fast.closed) == (2, 1)
    seconds: dict[str, Any] = {"a": [3.0, 1.0, 2.0], "b": [1.5, 1.5, 9.0], "c": "does not run: x"}
    assert fastest(seconds) == "b"
    assert fastest({"a": [1.0], "b": [2.0, 2.0]}) == "b"  # tried for longer
    assert fastest({"c": "failed: x"}) is None


def test_scouting_stops_where_more_microbatches_are_slower() -> None:
    clock = Clock(9.0, 1.0, 9.0, 1.02, 9.0, 1.2, *[1.0] * 12)
    recipe: Any = SimpleNamespace(name="", builds=[], start=lambda: clock)
    recipe.has_processes_of = lambda _: True
    found = scout({f"m={m}, 1F1B": lambda: recipe for m in (2, 4, 8, 16)}, 2, lambda _: None)
    assert found["m=16, 1F1B"] == "left out: m=8, 1F1B was slower than m=2, 1F1B"
    assert [len(found[f"m={m}, 1F1B"]) for m in (2, 4, 8)] == [2, 2, 2]


@pytest.mark.parametrize(
    ("module", "arguments", "named"),
    [
        ("guarded", ["--models", "gpt", "--workers", "threads"], "--models and --workers"),
        ("small", ["--only", "vit"], "--only"),
        ("links", ["--quick"], "--quick"),
    ],
)
def test_a_part_is_not_recorded_as_the_whole(
    module: str, arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    benchmark = importlib.import_module(f"penstock.bench.{module}")
    with pytest.raises(SystemExit):
        benchmark.main([*arguments, "--record"])
    assert f"leave out {named}, or write to a file" in capsys.readouterr().err


def test_some_cases_do_not_replace_the_table_of_exactness(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        contract.main(["--only", "linear"])
    assert "give --output as well" in capsys.readouterr().err


def test_what_cannot_be_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, said in (
        ([], "required: file, name"),
        ([str(tmp_path / "none.json"), "bench"], "cannot be read as JSON"),
    ):
        with pytest.raises(SystemExit):
            record.main(arguments)
        assert said in capsys.readouterr().err
