"""The command line: data on stdout, talk on stderr, exit codes."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner, Result
from torch import nn

import penstock as ps
from penstock.cli import main
from penstock.cli.arguments import as_inputs, device_list
from penstock.cli.common import show
from tests.support.models import mlp

PENSTOCK = Path(sys.executable).with_name("penstock")
ROOT = Path(__file__).parents[2]
HERE = "tests.cli.test_cli"


# -- what the commands are given --------------------------------------------------------------


def small() -> nn.Module:
    """A model that the commands are given."""
    return mlp(4, 4, 4)


SMALL = [f"{HERE}:small", "--input", "6x4"]
TWO = ("--devices", "cpu,cpu")
IN_STAGES = ("--replicas", "1")


class Scaled(nn.Module):
    """Takes a keyword argument, draws random numbers, and changes a value in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)
        self.dropout, self.relu = nn.Dropout(), nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        hidden = self.dropout(self.relu(self.first(x))) * scale
        result: torch.Tensor = self.second(hidden)
        return result


def example() -> Any:
    """Arguments, as --example wants them."""
    return (torch.zeros(5, 4),), {"scale": torch.ones(5, 1)}


class Lonely(nn.Module):
    """Fails in a pipeline's worker, and nowhere else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if threading.current_thread().name.startswith("penstock"):
            raise ArithmeticError("no company wanted")
        return x * 1.0


def lonely() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), Lonely(), nn.Linear(4, 4))


def unstable() -> nn.Module:
    """A model that no split can reproduce."""
    from tests.pipeline.test_exactness import Counting

    return nn.Sequential(nn.Linear(4, 4), Counting(), nn.Linear(4, 4))


def squared(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def broken_loss(output: torch.Tensor) -> torch.Tensor:
    raise ValueError("no loss today")


def broken_model() -> nn.Module:
    raise LookupError("no weights today")


def patient_model() -> nn.Module:
    """Takes its time, so that somebody can lose patience."""
    print("working", file=sys.stderr, flush=True)
    time.sleep(60)
    return small()


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


# -- inspect ------------------------------------------------------------------------------


def test_inspect() -> None:
    result = run("inspect", *SMALL)
    assert result.exit_code == 0, result.output
    heading, root, first, *_, summary = result.stdout.splitlines()
    assert heading.split() == ["module", "class", "calls", "weights", "share", "time", "enters"]
    assert root.split()[:6] == ["Sequential", "Sequential", "3", "160", "B", "100%"]
    assert first.split()[:7] == ["├", "0", "Linear", "1", "80", "B", "50%"]
    assert summary.startswith("Sequential: 3 calls, 40 parameters, 2 possible cuts, captured in ")
    assert summary.endswith("evaluation runs the same program")
    assert "profiling 6 rows" in result.stderr


def test_inspect_call_by_call() -> None:
    result = run("inspect", *SMALL, "--calls", "--no-time")
    heading, first, *_ = result.stdout.splitlines()
    assert heading.split()[:5] == ["call", "what", "parameters", "weights", "cut"]
    assert first.split() == ["0", "0", "20", "80", "B", "96", "B", "float32[Bx4]"]
    assert result.stderr == ""


def test_inspect_as_json() -> None:
    data = json.loads(run("inspect", *SMALL, "--json").stdout)
    assert all(row["seconds"] > 0 for row in data["rows"])
    assert [row["label"] for row in data["rows"]] == ["0", "1", "2"]
    assert [row["parameters"] for row in data["rows"]] == [20, 0, 20]
    assert [row["cut_bytes"] for row in data["rows"]] == [96, 96, None]
    assert (data["batch_size"], data["possible_cuts"]) == (6, 2)
    assert data["same_in_eval"] is True
    assert data["closed"] == {}
    assert data["capture_seconds"] > 0


@pytest.mark.parametrize(
    "given", [["--input", "5x4", "--input", "scale=5x1"], ["--example", f"{HERE}:example"]]
)
def test_inspect_marks_what_is_special(given: list[str]) -> None:
    result = run("inspect", f"{HERE}:Scaled", *given, "--json")
    data = json.loads(result.stdout)
    rows = {row["label"]: row for row in data["rows"]}
    assert data["batch_size"] == 5
    assert [label for label, row in rows.items() if row["random"]] == ["dropout"]
    assert [label for label, row in rows.items() if row["in_place"]] == ["relu"]
    assert rows["relu"]["cut_bytes"] == 5 * 4 * 4 + 5 * 4  # the hidden values and the scale
    assert data["differences"] == ["draws no random numbers in 1 call: dropout"]
    text = run("inspect", f"{HERE}:Scaled", *given).stdout
    assert "evaluation: draws no random numbers in 1 call: dropout" in text


def test_inspect_says_why_modules_are_closed() -> None:
    result = run("inspect", f"{HERE}:unrecordable", "--input", "6x4")
    assert "closed: 1: " in result.stdout
    assert "6 possible" not in result.stdout


class Peeking(nn.Module):
    """Python reads a value that depends on the input, so nobody can look inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(x) if x.sum() > 0 else self.inner(-x)
        return result


