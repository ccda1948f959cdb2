"""Training scripts as people write them, changed by a few lines, keep the bits of one device."""

from __future__ import annotations

import ast
from typing import Any

import pytest
import torch

from tests.ports.__main__ import PAGE, page, row
from tests.ports.running import (
    DRAWS,
    FOLDER,
    NEEDS,
    REPLICAS,
    SCRIPTS,
    STAGES,
    WHOLE,
    changed,
    diff,
    differences,
    plain,
    ported,
    reference,
)

QUICK = ("gan", "segmentation")  # `test_all_of_them` runs the others


@pytest.mark.parametrize("name", QUICK)
def test_a_ported_script_has_the_bits_of_one_device(name: str) -> None:
    run = ported(name, **STAGES)
    assert all(len(plan.stages) > 1 for plan in run.plans)
    expected = reference(name)
    assert differences(run.saved, expected.saved) == []
    assert run.printed == expected.printed


def test_with_one_microbatch_it_has_the_bits_of_the_plain_script() -> None:
    run, expected = ported("gan", count=1, **STAGES), plain("gan")
    assert differences(run.saved, expected.saved) == []
    assert run.printed == expected.printed


def test_on_replicas_in_processes() -> None:
    run = ported("segmentation", **REPLICAS, workers="processes")
    assert differences(run.saved, reference("segmentation").saved) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SCRIPTS)
def test_all_of_them(name: str) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    found = row(name)
    assert found.by_stages == ()
    assert found.by_replicas == ()
    assert found.by_plain == (None if name in DRAWS else ())
    assert (max(found.stages) > 1) == (name not in WHOLE)


def test_micro_batches_matter_to_what_is_compared() -> None:
    """Else a reference that ignored them would do as well."""
    assert differences(reference("segmentation").saved, plain("segmentation").saved)


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_page_shows_the_scripts_as_they_are(name: str) -> None:
    text = PAGE.read_text()
    assert "\n".join(["```diff", *diff(name), "```"]) in text
    added, removed = changed(name)
    assert f"| [{name}](#{name}): {SCRIPTS[name]} | +{added} -{removed} | **exact**" in text


@pytest.mark.parametrize("name", SCRIPTS)
def test_only_the_port_knows_penstock(name: str) -> None:
    imported = {
        alias.name
        for node in ast.walk(ast.parse((FOLDER / f"{name}.py").read_text()))
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    assert "torch" in imported
    assert "penstock" not in imported
    assert "+import penstock as ps" in diff(name)


@pytest.mark.parametrize(
    ("ours", "theirs", "places"),
    [
        ({"a": [torch.ones(2), 1]}, {"a": [torch.ones(2), 1]}, []),
        ({"a": [torch.ones(2), 1]}, {"a": [torch.zeros(2), 2]}, ["a[0]", "a[1]"]),
        ({"a": torch.ones(2)}, {"a": torch.ones(2).double()}, ["a"]),
        ({"a": 1}, {"b": 1}, [""]),
    ],
)
def test_differences(ours: Any, theirs: Any, places: list[str]) -> None:
    assert differences(ours, theirs) == places


def test_a_page_says_what_differs() -> None:
    at = {"commit": "abc", "torch": "2"}
    found = {"stages": [2], "by_stages": ["fc.weight", "b"], "by_replicas": [], "by_plain": None}
    text = page({"gan": {**found, "at": at}})
    assert "| differs in 2: fc.weight, 2 stages | **exact** | has dropout |" in text
