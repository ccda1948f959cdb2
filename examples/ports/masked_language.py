"""Fine-tunes BERT on masked tokens: padded sentences, a linear warm-up, clipped gradients."""

import argparse
import math

import torch
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForMaskedLM, get_linear_schedule_with_warmup

PAD, MASK, FIRST = 0, 1, 2


class Sentences(torch.utils.data.Dataset):
    """Counting sequences of several lengths, so that there is something to learn."""

    def __init__(self, count: int, vocab: int, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.rows = []
        for _ in range(count):
            start, step, length = torch.randint(1, 17, (3,), generator=draw).tolist()
            numbers = start + step * torch.arange(length + 8)
            self.rows.append(FIRST + numbers % (vocab - FIRST))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, k: int) -> torch.Tensor:
        return self.rows[k]


def collate(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Pads to the longest row, and masks 15 % of the tokens."""
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)
    attention_mask = (tokens != PAD).long()
    masked = (torch.rand(tokens.shape) < 0.15) & (tokens != PAD)
    masked[:, 0] = True  # at least one in every row
    labels = tokens.masked_fill(~masked, -100)
    input_ids = tokens.masked_fill(masked, MASK)
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-train-epochs", type=int, default=2)
    parser.add_argument("--per-device-batch-size", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--weight-decay", type=float, default=0.01)
    parser.add_argument("--max-grad-norm", type=float, default=1.0)
    parser.add_argument("--output", default="masked_language.pt")
    args = parser.parse_args()

    torch.manual_seed(42)
    vocab = 64
    size = args.per_device_batch_size
    train = DataLoader(Sentences(36, vocab, 0), size, shuffle=True, collate_fn=collate)
    evaluation = DataLoader(Sentences(16, vocab, 1), size, collate_fn=collate)

    config = BertConfig(
        vocab_size=vocab,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=32,
    )
    model = BertForMaskedLM(config)
    no_decay = ("bias", "LayerNorm.weight")
    named = list(model.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {
                "params": [p for n, p in named if not n.endswith(no_decay)],
                "weight_decay": args.weight_decay,
            },
            {"params": [p for n, p in named if n.endswith(no_decay)], "weight_decay": 0.0},
        ],
        lr=args.learning_rate,
    )
    steps = args.num_train_epochs * len(train)
    lr_scheduler = get_linear_schedule_with_warmup(optimizer, steps // 5, steps)

    for epoch in range(args.num_train_epochs):
        model.train()
        total_loss = 0.0
        for batch in train:
            outputs = model(**batch)
            loss = outputs.loss
            total_loss += loss.detach().float()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()

        model.eval()
        losses = []
        for batch in evaluation:
            with torch.no_grad():
                outputs = model(**batch)
            losses.append(outputs.loss.repeat(len(batch["labels"])))
        perplexity = math.exp(torch.cat(losses).mean())
        print(f"epoch {epoch}: loss {total_loss / len(train):.4f}, perplexity {perplexity:.2f}")

    torch.save(model.state_dict(), args.output)


if __name__ == "__main__":
    main()
