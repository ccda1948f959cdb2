"""The Trainer of transformers on a pipeline, beside the plain Trainer with the same arguments."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import penstock as ps
from penstock.oracle import Oracle
from tests.workers.ranks.launching import ROOT, environment

pytest.importorskip("accelerate")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        Seq2SeqTrainer,
        Seq2SeqTrainingArguments,
        T5Config,
        T5ForConditionalGeneration,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    from penstock.integrations.transformers import PenstockMixin, PenstockTrainer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

TOKENS, ROWS = 16, 24
WORKERS = {"devices": 2, "threads_per_worker": 1, "replicas": 1, "progress": None}
FOUR = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
_numbers = torch.Generator().manual_seed(1)


def row(k: int, length: int = TOKENS) -> dict[str, torch.Tensor]:
    """Tokens and labels, of which another number is ignored in each row."""
    tokens = torch.randint(64, (length,), generator=_numbers)
    return {"input_ids": tokens, "labels": tokens.masked_fill(torch.arange(length) < k % 7, -100)}


DATA = [row(k) for k in range(ROWS)]
LENGTHS = [row(k, 8 + 2 * (k // 4 % 3)) for k in range(ROWS)]  # four in a row are as long


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """As each of the workers has, because bits depend on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def model(dropout: float = 0.0, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=64,
            n_positions=TOKENS,
            n_embd=16,
            n_layer=2,
            n_head=2,
            bos_token_id=0,
            eos_token_id=0,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
        )
    )


def arguments(folder: Path, **given: Any) -> Any:
    return TrainingArguments(
        str(folder),
        **{
            "report_to": [],
            "disable_tqdm": True,
            "use_cpu": True,
            "logging_steps": 1,
            "save_strategy": "no",
            "num_train_epochs": 1,
            "learning_rate": 1e-2,
            **given,
        },
    )


def trained(kind: Any, args: Any, *, data: Any = DATA, resume: Any = None, **given: Any) -> Any:
    """A trainer that has trained."""
    given.setdefault("model", model())
    trainer = kind(args=args, train_dataset=data, eval_dataset=data[:4], **given)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def on_pipeline(args: Any, *, kind: Any = PenstockTrainer, **given: Any) -> Any:
    given["pipeline"] = {**WORKERS, **given.get("pipeline", {})}
    return trained(kind, args, **given)


def logged(trainer: Any, name: str = "loss") -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def assert_same(one: Any, other: Any) -> None:
    """Both trainers have trained to the same bits, and logged the same numbers."""
    for (name, ours), theirs in zip(
        one.model.named_parameters(), other.model.parameters(), strict=True
    ):
        assert torch.equal(ours, theirs), name
    for name in ("loss", "grad_norm", "learning_rate"):
        assert logged(one, name) == logged(other, name) != []


# -- the same bits ---------------------------------------------------------------------------------

CASES: dict[str, dict[str, Any]] = {
    "accumulation": {},
    "a last step with fewer batches": {"gradient_accumulation_steps": 5},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "bfloat16": {"bf16": True},
    "label smoothing in bfloat16": {"label_smoothing_factor": 0.1, "bf16": True},
    "no clipping": {"max_grad_norm": 0.0},
    "sgd": {"optim": "sgd", "lr_scheduler_type": "cosine", "warmup_steps": 2},
    "activation checkpointing": {"activation_checkpointing": True},
}


@pytest.mark.parametrize("name", CASES)
def test_the_batches_of_a_step_are_its_microbatches(name: str, tmp_path: Path) -> None:
    given = {**FOUR, **CASES[name]}
    plain = trained(Trainer, arguments(tmp_path, **given))
    ours = on_pipeline(arguments(tmp_path, **given))
    assert_same(ours, plain)
    assert ours.pipe.plan.num_microbatches == given["gradient_accumulation_steps"]
    assert len(ours.pipe.plan.stages) > 1
    ours.end()


def test_a_batch_that_is_split_is_one_that_is_accumulated(tmp_path: Path) -> None:
    plain = trained(Trainer, arguments(tmp_path, **FOUR))
    args = arguments(tmp_path, per_device_train_batch_size=8)
    ours = on_pipeline(args, pipeline={"num_microbatches": 4})
    assert_same(ours, plain)
    ours.end()


