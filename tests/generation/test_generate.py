"""`Pipeline.generate`: the tokens of the model's own `generate`, whatever else is under way."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import penstock as ps
from penstock.generation.seeds import seed_of
from tests.generation.subjects import (
    Plain,
    expected,
    gpt2,
    mamba,
    padded,
    pipeline,
    sliding,
    t5,
    tokens,
)
from tests.support.models import uniform_plan

KINDS: Any = ["threads", "processes"]
pytestmark = pytest.mark.usefixtures("pool")

MODES: dict[str, dict[str, Any]] = {
    "greedy": {"max_new_tokens": 12},
    "sampled": {"max_new_tokens": 9, "do_sample": True, "top_k": 20, "temperature": 1.3},
    "beams": {"max_new_tokens": 8, "num_beams": 3},
    "several": {"max_new_tokens": 5, "num_beams": 2, "num_return_sequences": 2},
    "penalised": {"max_new_tokens": 8, "repetition_penalty": 1.4, "no_repeat_ngram_size": 2},
    "without a cache": {"max_new_tokens": 4, "use_cache": False},
}


@pytest.mark.parametrize("kind", KINDS)
def test_of_every_mode(kind: Any) -> None:
    """Rows are padded on the left; groups end at different lengths."""
    model, ids = gpt2(), tokens(5, 8)
    mask = torch.ones_like(ids)
    for row, count in ((1, 3), (3, 5)):
        mask[row, :count] = ids[row, :count] = 0
    with pipeline(model, kind) as pipe:
        for name, options in MODES.items():
            groups = [{"input_ids": ids[a:b], "attention_mask": mask[a:b]} for a, b in PARTS]
            wanted = padded(expected(model, groups, seed=7, **options))
            found = pipe.generate(ids, attention_mask=mask, seed=7, **options)
            assert torch.equal(found, wanted), name


PARTS = [(0, 3), (3, 5)]


@pytest.fixture
def without_collector() -> Iterator[None]:
    """No cycle of references keeps states until Python's collector finds it."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("make", [sliding, mamba, t5])
@pytest.mark.parametrize("stages", [2, 3])
def test_other_states(make: Callable[[], Any], stages: int) -> None:
    """A window that is full after some tokens, recurrent states, an encoder."""
    model, ids = make(), tokens(4, 5)
    with pipeline(model, stages=stages) as pipe:
        for options in (MODES["greedy"], MODES["beams"]):
            wanted = padded(expected(model, [ids[:2], ids[2:]], **options))
            assert torch.equal(pipe.generate(ids, group_size=2, **options), wanted)


