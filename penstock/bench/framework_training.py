"""A training script of a framework, and the seconds of its steps; `frameworks` runs it.

    python -m penstock.bench.framework_training FRAMEWORK [threads|processes]

Without a kind of workers it is the framework alone, with as many threads as `OMP_NUM_THREADS`
says. Prints JSON: the seconds of the steps that count, the loss of the first batch after all steps,
and the plan, if there is one.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, Dataset

from penstock.bench.turns import AUDITED
from penstock.loading import tolerate_missing_torchvision_operators
from penstock.pipeline import Pipeline
from penstock.plan.text import prediction

ROWS, TOKENS, WIDTH, LAYERS, WORDS = 16, 128, 256, 6, 2048
WARM_UP, COUNTED = AUDITED + 2, 12  # steps

Options = dict[str, Any] | None
"""Keyword arguments of the pipeline; `None` for the framework alone."""

Train = Callable[[Any, Options], Pipeline | None]


class _Sentences(Dataset[dict[str, torch.Tensor]]):
    """Rows of random tokens, which are the labels as well."""

    def __len__(self) -> int:
        return ROWS * (WARM_UP + COUNTED)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = torch.randint(WORDS, (TOKENS,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": row, "labels": row}


def _batches() -> DataLoader[dict[str, torch.Tensor]]:
    return DataLoader(_Sentences(), batch_size=ROWS)


def _loss_of(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The mean cross-entropy of the next tokens, like the loss of the model itself."""
    logits = model(input_ids=batch["input_ids"], use_cache=False).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())


def language_model() -> Any:
    """A small GPT-2 of transformers, without dropout."""
    tolerate_missing_torchvision_operators()
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=WORDS,
        n_positions=TOKENS,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return GPT2LMHeadModel(config)


def with_trainer(model: Any, options: Options) -> Pipeline | None:
    """Train with the Trainer of transformers; returns the pipeline, if there is one."""
    from transformers import Trainer, TrainingArguments

    from penstock.integrations.transformers import PenstockTrainer

    with TemporaryDirectory() as folder:
        args: Any = TrainingArguments(
            folder,
            max_steps=WARM_UP + COUNTED,
            per_device_train_batch_size=ROWS,
            dataloader_pin_memory=False,
            learning_rate=1e-3,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        if options is None:
            Trainer(model, args, train_dataset=_Sentences()).train()
            return None
        trainer = PenstockTrainer(model, args, train_dataset=_Sentences(), pipeline=options)
        trainer.train()
    return trainer.pipe


def with_lightning(model: Any, options: Options) -> Pipeline | None:
    """Train with a usual LightningModule; returns the pipeline, if there is one."""
    import lightning

    from penstock.integrations.lightning import PenstockStrategy

    found: list[Pipeline] = []

    class Lit(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
            return _loss_of(self.net, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

        def on_train_end(self) -> None:
            found.extend(getattr(self.trainer.strategy, "pipelines", {}).values())

    trainer = lightning.Trainer(
        strategy="auto" if options is None else PenstockStrategy(**options),
        accelerator="auto",
        max_steps=WARM_UP + COUNTED,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Lit(), _batches())
    return found[0] if found else None


def with_accelerate(model: Any, options: Options) -> Pipeline | None:
    """Train with a loop prepared by Accelerate; returns the pipeline, if there is one."""
    from accelerate import Accelerator

    from penstock.integrations.accelerate import prepare

    accelerator = Accelerator()
    if options is None:
        prepared: Any = accelerator.prepare(model)
    else:
        prepared = prepare(accelerator, model, **options)
    optimizer = torch.optim.AdamW(prepared.parameters(), lr=1e-3)
    optimizer, loader = accelerator.prepare(optimizer, _batches())
    for batch in loader:
        accelerator.backward(_loss_of(prepared, batch))
        optimizer.step()
        optimizer.zero_grad()
    return None if options is None else prepared.late.pipe


FRAMEWORKS: dict[str, Train] = {
    "transformers": with_trainer,
    "lightning": with_lightning,
    "accelerate": with_accelerate,
}


def train(framework: str, options: Options) -> dict[str, Any]:
    """Train a model with a framework, timing from the end of one optimizer step to the next.

    Args:
        framework: one of `FRAMEWORKS`.
        options: keyword arguments of the pipeline; `None` for the framework alone.

    Returns:
        `seconds` of each counted step, the `loss` of the first batch after training, and the `plan`
        in words, which is empty without a pipeline.

    Raises:
        RuntimeError: the optimizers have not made as many steps as the script.
    """
    ends: list[float] = []
    model = language_model()
    handle = register_optimizer_step_post_hook(lambda *_: ends.append(time.perf_counter()))
    try:
        pipe = FRAMEWORKS[framework](model, options)
    finally:
        handle.remove()
    plan = "" if pipe is None else prediction(pipe.plan)
    if pipe is not None:
        pipe.close()
    if len(ends) != WARM_UP + COUNTED:
        raise RuntimeError(f"{len(ends)} steps of optimizers were seen, not {WARM_UP + COUNTED}")
    ends = ends[WARM_UP - 1 :]
    first = next(iter(_batches()))
    with torch.no_grad():
        loss = float(model(**first).loss)
    seconds = [end - begin for begin, end in pairwise(ends)]
    return {"seconds": seconds, "loss": loss, "plan": plan}


if __name__ == "__main__":
    kind = " ".join(sys.argv[2:])
    print(json.dumps(train(sys.argv[1], {"workers": kind} if kind else None)))