def test_batches_that_are_split_and_accumulated(tmp_path: Path) -> None:
    plain = trained(Trainer, arguments(tmp_path, **FOUR))
    args = arguments(tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=2)
    ours = on_pipeline(args, pipeline={"num_microbatches": 2})
    assert_same(ours, plain)
    ours.end()


def test_worker_processes(tmp_path: Path) -> None:
    given = {**FOUR, "label_smoothing_factor": 0.1, "max_steps": 2}
    plain = trained(Trainer, arguments(tmp_path, **given))
    ours = on_pipeline(arguments(tmp_path, **given), pipeline={"workers": "processes"})
    assert_same(ours, plain)
    ours.end()


def test_batches_of_other_lengths_get_another_pipeline(tmp_path: Path) -> None:
    given = {**FOUR, "train_sampling_strategy": "sequential"}
    plain = trained(Trainer, arguments(tmp_path, **given), data=LENGTHS)
    ours = on_pipeline(arguments(tmp_path, **given), data=LENGTHS)
    assert_same(ours, plain)
    ours.end()


def counted(monkeypatch: pytest.MonkeyPatch) -> list[ps.Pipeline]:
    """The pipelines that trainers build from now on."""
    built: list[ps.Pipeline] = []

    def build(*args: Any, **kwargs: Any) -> ps.Pipeline:
        built.append(ps.Pipeline(*args, **kwargs))
        return built[-1]

    monkeypatch.setattr("penstock.integrations.trainer_model.Pipeline", build)
    return built


def test_lengths_that_are_named_need_no_other_pipeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = counted(monkeypatch)
    dynamic = {name: {1: "length"} for name in ("input_ids", "labels")}
    args = arguments(tmp_path, **FOUR, train_sampling_strategy="sequential")
    plain = trained(Trainer, args, data=LENGTHS)
    ours = on_pipeline(args, data=LENGTHS, pipeline={"dynamic": dynamic})
    assert_same(ours, plain)
    assert len(built) == 1
    ours.end()


def without_labels(rows: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": each["input_ids"]} for each in rows]


@pytest.mark.parametrize("names", [(), ("input_ids", "labels")])
def test_lengths_of_rows_without_labels(names: tuple[str, ...], tmp_path: Path) -> None:
    """Before those with labels, and after them."""
    dynamic = {name: {1: "length"} for name in names}
    args = arguments(tmp_path, **FOUR, train_sampling_strategy="sequential")
    plain = trained(Trainer, args, data=LENGTHS)
    options = {**WORKERS, "dynamic": dynamic}
    ours = PenstockTrainer(model(), args, train_dataset=LENGTHS, pipeline=options)
    ours.predict(without_labels(DATA[:8]))
    ours.train()
    assert_same(ours, plain)
    ours.end()
    ours = on_pipeline(args, pipeline={"dynamic": dynamic})
    ours.predict(without_labels(LENGTHS[:4] * 2))
    ours.predict(without_labels(LENGTHS[4:8] * 2))
    plain = trained(Trainer, args)
    assert ours.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-6)
    ours.end()


