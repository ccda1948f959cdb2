"""The table of what stays exact: a difference is found, and an error is told in a few words."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from penstock.bench.cases.case import CASES, Case
from penstock.bench.cases.trainers import OneDevice, Penstock
from penstock.bench.contract import (
    OTHERS,
    OURS,
    Contenders,
    Verdict,
    as_data,
    as_markdown,
    compared,
    in_a_few_words,
    run,
)
from penstock.bench.peers.peer import PeerError

BY_NAME = {case.name: case for case in CASES}


def test_cases_have_names_of_their_own() -> None:
    assert len(BY_NAME) == len(CASES) == len({case.title for case in CASES})


def test_penstock_is_exact_and_another_accumulation_is_not() -> None:
    case = BY_NAME["uneven_microbatches"]
    expected = run(case, OneDevice)
    assert compared(run(case, Penstock), expected).is_exact
    fewer = dataclasses.replace(case, setup=dataclasses.replace(case.setup, microbatches=2))
    verdict = compared(run(fewer, Penstock), expected)
    assert not verdict.is_exact
    assert str(verdict).startswith("differs by ")


QUICK = ("uneven_microbatches", "fewer_microbatches_than_stages", "evaluation", "loss_scaling")


@pytest.mark.usefixtures("pool", "one_thread")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("case", "name"),
    [
        pytest.param(
            *(case, name),
            id=f"{case}-{number}",
            marks=[] if case in QUICK and number == 2 else [pytest.mark.slow],
        )
        for case in BY_NAME
        for number, name in enumerate(OURS)
    ],
)
def test_every_case_is_exact(case: str, name: str) -> None:
    verdict = Contenders().verdict(BY_NAME[case], name)
    assert verdict.is_exact, verdict


def test_what_is_compared() -> None:
    whole: dict[str, Any] = {"a": torch.zeros(2), "count": torch.tensor(4)}
    assert compared(whole, whole).is_exact
    other = {"a": torch.tensor([0.0, 1e-3]), "count": torch.tensor(9)}
    assert str(compared(other, whole)) == "differs by 1.0e-03 (a)"
    assert str(compared({**whole, "count": torch.tensor(9)}, whole)) == "differs by 5.0e+00 (count)"
    for changed in ({"count": whole["count"]}, {**whole, "b": torch.ones(1)}):
        assert "missing" in str(compared(changed, whole))


def test_the_reference_is_plain_and_no_case_is_made_to_fail() -> None:
    """It shares nothing with Penstock, and everybody is asked the same in the same way."""
    assert not set(vars(OneDevice)) & {"_norms", "_pipe"}
    assert {field.name for field in dataclasses.fields(Case)} == {"script", "setup", "without"}
    assert not any("default" in case.title or "by hand" in case.title for case in CASES)
    assert not any(set(dict(case.without)) & set(OURS) for case in CASES)


def test_what_does_not_apply_is_not_counted() -> None:
    verdicts = {name: Verdict(0.0) for name in (*OURS, *OTHERS)}
    alone = BY_NAME["fewer_microbatches_than_stages"]
    verdicts[OTHERS[1]] = Contenders().verdict(alone, OTHERS[1])
    page = as_markdown({CASES[0]: verdicts})
    assert "does not apply: one micro-batch is not shared" in page
    assert "data parallelism 0 of 0" in page


def test_errors_in_a_few_words() -> None:
    error = PeerError("all that was said", "ValueError: not this way")
    assert in_a_few_words(error) == "ValueError: not this way"
    assert in_a_few_words(KeyError("k")) == "KeyError: 'k'"
    assert len(in_a_few_words(ValueError("long " * 1000))) < 1000


def test_the_page() -> None:
    verdicts = {name: Verdict(0.0) for name in (*OURS[:1], *OTHERS)}
    verdicts[OTHERS[0]] = Verdict(reason="not supported: it | is not")
    results = {CASES[0]: verdicts}
    page = as_markdown(results)
    assert "| **exact** | not supported: it \\| is not | **exact** |" in page
    assert "Penstock 1 of 1; torch.distributed.pipelining 0 of 1; data parallelism 1 of 1" in page
    assert as_data(results)["cases"][0]["results"]["Penstock"]["exact"] is True