def unrecordable() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), Peeking(), nn.Linear(4, 4))


def test_evaluation_that_leaves_calls_out() -> None:
    class Auxiliary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.main, self.extra, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.norm(self.main(x))
            return y + self.extra(x) if self.training else y

    explanation = ps.capture(Auxiliary(), (torch.randn(6, 4),)).explain()
    assert explanation.differences == (
        "does not make 2 calls: extra, add()",
        "leaves alone 3 buffers that training changes",
    )
    assert not explanation.same_in_eval


# -- verify -------------------------------------------------------------------------------


def test_verify() -> None:
    result = run("verify", *SMALL, "--microbatches", "3", *IN_STAGES, "--devices", "cpu,cpu,cpu")
    assert result.exit_code == 0, result.output
    assert "Sequential in 3 stages, 3 micro-batches" in result.stdout
    assert "exact" in result.stdout
    assert "mean of the squares" in result.stderr
    assert "mean of the squares" not in result.stdout


def test_verify_with_a_loss_and_a_target() -> None:
    result = run("verify", *SMALL, "--loss", f"{HERE}:squared", "--target", "6x4", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["ok"] is True
    assert "mean of the squares" not in result.stderr


def test_verify_with_an_optimizer_clipping_and_a_sum() -> None:
    options = ("--optimizer", "AdamW", "--lr", "0.01", "--clip", "0.1", "--weight", "sum")
    result = run("verify", *SMALL, *options, "--recompute", "all", *IN_STAGES, *TWO)
    assert result.exit_code == 0, result.output
    assert "AdamW, recomputing in 2 of them, gradients clipped to 0.1: exact" in result.stdout
    assert "norms of the gradients: 3 compared" in result.stdout
    named = ("--optimizer", "torch.optim:Adagrad", "--weight", "builtins:len")
    given = ("--loss", f"{HERE}:squared", "--target", "6x4", "--json")
    result = run("verify", *SMALL, *named, *given)
    assert result.exit_code == 0, result.output
    assert "Adagrad" in json.loads(result.stdout)["subject"]


def test_verify_with_batchnorm_and_rounded_boundaries() -> None:
    result = run("verify", *SMALL, "--batchnorm", "deferred", *IN_STAGES, *TWO)
    assert result.exit_code == 0, result.output
    assert "BatchNorm deferred: exact" in result.stdout
    result = run("verify", *SMALL, "--boundary-dtype", "float16", *IN_STAGES, *TWO)
    assert result.exit_code == 1
    assert "boundaries in float16: NOT exact" in result.stdout
    assert "which changes results by design" in result.stdout


def test_verify_that_fails() -> None:
    result = run("verify", f"{HERE}:unstable", "--input", "6x4", "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert found["ok"] is False
    assert found["workers"] == "threads"
    assert found["place"]["microbatch"] == 0
    assert "it arises in stage" in run("verify", f"{HERE}:unstable", "--input", "6x4").stdout


def test_a_loss_that_is_a_class() -> None:
    result = run("verify", *SMALL, "--loss", "torch.nn:MSELoss", "--target", "6x4")
    assert result.exit_code == 0, result.output


# -- bench --------------------------------------------------------------------------------


def test_bench(tmp_path: Path) -> None:
    result = run("bench", *SMALL, "--quick", "--output", str(tmp_path), "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data == json.loads((tmp_path / "bench.json").read_text())
    assert data["settings"]["model"] == SMALL[0]
    assert "keeps freed memory" in result.stderr
    assert "figures and raw times are in" in result.stderr
    assert {p.name for p in tmp_path.iterdir()} == {"bars.png", "sweep.png", "bench.json"}


# -- mistakes -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["inspect", "nowhere", "--input", "2x2"], 2, "write package.module:callable"),
        (["inspect", "torch.nn:Linearr", "--input", "2x2"], 2, "has no 'Linearr'"),
        (["inspect", "no.such:thing", "--input", "2x2"], 2, "no module"),
        (["inspect", f"{HERE}:broken_model", "--input", "2x2"], 2, "no weights today"),
        (["inspect", "torch.nn:Linear", "--input", "2x2"], 2, "raised TypeError"),
        (["inspect", SMALL[0]], 2, "needs an example"),
        (["inspect", SMALL[0], "--input", "2xx"], 2, "is not an input"),
        (["inspect", *SMALL, "--example", f"{HERE}:example"], 2, "give one"),
        (["inspect", SMALL[0], "--input", "a=2x4", "--input", "a=2x4"], 2, "given before"),
        (["inspect", SMALL[0], "--example", f"{HERE}:small"], 2, "must return a tuple"),
        (["inspect", SMALL[0], "--input", "6x5"], 1, "the forward of Sequential raised"),
        (["plan", *SMALL, "--devices", "cpu,tpu"], 2, "'tpu' is not a device"),
        (["plan", *SMALL, "--schedule", "best"], 2, "choose naive, gpipe"),
        (["plan", *SMALL, "--microbatches", "many"], 2, "neither a number"),
        (["plan", *SMALL, "--microbatches", "7"], 2, "choose between 1 and 6"),
        (["plan", *SMALL, *IN_STAGES, "--devices", "cpu,cpu,cpu,cpu"], 1, "3 at most"),
        (["verify", *SMALL, "--target", "6x4"], 2, "needs a --loss"),
        (["verify", *SMALL, "--loss", "torch.nn:MSELoss", "--target", "y=6x4"], 2, "leave out y="),
        (["verify", *SMALL, "--loss", f"{HERE}:broken_loss"], 2, "ValueError: no loss today"),
        (["verify", *SMALL, "--loss", f"{HERE}:PENSTOCK"], 2, "cannot be called"),
        (["verify", *SMALL, "--optimizer", "Adam2"], 2, "give one of torch.optim (ASGD, "),
        (["verify", *SMALL, "--optimizer", "LBFGS"], 2, "LBFGS evaluates the model"),
        (["verify", *SMALL, "--clip", "-1"], 2, "must be greater than 0"),
        (["verify", *SMALL, "--weight", "tokens"], 2, "neither rows nor sum"),
        (["verify", *SMALL, "--weight", f"{HERE}:PENSTOCK"], 2, "cannot be called"),
        (["bench", "--loss", f"{HERE}:squared"], 2, "--loss needs a MODEL"),
        (["bench", *SMALL, "--devices", "cpu"], 2, "two devices at least"),
        (["bench", "rpc", "--devices", "cpu,cpu"], 2, "takes no input"),
        (["bench", "data-parallel", "--seed", "1"], 2, "--seed 1: `penstock bench data-parallel`"),
        (["inspect"], 2, "Missing argument"),
        (["inspectt"], 2, "No such command"),
    ],
)
def test_mistakes(arguments: list[str], code: int, words: str) -> None:
    if arguments[0] == "bench":
        arguments = [*arguments, "--output", os.devnull + "-nothing"]
    result = run(*arguments)
    assert result.exit_code == code, result.output
    assert words in result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr


def test_a_worker_that_fails_says_where() -> None:
    arguments = ("verify", f"{HERE}:lonely", "--input", "6x4", *TWO, *IN_STAGES)
    result = run(*arguments)
    assert result.exit_code == 1
    assert "failed in the forward of micro-batch 0: ArithmeticError: no company" in result.stderr
    assert 'in forward: raise ArithmeticError("no company wanted")' in result.stderr
    assert "Traceback" not in result.stderr
    full = run(*arguments, "--traceback").stderr
    assert "Traceback" in full
    assert "WorkerError" in full


# -- small parts --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "args", "keywords"),
    [
        (torch.zeros(3), 1, []),  # not three arguments
        ((torch.zeros(3), torch.zeros(3)), 2, []),
        ([torch.zeros(3)], 1, []),
        ({"x": torch.zeros(3)}, 0, ["x"]),
        (((torch.zeros(3),), {"y": torch.zeros(3)}), 1, ["y"]),
        ((torch.zeros(3), {"y": torch.zeros(3)}), 2, []),  # the second argument is a dict
    ],
)
def test_what_an_example_may_return(value: Any, args: int, keywords: list[str]) -> None:
    found = as_inputs("m:f", value)
    assert (len(found[0]), list(found[1])) == (args, keywords)


