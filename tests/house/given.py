"""What readers bring to the snippets of the docs: models, batches, losses.

A page names a function of this module before a block, in a comment: `<!-- given: classifier -->`.
"""

from __future__ import annotations

import json
import warnings
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import lightning
import safetensors.torch
import torch
import transformers
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import penstock as ps

Names = dict[str, Any]


class Blocks(nn.Sequential):
    """A small classifier whose layers have the names that the docs use."""

    def __init__(self) -> None:
        layers = [nn.Linear(6, 8), nn.Sequential(nn.Tanh(), nn.Linear(8, 8)), nn.Linear(8, 4)]
        super().__init__(OrderedDict((f"layer{k}", each) for k, each in enumerate(layers, 1)))


def nothing() -> Names:
    """For a page whose blocks bring everything themselves."""
    return {}


def model() -> Names:
    """A script before its pipeline: a classifier, a batch, a loss, two devices."""
    made, x, y = Blocks(), torch.randn(8, 6), torch.randint(0, 4, (8,))
    return {
        "torch": torch,
        "nn": nn,
        "F": F,
        "ps": ps,
        "model": made,
        "x": x,
        "y": y,
        "loss_fn": F.cross_entropy,
        "class_weights": torch.ones(4),
        "devices": ["cpu", "cpu"],
        "batches": [(x, y)] * 2,
    }


def functions() -> Names:
    """Functions that make a model and batches, an example, and a data set."""
    names = model()
    x, y = names["x"], names["y"]
    data = TensorDataset(x.repeat(8, 1), y.repeat(8))
    return names | {
        "build_model": Blocks,
        "first_batch": lambda: (x, y),
        "batches": lambda: [(x, y)] * 2,
        "data": data,
        "dataset": data,
        "example": x,
        "DataLoader": DataLoader,
        "Path": Path,
    }


def process_group() -> Names:
    """The same in a script of one rank, with its process group."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    return functions() | {
        "dist": torch.distributed,
        "DistributedSampler": DistributedSampler,
        "DistributedDataParallel": nn.parallel.DistributedDataParallel,
    }


def pipelining() -> Names:
    """The same with batches in a list."""
    names = functions()
    return names | {"batches": names["batches"]()}


def pipeline() -> Names:
    """The same with its pipeline, its optimizer, a scheduler and a gradient scaler."""
    names = functions()
    pipe = ps.Pipeline(names["model"], (names["x"],), devices=2, num_microbatches=2)
    optimizer = pipe.optimizer(torch.optim.AdamW, lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    found = {"pipe": pipe, "optimizer": optimizer, "scheduler": scheduler, "scaler": pipe.scaler()}
    return names | found | {"resume": False, "batches": [(names["x"], names["y"])] * 2}


def embedding() -> Names:
    """A pipeline whose results are embeddings, and the embeddings that should be near."""
    return pipeline() | {"positives": torch.randn(8, 4)}


def language_model() -> Names:
    """A small GPT-2, an example batch of tokens, others, and the tokens that should follow."""
    config = transformers.GPT2Config(
        n_layer=2,
        n_embd=16,
        n_head=2,
        vocab_size=32,
        n_positions=16,
        bos_token_id=0,
        eos_token_id=0,
    )
    tokens = torch.randint(0, 32, (4, 9))
    tokens, target = tokens[:, :-1], tokens[:, 1:]

    def loss_fn(output: Any, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output.logits.flatten(0, 1), target.flatten())

    return {
        "torch": torch,
        "nn": nn,
        "F": F,
        "ps": ps,
        "example": tokens,
        "transformers": transformers,
        "config": config,
        "tokens": tokens,
        "labels": tokens,
        "loss_fn": loss_fn,
        "batches": [(tokens, target)] * 2,
        "devices": ["cpu", "cpu"],
    }


def pretrained() -> Names:
    """The folder of a small GPT-2 with its weights."""
    names = language_model()
    transformers.GPT2LMHeadModel(names["config"]).save_pretrained("gpt2")
    tokens = names["tokens"]
    return names | {"path": "gpt2", "batches": [(tokens, tokens)] * 2}


def model_with_loss() -> Names:
    """A pipeline of a GPT-2, which computes its own loss."""
    names = language_model()
    made = transformers.GPT2LMHeadModel(names["config"])
    example = {"input_ids": names["tokens"], "labels": names["labels"]}
    return names | {"pipe": ps.Pipeline(made, kwargs=example, devices=2)}


class Tagger(nn.Module):
    """Words in, a class for every word out; padding is masked."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 8), nn.Linear(8, 4)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(torch.tanh(self.embed(input_ids)))
        return found * attention_mask.unsqueeze(2)


def varying_lengths() -> Names:
    """A tagger of sentences, and batches of several lengths."""

    def made(rows: int, length: int) -> Names:
        ids = torch.randint(0, 32, (rows, length))
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def labels(rows: int, length: int) -> torch.Tensor:
        return torch.randint(0, 4, (rows, length))

    def loss_fn(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output.flatten(0, 1), labels.flatten())

    return {
        "torch": torch,
        "nn": nn,
        "F": F,
        "ps": ps,
        "model": Tagger(),
        "loss_fn": loss_fn,
        "devices": ["cpu", "cpu"],
        "batch": made(4, 5),
        "longer_batch": made(4, 9),
        "labels": labels(4, 9),
        "short": made(2, 3),
        "longer": made(2, 7),
        "longest": made(1, 12),
        "a": labels(2, 3),
        "b": labels(2, 7),
        "c": labels(1, 12),
    }


