"""Trains a speech recogniser with CTC: convolutions, then an LSTM, on sounds of several lengths."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader

MELS, LETTERS = 16, 8  # letter 0 is CTC's blank


def utterances(count: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Spectrograms (time, MELS) and the letters in them; each sounds for 6 to 9 frames."""
    draw = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        length = int(torch.randint(2, 6, (), generator=draw))
        letters = torch.randint(1, LETTERS, (length,), generator=draw)
        frames = torch.randint(6, 10, (length,), generator=draw)
        sound = F.one_hot(letters.repeat_interleave(frames) * 2, MELS).float()
        found.append((sound + 0.2 * torch.randn(sound.shape, generator=draw), letters))
    return found


def collate(rows: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, ...]:
    rows = sorted(rows, key=lambda row: -len(row[0]))
    sounds, texts = zip(*rows, strict=True)
    spectrograms = pad_sequence(sounds, batch_first=True).transpose(1, 2)
    labels = pad_sequence(texts, batch_first=True)
    input_lengths = torch.tensor([len(sound) for sound in sounds])
    label_lengths = torch.tensor([len(text) for text in texts])
    return spectrograms, labels, input_lengths, label_lengths


class Recogniser(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv1d(MELS, width, 5, stride=2, padding=2),
            nn.GELU(),
            nn.Conv1d(width, width, 5, padding=2),
            nn.GELU(),
        )
        self.norm = nn.LayerNorm(width)
        self.lstm = nn.LSTM(width, width, 2, batch_first=True, bidirectional=True)
        self.classifier = nn.Sequential(
            nn.Linear(2 * width, width), nn.GELU(), nn.Dropout(0.1), nn.Linear(width, LETTERS)
        )

    def forward(
        self, spectrograms: torch.Tensor, lengths: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.norm(self.conv(spectrograms).transpose(1, 2))
        lengths = (lengths + 1) // 2
        packed = pack_padded_sequence(x, lengths, batch_first=True)
        x, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=x.shape[1])
        return F.log_softmax(self.classifier(x), dim=-1), lengths


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--output", default="speech.pt")
    args = parser.parse_args()

    torch.manual_seed(7)
    train = DataLoader(utterances(44, 0), args.batch_size, shuffle=True, collate_fn=collate)
    test = DataLoader(utterances(16, 1), args.batch_size, collate_fn=collate)
    model = Recogniser()
    criterion = nn.CTCLoss(blank=0, zero_infinity=True)
    optimizer = torch.optim.AdamW(model.parameters(), args.learning_rate)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, args.learning_rate, steps_per_epoch=len(train), epochs=args.epochs
    )

    for epoch in range(args.epochs):
        model.train()
        for spectrograms, labels, input_lengths, label_lengths in train:
            optimizer.zero_grad()
            log_probs, output_lengths = model(spectrograms, input_lengths)
            log_probs = log_probs.transpose(0, 1)  # (time, batch, letters)
            loss = criterion(log_probs, labels, output_lengths, label_lengths)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            scheduler.step()
        print(f"epoch {epoch}: loss {loss.item():.4f}")

        model.eval()
        total = 0.0
        with torch.no_grad():
            for spectrograms, labels, input_lengths, label_lengths in test:
                log_probs, output_lengths = model(spectrograms, input_lengths)
                log_probs = log_probs.transpose(0, 1)
                loss = criterion(log_probs, labels, output_lengths, label_lengths)
                total += loss.item() / len(test)
        print(f"epoch {epoch}: test loss {total:.4f}")

    torch.save(model.state_dict(), args.output)


if __name__ == "__main__":
    main()
