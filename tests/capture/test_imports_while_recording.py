"""Python modules that are imported for the first time while a forward is recorded."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import penstock as ps

IMPORTED = "imported_while_recording"


class Imports(nn.Module):
    """As a forward does that first uses another part of a library."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        importlib.import_module(IMPORTED)
        sys.modules[f"{IMPORTED}.lazy"] = 1  # type: ignore[assignment]
        return self.second(self.first(x))


def test_they_find_what_torch_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        "from torch import nn",
        "CALL = nn.Module.__call__",
        "GET = nn.Module.__getattribute__",
    ]
    (tmp_path / f"{IMPORTED}.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, IMPORTED, raising=False)
    ps.capture(Imports(), (torch.randn(4, 4),))
    found = sys.modules.pop(IMPORTED)
    sys.modules.pop(f"{IMPORTED}.lazy")
    assert found.CALL is nn.Module.__call__
    assert found.GET is object.__getattribute__


def test_recording_does_not_import_what_compiles() -> None:
    script = (
        "import sys, torch, penstock as ps\n"
        "from torch import nn\n"
        "class Own(nn.Module):\n"
        "    def forward(self, x):\n"
        "        return x * 2\n"
        "model = nn.Sequential(nn.Linear(4, 4), Own(), nn.Dropout(0.5), nn.Linear(4, 4))\n"
        "ps.capture(model, (torch.randn(4, 4),), keep_closed=['1'])\n"
        "print('torch._dynamo' in sys.modules)\n"
    )
    run = [sys.executable, "-W", "ignore", "-c", script]
    found = subprocess.run(run, capture_output=True, text=True, timeout=120, check=True)
    assert found.stdout.strip() == "False"
