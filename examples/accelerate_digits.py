"""Trains a network that reads digits with Accelerate, on all devices of this machine.

    python examples/accelerate_digits.py [--devices 2] [--workers processes] [--epochs 4]
    python examples/accelerate_digits.py --plain

With `--plain` the model is prepared by Accelerate alone, on one device. The pictures are drawn in
the fonts that matplotlib carries. It needs `pip install 'penstock[accelerate,report]'`.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from digits import digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from penstock.integrations.accelerate import prepare


def network(width: int = 12) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in ((1, width), (width, 2 * width), (2 * width, 4 * width)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
        layers += [nn.Conv2d(outputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
        layers += [nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Dropout(0.1), nn.Linear(64 * width, 10))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plain", action="store_true", help="Accelerate alone")
    parser.add_argument("--devices", type=int, help="how many; by default as many as are fastest")
    parser.add_argument("--workers", default="auto", help="threads or processes")
    parser.add_argument("--epochs", type=int, default=4)
    chosen = parser.parse_args()
    set_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = network()
    if chosen.plain:
        model = accelerator.prepare(model)
    else:
        model = prepare(accelerator, model, devices=chosen.devices, workers=chosen.workers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    loader = DataLoader(digits(2048, seed=1), batch_size=32, shuffle=True, drop_last=True)
    optimizer, loader = accelerator.prepare(optimizer, loader)
    for epoch in range(chosen.epochs):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        print(f"epoch {epoch}: loss {loss:.3f}")
    model.eval()
    x, y = digits(512, seed=2).tensors
    with torch.no_grad():
        right = (model(x.to(accelerator.device)).argmax(1).cpu() == y).float().mean()
    print(f"{right:.1%} of the digits held out are read right")


if __name__ == "__main__":
    main()