def checkpoint() -> Names:
    """A pipeline that has trained a step and was saved to "checkpoint"."""
    names = pipeline()
    names["pipe"].train_step(names["x"], target=names["y"], loss_fn=F.cross_entropy)
    names["optimizer"].step()
    things = {"optimizer": names["optimizer"], "scheduler": names["scheduler"]}
    names["pipe"].save("checkpoint", **things)
    names["pipe"].close()
    return names


def plain_script() -> Names:
    """A script of plain PyTorch that goes on from what `checkpoint` saved."""
    checkpoint()
    made = Blocks()
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-3)
    return {
        "torch": torch,
        "ps": ps,
        "json": json,
        "Path": Path,
        "safetensors": safetensors,
        "model": made,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.LinearLR(optimizer),
    }


def loggers() -> Names:
    """A pipeline, and stand-ins for the packages that show curves."""
    noted: list[Any] = []
    writer = SimpleNamespace(add_scalar=lambda *values: noted.append(values))
    stand_ins = {"wandb": SimpleNamespace(log=noted.append), "SummaryWriter": lambda: writer}
    return pipeline() | stand_ins


def model_in_bfloat16() -> Names:
    """A model, and a batch of the dtype that it is to have."""
    names = model()
    return names | {"x": names["x"].to(torch.bfloat16)}


class Routed(NamedTuple):
    """What a mixture of experts returns."""

    logits: torch.Tensor
    balance: torch.Tensor


class Experts(Blocks):
    """A classifier with an auxiliary loss."""

    def forward(self, x: torch.Tensor) -> Routed:  # type: ignore[override]
        logits = super().forward(x)
        return Routed(logits, logits.square().mean())


def experts() -> Names:
    """A pipeline whose results have an auxiliary loss."""
    names = functions()
    return names | {"pipe": ps.Pipeline(Experts(), (names["x"],), devices=2)}


def large_model() -> Names:
    """A Llama whose weights are in several files."""
    config = transformers.LlamaConfig(
        num_hidden_layers=2,
        hidden_size=16,
        intermediate_size=16,
        vocab_size=32,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(".", max_shard_size="4KB")
    batch = {"input_ids": torch.randint(0, 32, (4, 8))}
    names = {"transformers": transformers, "config": config, "batch": batch}
    return names | {"ps": ps, "devices": ["cpu", "cpu"]}


def generating() -> Names:
    """A small language model and tokens."""
    names = language_model()
    names["config"].n_positions, names["config"].pad_token_id = 64, 1
    return names | {"ps": ps, "model": transformers.GPT2LMHeadModel(names["config"])}


def translating() -> Names:
    """A small model with an encoder, a text and an answer."""
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    config = transformers.T5Config(vocab_size=50, decoder_start_token_id=0, **sizes)
    model = transformers.T5ForConditionalGeneration(config).eval()
    longest, answer = torch.randint(3, 50, (2, 12)), torch.randint(3, 50, (2, 8))
    return {"ps": ps, "torch": torch, "model": model, "longest": longest, "longest_answer": answer}


def generating_pipeline() -> Names:
    """A pipeline of that."""
    names = generating()
    example = {"input_ids": names["tokens"]}
    pipe = ps.Pipeline(names["model"].eval(), kwargs=example, devices=2)
    return names | {"pipe": pipe}


class Cell(nn.Module):
    """A model that takes its state and returns it."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(4, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor, hidden: torch.Tensor | None = None) -> Any:
        hidden = self.cell(x, x.new_zeros(len(x), 8) if hidden is None else hidden)
        return self.head(hidden), hidden


def recurrent() -> Names:
    """A recurrent cell, and a pipeline of it."""
    x, model = torch.randn(4, 4), Cell().eval()
    pipe = ps.Pipeline(model, (x,), devices=["cpu", "cpu"])
    return {"ps": ps, "x": x, "model": model, "pipe": pipe}


class Lit(lightning.LightningModule):
    """A module of Lightning."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Blocks()

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def lightning_module() -> Names:
    """A module of Lightning and its data."""
    names = functions()
    warnings.filterwarnings("ignore", module="lightning")  # of loggers and the number of loaders
    loader = DataLoader(names["data"], batch_size=32)
    return names | {"lightning": lightning, "module": Lit(), "loader": loader}


def fabric() -> Names:
    """A model, an optimizer and data for Fabric and Accelerate."""
    names = lightning_module()
    optimizer = torch.optim.SGD(names["model"].parameters(), lr=0.1)
    return names | {"Fabric": lightning.Fabric, "optimizer": optimizer}


def accelerated() -> Names:
    """The same for Accelerate."""
    return fabric() | {"Accelerator": Accelerator}


def trainer() -> Names:
    """A model, data and arguments for the Trainer of transformers."""
    from penstock.integrations.transformers import PenstockMixin

    names = language_model()
    rows = [{"input_ids": row, "labels": row} for row in names["tokens"]]
    arguments = transformers.TrainingArguments(
        output_dir="out",
        num_train_epochs=1,
        per_device_train_batch_size=4,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
    )
    return names | {
        "model": transformers.GPT2LMHeadModel(names["config"]),
        "args": arguments,
        "train": rows,
        "held_out": rows,
        "collator": transformers.default_data_collator,
        "PenstockMixin": PenstockMixin,
        "SFTTrainer": transformers.Trainer,
    }


def frameworks() -> Names:
    """What the constructors of several frameworks get."""
    import penstock.integrations.accelerate
    from penstock.integrations.lightning import PenstockStrategy
    from penstock.integrations.transformers import PenstockTrainer

    names = lightning_module() | trainer()
    return names | {
        "penstock": penstock,
        "PenstockStrategy": PenstockStrategy,
        "PenstockTrainer": PenstockTrainer,
        "accelerator": Accelerator(cpu=True),
        "data": names["train"],
    }
