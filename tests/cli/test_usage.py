"""Commands that were used wrongly say so before torch is imported; what models may be called."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.cli import bench_command
from penstock.loading import load, load_model
from penstock.names import input_of, is_kind, target_of

RUN = (
    "import sys\n"
    "from penstock.cli import main\n"
    "try:\n"
    "    main(sys.argv[1:])\n"
    "finally:\n"
    "    print('torch' in sys.modules, file=sys.stderr)\n"
)
MODEL = "torchvision.models:resnet18"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan"], "Missing argument 'MODEL'"),
        (["plan", "resnet18", "--input", "2x3"], "'resnet18' is not a callable"),
        (["plan", "gpt-2", "--input", "2x3"], "a kind of transformers' models, gpt2"),
        (["plan", "nowhere:net", "--input", "2x3"], "there is no module 'nowhere'"),
        (["verify", "nowhere.py:net", "--input", "2x3"], "there is no file nowhere.py"),
        (["inspect", f"{MODEL}(width=wide)", "--input", "2x3"], "neither a name nor a call"),
        (["profile", MODEL], "needs an example to be called with: give --input"),
        (["plan", MODEL, "--input", "2y3"], "'2y3' is not an input"),
        (["plan", MODEL, "--input", "int64[8,]"], "'int64[8,]' is not an input"),
        (["plan", MODEL, "--input", "2x3", "--optimizer-state", "nan"], "not a finite number"),
        (["verify", MODEL, "--input", "2x3", "--lr", "inf"], "not a finite number"),
        (["profile", MODEL, "--input", "2x3", "--seconds", "inf"], "not a finite number"),
        (["top", "--once", "--interval", "inf"], "not a finite number"),
        (["plan", MODEL, "--input", "real32[2,3]"], "'real32[2,3]' is not an input"),
        (["plan", MODEL, "--input", "2x3", "--example", "a:b"], "both say what to call"),
        (["plan", MODEL, "--input", "2x3", "--devices", "cpu,tpu"], "'tpu' is not a device"),
        (["plan", MODEL, "--input", "2x3", "--devices", "no.toml"], "there is no such file"),
        (["plan", MODEL, "--input", "2x3", "--microbatches", "x"], "--microbatches 'x' is"),
        (["plan", MODEL, "--input", "2x3", "--schedule", "x"], "choose naive, gpipe"),
        (["verify", MODEL, "--input", "2x3", "--target", "2x3"], "needs a --loss"),
        (["verify", MODEL, "--input", "2x3", "--loss", "mse"], "'mse' is not a callable"),
        (["bench", "--loss", "torch.nn:MSELoss"], "--loss needs a MODEL"),
    ],
    ids=" ".join,
)
def test_without_torch(arguments: list[str], words: str, tmp_path: Path) -> None:
    found = subprocess.run(
        [sys.executable, "-c", RUN, *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 2
    assert words in found.stderr
    assert found.stderr.splitlines()[-1] == "False"


class Net(nn.Module):
    def __init__(self, width: int = 4, bias: bool = True) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width, bias)


HERE = "tests.cli.test_usage"


def test_models_with_arguments() -> None:
    model: Any = load_model(f"{HERE}:Net(8, bias=False)")
    assert model.layer.weight.shape == (8, 8)
    assert model.layer.bias is None
    assert load(f"{HERE}:Net").__name__ == "Net"
    assert load("torch.nn:CrossEntropyLoss(label_smoothing=0.1)").label_smoothing == 0.1
    with pytest.raises(ps.InputError, match="neither a name nor a call with plain values"):
        load_model(f"{HERE}:Net(__import__('os').getpid())")


def test_models_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "folder" / "own_model.py"
    file.parent.mkdir()
    file.write_text("import torch\ndef make(width=3):\n    return torch.nn.Linear(width, 2)\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    assert load_model("folder/own_model.py:make").weight.shape == (2, 3)
    assert load_model(f"{file}:make(5)").weight.shape == (2, 5)


def test_models_of_transformers() -> None:
    small = "n_layer=1, n_embd=8, n_head=2, vocab_size=11, n_positions=8"
    model: Any = load_model(f"transformers:GPT2Config({small})")
    assert type(model).__name__ == "GPT2LMHeadModel"
    assert model.config.n_embd == 8
    assert not model.config.use_cache
    assert is_kind("gpt2")
    assert is_kind("bert")
    assert not is_kind("gpt-2")
    assert not is_kind(MODEL)
    with torch.device("meta"):
        assert type(load_model("gpt2")).__name__ == "GPT2LMHeadModel"
        assert type(load_model("transformers:ViTConfig")).__name__ == "ViTModel"
        assert "Conditional" in type(load_model("t5")).__name__


def test_names() -> None:
    assert target_of("penstock.names:is_kind").module == "penstock.names"
    assert input_of("ids=int64[8,64]<256") == ("ids", "int64", (8, 64), 256)
    assert input_of("8x3") == (None, "float32", (8, 3), 2)


def test_bench_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    from click.testing import CliRunner

    from penstock.cli import main

    for package, extra in (("matplotlib", "report"), ("torchvision", "models")):
        missing = lambda name, package=package: None if name == package else object()  # noqa: E731
        monkeypatch.setattr(bench_command, "find_spec", missing)
        for arguments in (["bench", "--quick"], ["bench", "rpc"]):
            result = CliRunner().invoke(main, arguments)
            assert result.exit_code == 1
            assert f"pip install 'penstock[{extra}]'" in result.stderr
