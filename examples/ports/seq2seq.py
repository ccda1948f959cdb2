"""Trains T5 to turn sequences of tokens round: variable lengths, label padding, generation."""

import argparse

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import Adafactor, T5Config, T5ForConditionalGeneration

PAD, END, FIRST, VOCAB = 0, 1, 2, 32


def pairs(count: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        length = int(torch.randint(3, 11, (), generator=draw))
        source = torch.randint(FIRST, VOCAB, (length,), generator=draw)
        target = source.flip(0)[: length // 2 + 1]
        found.append(tuple(torch.cat([tokens, torch.tensor([END])]) for tokens in (source, target)))
    return found


def collate(rows: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
    sources, targets = zip(*rows, strict=True)
    input_ids = pad_sequence(sources, batch_first=True, padding_value=PAD)
    labels = pad_sequence(targets, batch_first=True, padding_value=-100)
    attention_mask = (input_ids != PAD).long()
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-train-epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--output", default="seq2seq.pt")
    args = parser.parse_args()

    torch.manual_seed(0)
    train = DataLoader(pairs(40, 0), args.batch_size, shuffle=True, collate_fn=collate)
    evaluation = DataLoader(pairs(16, 1), args.batch_size, collate_fn=collate)

    config = T5Config(
        vocab_size=VOCAB,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        pad_token_id=PAD,
        eos_token_id=END,
        decoder_start_token_id=PAD,
    )
    model = T5ForConditionalGeneration(config)
    optimizer = Adafactor(
        model.parameters(), lr=args.learning_rate, scale_parameter=False, relative_step=False
    )

    for epoch in range(args.num_train_epochs):
        model.train()
        for batch in train:
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        print(f"epoch {epoch}: loss {loss.item():.4f}")

        model.eval()
        right = 0
        for batch in evaluation:
            inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
            generated = model.generate(**inputs, max_new_tokens=batch["labels"].shape[1])[:, 1:]
            labels = batch["labels"][:, : generated.shape[1]]
            right += ((generated == labels) | (labels == -100)).all(1).sum().item()
        print(f"epoch {epoch}: {right} right")

    torch.save(model.state_dict(), args.output)


if __name__ == "__main__":
    main()