def test_default_devices_are_two_at_least() -> None:
    assert len(device_list(None)) >= 2
    assert device_list("cpu, cpu,cpu") == ["cpu"] * 3


def test_json_is_strict(capsys: pytest.CaptureFixture[str]) -> None:
    show({"a": [math.inf, 1.5], "b": (math.nan, {"c": 2})}, "", as_json=True)
    assert json.loads(capsys.readouterr().out) == {"a": [None, 1.5], "b": [None, {"c": 2}]}


# -- as a program -------------------------------------------------------------------------


def test_help_imports_no_torch_whatever_the_command() -> None:
    """A shell that completes, and a person who looks something up, do not wait for torch."""
    code = (
        "import sys; from click.testing import CliRunner; from penstock.cli import main, _COMMANDS;"
        "assert 'torch' not in sys.modules\n"
        "for command in [[], *([c] for c in _COMMANDS)]:\n"
        "    result = CliRunner().invoke(main, [*command, '--help'])\n"
        "    assert result.exit_code == 0 and 'Usage' in result.output, result.output\n"
        "print(sorted({'torch', 'numpy', 'rich', 'matplotlib'} & set(sys.modules)))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert run.stdout.strip() == "[]"


def test_every_option_is_explained() -> None:
    for name in main.list_commands(click.Context(main)):
        command = main.get_command(click.Context(main), name)
        assert command is not None
        assert command.help
        for option in command.params:
            if isinstance(option, click.Option) and option.name != "microbatches":
                assert option.help, f"{name} --{option.name}"


def test_as_a_program_with_nobody_at_the_terminal() -> None:
    arguments = [PENSTOCK, "verify", *SMALL, "--devices", "cpu,cpu", "--json"]
    result = subprocess.run(arguments, capture_output=True, text=True, check=False, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["ok"] is True
    assert "0/1  recording what Sequential does\n" in result.stderr
    assert "\x1b" not in result.stdout + result.stderr


def test_exit_codes_as_a_program() -> None:
    arguments = [PENSTOCK, "inspect", "torch.nn:Nothing", "--input", "2x2"]
    result = subprocess.run(arguments, capture_output=True, text=True, check=False, cwd=ROOT)
    assert result.returncode == 2
    assert result.stderr.startswith("error: 'torch.nn:Nothing': torch.nn has no 'Nothing'")
    assert result.stdout == ""


def test_ctrl_c() -> None:
    process = subprocess.Popen(
        [PENSTOCK, "inspect", f"{HERE}:patient_model", "--input", "6x4"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stderr is not None
    assert process.stderr.readline() == "working\n"
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert stderr == "interrupted\n"
    assert stdout == ""
