"""Trains GPT-2 on the sources of Python's standard library with the Trainer of transformers.

    python examples/transformers_trainer.py [--steps 20] [--plain] [--resume] [--out DIR]
    torchrun --nproc-per-node 2 examples/transformers_trainer.py [--steps 20] ...

`--plain` runs the same script on one device, without Penstock: the losses are the same numbers,
and so are the weights, whose checksum is printed last.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
import zlib
from pathlib import Path
from typing import Any

import torch

from penstock.loading import tolerate_missing_torchvision_operators

tolerate_missing_torchvision_operators()  # transformers imports torchvision where it is there
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments  # noqa: E402

from penstock.integrations.transformers import PenstockTrainer  # noqa: E402

TOKENS = 64  # bytes of context
UNDER_TORCHRUN = "RANK" in os.environ


def rows() -> list[dict[str, torch.Tensor]]:
    """The standard library's sources as bytes, in rows of tokens, which are the labels as well."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = bytearray(b"".join(file.read_bytes() for file in files[:60]))
    windows = torch.frombuffer(text, dtype=torch.uint8)
    windows = windows[: len(windows) // TOKENS * TOKENS].view(-1, TOKENS).long()
    return [{"input_ids": row, "labels": row} for row in windows]


def small_model() -> Any:
    """GPT-2 with four blocks of width 128 over bytes; without dropout, so that bits can agree."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256,
        n_positions=TOKENS,
        n_embd=128,
        n_layer=4,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return GPT2LMHeadModel(config)


def main() -> None:
    """Train, evaluate, and print what the weights are."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--plain", action="store_true", help="without Penstock")
    parser.add_argument("--resume", action="store_true", help="from the last checkpoint in --out")
    parser.add_argument("--out", default="out/trainer")
    options = parser.parse_args()

    torch.set_num_threads(1)  # as each worker has, because bits depend on it
    data, model = rows(), small_model()
    args: Any = TrainingArguments(
        options.out,
        max_steps=options.steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
        learning_rate=1e-3,
        warmup_steps=5,
        logging_steps=5,
        eval_strategy="steps",
        eval_steps=10,
        save_steps=10,
        dataloader_pin_memory=torch.cuda.is_available(),
        report_to=[],
        disable_tqdm=True,
    )
    given = {"train_dataset": data[64:], "eval_dataset": data[:64]}
    if options.plain:
        trainer = Trainer(model, args, **given)
    else:
        pipeline = {"threads_per_worker": 1} | ({} if UNDER_TORCHRUN else {"devices": 2})
        trainer = PenstockTrainer(model, args, **given, pipeline=pipeline)
    trainer.train(resume_from_checkpoint=options.resume)
    if trainer.is_world_process_zero():
        if isinstance(trainer, PenstockTrainer):
            print(trainer.pipe)
        weights = (p.detach().cpu().numpy().tobytes() for p in model.parameters())
        print(f"checksum of the weights: {zlib.crc32(b''.join(weights)):08x}")


if __name__ == "__main__":
    main()
