"""The benchmark of generation: peers write the model's own texts, and calls are noted rightly."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.bench.decoding import Passes, Work, cells
from penstock.bench.generation import Expected, PeerWriter, Settings, wrong
from penstock.bench.limits import Threads
from penstock.bench.peers.generating import in_turn, saved, transformers_pipeline
from penstock.bench.peers.pippy import pippy
from penstock.bench.peers.writing import Inference, last_logits
from penstock.bench.writers import writers


@pytest.mark.slow
@pytest.mark.parametrize("peer", ["in turn", "hooks", "transformers"])
def test_peers_write_what_the_model_writes(peer: str, tmp_path: Path) -> None:
    writing = writers(quick=True)["llama"]
    if peer == "transformers":
        recipe = transformers_pipeline(writing, saved(writing, str(tmp_path)))
    else:
        recipe = in_turn(writing, hooks=peer == "hooks")
    started = recipe.start()
    try:
        writer = PeerWriter(started)
        assert writer.step(8, 2) > 0
        assert writer.tokens() == Expected(writing).texts(8, 2)
    finally:
        started.close()


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_prepare_pippy_infers_what_the_model_does(model: str) -> None:
    work = Inference(writers(quick=True)[model], 2, 4, 8)
    started = pippy(work, 2, 2).start()
    try:
        started.step()
        found = torch.from_numpy(started.call("logits")[-1])
    finally:
        started.close()
    whole = work.build()
    with torch.no_grad():
        expected = last_logits([whole(batch) for batch in work.batches])
    torch.testing.assert_close(found, expected)


def test_groups_are_equal() -> None:
    writing = writers(quick=True)["gpt2"]
    assert [len(group) for group in writing.prompts(8, 2)] == [4, 4]
    with pytest.raises(ValueError, match="8 sequences are not 3 equal groups"):
        writing.prompts(8, 3)
    assert Settings(9).divisors(12) == [1, 2, 3, 4, 6]


def test_the_work_of_passes_is_the_calls_of_their_stages() -> None:
    with ExitStack() as stack:
        passes = Passes(cells(), "threads", 3, stack)
        work = Work(passes, 3)
        work.step()
        assert torch.equal(work.results[0], passes.result[0])


@pytest.mark.parametrize("handed_on", [False, True])
def test_threads_run_the_calls_of_their_stages(handed_on: bool) -> None:
    with ExitStack() as stack:
        passes = Passes(cells(), "threads", 3, stack)
        work, threads = Work(passes, 3), Threads(Work(passes, 3), handed_on)
        assert work.step() > 0
        assert threads.step() > 0
        assert torch.equal(threads.results[1][0], work.results[0])
        work.calls.append((None, ()))  # type: ignore[arg-type]  # fails in the first stage
        with pytest.raises(TypeError):
            Threads(work, handed_on).step()


def test_other_tokens_and_logits_are_named() -> None:
    good: dict[str, Any] = {"name": "a", "same_tokens": True}
    found: dict[str, Any] = {
        "generation": {"rows": [good, {"name": "b", "same_tokens": False}]},
        "latency": {"rows": [good]},
        "inference": {
            "largest": 1.0,
            "rows": [
                {"name": "c", "difference": float("nan")},
                {"name": "d", "difference": 1e-6},
            ],
        },
    }
    said = wrong("GPT-2", found)
    assert [line.partition(" has ")[0] for line in said[:1]] == ["GPT-2: b"]
    assert "logits of c differ by nan" in said[1]
    assert len(said) == 2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_everything_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "generation.json"
    command = [sys.executable, "-W", "ignore", "-m", "penstock.bench", "generation", "--quick"]
    subprocess.run([*command, "--models", "llama", "--json", str(path)], check=True)
    (model,) = json.loads(path.read_text())["models"]
    names = {row["name"] for row in model["generation"]["rows"]}
    assert {"Penstock, threads", "Penstock, processes", "transformers' pipeline"} <= names
    assert any(row["name"].startswith("prepare_pippy") for row in model["inference"]["rows"])
