"""`Pipeline.generate` under torchrun: the same tokens on every rank, or the same error."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.generation import subjects
from tests.generation.ranks import HAS_PROMPTS, LONG, MODES, SCORED
from tests.generation.subjects import expected, gpt2, padded, tokens
from tests.workers.ranks.launching import Launcher


@functools.cache
def wanted(name: str) -> dict[str, Any]:
    """What the model itself generates."""
    model, ids = getattr(subjects, name)(), tokens(6, 5)
    groups = [ids[:2], ids[2:4], ids[4:]]
    found: dict[str, Any] = {
        mode: padded(expected(model, groups, seed=7, **options)) for mode, options in MODES.items()
    }
    if name in HAS_PROMPTS:
        prompts = [tokens(1, 3 + 2 * k, seed=k) for k in range(5)]
        found["prompts"] = expected(model, prompts, seed=3, do_sample=True, max_new_tokens=5)
    return found


@pytest.mark.parametrize(
    ("name", "stages", "replicas"),
    [
        ("llama", 2, 2),
        ("t5", 2, 1),
        pytest.param("gpt2", 3, 1, marks=pytest.mark.slow),
        pytest.param("gpt2", 1, 2, marks=pytest.mark.slow),
        pytest.param("mamba", 2, 1, marks=pytest.mark.slow),
    ],
)
def test_tokens_of_every_mode(
    launcher: Launcher, tmp_path: Path, name: str, stages: int, replicas: int
) -> None:
    ranks = launcher.run(f"generates:modes:{name}:{stages}:{replicas}", tmp_path, stages * replicas)
    for found in ranks:
        assert found.keys() == wanted(name).keys()
        for mode, those in wanted(name).items():
            if isinstance(those, list):
                assert all(map(torch.equal, found[mode], those)), mode
            else:
                assert torch.equal(found[mode], those), mode


def test_another_rank_than_the_first_leads(launcher: Launcher, tmp_path: Path) -> None:
    """The rank with the first stage does, and others need no arguments."""
    ids = tokens(4)
    wanted = padded(expected(gpt2(), [ids[:2], ids[2:]], **LONG))
    for leads, found, error in launcher.run("generates:from_another", tmp_path, 3):
        assert torch.equal(found, wanted)
        assert error == ("InputError", "there are no prompts in the list")
        assert leads == [False, True, False]


def test_a_tied_weight_goes_once(launcher: Launcher, tmp_path: Path) -> None:
    """For all tokens of a call, and for all micro-batches of a step."""
    model, ids = gpt2(), tokens(4)
    weight, wanted = model.transformer.wte.weight, []
    for _ in range(2):
        wanted.append(padded(expected(model, [ids[:2], ids[2:]], **LONG)))
        weight.data.copy_(weight.data.flip(0))
    for (first, second, trained), found in launcher.run("generates:tied", tmp_path):
        assert all(map(torch.equal, found, wanted))
        assert (first, second) in [(1, 1), (0, 0)]  # the rank with the last stage sends none
        assert trained <= 2  # and its gradients: one a micro-batch
    assert not torch.equal(*wanted)


def test_groups_do_not_wait_for_each_other(launcher: Launcher, tmp_path: Path) -> None:
    """The first stage begins with one group while the second is at the other one."""
    (first, found), (second, other) = launcher.run("generates:in_flight", tmp_path)
    assert len(first) == len(second) == 8
    pairs = zip(first[1:], second, strict=False)
    early = [begun < ended for (begun, _), (_, ended) in pairs]
    assert sum(early) >= 5, early
    assert torch.equal(found, 4**4 * tokens(2))
    assert torch.equal(found, other)


def test_dictionaries(launcher: Launcher, tmp_path: Path) -> None:
    """Other ranks get the shapes of a cache, whose elements stay where they are."""
    ids = tokens(4)
    groups = expected(gpt2(), [ids[:2], ids[2:]], **SCORED)
    (single,) = expected(gpt2(), [tokens(1)], **SCORED)
    for sequences, scores, alone, layers in launcher.run("generates:dictionaries", tmp_path):
        assert torch.equal(sequences, padded([each.sequences for each in groups]))  # type: ignore[attr-defined]
        steps = zip(*(each.scores for each in groups), strict=True)  # type: ignore[attr-defined]
        assert all(map(torch.equal, scores, map(torch.cat, steps)))
        assert torch.equal(alone, single.sequences)  # type: ignore[attr-defined]
        assert layers == [x.keys.shape for x in single.past_key_values.layers]  # type: ignore[attr-defined]


def test_tokens_as_they_come(launcher: Launcher, tmp_path: Path) -> None:
    """Every rank gets them, may leave the loop, and nothing stays with the workers."""
    ids = tokens(4)
    text = padded(expected(gpt2(), [ids[:2], ids[2:]], **LONG))
    ranks = launcher.run("generates:streamed", tmp_path)
    for rank, (whole, came, left, some, again, states) in enumerate(ranks):
        assert torch.equal(whole, text)
        assert torch.equal(again, text)
        streamed: dict[int, list[int]] = {}
        for rows, new in came:
            for row, token in zip(rows, new.tolist(), strict=True):
                streamed.setdefault(row, []).append(token)
        assert [streamed[row] for row in range(4)] == text[:, 7:].tolist()
        assert all(torch.equal(a, b) for a, (_, b) in zip(left, came, strict=False))
        assert len(left) == 3
        # Where the rank that leads leaves the loop, it ends for all; another one leaves alone.
        assert some == ([2, len(came)] if rank == 0 else [2, 2])
        assert states == 0


def test_errors_are_raised_by_all(launcher: Launcher, tmp_path: Path) -> None:
    """Those of the user's functions, of a stage, and of ranks that do different things."""
    ids = tokens(4)
    text = padded(expected(gpt2(), [ids[:2], ids[2:]], max_new_tokens=3))
    for found, later in launcher.run("generates:failing", tmp_path):
        mine, stage, none, apart = found
        assert mine == ("ZeroDivisionError", "mine")
        assert "index out of range" in stage[1]
        assert none[0] == "InputError"
        assert "there are no prompts" in none[1]
        assert apart[0] == "InputError"
        assert "all ranks must call the same methods" in apart[1]
        assert all(torch.equal(tokens, text) for tokens in later)