class Mean(torch.nn.Module):
    """Accepts the number of items, as the Trainer looks for, and returns a mean nevertheless."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = torch.nn.Embedding(64, 8), torch.nn.Linear(8, 64)

    def forward(self, input_ids: Any, labels: Any, **more: Any) -> dict[str, torch.Tensor]:
        logits = self.head(torch.tanh(self.embed(input_ids)))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


FULL = [{"input_ids": each["input_ids"], "labels": each["input_ids"]} for each in DATA]


@pytest.mark.parametrize("accepts", [True, False])
def test_a_mean_is_not_added_up(accepts: bool, tmp_path: Path) -> None:
    """It was four times as large, and nobody noticed, because gradients are clipped."""
    given = {"per_device_train_batch_size": 8, "optim": "sgd", "max_grad_norm": 1e9}
    other, reference = Mean(), Mean()
    other.accepts_loss_kwargs = accepts  # type: ignore[assignment]
    args = arguments(tmp_path, **given, max_steps=1, train_sampling_strategy="sequential")
    ours = on_pipeline(args, data=FULL, model=other, pipeline={"num_microbatches": 4})
    batch = {name: torch.stack([each[name] for each in FULL[:8]]) for name in FULL[0]}
    oracle = Oracle(reference, (), batch, 4)
    loss = oracle.train_step(0, lambda output: output["loss"])
    torch.optim.SGD(reference.parameters(), lr=1e-2).step()
    assert logged(ours) == [loss.item()]
    for mine, its in zip(other.parameters(), reference.parameters(), strict=True):
        assert torch.equal(mine, its)
    ours.end()


# -- losses of the user's own ----------------------------------------------------------------------


def next_token(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    return F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class WithComputeLoss(PenstockTrainer):
    def compute_loss(  # type: ignore[no-untyped-def]
        self, model, inputs, return_outputs=False, num_items_in_batch=None
    ):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = next_token(outputs, labels)
        return (loss, outputs) if return_outputs else loss


@pytest.mark.parametrize("how", ["compute_loss_func", "compute_loss"])
def test_a_loss_of_the_users_is_one_of_the_whole_batch(how: str, tmp_path: Path) -> None:
    given = {"max_steps": 1, "optim": "sgd", "max_grad_norm": 0.0}
    args = arguments(
        tmp_path, per_device_train_batch_size=8, train_sampling_strategy="sequential", **given
    )
    more = {"compute_loss_func": next_token} if how == "compute_loss_func" else {}
    kind = WithComputeLoss if how == "compute_loss" else PenstockTrainer
    ours = on_pipeline(args, kind=kind, pipeline={"num_microbatches": 4}, **more)
    reference = model()
    batch = {name: torch.stack([each[name] for each in DATA[:8]]) for name in DATA[0]}
    labels = batch.pop("labels")
    reference.config.use_cache = False
    oracle = Oracle(reference, (), batch, 4)
    oracle.call_and_backward(0, next_token, labels)
    torch.optim.SGD(reference.parameters(), lr=1e-2).step()
    for mine, its in zip(ours.model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(mine, its)
    ours.end()


class Counting(Trainer):  # type: ignore[misc]
    """A subclass that Penstock knows nothing of."""

    steps = 0

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        type(self).steps += 1
        return super().training_step(*args, **kwargs)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(model, inputs, *args, **kwargs)


class OnPipeline(PenstockMixin, Counting):
    pass


def test_a_subclass_by_the_mixin(tmp_path: Path) -> None:
    plain = trained(Trainer, arguments(tmp_path, **FOUR))
    args = arguments(tmp_path, per_device_train_batch_size=8)
    ours = on_pipeline(args, kind=OnPipeline, pipeline={"num_microbatches": 4})
    assert_same(ours, plain)
    assert OnPipeline.steps == 3
    ours.end()


# -- evaluation ------------------------------------------------------------------------------------


def test_evaluation_and_prediction_are_those_of_microbatches(tmp_path: Path) -> None:
    """Before any training as well, and for data without labels."""
    args = arguments(tmp_path, per_device_eval_batch_size=6)
    trainer = PenstockTrainer(
        model(), args, eval_dataset=DATA[:12], pipeline={**WORKERS, "num_microbatches": 3}
    )
    alone = Trainer(model(), arguments(tmp_path, per_device_eval_batch_size=2))
    expected, found = alone.predict(DATA[:12]), trainer.predict(DATA[:12])
    assert (found.predictions == expected.predictions).all()
    assert (found.label_ids == expected.label_ids).all()
    unlabelled = [{"input_ids": each["input_ids"]} for each in DATA[:12]]
    assert (trainer.predict(unlabelled).predictions == expected.predictions).all()
    whole = Trainer(model(), args).evaluate(DATA[:6])["eval_loss"]
    assert trainer.evaluate(DATA[:6])["eval_loss"] == pytest.approx(whole, rel=1e-6)
    trainer.end()


class Generating(PenstockMixin, Seq2SeqTrainer):
    pass


def test_generation_runs_in_the_pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain model may be on several devices."""
    size = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    config = T5Config(vocab_size=64, decoder_start_token_id=0, dropout_rate=0.0, **size)
    given = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "save_strategy": "no"}
    args = Seq2SeqTrainingArguments(
        str(tmp_path), predict_with_generate=True, generation_max_length=6, **given
    )
    made, calls = [], []
    plain = ps.Pipeline.generate
    monkeypatch.setattr(
        ps.Pipeline, "generate", lambda *a, **kw: calls.append(kw) or plain(*a, **kw)
    )
    for kind in (Seq2SeqTrainer, Generating):
        torch.manual_seed(0)
        more = {"pipeline": WORKERS} if kind is Generating else {}
        trainer = kind(T5ForConditionalGeneration(config), args, **more)
        made.append(trainer.predict(FULL[:8]))
    assert (made[0].predictions == made[1].predictions).all()
    assert made[0].metrics["test_loss"] == pytest.approx(made[1].metrics["test_loss"], rel=1e-6)
    assert len(calls) == 1
    trainer.end()


