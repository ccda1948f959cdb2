"""Lists of prompts with other tensors, streams of what cannot be streamed, errors that are told."""

from __future__ import annotations

import functools
from itertools import count
from typing import Any

import pytest
import torch
import transformers

import penstock as ps
from tests.generation.subjects import expected, gpt2, pipeline, t5, tokens


def test_a_size_of_groups_is_not_for_prompts_of_any_lengths() -> None:
    with pipeline(gpt2()) as pipe:
        with pytest.raises(ps.InputError, match="group_size=2 asks for larger ones"):
            pipe.generate(list(tokens()), group_size=2, max_new_tokens=2)
        assert len(pipe.generate(list(tokens()), group_size=1, max_new_tokens=2)) == 4


def test_each_prompt_gets_its_part_of_other_tensors() -> None:
    model, ids = t5(), tokens(3, 5)
    given = torch.tensor([[0, 5], [0, 6], [0, 7]])
    with pipeline(model) as pipe:
        found = pipe.generate(
            list(ids),
            decoder_input_ids=given,
            eos_token_id=torch.tensor([2, 3, 4]),  # a setting is of all of them
            max_new_tokens=4,
        )
    for row in range(3):
        group = {"input_ids": ids[row : row + 1], "decoder_input_ids": given[row : row + 1]}
        (wanted,) = expected(model, [group], eos_token_id=[2, 3, 4], max_new_tokens=4)
        assert torch.equal(found[row], wanted)


def test_pictures_of_nobody_knows_which_prompt_are_refused() -> None:
    with (
        pipeline(gpt2()) as pipe,
        pytest.raises(ps.InputError, match="has 5 entries, and there are 4 sequences"),
    ):
        pipe.generate(list(tokens()), pixel_values=torch.ones(5, 3), max_new_tokens=2)


@pytest.mark.parametrize("as_list", [False, True])
def test_beams_cannot_be_streamed(as_list: bool) -> None:
    model, ids = gpt2(), tokens(1)
    given: Any = list(ids) if as_list else ids
    with pipeline(model) as pipe:
        with pytest.raises(ps.InputError, match="stream=True gives tokens as they come, and with "):
            pipe.generate(given, stream=True, num_beams=3, max_new_tokens=2)
        with pytest.raises(ps.InputError, match=r"streamer= gives .* num_beams=3 nobody knows"):
            pipe.generate(given, streamer=Ignoring(), num_beams=3, max_new_tokens=2)
        model.generation_config.num_beams = 2
        with pytest.raises(ps.InputError, match="num_beams=2, as the generation config says,"):
            pipe.generate(given, stream=True, max_new_tokens=2)
        config = transformers.GenerationConfig(num_beams=4, max_new_tokens=2)
        with pytest.raises(ps.InputError, match="num_beams=4, as the generation config says,"):
            pipe.generate(given, generation_config=config, stream=True)
        assert list(pipe.generate(given, stream=True, num_beams=1, max_new_tokens=2))


class Ignoring:
    """A streamer."""

    def put(self, value: torch.Tensor) -> None:
        """Take a value."""

    def end(self) -> None:
        """Nothing more comes."""


@pytest.mark.parametrize("as_list", [False, True])
def test_an_error_of_a_group_that_begins_again_is_raised(
    as_list: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States are lost once; as its group begins again, the model's `generate` fails."""
    model, ids = gpt2(), tokens(2)
    plain, begun = type(model).generate, count()

    @functools.wraps(plain)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        if next(begun) == 2:
            raise ZeroDivisionError("mine")
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(type(model), "generate", generate)
    with pipeline(model) as pipe:
        finish, finished = pipe._sessions.finish, count()

        def losing(done: Any) -> Any:
            result = finish(done)
            if next(finished) == 3:
                raise ps.StatesLost("they are gone")
            return result

        monkeypatch.setattr(pipe._sessions, "finish", losing)
        given: Any = list(ids) if as_list else ids
        with pytest.raises(ZeroDivisionError, match="mine"):
            pipe.generate(given, max_new_tokens=6, min_new_tokens=6)
