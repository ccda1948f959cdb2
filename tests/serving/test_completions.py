"""What requests ask for, and what is wrong with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.generation.seeds import seed_of
from penstock.serving import Served
from penstock.serving.completions import Reader
from penstock.serving.plain import as_plain, prediction
from penstock.serving.refusal import Refusal
from tests.serving.models import CONTEXT, END, gpt2, letters, net, t5


@pytest.fixture(scope="module")
def reader() -> Reader:
    return Reader(Served.of((gpt2(), letters()), "gpt2"), 32)


@pytest.fixture(scope="module")
def without_tokenizer() -> Reader:
    return Reader(Served.of(gpt2(), "gpt2"), 32)


def error_of(reader: Reader, **body: Any) -> dict[str, Any]:
    with pytest.raises(Refusal) as found:
        reader.completion({"prompt": "ab", **body})
    error: dict[str, Any] = found.value.body["error"]
    return error


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ("ab", [[1, 2]]),
        (["a", "b"], [[1], [2]]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_prompts(reader: Reader, prompt: Any, tokens: Any) -> None:
    assert reader.completion({"prompt": prompt}).prompts == tokens


def test_sampling_is_what_generate_takes(reader: Reader) -> None:
    def arguments(**body: Any) -> Any:
        return reader.completion({"prompt": "ab", **body}).arguments

    assert arguments() == {}  # the model's own generation_config decides
    assert arguments(temperature=0, top_p=0.5) == {"do_sample": False}
    assert arguments(temperature=1e-300) == {"do_sample": False}  # logits / 1e-300 is infinite
    assert arguments(temperature=0.5) == {"do_sample": True, "temperature": 0.5}
    assert arguments(top_p=0.5, top_k=3) == {"do_sample": True, "top_p": 0.5, "top_k": 3}
    assert arguments(repetition_penalty=2) == {"repetition_penalty": 2.0}


def test_jobs(reader: Reader) -> None:
    asked = reader.completion({"prompt": ["ab", "c"], "max_tokens": 4, "stop": "x"})
    first, second = reader.jobs(asked, 7)
    assert (first.seed, second.seed) == (7, seed_of(7, 1))
    assert first.group.args[0].tolist() == [[1, 2]]
    assert first.group.kwargs["max_new_tokens"] == 4
    assert first.group.kwargs["pad_token_id"] == END
    for job, prompt in ((first, [1, 2]), (second, [3])):
        (stops,) = job.group.kwargs["stopping_criteria"]
        (x,) = letters()("x").input_ids
        assert stops(torch.tensor([[*prompt, 5]]), None).tolist() == [False]
        assert stops(torch.tensor([[*prompt, 5, x]]), None).tolist() == [True]
        assert stops(torch.tensor([[*prompt, 5]]), None).tolist() == [False]  # it begins again
    assert first.group.kwargs["num_beams"] == 1


def test_a_stop_text_ends_what_a_decoder_beside_an_encoder_generates() -> None:
    """The prompt is the encoder's, however long it is."""
    model: Any = t5()
    reader = Reader(Served.of((model, letters()), "t5"), 32)
    body = {"prompt": "a long prompt", "max_tokens": 6, "temperature": 0}

    def generated(**more: Any) -> list[int]:
        (job,) = reader.jobs(reader.completion({**body, **more}), 0)
        found: list[int] = model.generate(*job.group.args, **job.group.kwargs)[0].tolist()
        return found

    whole = generated()
    assert len(whole) == 7  # with the token that a decoder begins with
    assert generated(stop=letters().decode(whole[1:2])) == whole[:2]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, True]}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": [1, 64]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 33}, "max_tokens"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": 0}, "top_k"),
        ({"seed": -1}, "seed"),
        ({"seed": 1 << 63}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": list("abcde")}, "stop"),
        ({"stream": 1}, "stream"),
        ({"stream": 1.0}, "stream"),
        ({"stream_options": {"other": True}}, "stream_options"),
        ({"model": "another"}, "model"),
        ({"n": 2}, "n"),
        ({"logprobs": 3}, "logprobs"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"best_off": 1}, "best_off"),
        ({"prompt": [1] * 60, "max_tokens": 5}, "max_tokens"),
    ],
)
def test_what_is_wrong_is_named(reader: Reader, body: Any, param: str) -> None:
    error = error_of(reader, **body)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert param in error["message"] or param == "max_tokens"


def test_what_changes_nothing_is_accepted(reader: Reader) -> None:
    body = {"n": 1, "echo": False, "presence_penalty": 0.0, "logit_bias": None, "user": "me"}
    assert reader.completion({"prompt": "ab", "model": "GPT2LMHeadModel", **body}).prompts


def test_without_a_tokenizer(without_tokenizer: Reader) -> None:
    assert "served without a tokenizer" in error_of(without_tokenizer)["message"]
    assert error_of(without_tokenizer, prompt=[1], stop="x")["param"] == "stop"
    with pytest.raises(Refusal, match="no chat template"):
        without_tokenizer.chat({"messages": [{"role": "user", "content": "a"}]})


def test_a_chat(reader: Reader) -> None:
    text = {"type": "text", "text": "b"}
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": [text]}]
    asked = reader.chat({"messages": messages})
    assert asked.prompts == [letters()("u a u b a").input_ids]
    assert asked.max_tokens == 32
    longer = [{"role": "user", "content": "a" * (CONTEXT - 8)}]
    assert reader.chat({"messages": longer}).max_tokens == 4
    assert reader.chat({"messages": messages, "max_completion_tokens": 5}).max_tokens == 5


@pytest.mark.parametrize("messages", [None, [], ["a"], [{"role": "user"}], [{"content": "a"}]])
def test_what_is_no_chat(reader: Reader, messages: Any) -> None:
    with pytest.raises(Refusal) as found:
        reader.chat({"messages": messages})
    assert found.value.body["error"]["param"] == "messages"


def test_a_prediction() -> None:
    kwargs = net().kwargs
    job = prediction({"kwargs": {"x": [[1, 2, 3]], "scale": [[2.5]]}}, (), kwargs)
    assert job.kwargs["x"].dtype == torch.float32
    assert job.kwargs["scale"].tolist() == [[2.5]]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"x": 1}, "'x' is unknown"),
        ({"args": [1]}, "with 0 args, not 1"),
        ({"kwargs": {"x": [[1]]}}, "kwargs scale, x"),
        ({"kwargs": {"x": [[1, 2], [3]], "scale": [[1]]}}, "x must be numbers in 2 nested lists"),
        ({"kwargs": {"x": [1], "scale": [[1]]}}, r"the shape \[1\]"),
        ({"kwargs": {"x": [], "scale": [[1]]}}, "x"),
        ({"kwargs": {"x": "a", "scale": [[1]]}}, "x must be"),
    ],
)
def test_what_is_no_prediction(body: Any, message: str) -> None:
    with pytest.raises(Refusal, match=message):
        prediction(body, (), net().kwargs)


def test_fractions_are_not_cut_off() -> None:
    with pytest.raises(Refusal, match="fractions"):
        prediction({"args": [[1.5]]}, (torch.ones(1, dtype=torch.long),), {})


def test_results_as_json() -> None:
    result = {"a": (torch.ones(1, 2), None), "b": [True, 1.5]}
    assert as_plain(result) == {"a": [[[1.0, 1.0]], None], "b": [True, 1.5]}
    with pytest.raises(Refusal, match="has a object"):
        as_plain(object())
