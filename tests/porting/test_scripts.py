"""Training scripts as users write them run after the change, and end with the same bits."""

from __future__ import annotations

import gc
import runpy
import socket
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock as ps
from penstock.loading import tolerate_missing_torchvision_operators
from penstock.porting import Options, port

HERE = Path(__file__).parent / "scripts"
STYLES = {
    "accumulation": "train_step",
    "amp": "train_step",
    "branches": "call",
    "causal_lm": "train_step",
    "cifar": "train_step",
    "data_parallel": "call",
    "ddp": "train_step",
    "folds": "call",
    "generator": "train_step",
    "lbfgs": "call",
    "mnist": "train_step",
    "nanogpt": "train_step",
    "one_line": "call",
    "quickstart": "train_step",
    "step_function": "train_step",
    "timm_like": "call",
    "transformers_loop": "train_step",
    "two_models": "call",
}


def trained(script: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, ranked: bool) -> Any:
    """What the script has saved, run in a folder of its own, on one thread."""
    folder.mkdir()
    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of other packages
        patch.chdir(folder)
        patch.setattr(sys, "argv", [str(script)])
        patch.setenv("PENSTOCK_CACHE", str(folder / "cache"))
        if ranked:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = str(probe.getsockname()[1])
            ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
            for name, value in {**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
                patch.setenv(name, value)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            names = runpy.run_path(str(script), run_name="__main__")
        finally:
            torch.set_num_threads(threads)
    for each in names.values():
        if isinstance(each, ps.Pipeline):
            each.close()
    gc.collect()  # pipelines that were local to a function
    return torch.load(folder / "model.pth")


def leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for key in value for leaf in (key, *leaves(value[key]))]
    return [value]


def same(one: Any, other: Any) -> bool:
    pairs = zip(leaves(one), leaves(other), strict=True)
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


@pytest.mark.parametrize("name", STYLES)
def test_ends_with_the_bits_of_the_script_as_it_was(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tolerate_missing_torchvision_operators()
    script = HERE / f"{name}.py"
    before = script.read_bytes()
    is_ranked = name == "ddp"
    devices = "" if is_ranked else '["cpu", "cpu"]'
    changed = port(before.decode(), str(script), Options(devices, microbatches=1))
    assert changed.style == STYLES[name]
    # Bits depend on the number of threads, and a single worker would be no pipeline.
    fixed = "num_microbatches=1, threads_per_worker=1, replicas=1"
    assert changed.text.count("num_microbatches=1") == 1
    copy = tmp_path / f"{name}_penstock.py"
    copy.write_text(changed.text.replace("num_microbatches=1", fixed))
    expected = trained(script, tmp_path / "before", monkeypatch, is_ranked)
    printed = capsys.readouterr().out
    found = trained(copy, tmp_path / "after", monkeypatch, is_ranked)
    assert same(found, expected)
    assert capsys.readouterr().out == printed
    assert script.read_bytes() == before


@pytest.mark.slow
def test_ranks_end_with_the_bits_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = HERE / "ddp.py"
    expected = trained(script, tmp_path / "one", monkeypatch, True)
    text = port(script.read_text(), str(script), Options(microbatches=1)).text
    copy = tmp_path / "ddp_penstock.py"
    copy.write_text(text.replace("num_microbatches=1", "num_microbatches=1, threads_per_worker=1"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    result = subprocess.run(
        [*command, "--nproc-per-node", "2", str(copy)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert result.returncode == 0, result.stderr
    assert same(torch.load(tmp_path / "model.pth"), expected)


def test_every_script_is_tried() -> None:
    assert {path.stem for path in HERE.glob("*.py")} == set(STYLES)


def test_the_comparison_sees_a_difference() -> None:
    one = {"model": {"w": torch.ones(2)}}
    assert same(one, {"model": {"w": torch.ones(2)}})
    assert not same(one, {"model": {"w": torch.ones(2) * 1.001}})


def test_as_it_is_chosen_a_changed_script_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With as many micro-batches, workers and replicas as the pipeline takes."""
    script = HERE / "quickstart.py"
    copy = tmp_path / "quickstart_penstock.py"
    copy.write_text(port(script.read_text(), str(script)).text)
    found = trained(copy, tmp_path / "after", monkeypatch, False)
    assert all(torch.isfinite(value).all() for value in found.values())
