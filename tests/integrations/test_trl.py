"""SFTTrainer of TRL on a pipeline, beside the plain one. Needs `pip install trl`."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.loading import tolerate_missing_torchvision_operators

tolerate_missing_torchvision_operators()
pytest.importorskip("trl", reason="trl is not installed: pip install trl")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    from penstock.integrations.transformers import PenstockMixin

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
]


class Pipelined(PenstockMixin, SFTTrainer):
    """As docs/integrations/transformers.md says."""


def trained(kind: type[Any], folder: Path, **options: Any) -> Any:
    """A trainer after six steps, of two micro-batches each."""
    torch.manual_seed(0)
    without = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    size = {"n_layer": 4, "n_embd": 32, "n_head": 2, "n_positions": 64, "vocab_size": 100}
    model = GPT2LMHeadModel(
        GPT2Config(**size, **without, bos_token_id=0, eos_token_id=1, pad_token_id=2)
    )
    words = Tokenizer(models.WordLevel({f"t{k}": k for k in range(100)}, unk_token="t3"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="t2", eos_token="t1", unk_token="t3"
    )
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, 100, (n,), generator=generator).tolist() for n in (16, 9, 12, 16) * 16]
    arguments = SFTConfig(
        output_dir=str(folder),
        max_steps=6,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        logging_steps=1,
        max_length=64,
        disable_tqdm=True,
    )
    data = Dataset.from_dict({"input_ids": rows})
    trainer = kind(model, arguments, train_dataset=data, processing_class=tokenizer, **options)
    trainer.train()
    return trainer


def test_the_same_bits_and_the_same_log(tmp_path: Path) -> None:
    plain = trained(SFTTrainer, tmp_path / "plain")
    workers = {"devices": 2, "threads_per_worker": 1, "replicas": 1, "progress": None}
    given = trained(Pipelined, tmp_path / "given", pipeline=workers)
    assert len(given.pipe.plan.devices) == 2
    given.end()
    expected = plain.model.state_dict()
    assert all(torch.equal(expected[k], v) for k, v in given.model.state_dict().items())
    for one, other in zip(plain.state.log_history[:6], given.state.log_history[:6], strict=True):
        assert {k: one[k] for k in ("loss", "entropy", "mean_token_accuracy", "num_tokens")} == {
            k: other[k] for k in ("loss", "entropy", "mean_token_accuracy", "num_tokens")
        }
