"""Groups of sequences are apart, and what is said of them is said of the batch."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import penstock as ps
from tests.generation.subjects import expected, gpt2, padded, pipeline, t5, tokens


def test_one_cache_for_several_groups_is_refused() -> None:
    model, ids = gpt2(), tokens()
    with pipeline(model) as pipe:
        for given in (ids, list(ids)):
            with pytest.raises(ps.InputError, match="is one DynamicCache, and there are"):
                pipe.generate(given, past_key_values=transformers.DynamicCache(), max_new_tokens=2)
        cache = transformers.DynamicCache()
        found = pipe.generate(ids, past_key_values=cache, group_size=len(ids), max_new_tokens=4)
    assert torch.equal(found, expected(model, [ids], max_new_tokens=4)[0])


def test_beams_are_numbered_in_the_batch() -> None:
    model, ids = gpt2(), tokens()
    options: dict[str, Any] = {"num_beams": 3, "return_dict_in_generate": True}
    options |= {"max_new_tokens": 5, "output_scores": True}
    with pipeline(model) as pipe:
        found = pipe.generate(ids, **options)
    wanted = model.generate(ids, **options)
    assert torch.equal(found.beam_indices, wanted.beam_indices)
    assert found.beam_indices.max() >= 3 * (len(ids) // 2)


@pytest.mark.parametrize("as_list", [False, True])
@pytest.mark.parametrize("options", [{"do_sample": True}, {"num_beams": 3}])
def test_functions_are_told_the_rows_of_those_that_are_returned(
    options: dict[str, Any], as_list: bool
) -> None:
    model, ids = gpt2(), tokens()
    options = {"max_new_tokens": 2, "num_return_sequences": 2, **options}
    own: list[int] = []
    called: list[int] = []

    def noting(rows: list[int]) -> Any:
        return lambda row, _: rows.append(row) or [10 + row, 20 + row]

    model.generate(ids, prefix_allowed_tokens_fn=noting(own), **options)
    with pipeline(model) as pipe:
        given = list(ids) if as_list else ids
        pipe.generate(given, prefix_allowed_tokens_fn=noting(called), **options)
    assert sorted(called) == sorted(own)


@pytest.mark.parametrize("as_list", [False, True])
def test_functions_are_told_the_rows_of_the_batch(as_list: bool) -> None:
    model, ids = gpt2(), tokens()

    def allowed(row: int, _: torch.Tensor) -> list[int]:
        return [10 + row]

    with pipeline(model) as pipe:
        given = list(ids) if as_list else ids
        found = pipe.generate(given, max_new_tokens=1, prefix_allowed_tokens_fn=allowed)
    assert [int(row.reshape(-1)[-1]) for row in found] == [10, 11, 12, 13]


def test_a_stream_has_a_token_for_each_row() -> None:
    """Assisted decoding finds several at a time."""
    model, ids = gpt2(), tokens(1)
    options: dict[str, Any] = {"max_new_tokens": 8, "assistant_model": gpt2()}
    with pipeline(model) as pipe:
        came = list(pipe.generate(ids, stream=True, **options))
    assert all(len(each.rows) == len(each.tokens) == 1 for each in came)
    (wanted,) = expected(model, [ids], **options)
    assert [int(each.tokens) for each in came] == wanted[0, ids.shape[1] :].tolist()


def test_an_encoder_runs_under_the_autocast_of_the_script() -> None:
    model, ids = t5(), tokens()
    seen: list[torch.dtype] = []
    layer = model.get_encoder().block[0].layer[0].SelfAttention.q
    with pipeline(model) as pipe:
        handle = layer.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
        with torch.autocast("cpu", torch.bfloat16):
            found = pipe.generate(ids, group_size=4, max_new_tokens=6)
            handle.remove()
            (wanted,) = expected(model, [ids], max_new_tokens=6)
    assert set(seen) == {torch.bfloat16}
    assert torch.equal(found, wanted)


def test_pipelines_in_two_threads_draw_what_each_would_alone() -> None:
    models, ids = [gpt2(seed=0), gpt2(seed=1)], tokens()
    options: dict[str, Any] = {"max_new_tokens": 10, "do_sample": True}
    groups = [ids[:2], ids[2:]]
    wanted = [padded(expected(model, groups, seed=5, **options)) for model in models]
    found: list[list[torch.Tensor]] = [[], []]
    with pipeline(models[0]) as one, pipeline(models[1]) as other:
        for pipe in (one, other):
            pipe.generate(ids, seed=5, **options)  # all lengths are known

        def run(place: int, pipe: ps.Pipeline) -> None:
            for _ in range(5):
                found[place].append(pipe.generate(ids, seed=5, **options))

        threads = [threading.Thread(target=run, args=each) for each in enumerate((one, other))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for results, want in zip(found, wanted, strict=True):
        assert [torch.equal(result, want) for result in results] == [True] * 5


def test_the_scripts_own_numbers_go_on() -> None:
    model, ids = gpt2(), tokens()
    with pipeline(model) as pipe:
        torch.manual_seed(3)
        pipe.generate(ids, seed=5, do_sample=True, max_new_tokens=4)
        after = torch.rand(2)
    torch.manual_seed(3)
    assert torch.equal(after, torch.rand(2))


class Wrapper(nn.Module):
    """Has its part generate."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = gpt2()

    def forward(self, input_ids: torch.Tensor) -> Any:
        return self.inner(input_ids)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner.generate(*args, **kwargs)


def test_a_generate_that_calls_a_part_is_refused() -> None:
    model = Wrapper().eval()
    with (
        ps.Pipeline(
            model, kwargs={"input_ids": tokens()}, devices=["cpu"] * 2, audit=None, progress=None
        ) as pipe,
        pytest.raises(ps.InputError, match=r"pipeline of that part, model\.inner"),
    ):
        pipe.generate(tokens(), max_new_tokens=2)


def test_prompts_in_a_list_that_are_none() -> None:
    with pipeline(gpt2()) as pipe:
        for prompt, said in (
            (tokens(2), r"prompt 0 is a tensor of shape \(2, 7\)"),
            (tokens()[0, :0], r"prompt 0 is a tensor of shape \(0,\)"),
            ([3, 4], "prompt 0 is a list"),
        ):
            with pytest.raises(ps.InputError, match=said):
                pipe.generate([prompt], max_new_tokens=2)
        with pytest.raises(ps.InputError, match="leave attention_mask out"):
            pipe.generate([tokens()[0]], attention_mask=torch.ones(1, 7), max_new_tokens=2)


def test_scripts_of_two_threads_keep_their_generators() -> None:
    """One thread draws in its own script while another is in the midst of one."""
    from penstock.generation.script import Ended, Script

    def draws(script: Script) -> list[float]:
        found = []
        for _ in range(20):
            found.append(torch.rand(()).item())
            time.sleep(0.001)
            found.append(torch.rand(()).item())
            script.ask(None)
        return found

    def run(results: list[Any]) -> None:
        script = Script(draws, 5, 1)
        while not isinstance(event := script.resume(), Ended):
            pass
        results.append(event.result)

    results: list[Any] = []
    threads = [threading.Thread(target=run, args=(results,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with torch.random.fork_rng():
        torch.manual_seed(5)
        wanted = [torch.rand(()).item() for _ in range(40)]
    assert results == [wanted] * 3
