"""Trains a small GPT on the bytes of Python's standard library."""

import argparse
import math
import sysconfig
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1 = nn.LayerNorm(width, bias=False)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)
        self.ln_2 = nn.LayerNorm(width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, C = x.shape  # noqa: N806
        q, k, v = self.qkv(self.ln_1(x)).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, C))
        return x + self.down(F.gelu(self.up(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self, vocab: int, block_size: int, layers: int, heads: int, width: int) -> None:
        super().__init__()
        self.block_size = block_size
        self.wte = nn.Embedding(vocab, width)
        self.wpe = nn.Embedding(block_size, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width, bias=False)
        self.lm_head = nn.Linear(width, vocab, bias=False)
        self.lm_head.weight = self.wte.weight
        for name, p in self.named_parameters():
            if p.ndim >= 2:
                std = 0.02 / math.sqrt(2 * layers) if name.endswith("proj.weight") else 0.02
                nn.init.normal_(p, std=std)

    def forward(self, idx, targets=None):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        for block in self.blocks:
            x = block(x)
        x = self.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1]]), None
        logits = self.lm_head(x)
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
        return logits, loss

    def configure_optimizers(self, weight_decay: float, lr: float) -> torch.optim.AdamW:
        decay = [p for p in self.parameters() if p.ndim >= 2]
        others = [p for p in self.parameters() if p.ndim < 2]
        groups = [
            {"params": decay, "weight_decay": weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))

    @torch.no_grad()
    def generate(self, idx: torch.Tensor, count: int) -> torch.Tensor:
        for _ in range(count):
            logits, _ = self(idx[:, -self.block_size :])
            token = torch.multinomial(F.softmax(logits[:, -1], dim=-1), num_samples=1)
            idx = torch.cat([idx, token], dim=1)
        return idx


def set_lr(optimizer: torch.optim.Optimizer, step: int, args: argparse.Namespace) -> None:
    if step < args.warmup:
        lr = args.lr * (step + 1) / (args.warmup + 1)
    else:
        ratio = (step - args.warmup) / (args.steps - args.warmup)
        lr = args.lr * (0.1 + 0.45 * (1.0 + math.cos(math.pi * ratio)))
    for group in optimizer.param_groups:
        group["lr"] = lr


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--eval-interval", type=int, default=3)
    parser.add_argument("--eval-iters", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--output", default="gpt.pt")
    args = parser.parse_args()

    torch.manual_seed(1337)
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:40]
    data = np.frombuffer(b"".join(file.read_bytes() for file in files), dtype=np.uint8)
    splits = {"train": data[: len(data) * 9 // 10], "val": data[len(data) * 9 // 10 :]}

    def get_batch(split: str) -> tuple[torch.Tensor, torch.Tensor]:
        data = torch.from_numpy(splits[split].astype(np.int64))
        starts = torch.randint(len(data) - args.block_size, (args.batch_size,))
        x = torch.stack([data[i : i + args.block_size] for i in starts])
        y = torch.stack([data[i + 1 : i + 1 + args.block_size] for i in starts])
        return x, y

    model = GPT(vocab=256, block_size=args.block_size, layers=4, heads=4, width=64)
    optimizer = model.configure_optimizers(weight_decay=0.1, lr=args.lr)
    ctx = torch.autocast("cpu", dtype=torch.bfloat16)

    @torch.no_grad()
    def estimate_loss() -> dict[str, float]:
        out = {}
        model.eval()
        for split in ("train", "val"):
            losses = torch.zeros(args.eval_iters)
            for k in range(args.eval_iters):
                x, y = get_batch(split)
                with ctx:
                    loss = pipe.eval_step(x, y, loss_fn=lambda output: output[1])
                losses[k] = loss.item()
            out[split] = losses.mean().item()
        model.train()
        return out

    x, y = get_batch("train")
    pipe = ps.Pipeline(model, (x, y), devices=2)
    for step in range(args.steps):
        set_lr(optimizer, step, args)
        if step % args.eval_interval == 0:
            print(f"step {step}: {estimate_loss()}")
        for _ in range(args.accumulate):
            with ctx:
                loss = pipe.train_step(x, y, loss_fn=lambda output: output[1] / args.accumulate)
            x, y = get_batch("train")
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        print(f"iter {step}: loss {loss.item() * args.accumulate:.4f}")

    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, args.output)
    model.eval()
    tokens = model.generate(torch.zeros(1, 1, dtype=torch.long), 32)
    print(bytes(tokens[0].tolist()).decode("utf-8", "replace"))


if __name__ == "__main__":
    main()