def test_an_encoder_runs_once_for_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages can have the decoder alone, by an example with what the encoder has returned."""
    model, ids = t5(), tokens(4, 5)
    stack = type(model.encoder)
    forward, calls = stack.forward, []

    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.config.is_decoder:
            calls.append(self)
        return forward(self, *args, **kwargs)

    with torch.no_grad():
        hidden = model.encoder(ids[:2])[0]
    example = {"encoder_outputs": (hidden,), "decoder_input_ids": ids[:2]}
    program = ps.capture(model, kwargs=example)
    assert not any(label.startswith("encoder.") for label in program.labels)
    plan = uniform_plan(program, 2, 1)
    options: Any = {"plan": plan, "threads_per_worker": 1, "audit": None, "progress": None}
    wanted = padded(expected(model, [ids[:2], ids[2:]], max_new_tokens=8))
    with ps.Pipeline(model, kwargs=example, program=program, **options) as pipe:
        monkeypatch.setattr(stack, "forward", noting)
        found = pipe.generate(ids, group_size=2, max_new_tokens=8)
    assert torch.equal(found, wanted)
    assert len(calls) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_of_any_length(kind: Any) -> None:
    """Each is a group; more than there is room for wait, and their lengths need no recording."""
    model = gpt2()
    prompts = [tokens(1, 3 + 2 * k, seed=k)[0] for k in range(7)]
    options = {"max_new_tokens": 6, "do_sample": True}
    with pipeline(model, kind) as pipe:
        found = pipe.generate(prompts, seed=3, **options)
    wanted = expected(model, [prompt[None] for prompt in prompts], seed=3, **options)
    assert all(map(torch.equal, found, wanted))


def test_rows_do_not_depend_on_others() -> None:
    model, ids = gpt2(), tokens(3)
    with pipeline(model) as pipe:
        together = pipe.generate(ids, rowwise=True, do_sample=True, max_new_tokens=6, seed=1)
        last = pipe.generate(ids[2:], do_sample=True, max_new_tokens=6, seed=seed_of(1, 2))
    assert torch.equal(together[2:, : last.shape[1]], last)


@pytest.mark.parametrize(("replicas", "stages"), [(2, 1), (2, 2)])
def test_replicas(replicas: int, stages: int) -> None:
    """Groups are dealt to the replicas, and their caches are there."""
    model, ids = gpt2(), tokens(6)
    with pipeline(model, stages=stages, replicas=replicas) as pipe:
        found = pipe.generate(ids, group_size=2, max_new_tokens=8)
    wanted = padded(expected(model, [ids[:2], ids[2:4], ids[4:]], max_new_tokens=8))
    assert torch.equal(found, wanted)


def test_stream() -> None:
    """Tokens come one after the other, and are those that the whole result has."""
    model, ids = gpt2(eos_token_ids=None), tokens(4)
    with pipeline(model) as pipe:
        whole = pipe.generate(ids, max_new_tokens=5, min_new_tokens=5)
        streamed: dict[int, list[int]] = {}
        first = None
        for new in pipe.generate(ids, max_new_tokens=5, min_new_tokens=5, stream=True):
            first = first or new
            for row, token in zip(new.rows, new.tokens.tolist(), strict=True):
                streamed.setdefault(row, []).append(token)
    assert first is not None
    assert list(first.rows) == [0, 1]
    assert [streamed[row] for row in range(4)] == whole[:, 7:].tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_leaving_the_loop_cancels(kind: Any, without_collector: None) -> None:
    """Nothing is under way afterwards, and nothing stays with the workers."""
    model, ids = gpt2(), tokens(4)
    with pipeline(model, kind) as pipe:
        stream = pipe.generate(ids, max_new_tokens=80, stream=True)
        for _ in range(3):
            next(stream)
        stream.close()
        pipe._sessions.drop()
        numbers = range(pipe._sessions._kept)
        assert not pipe._workers.fetch_states(numbers)
        found = pipe.generate(ids, max_new_tokens=4)
    assert torch.equal(found, padded(expected(model, [ids[:2], ids[2:]], max_new_tokens=4)))


def test_caches_are_let_go(without_collector: None) -> None:
    """While a long text is generated, a worker has the caches of the present step only."""
    model, ids = gpt2(), tokens(2)
    with pipeline(model) as pipe:
        held = []
        for _ in pipe.generate(ids, max_new_tokens=30, min_new_tokens=30, stream=True):
            held.append(len(pipe._workers.fetch_states(range(pipe._sessions._kept))))
        per_pass = 2 * 4  # keys and values of four layers
        assert max(held) <= 3 * 2 * per_pass
        assert not pipe._workers.fetch_states(range(pipe._sessions._kept))


def test_a_model_with_its_own_loop() -> None:
    model, ids = Plain().eval(), tokens(4)
    with pipeline(model) as pipe:
        for temperature in (0.0, 1.0):
            groups = [{"ids": ids[:2]}, {"ids": ids[2:]}]
            wanted = padded(expected(model, groups, 5, count=6, temperature=temperature))
            found = pipe.generate(ids, 6, temperature=temperature, seed=5)
            assert torch.equal(found, wanted)


def test_own_processors_criteria_and_dictionaries() -> None:
    """What the model's own `generate` takes and returns works as it does there."""
    model, ids = gpt2(), tokens(4)

    class OnlyEven(transformers.LogitsProcessor):
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            scores[:, 1::2] = -float("inf")
            return scores

    class AtLength(transformers.StoppingCriteria):
        def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
            return torch.full((len(input_ids),), input_ids.shape[1] >= 10)

    options = {
        "logits_processor": transformers.LogitsProcessorList([OnlyEven()]),
        "stopping_criteria": transformers.StoppingCriteriaList([AtLength()]),
        "max_new_tokens": 20,
        "return_dict_in_generate": True,
        "output_scores": True,
    }
    with pipeline(model) as pipe:
        found = pipe.generate(ids, **options)
    wanted = expected(model, [ids[:2], ids[2:]], **options)
    assert torch.equal(found.sequences, padded([each.sequences for each in wanted]))  # type: ignore[attr-defined]
    assert found.sequences.shape == (4, 10)
    steps = zip(*(each.scores for each in wanted), strict=True)  # type: ignore[attr-defined]
    assert all(map(torch.equal, found.scores, map(torch.cat, steps)))


