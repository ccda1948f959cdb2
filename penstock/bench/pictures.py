"""Draws the pictures of docs/watching.md, of a small model that two worker processes train.

    python -m penstock.bench pictures [--output docs/images]

`top.svg` is what `penstock top` shows, `report.png` the upper part of a report as Chromium shows
it (left out where Chromium is not installed), and `watched.png` a recorded step.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import torch

import penstock as ps
from penstock.bench.subjects import gpt2_like, language_loss, tokens
from penstock.observe.timeline import save_figure

_STEPS = 40
_SIZE = "1100,1500"  # of the report's picture, in pixels
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def _top(path: Path, go_on: threading.Event) -> None:
    """Draw this process's pipeline, while it trains; then let it end."""
    command = [
        str(Path(sys.executable).with_name("penstock")),
        "top",
        str(os.getpid()),
        "--figure",
        str(path),
    ]
    try:
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    finally:
        go_on.set()


def _photograph(page: Path, picture: Path) -> None:
    """Have a browser draw a page."""
    browser = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if browser is None:
        print(f"{picture.name} is left out: there is no {' or '.join(_BROWSERS)} here")
        return
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += [f"--window-size={_SIZE}", f"--screenshot={picture}", page.resolve().as_uri()]
    subprocess.run(command, check=True, capture_output=True)


def main(arguments: Sequence[str]) -> int:
    """Train, and draw."""
    parser = argparse.ArgumentParser("python -m penstock.bench pictures", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("docs/images"))
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    sys.argv = ["train.py"]  # which the report names
    torch.manual_seed(0)
    model, (x, y) = gpt2_like(4, 128, 4, 32), tokens(16, 32)
    drawn = threading.Event()
    with ps.Pipeline(
        model,
        (x,),
        devices=["cpu", "cpu"],
        workers="processes",
        replicas=1,
        num_microbatches=4,
    ) as pipe:
        optimizer = pipe.optimizer(torch.optim.AdamW)
        drawing = threading.Thread(target=_top, args=(options.output / "top.svg", drawn))
        step = 0
        while step < _STEPS or not drawn.is_set():
            step += 1
            if step == _STEPS // 2:
                drawing.start()
            optimizer.zero_grad()
            pipe.train_step(x, target=y, loss_fn=language_loss)
            optimizer.step()
        drawing.join()
        with pipe.recording() as timelines:
            pipe.train_step(x, target=y, loss_fn=language_loss)
        save_figure(timelines[0], options.output / "watched.png")
        with tempfile.TemporaryDirectory() as folder:
            page = Path(folder) / "report.html"
            pipe.report(page)
            _photograph(page, options.output / "report.png")
    return 0