class Averaging(Mean):
    """Returns some mean as its loss, and says nothing of it."""

    def __init__(self, over: str) -> None:
        super().__init__()
        self.over = over

    def forward(self, input_ids: Any, labels: Any) -> dict[str, torch.Tensor]:  # type: ignore[override]
        logits = self.head(torch.tanh(self.embed(input_ids)))
        if self.over == "next tokens":
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        elif self.over == "labels":
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        elif self.over == "rows":
            each = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
            loss = (each.sum(1) / labels.ne(-100).sum(1)).mean()
        else:
            loss = (20 * logits.mean(1)).var(0).mean()
        return {"loss": loss, "logits": logits}


def uneven(count: int) -> list[dict[str, torch.Tensor]]:
    """Rows of which every second has few labels."""
    found = [dict(row(0)) for _ in range(count)]
    for k, each in enumerate(found):
        each["labels"] = each["labels"].masked_fill(torch.arange(TOKENS) < 13 * (k % 2), -100)
    return found


@pytest.mark.parametrize("over", ["labels", "next tokens", "rows", "the batch"])
def test_the_loss_of_evaluation_is_that_of_whole_batches(over: str, tmp_path: Path) -> None:
    """Whatever mean the model returns; what is no mean at all is warned of."""
    rows = uneven(18)
    if over == "labels":
        for each in rows[3:5]:  # all of a micro-batch, whose mean is NaN
            each["labels"] = torch.full((TOKENS,), -100)
    args = arguments(tmp_path, per_device_eval_batch_size=9)
    plain = Trainer(Averaging(over), args).evaluate(rows)["eval_loss"]
    ours = PenstockTrainer(
        Averaging(over), args, pipeline={**WORKERS, "num_microbatches": 4}, eval_dataset=rows
    )
    if over == "the batch":
        with pytest.warns(UserWarning, match="which is no mean of those of its micro-batches"):
            assert ours.evaluate()["eval_loss"] != pytest.approx(plain, rel=1e-3)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            ours.evaluate()
    for _ in range(2 if over != "the batch" else 0):
        assert ours.evaluate()["eval_loss"] == pytest.approx(plain, rel=1e-6)
    ours.end()


def test_evaluation_first_leaves_training_as_it_is(tmp_path: Path) -> None:
    plain = trained(Trainer, arguments(tmp_path, **FOUR))
    ours = on_pipeline(
        arguments(tmp_path, **FOUR, eval_strategy="steps", eval_steps=1, eval_on_start=True)
    )
    assert_same(ours, plain)
    assert len(logged(ours, "eval_loss")) == 4
    ours.end()


# -- saving and resuming ---------------------------------------------------------------------------


def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    """Also with dropout, whose masks depend on what is saved beside the Trainer's own files."""
    given = {"per_device_train_batch_size": 4, "save_strategy": "steps", "save_steps": 2}
    args = arguments(tmp_path, **given)
    whole = on_pipeline(args, model=model(0.1), pipeline={"num_microbatches": 2})
    saved = tmp_path / "checkpoint-2"
    assert json.loads((saved / "penstock.json").read_text())["num_microbatches"] == 2
    resumed = on_pipeline(args, model=model(0.1, seed=5), resume=str(saved))
    assert resumed.pipe.plan.num_microbatches == 2
    for mine, its in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, its)
    whole.end()
    resumed.end()