@pytest.mark.parametrize(
    "options",
    [
        {"cache_implementation": "static"},
        {"prefill_chunk_size": 3},
        {"guidance_scale": 1.5},
        {"eos_token_id": [5, 9, 33], "max_new_tokens": 30},
        {"num_beams": 4, "do_sample": True},
        {"prompt_lookup_num_tokens": 3},
        {"assistant_model": gpt2(seed=1)},
    ],
    ids=lambda options: next(iter(options)),
)
def test_ways_to_generate(options: dict[str, Any]) -> None:
    """Caches that are filled in place, prompts in chunks, tokens that are taken back."""
    model, ids = gpt2(), tokens(2)
    options = {"max_new_tokens": 8, **options}
    with pipeline(model) as pipe:
        found = pipe.generate(ids, group_size=1, seed=0, **options)
    assert torch.equal(found, padded(expected(model, list(ids.split(1)), **options)))


def test_hidden_states() -> None:
    """transformers leaves hooks in the model when these are asked for; they disturb nothing."""
    model, ids = gpt2(), tokens(4)
    options = {
        "max_new_tokens": 3,
        "return_dict_in_generate": True,
        "output_hidden_states": True,
    }
    wanted = expected(model, [ids[:2], ids[2:]], **options)
    model = gpt2()
    with pipeline(model) as pipe:
        found = pipe.generate(ids, **options)
        pipe.train_step(input_ids=ids, target=ids, loss_fn=language_loss)
    for step, both in enumerate(zip(*(each.hidden_states for each in wanted), strict=True)):  # type: ignore[attr-defined]
        for layer, parts in enumerate(zip(*both, strict=True)):
            assert torch.equal(found.hidden_states[step][layer], torch.cat(parts))


@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on(kind: Any) -> None:
    """Steps before and after generating end with the bits of steps alone; so do the tokens."""
    one, other = gpt2(), gpt2()
    batch = tokens(4, 7, seed=5)
    texts = []

    def trained(model: Any, generates: bool) -> dict[str, torch.Tensor]:
        model.train()
        with pipeline(model, kind) as pipe:
            optimizer = pipe.optimizer(torch.optim.AdamW, lr=1e-2)
            for _ in range(3):
                pipe.train_step(input_ids=batch, target=batch, loss_fn=language_loss)
                optimizer.step()
                optimizer.zero_grad()
                if generates:
                    model.eval()
                    plainly = copy.deepcopy(model)
                    texts.append(pipe.generate(tokens(2), group_size=1, max_new_tokens=5))
                    model.train()
                    wanted = expected(plainly, list(tokens(2).split(1)), max_new_tokens=5)
                    assert torch.equal(texts[-1], padded(wanted))
        return {name: value.clone() for name, value in model.state_dict().items()}

    alone, between = trained(one, False), trained(other, True)
    assert len(texts) == 3
    assert all(torch.equal(alone[name], between[name]) for name in alone)


def language_loss(output: Any, target: torch.Tensor) -> torch.Tensor:
    logits = output.logits[:, :-1].flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, target[:, 1:].flatten())


