"""What goes into `generate` and comes out of it, as with the model's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import penstock as ps
from tests.generation.subjects import expected, gpt2, padded, pipeline, t5, tokens

ENDS = [7, 27]


def longest(model: Any, groups: list[Any], **options: Any) -> list[Any]:
    """What the model returns for each group, one of which ends earlier than another."""
    found = expected(model, groups, **options)
    lengths = {getattr(each, "sequences", each).shape[1] for each in found}
    assert len(lengths) > 1
    return found


def test_a_configuration_that_comes_second_counts_when_groups_are_joined() -> None:
    model, ids = gpt2(), tokens()
    config = transformers.GenerationConfig(pad_token_id=9, eos_token_id=ENDS, max_new_tokens=12)
    parts = longest(model, [ids[:2], ids[2:]], generation_config=config)
    with pipeline(model) as pipe:
        found = pipe.generate(ids, config)
    most = max(part.shape[1] for part in parts)
    pads = [torch.nn.functional.pad(p, (0, most - p.shape[1]), value=9) for p in parts]
    assert torch.equal(found, torch.cat(pads))


def test_steps_after_a_group_has_ended_have_no_scores() -> None:
    model, ids = gpt2(), tokens()
    options = {"max_new_tokens": 12, "eos_token_id": ENDS, "return_dict_in_generate": True}
    options |= {"output_scores": True, "output_hidden_states": True}
    parts = longest(model, [ids[:2], ids[2:]], **options)
    with pipeline(model) as pipe:
        found = pipe.generate(ids, group_size=2, **options)
    steps = max(len(part.scores) for part in parts)
    assert len(found.scores) == len(found.hidden_states) == steps
    for step, scores in enumerate(found.scores):
        for own, part in zip(scores.split(2), parts, strict=True):
            if step < len(part.scores):
                assert torch.equal(own, part.scores[step])
                (wanted,) = part.hidden_states[step][-1][:1]
                found_here = found.hidden_states[step][-1]
            else:
                assert own.isnan().all()
    assert wanted.shape[-1] == found_here.shape[-1]


@pytest.mark.parametrize("where", ["first", "by name"])
def test_a_configuration_asks_for_hidden_states(where: str) -> None:
    model, ids = gpt2(), tokens()
    config = transformers.GenerationConfig(
        max_new_tokens=4, output_hidden_states=True, return_dict_in_generate=True, eos_token_id=None
    )
    (wanted,) = expected(model, [ids], generation_config=config)
    hooks = [len(m._forward_hooks) for m in model.modules()]
    with pipeline(model) as pipe:
        given: Any = (ids, config) if where == "first" else (ids,)
        options = {} if where == "first" else {"generation_config": config}
        found = pipe.generate(*given, group_size=4, **options)
    for step, own in zip(wanted.hidden_states, found.hidden_states, strict=True):
        assert [torch.equal(a, b) for a, b in zip(step, own, strict=True)] == [True] * 5
    assert [len(m._forward_hooks) for m in model.modules()] == hooks  # which it had already


def test_prompts_in_a_list_may_be_named() -> None:
    model = gpt2()
    prompts = [tokens(1, length, seed=length) for length in (3, 5)]
    options: dict[str, Any] = {"max_new_tokens": 5, "eos_token_id": None}
    with pipeline(model) as pipe:
        found = pipe.generate(input_ids=prompts, **options)
        assert all(map(torch.equal, found, pipe.generate(prompts, **options)))


def test_what_an_encoder_has_made_is_enough() -> None:
    model, ids = t5(), tokens()
    with torch.no_grad():
        made = model.get_encoder()(ids)
    options: dict[str, Any] = {"max_new_tokens": 6}
    parts = [
        type(made)(last_hidden_state=made.last_hidden_state[a : a + 2]) for a in range(0, 4, 2)
    ]
    wanted = padded(expected(model, [{"encoder_outputs": each} for each in parts], **options))
    with pipeline(model) as pipe:
        assert torch.equal(pipe.generate(encoder_outputs=made, group_size=2, **options), wanted)


def test_settings_are_not_split_into_rows() -> None:
    """Where there are as many tokens that end a sequence as there are sequences."""
    model, ids = gpt2(), tokens()
    options = {"max_new_tokens": 12, "eos_token_id": torch.tensor([7, 27, 60, 61])}
    wanted = padded(expected(model, [ids[:2], ids[2:]], pad_token_id=0, **options))
    with pipeline(model) as pipe:
        found = pipe.generate(ids, group_size=2, pad_token_id=0, **options)
    assert torch.equal(found, wanted)


def test_every_sequence_may_begin_with_another_token() -> None:
    model, ids = t5(), tokens()
    starts = torch.tensor([0, 3, 4, 5])
    options: dict[str, Any] = {"max_new_tokens": 6}
    groups = [
        {"input_ids": ids[a : a + 2], "decoder_start_token_id": starts[a : a + 2]}
        for a in range(0, 4, 2)
    ]
    wanted = padded(expected(model, groups, **options))
    with pipeline(model) as pipe:
        found = pipe.generate(ids, decoder_start_token_id=starts, group_size=2, **options)
    assert torch.equal(found, wanted)


class Listener(transformers.generation.streamers.BaseStreamer):
    def __init__(self) -> None:
        self.got: list[list[int]] = []

    def put(self, value: torch.Tensor) -> None:
        self.got.append(value.reshape(-1).tolist())

    def end(self) -> None:
        self.got.append([])


def test_a_streamer_gets_one_group_or_none() -> None:
    model, ids = gpt2(), tokens()
    options: dict[str, Any] = {"max_new_tokens": 3, "eos_token_id": None}
    with pipeline(model) as pipe:
        with pytest.raises(ps.InputError, match=r"tokens of 2 groups.*group_size="):
            pipe.generate(ids, streamer=Listener(), **options)
        with pytest.raises(ps.InputError, match=r"stream=True and streamer= both"):
            pipe.generate(ids[:1], streamer=Listener(), stream=True, **options)
        ours, theirs = Listener(), Listener()
        pipe.generate(ids[:1], streamer=ours, **options)
    expected(model, [ids[:1]], streamer=theirs, **options)
    assert ours.got == theirs.got


def test_streamed_tokens_say_whose_they_are() -> None:
    model, ids = gpt2(), tokens(2)
    options = {"max_new_tokens": 4, "do_sample": True, "num_return_sequences": 3}
    with pipeline(model) as pipe:
        came = list(pipe.generate(ids, group_size=1, seed=0, stream=True, **options))
    assert {tuple(each.rows) for each in came} == {(0, 0, 0), (1, 1, 1)}
    assert all(len(each.rows) == len(each.tokens) for each in came)


def test_images_of_all_sequences_are_one_group() -> None:
    model, ids = gpt2(), tokens()
    with (
        pipeline(model) as pipe,
        pytest.raises(ps.InputError, match=r"pixel_values= has 6 entries.*group_size=4"),
    ):
        pipe.generate(ids, pixel_values=torch.ones(6, 3))


def test_a_static_cache_that_transformers_would_compile() -> None:
    model, ids = gpt2(), tokens()
    compiled = transformers.generation.configuration_utils.CompileConfig(backend="eager")
    compiled._compile_all_devices = True
    options: dict[str, Any] = {"max_new_tokens": 6, "cache_implementation": "static"}
    wanted = padded(expected(model, [ids[:2], ids[2:]], **options))
    with pipeline(model) as pipe:
        found = pipe.generate(ids, group_size=2, compile_config=compiled, **options)
    assert torch.equal(found, wanted)


def test_a_static_cache_with_padded_prompts_is_refused() -> None:
    ids = tokens()
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    options: dict[str, Any] = {"max_new_tokens": 4, "cache_implementation": "static"}
    with pipeline(gpt2()) as pipe:
        with pytest.raises(ps.InputError, match="cache_implementation='static'"):
            pipe.generate(ids, attention_mask=mask, **options)
        pipe.generate(ids, attention_mask=torch.ones_like(ids), **options)


def language_loss(output: Any, target: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(output["logits"].flatten(0, 1), target.flatten())


def test_verify_compares_the_sequences_of_outputs() -> None:
    report = ps.verify(
        gpt2(),
        kwargs={"input_ids": tokens()},
        loss_fn=language_loss,
        target=tokens(),
        devices=["cpu", "cpu"],
        generate={
            "input_ids": tokens(),
            "max_new_tokens": 4,
            "return_dict_in_generate": True,
            "in_flight": 1,
            "stream": False,
        },
    )
    assert any(c.what == "generated tokens" and c.ok for c in report.comparisons)
