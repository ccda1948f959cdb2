"""Draws the pictures of docs/watching.md, of a small model that two worker processes train.

    python -m penstock.bench pictures [--output docs/images]

`top.svg` is the screen of `penstock top`, and `watched.png` the timeline of a recorded step.
`report.png`, the upper part of a report, and `trace.png`, the trace of that step in Perfetto, are
screenshots made with Chromium. They are left out where Chromium or
`pip install 'penstock[browser]'` is missing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import torch

import penstock as ps
from penstock.bench.perfetto_page import serve_perfetto
from penstock.bench.subjects import gpt2_like, language_loss, tokens
from penstock.observe.timeline import save_figure

_STEPS = 40
_SIZES = {"report.png": (1100, 1500), "trace.png": (1400, 480)}  # in pixels
_SETTLING = 2_000  # ms in which Perfetto's page draws
_UNFOLD = "window.app.commands.runCommand('dev.perfetto.ExpandTracksByRegex', 'measured|worker')"
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_NEEDED = "they need Chromium, and pip install 'penstock[browser]'"


def _top(path: Path, go_on: threading.Event) -> None:
    """Draw the pipeline of this process with `penstock top`; then set `go_on` in any case."""
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


def _browser() -> str | None:
    """The path of a browser; `None` if there is none, or playwright or viztracer is missing."""
    driven = all(map(find_spec, ("playwright", "viztracer")))
    return next(filter(None, map(shutil.which, _BROWSERS)), None) if driven else None


def _photograph(browser: str, pages: Mapping[str, str], folder: Path) -> None:
    """Save screenshots of pages.

    Args:
        browser: the path of the browser.
        pages: the address of each page, by the file name of its picture.
        folder: where the pictures go.
    """
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        opened = started.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        for name, address in pages.items():
            width, height = _SIZES[name]
            page = opened.new_page(viewport={"width": width, "height": height})
            page.goto(address)
            if name == "trace.png":
                page.wait_for_function("window.app && window.app.trace && window.app.trace.engine")
                page.wait_for_timeout(_SETTLING)
                page.evaluate(_UNFOLD)
                page.wait_for_timeout(_SETTLING)
            page.screenshot(path=folder / name)
        opened.close()


def main(arguments: Sequence[str]) -> int:
    """Train a small model, and draw the pictures."""
    parser = argparse.ArgumentParser("python -m penstock.bench pictures", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("docs/images"))
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    sys.argv = ["train.py"]  # the name of the script in the report
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
        browser = _browser()
        if browser is None:
            print(f"{' and '.join(_SIZES)} are left out: {_NEEDED}")
            return 0
        with tempfile.TemporaryDirectory() as folder:
            report, trace = Path(folder) / "report.html", Path(folder) / "step.pftrace"
            pipe.report(report)
            timelines[0].save(trace)
            with serve_perfetto(trace) as address:
                pages = {"report.png": report.as_uri(), "trace.png": address}
                _photograph(browser, pages, options.output)
    return 0