def test_an_error_of_one_ends_all() -> None:
    """What a user's function raises is raised, and the pipeline goes on to work."""
    model, ids = gpt2(), tokens(4)

    class Broken(transformers.LogitsProcessor):
        calls = 0

        def __call__(self, input_ids: Any, scores: Any) -> Any:
            Broken.calls += 1
            if Broken.calls == 5:
                raise ZeroDivisionError("mine")
            return scores

    with pipeline(model) as pipe:
        with pytest.raises(ZeroDivisionError, match="mine"):
            pipe.generate(ids, logits_processor=[Broken()], max_new_tokens=9)
        found = pipe.generate(ids, max_new_tokens=4)
    assert torch.equal(found, padded(expected(model, [ids[:2], ids[2:]], max_new_tokens=4)))


def test_bad_arguments() -> None:
    model = gpt2()
    with pipeline(model) as pipe:
        with pytest.raises(ps.InputError, match="group_size=0 must be a positive integer"):
            pipe.generate(tokens(), group_size=0)
        with pytest.raises(ps.InputError, match="seed='x' must be an integer"):
            pipe.generate(tokens(), seed="x")  # type: ignore[arg-type]
        with pytest.raises(ps.InputError, match="rowwise=True makes each sequence a group"):
            pipe.generate(tokens(), group_size=2, rowwise=True)
        with pytest.raises(ps.InputError, match="needs a tensor with one row"):
            pipe.generate(max_new_tokens=3)
        with pytest.raises(ps.InputError, match="there are no prompts"):
            pipe.generate([])
        with pytest.raises(ps.InputError, match="prompt 1 is a list"):
            pipe.generate([tokens(1)[0], [1, 2]])
        with pytest.raises(ValueError, match="no_such_argument"):  # transformers' own error
            pipe.generate(tokens(), no_such_argument=3)
    linear = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    x = torch.ones(4, 3)
    with (
        ps.Pipeline(linear, (x,), devices=["cpu", "cpu"], progress=None) as pipe,
        pytest.raises(ps.InputError, match=r"Sequential has no method generate\(\)"),
    ):
        pipe.generate(x)


def test_few_lengths_are_recorded() -> None:
    """A cache that grows by one is compared with the model at a few lengths, not at all."""
    model, ids = gpt2(), tokens(2)
    calls = []
    with pipeline(model) as pipe:
        source = pipe.program.recordings._source
        compared = source.check_at

        def counted(*args: Any) -> None:
            calls.append(args)
            compared(*args)

        source.check_at = counted  # type: ignore[method-assign]
        pipe.generate(ids, max_new_tokens=70, min_new_tokens=70)
    assert 4 <= len(calls) <= 20


@pytest.mark.parametrize("kind", KINDS)
def test_verify(kind: Any) -> None:
    """`verify` compares tokens as well, and sees it if they are others."""
    model, ids = gpt2(), tokens(4)
    options: dict[str, Any] = {
        "kwargs": {"input_ids": ids},
        "target": ids,
        "loss_fn": language_loss,
        "devices": ["cpu", "cpu"],
        "workers": kind,
        "schedule": "1f1b",
        "replicas": 1,
        "progress": None,
        "generate": {"input_ids": ids, "max_new_tokens": 5, "do_sample": True, "group_size": 3},
    }
    report = ps.verify(model, **options)
    assert report.ok, report
    assert "generated tokens" in str(report)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_without_weights(kind: Any, tmp_path: Path) -> None:
    """Each stage reads its own, and generates with them."""
    whole, ids = gpt2(), tokens(4)
    whole.save_pretrained(tmp_path)
    with ps.empty_weights():
        model = transformers.GPT2LMHeadModel(whole.config).eval()
    pipe = ps.Pipeline(
        model,
        kwargs={"input_ids": ids},
        devices=["cpu", "cpu"],
        workers=kind,
        weights=tmp_path / "model.safetensors",
        schedule="1f1b",
        num_microbatches=2,
        replicas=1,
        threads_per_worker=1,
        progress=None,
    )
    with pipe:
        found = pipe.generate(ids, max_new_tokens=9, group_size=2)
    assert torch.equal(found, padded(expected(whole, [ids[:2], ids[2:]], max_new_tokens=9)))
