"""What a group's `generate` does to the model, its parts and its settings stays with the group."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import penstock as ps
from penstock.generation.seeds import seed_of
from penstock.generation.stand_in import stand_in
from tests.generation.subjects import expected, gpt2, llama, pipeline, tokens


@pytest.mark.parametrize("in_settings", [False, True])
def test_early_exits_are_refused_before_anything_changes(in_settings: bool) -> None:
    """Groups would draft with each other's number of layers, which would be left in the model."""
    model = llama()
    options: dict[str, Any] = {"assistant_early_exit": 1}
    if in_settings:
        model.generation_config.assistant_early_exit, options = 1, {}
    with (
        pipeline(model) as pipe,
        pytest.raises(ps.InputError, match="assistant_early_exit=1 has generate"),
    ):
        pipe.generate(tokens(2), group_size=1, max_new_tokens=6, **options)
    assert model.config.num_hidden_layers == 3


def test_another_attention_is_refused() -> None:
    with (
        pipeline(gpt2()) as pipe,
        pytest.raises(ps.InputError, match="cache_implementation='paged' has generate"),
    ):
        pipe.generate(tokens(2), cache_implementation="paged", max_new_tokens=2)


def test_the_implementation_of_experts_is_not_changed_for_decoding() -> None:
    """transformers does so on GPUs, in the configuration."""
    model = gpt2()
    model._optimize_model_for_decode = lambda: pytest.fail("it was changed")
    made: Any = stand_in(model, lambda: None, lambda name: None)
    with made._optimize_model_for_decode():
        pass
    assert isinstance(made._optimize_model_for_decode(), nullcontext)


def test_what_drafting_leaves_does_not_reach_other_groups() -> None:
    """Each begins with the number of drafts that the assistant's settings have."""
    model, assistant, ids = gpt2(), gpt2(seed=1), tokens(3)
    assistant.generation_config.num_assistant_tokens_schedule = "heuristic"
    assistant.generation_config.num_assistant_tokens = 4
    options: dict[str, Any] = {"do_sample": True, "max_new_tokens": 12}
    with pipeline(model) as pipe:
        found = pipe.generate(list(ids), assistant_model=assistant, in_flight=1, seed=2, **options)
    assert assistant.generation_config.num_assistant_tokens == 4
    for k, row in enumerate(ids.split(1)):
        fresh = {**options, "seed": seed_of(2, k), "assistant_model": copy.deepcopy(assistant)}
        assert torch.equal(found[k], expected(model, [row], **fresh)[0])
