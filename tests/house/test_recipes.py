"""The recipes of docs/recipes.md run as they stand there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "recipes.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)


def test_the_recipes_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "recipes"}
    for number, block in enumerate(BLOCKS):
        code = "\n" * TEXT[: TEXT.index(block)].count("\n") + block  # errors have the right line
        exec(compile(code, str(ROOT / "docs" / "recipes.md"), "exec"), names)
        if number == 1:
            model, pipe = names["model"].eval(), names["pipe"]
            # Kernels round differently for other numbers of rows.
            parts = names["x"].tensor_split(pipe.plan.num_microbatches)
            expected = torch.cat([model(part) for part in parts])
            model.train()
            assert torch.equal(names["logits"][:8], expected)
    assert len(BLOCKS) == TEXT.count("```") // 2
    assert names["position"]["epoch"] == 3


def test_readme_leads_there() -> None:
    assert "docs/recipes.md" in (ROOT / "README.md").read_text()