@pytest.mark.parametrize("first", [PenstockTrainer, Trainer])
def test_either_resumes_what_the_other_has_saved(first: Any, tmp_path: Path) -> None:
    args = arguments(tmp_path, **FOUR, save_strategy="steps", save_steps=1)
    plain = trained(Trainer, arguments(tmp_path / "other", **FOUR))
    other = Trainer if first is PenstockTrainer else PenstockTrainer
    for kind, resume in ((first, None), (other, str(tmp_path / "checkpoint-1"))):
        more = {"pipeline": WORKERS} if kind is PenstockTrainer else {}
        last = trained(kind, args, resume=resume, **more)
    for mine, its in zip(last.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(mine, its)


def test_the_best_model_is_loaded(tmp_path: Path) -> None:
    given = {"save_strategy": "epoch", "eval_strategy": "epoch", "load_best_model_at_end": True}
    given |= {"num_train_epochs": 2, "greater_is_better": True, "metric_for_best_model": "loss"}
    trainers = [
        trained(Trainer, arguments(tmp_path / "plain", **FOUR, **given)),
        on_pipeline(arguments(tmp_path / "ours", **FOUR, **given)),
    ]
    assert "checkpoint-3" in str(trainers[1].state.best_model_checkpoint)
    assert_same(*trainers)
    losses = logged(trainers[1], "eval_loss")
    assert trainers[1].evaluate()["eval_loss"] == losses[0] > losses[1]


# -- what else Trainers are given ------------------------------------------------------------------


def test_adapters_of_peft(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def adapted() -> Any:
        base = model()
        torch.manual_seed(3)
        config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
        return peft.get_peft_model(base, config)

    given = {**FOUR, "label_smoothing_factor": 0.1}
    plain = trained(Trainer, arguments(tmp_path, **given), model=adapted())
    ours = on_pipeline(arguments(tmp_path, **given), model=adapted())
    assert_same(ours, plain)
    ours.save_model(str(tmp_path / "adapter"))
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
    ours.end()


class Seen(TrainerCallback):  # type: ignore[misc]
    """Counts, and reads what callbacks are given."""

    def __init__(self) -> None:
        self.steps, self.parts, self.norms = 0, 0, list[float]()

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        self.parts += 1

    def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
        gradients = [p.grad.norm() for p in model.parameters() if p.grad is not None]
        self.norms.append(torch.stack(gradients).norm().item())

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.steps += 1


def test_callbacks_see_what_they_see_on_one_device(tmp_path: Path) -> None:
    seen = Seen(), Seen()
    trained(Trainer, arguments(tmp_path, **FOUR), callbacks=[seen[0]])
    on_pipeline(arguments(tmp_path, **FOUR), callbacks=[seen[1]]).end()
    assert vars(seen[0]) == vars(seen[1])
    assert (seen[1].steps, seen[1].parts) == (3, 9)


def test_a_second_run_goes_on_with_the_same_pipeline(tmp_path: Path) -> None:
    plain = trained(Trainer, arguments(tmp_path, **FOUR))
    ours = on_pipeline(arguments(tmp_path, **FOUR))
    pipe = ours.pipe
    plain.train()
    ours.train()
    assert ours.pipe is pipe
    assert_same(ours, plain)
    ours.end()


def test_a_model_made_anew_gets_a_pipeline_of_its_own(tmp_path: Path) -> None:
    made = {"model": None, "model_init": lambda: model()}
    plain = trained(Trainer, arguments(tmp_path, **FOUR), **made)
    ours = on_pipeline(arguments(tmp_path, **FOUR), **made)
    before = ours.pipe
    ours.train()
    assert ours.pipe is not before
    assert ours.pipe.model is ours.model
    assert_same(ours, plain)
    ours.end()


def test_an_optimizer_and_a_scheduler_of_the_users(tmp_path: Path) -> None:
    made = []
    for kind in (Trainer, PenstockTrainer):
        own = model()
        optimizer = torch.optim.Adagrad(own.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        more = {"pipeline": WORKERS} if kind is PenstockTrainer else {}
        args = arguments(tmp_path, **FOUR)
        made.append(trained(kind, args, model=own, optimizers=(optimizer, scheduler), **more))
    assert_same(*made)


def test_workers_of_a_loader_have_the_same_seeds_on_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they draw is in the batches, of which all ranks have the same."""
    monkeypatch.setattr(TrainingArguments, "process_index", 1)
    args = arguments(tmp_path, dataloader_num_workers=1)
    trainer = PenstockTrainer(model(), args, train_dataset=DATA)
    loader = trainer.get_train_dataloader()
    assert loader.worker_init_fn.keywords["rank"] == 0


# -- mistakes --------------------------------------------------------------------------------------

RANKS = {"workers": "torchrun"}
MISTAKES: list[tuple[Any, dict[str, Any], str]] = [
    (3, {}, r"pipeline=3 is no dict of keyword arguments of Pipeline, such as"),
    ({"device": 2}, {}, "did you mean devices="),
    ({"model": 2}, {}, "model= is not given: the first batch is the example"),
    ({"merge": "list"}, {}, "the Trainer puts results together itself"),
    ({"workers": "ray"}, {}, "workers in a Ray cluster keep weights and gradients there"),
    ({"nothing": 2}, {}, "has no option nothing=2; it has "),
    ({}, {"fp16": True}, "fp16=True cannot be used with a pipeline.*use bf16=True"),
    ({}, {"bf16_full_eval": True}, "bf16_full_eval=True cannot be used with a pipeline"),
    ({}, {"torch_compile": True}, "torch_compile=True cannot .* compile submodules"),
    ({}, {"auto_find_batch_size": True}, "auto_find_batch_size=True cannot .* does not try again"),
    ({}, {"torch_empty_cache_steps": 4}, "torch_empty_cache_steps=4 cannot .* alternate"),
    ({}, {"optim": "lomo"}, "optim='lomo' cannot .* updates parameters within the backward"),
    ({}, {"optim": "galore_adamw_layerwise"}, "optim='galore_adamw_layerwise' cannot be used"),
    (RANKS, {"enable_jit_checkpoint": True}, "under torchrun: ranks save together"),
    (RANKS, {"train_sampling_strategy": "batch_rebalance"}, "gives ranks different rows"),
]


@pytest.mark.parametrize(("pipeline", "given", "message"), MISTAKES)
def test_mistakes_are_named(pipeline: Any, given: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ps.InputError, match=message):
        PenstockTrainer(model(), arguments(tmp_path, **given), pipeline=pipeline)


def test_what_does_not_save_memory_is_warned_of(tmp_path: Path) -> None:
    args = arguments(tmp_path, activation_checkpointing=True)
    with pytest.warns(UserWarning, match="saves no memory in layers that are divided"):
        PenstockTrainer(model(), args)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        PenstockTrainer(model(), args, pipeline={"recompute": "all"})


def test_compiling_by_accelerate_launch_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "EAGER")
    with pytest.raises(ps.InputError, match="set up to compile models by eager"):
        PenstockTrainer(model(), arguments(tmp_path))


def test_there_is_no_pipeline_before_the_first_batch(tmp_path: Path) -> None:
    with pytest.raises(ps.InputError, match="built for the first batch"):
        _ = PenstockTrainer(model(), arguments(tmp_path)).pipe


def test_a_loss_that_is_missing_is_named(tmp_path: Path) -> None:
    unlabelled = [{"input_ids": each["input_ids"]} for each in DATA]
    with pytest.raises(ps.InputError, match="returned no loss, only logits: it needs labels"):
        on_pipeline(arguments(tmp_path), data=unlabelled)


# -- ranks -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_the_same_script_under_torchrun(tmp_path: Path) -> None:
    """With an optimizer and a scheduler of the user's, which both ranks step; saved and resumed."""
    script = Path(__file__).with_name("trainer_on_ranks.py")
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    launch += ["--standalone", str(script)]
    for resume in ("", str(tmp_path / "ours" / "checkpoint-2")):
        command = [*launch, str(tmp_path / "ours"), resume]
        run = subprocess.run(
            command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=150
        )
        assert run.returncode == 0, run.stderr[-4000:]
    command = [sys.executable, str(script), str(tmp_path / "plain"), "", "plain"]
    subprocess.run(command, env=environment(), cwd=ROOT, check=True, timeout=150)
    expected = torch.load(tmp_path / "plain" / "0.pt")
    for rank in (0, 1):
        found = torch.load(tmp_path / "ours" / f"{rank}.pt")
        assert found.keys() == expected.keys()
        assert [n for n in expected if not torch.equal(found[n], expected[n])] == []
    files = [tmp_path / name / "checkpoint-4" / "model.safetensors" for name in ("ours", "plain")]
    assert files[0].read_bytes() == files[1].read_bytes()
