"""Plain PyTorch models, each cut into two and four stages; a few of the libraries' models."""

from __future__ import annotations

import pytest

from penstock.capture.recorder import Recorder
from penstock.capture.recordings import _Recording
from tests.zoo.check import check
from tests.zoo.entry import Entry
from tests.zoo.plain_models import entries
from tests.zoo.pool import entries as all_entries

PLAIN = {entry.name: entry for entry in entries()}
CLOSED = {
    "Recurrent": ("packed", "more than a yes or no"),
    "Experts": ("mixture", "asks for the size of a tensor that depends on values"),
    "Scripted": ("middle", "torch.jit"),
    "Compiled": ("middle", "torch.compile"),
    "ByValue": ("inner", "depends on a parameter"),
}
QUICK = {
    "torchvision": ["squeezenet1_1"],
    "transformers": ["LlamaForCausalLM", "GPT2LMHeadModel without labels", "BertForMaskedLM"],
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PLAIN)
def test_plain_models_are_exact(name: str) -> None:
    result = check(PLAIN[name], everything=False)
    assert result.status == "exact", result.line
    if name in CLOSED:
        path, why = CLOSED[name]
        assert list(result.closed) == [path]
        assert why in result.closed[path]


ON_REPLICAS = ("Recurrent", "Experts", "Normed", "Stored")
"""Of those that run by default: lengths, choices by value, statistics, tensors in attributes."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in ON_REPLICAS else [pytest.mark.slow]) for n in PLAIN],
)
def test_plain_models_are_exact_on_replicas(name: str) -> None:
    result = check(PLAIN[name], replicas=(2, 3))
    assert result.status in ("exact", "coarse"), result.line
    assert [words.split()[0] for words in result.ran[:2]] == ["2", "3"]


def test_no_two_have_the_same_name() -> None:
    assert len(PLAIN) == len(entries())


def test_a_wrong_capture_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recorder, "_check_sizes", lambda *_: None)
    monkeypatch.setattr(_Recording, "has_seen", lambda *_: True)
    assert check(PLAIN["Experts"], everything=False).status == "wrong"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", QUICK)
def test_some_of_the_libraries(family: str) -> None:
    found: dict[str, Entry] = {entry.name: entry for entry in all_entries([family])}
    for name in QUICK[family]:
        result = check(found[name], everything=False)
        assert result.status == "exact", f"{name}: {result.line}"