def test_another_method_between_two_tokens(launcher: Launcher, tmp_path: Path) -> None:
    """All ranks hear of it, and nothing of the loop that was left disturbs the next call."""
    ids = tokens(4)
    text = padded(expected(gpt2(), [ids[:2], ids[2:]], **LONG))
    for (kind, why), first, second in launcher.run("generates:left_apart", tmp_path):
        assert kind == "InputError"
        assert "all ranks must call the same methods" in why
        assert torch.equal(first, text)
        assert torch.equal(second, text)


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_training_goes_on(launcher: Launcher, tmp_path: Path, name: str) -> None:
    """The bits of steps alone; and scores of the weights that all ranks have by then."""
    ranks = launcher.run(f"generates:trained:{name}", tmp_path, 4 if name == "t5" else 2)
    for alone, between, texts, plain in ranks:
        assert all(torch.equal(alone[key], between[key]) for key in alone)
        model = getattr(subjects, name)()
        for text, state in zip(texts, plain, strict=True):
            model.load_state_dict(state)
            groups = list(tokens(2).split(1))
            steps = zip(*(each.scores for each in expected(model, groups, **SCORED)), strict=True)  # type: ignore[attr-defined]
            assert all(map(torch.equal, text.scores, map(torch.cat, steps)))
        assert len(texts) == 3


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_dies(launcher: Launcher, tmp_path: Path, victim: int) -> None:
    found = launcher.run(f"generates:killed:{victim}", tmp_path)
    assert found[victim] is None
    (kind, text), (after, _) = found[1 - victim]
    assert kind == "WorkerDied"
    assert f"rank {victim}" in text
    assert after == "ClosedError"


def test_other_calls_of_sessions_between_two_tokens(launcher: Launcher, tmp_path: Path) -> None:
    ids = tokens(4)
    text = padded(expected(gpt2(), [ids[:2], ids[2:]], **LONG))
    short = padded(expected(gpt2(), [ids[:1], ids[1:2]], max_new_tokens=3))
    with torch.no_grad():
        keys = gpt2()(input_ids=ids).past_key_values.layers[0].keys
    for came, (inner, fetched), again in launcher.run("generates:amid", tmp_path):
        assert torch.equal(inner, short)
        assert torch.equal(fetched, keys)
        assert torch.equal(again, text)
        assert sum(map(len, came)) == 4 * 6


def test_a_stage_that_fails_where_ways_are_new(launcher: Launcher, tmp_path: Path) -> None:
    ids = tokens(4)
    text = padded(expected(gpt2(), [ids[:2], ids[2:]], max_new_tokens=3))
    for error, found in launcher.run("generates:wrong_at_first", tmp_path):
        assert "index out of range" in error[1]
        assert torch.equal(found, text)
