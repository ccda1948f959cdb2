"""Pictures of digits, in the fonts that matplotlib carries: data for examples that run offline."""

from __future__ import annotations

import random
from pathlib import Path

import matplotlib
import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch.utils.data import TensorDataset

SIZE = 32  # pixels of each side
_FONTS = ("DejaVu", "STIXGeneral", "cmr10", "cmss10", "cmtt10")


def digits(count: int, seed: int) -> TensorDataset:
    """Pictures (count, 1, SIZE, SIZE) between 0 and 1, and what they show (count), 0 to 9.

    Every one is in a random font and size, turned and moved a little, with noise.
    """
    draw = random.Random(seed)
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    fonts = [path for path in sorted(folder.glob("*.ttf")) if path.name.startswith(_FONTS)]
    shown = [draw.randrange(10) for _ in range(count)]
    pictures = np.stack([_picture(str(digit), draw.choice(fonts), draw) for digit in shown])
    noise = np.random.default_rng(seed).normal(0, 0.15, pictures.shape)
    inputs = torch.tensor((pictures + noise).clip(0, 1), dtype=torch.float32)[:, None]
    return TensorDataset(inputs, torch.tensor(shown))


def _picture(text: str, font: Path, draw: random.Random) -> np.ndarray:
    picture = Image.new("L", (SIZE, SIZE))
    letters = ImageFont.truetype(str(font), draw.randint(16, 26))
    place = (SIZE / 2 + draw.uniform(-4, 4), SIZE / 2 + draw.uniform(-4, 4))
    ImageDraw.Draw(picture).text(place, text, fill=255, font=letters, anchor="mm")
    return np.asarray(picture.rotate(draw.uniform(-20, 20), Image.Resampling.BILINEAR)) / 255
