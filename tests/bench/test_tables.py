"""Tables of the docs are what the data in docs/data say, which say where they come from."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.bench import record, tables
from penstock.bench.compare import fastest, scout

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
    **ORIGIN,
    "plan": "1f1b, m=4",
    "predicted_step_seconds": 1.0,
    "train_step_seconds": 1.1,
    "percent_of_bound": 90.0,
    "rows": [
        {"name": "Penstock, m=4", "median": 1.2, "spread": 0.01, "slower": 1.0},
        {"name": "a peer, m=2", "median": 1.5, "spread": 0.02, "slower": 1.25},
    ],
}
PROCESSES = {
    **ORIGIN,
    "models": [
        {
            "model": "ResNet-50",
            "rows": [
                {"name": "Penstock, processes", "median": 1.0, "slower": 1.0},
                {"name": "Penstock, threads", "median": 0.9, "slower": 0.9},
                {
                    "name": "torch pipelining, cut by hand, 1F1B, m=4",
                    "median": 1.5,
                    "slower": 1.5,
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
    assert "| **Penstock** (1f1b, m=4) | 1.200 ± 0.010 |  |" in found
    assert "| a peer, m=2 | 1.500 ± 0.020 | 1.25x |" in found
    assert "commit 0123456789ab" in found
    assert found.startswith("before\n")
    assert found.endswith("\nafter\n")
    assert tables.filled(found, tmp_path) == found
    with pytest.raises(ValueError, match="no table nothing"):
        tables.filled(page.replace("compare", "nothing"), tmp_path)


def test_a_line_a_model() -> None:
    found = tables.processes(PROCESSES)
    assert "| ResNet-50 | 1 | 0.9 | 1.5 (1.50x; 1F1B, m=4) | does not run |" in found


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


def test_scouting_leaves_out_what_is_not_warm_and_what_does_not_run() -> None:
    clock = iter([9.0, 9.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    closed: list[int] = []
    peer: Any = SimpleNamespace(step=lambda: next(clock), close=lambda: closed.append(1))
    assert scout(lambda: peer, 5) == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert closed == [1]

    def refused() -> Any:
        raise ValueError("a batch of 8 is not 16 equal micro-batches")

    assert scout(refused, 5) == "does not run: a batch of 8 is not 16 equal micro-batches"
    seconds: dict[str, Any] = {"a": [3.0, 1.0, 2.0], "b": [1.5, 1.5, 9.0], "c": "does not run: x"}
    assert fastest(seconds) == "b"
    assert fastest({"c": "failed: x"}) is None
