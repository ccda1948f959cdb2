"""A script of the Trainer: `FOLDER [CHECKPOINT] [plain]`, alone or under torchrun."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset

from penstock.loading import tolerate_missing_torchvision_operators

tolerate_missing_torchvision_operators()
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments  # noqa: E402

from penstock.integrations.transformers import PenstockTrainer  # noqa: E402


class Stream(IterableDataset):  # type: ignore[type-arg]
    """Rows without end, of which those of later steps are longer."""

    def __iter__(self) -> Any:
        generator = torch.Generator().manual_seed(1)
        for k in range(64):
            tokens = torch.randint(64, (8 if k < 24 else 12,), generator=generator)
            yield {"input_ids": tokens, "labels": tokens.masked_fill(tokens % 5 == 0, -100)}


def main() -> None:
    """Train for four steps, evaluate after each, and leave what this process has in the end."""
    folder, resume, *plain = sys.argv[1:]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(
        vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, **off
    )
    model: Any = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    args: Any = TrainingArguments(
        folder,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        logging_steps=1,
        save_steps=2,
        eval_strategy="steps",
        eval_steps=1,
        max_steps=4,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        per_device_eval_batch_size=4,
    )
    options = {"threads_per_worker": 1, "progress": None}
    trainer = (Trainer if plain else PenstockTrainer)(
        model,
        args,
        train_dataset=Stream(),
        eval_dataset=list(Stream())[:6],
        optimizers=(optimizer, scheduler),
        **({} if plain else {"pipeline": options}),
    )
    trainer.train(resume_from_checkpoint=resume or None)
    found = dict(model.state_dict())
    for name in ("loss", "grad_norm", "learning_rate"):
        logs = [entry[name] for entry in trainer.state.log_history if name in entry]
        found[name] = torch.tensor(logs)
    found["rows"] = torch.tensor(len(trainer.predict(list(Stream())[:6]).predictions))
    if not plain:
        assert trainer.pipe.shares_model == ("RANK" not in os.environ)
    torch.save(found, Path(folder) / f"{os.environ.get('RANK', 0)}.pt")
    trainer.end()


if __name__ == "__main__":
    main()
