"""`penstock serve`, used wrongly. What it does when it is used well is in tests/serving."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from penstock.cli import main

MODELS = "tests.serving.models"


def serve(*arguments: str) -> tuple[int, str]:
    found = CliRunner().invoke(main, ["serve", *arguments])
    return found.exit_code, found.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["net"], "'net' is not a callable"),
        (["nowhere:net"], "there is no module 'nowhere'"),
        ([f"{MODELS}:nothing"], "returned a int; it must return an nn.Module"),
        ([f"{MODELS}:Net"], "no generate(), so an example says what it is called with"),
        (
            [f"{MODELS}:net", "--input", "2x3", "--example", f"{MODELS}:net"],
            "both say what to call",
        ),
        ([f"{MODELS}:Net", "--example", f"{MODELS}:broken"], "broken' raised KeyError when it was"),
        ([f"{MODELS}:net", "--devices", "tpu"], "'tpu' is not a device"),
        ([f"{MODELS}:net", "--timeout", "0"], "--timeout"),
        ([f"{MODELS}:net", "--queue", "-1"], "--queue"),
        ([f"{MODELS}:net", "--timeout", "nan"], "not a finite number"),
        ([f"{MODELS}:net", "--timeout", "1e9"], "--timeout"),
        ([f"{MODELS}:net", "--grace", "inf"], "--grace"),
        ([f"{MODELS}:net", "--input", "int8[8,2]<50257"], "torch cannot make this tensor"),
    ],
    ids=str,
)
def test_used_wrongly(arguments: list[str], words: str) -> None:
    code, said = serve(*arguments, "--port", "0")
    assert code == 2
    assert words in said


def test_a_port_that_is_taken() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        code, said = serve(f"{MODELS}:net", "--port", str(other.getsockname()[1]))
    assert code == 2
    assert "Address already in use. Give another --port; 0 takes a free one" in said


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "penstock.serving.server", None)
    code, said = serve(f"{MODELS}:net")
    assert code == 1
    assert "pip install 'penstock[serve]'" in said


def test_a_file_with_a_model_whose_generate_is_another(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from tests.generation.subjects import Plain, tokens\n"
        "from penstock.serving import Served\n"
        "def build():\n"
        "    return Served(Plain(), args=(tokens(),))\n"
    )
    options = ["--port", "0", "--workers", "threads", "--devices", "cpu,cpu", "--cuts", "head"]
    code, said = serve(f"{tmp_path / 'own.py'}:build", *options)
    assert code == 2
    assert "Plain.generate() does not take what transformers' does" in said
