"""What the zoo says: outcomes by model, pieces of a run, and a commit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import penstock as ps
from tests.zoo import __main__ as zoo
from tests.zoo import check as checking
from tests.zoo.check import Result, check
from tests.zoo.entry import Entry, Inputs


class Small(nn.Module):
    """Four layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Odd(Small):
    """Gives NaN in places."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = super().forward(x)
        return {"y": y, "nan": (y.detach() * 0) / (y.detach() * 0)}


class Detached(Small):
    """Has no gradients."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).detach()


class Slots(Small):
    """Draws random numbers in evaluation, too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + torch.randn_like(x))


def inputs(rows: int) -> Inputs:
    return (torch.randn(rows, 4),), {}


def entry(build: type[nn.Module] = Small, name: str = "Small") -> Entry:
    return Entry(name, "plain", build, inputs)


def raises(error: Exception) -> type[nn.Module]:
    """A class of models that cannot be built."""

    class Fails(Small):
        def __init__(self) -> None:
            raise error

    return Fails


def test_what_is_run_is_said_and_it_is_pipelining() -> None:
    """A quarter runs in processes, a quarter on the automatic plan."""
    ran = [words for k in range(8) for words in check(entry(name=f"number {k}")).ran]
    assert all("m=" in words for words in ran)
    assert not any("gpipe" in words for words in ran if "automatic" not in words)
    assert any("processes" in words for words in ran)
    assert any("automatic plan" in words for words in ran)
    assert any("4 stages" in words for words in ran)


def test_three_outcomes_of_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    def outcome(error: Exception) -> str:
        def capture(*_: object, **__: object) -> ps.Program:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(ps, "capture", capture)
            return check(entry()).status

    assert outcome(ps.CaptureError("it cannot be cut")) == "refused"
    assert outcome(ps.InputError("it has no rows")) == "refused"
    assert outcome(KeyError("call")) == "crash"
    assert outcome(AssertionError("the model's own")) == "crash"
    assert outcome(checking.WrongError("differs")) == "wrong"


def test_why_models_do_not_run() -> None:
    assert check(entry(raises(ImportError("no such package")))).status == "cannot be built"
    assert check(Entry("x", "plain", Small, lambda n: ((), {}))).status == "no input form"
    assert check(entry(Detached)).status == "does not train"


def test_what_draws_in_evaluation_is_compared_with_the_same_draws() -> None:
    assert check(entry(Slots), everything=False).status == "exact"


def test_a_nan_is_compared_as_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check(entry(Odd), everything=False).status == "exact"
    evaluate = checking._evaluate

    def other(*arguments: object) -> list[object]:
        found = evaluate(*arguments)  # type: ignore[arg-type]
        found[0]["nan"][0, 0] = 0.0
        return found

    monkeypatch.setattr(checking, "_evaluate", other)
    result = check(entry(Odd), everything=False)
    assert result.status == "wrong"
    assert "evaluation" in result.line


def test_a_model_is_counted_once_by_what_is_worst() -> None:
    results = [
        Result("A", "plain", "exact", model="A"),
        Result("A without labels", "plain", "coarse", model="A"),
        Result("B", "plain", "no input form", model="B"),
        Result("B with pictures", "plain", "exact", model="B"),
        Result("C", "plain", "crash", model="C", line="KeyError: a | b", commit="0123"),
    ]
    assert zoo.by_model(results) == {"A": "coarse", "B": "exact", "C": "crash"}
    page = zoo.markdown(results)
    rows = page.splitlines()
    head = next(k for k, row in enumerate(rows) if row.startswith("| family"))
    assert rows[head].count("|") == rows[head + 1].count("|")
    assert "| plain | 3 | 1 | 1 | 0 | 1 | 0 | 0 | 0 | 0 |" in page
    assert "at commit 0123" in page
    assert "| C | plain | crash | KeyError: a \\| b |" in page
    assert "Written by `python -m tests.zoo --replicas 2`" in zoo.markdown(results, [2])


def test_a_page_says_whose_models_it_counts():
    """Those of other authors alone are another page, whose commits are listed."""
    own = [Result("resnet18", "timm", "exact", commit="b"), Result("mlp", "plain", "exact")]
    others = [Result("UNet", "monai", "exact", commit="b"), Result("VAE", "diffusers", "exact")]
    assert zoo.markdown(own).startswith("# The zoo\n\nWritten by `make zoo`, at commit b.")
    others[1].commit = "a"
    page = zoo.markdown(others)
    assert page.startswith("# The zoo: models of other authors\n")
    assert "at commits a, b." in page


def test_a_page_says_how_torchaudio_was_installed() -> None:
    found = [Result("Conformer", "torchaudio", "exact")]
    assert "without its compiled libraries" in zoo.markdown(found)
    assert "compiled libraries" not in zoo.markdown([Result("UNet", "monai", "exact")])


def test_on_replicas() -> None:
    found = check(entry(), replicas=[2, 3])
    assert found.ran == [
        f"{r} replicas of {p}, m=3" for p in ("1 stage", "2 stages") for r in (2, 3)
    ]


def test_a_run_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def run(
        found: list[Entry], jobs: int, note: object, replicas: object, device: str
    ) -> list[Result]:
        results = [Result(e.name, e.family, "exact", model=e.counted) for e in found]
        for result in results:
            asked.append(result.name)
            note(result)  # type: ignore[operator]
        return results

    def command(*options: str) -> int:
        asked.clear()
        monkeypatch.setattr("sys.argv", ["zoo", "--output", str(tmp_path / "zoo"), *options])
        return zoo.main()

    found = [entry(name=f"m{k}") for k in range(10)]
    monkeypatch.setattr(zoo, "entries", lambda families: found)
    monkeypatch.setattr(zoo, "run", run)
    monkeypatch.setattr(zoo, "commit", lambda: "abc")
    assert command("--limit", "4") == 0
    assert asked == ["m0", "m1", "m2", "m3"]
    command()
    assert asked == ["m4", "m5", "m6", "m7", "m8", "m9"]
    command()
    assert asked == []
    command("--only", "m3", "--again")
    assert asked == ["m3"]
    shares = []
    for k in (1, 2, 3):
        command("--again", "--share", f"{k}/3")
        shares += asked
    assert sorted(shares) == [f"m{k}" for k in range(10)]
    monkeypatch.setattr(zoo, "commit", lambda: "def")
    command()
    assert len(asked) == 10
    data = json.loads((tmp_path / "zoo.json").read_text())
    assert {each["commit"] for each in data} == {"def"}
    with (tmp_path / "zoo.jsonl").open("a") as file:
        file.write('{"name": "m0", "fam')  # killed as it was writing
    command()
    assert asked == []


@pytest.mark.parametrize("status", ["wrong", "crash"])
def test_the_exit_code(status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(
        found: list[Entry], jobs: int, note: object, replicas: object, device: str
    ) -> list[Result]:
        return [Result("a", "plain", status)]

    monkeypatch.setattr(zoo, "entries", lambda families: [entry()])
    monkeypatch.setattr(zoo, "run", run)
    monkeypatch.setattr("sys.argv", ["zoo"])
    assert zoo.main() == 1


class Pairs(Small):
    """Takes two entries for each row."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.reshape(-1, 2, 4).sum(1))


def test_several_entries_for_each_row() -> None:
    several = Entry("Pairs", "plain", Pairs, lambda rows: inputs(2 * rows), batch_dim={0: (0, 2)})
    result = check(several, everything=False)
    assert (result.status, result.stages) == ("exact", [2, 4])
