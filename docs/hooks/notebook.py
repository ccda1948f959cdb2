"""A page of the docs as a notebook: Python blocks are cells, what is between them is text."""

from __future__ import annotations

import json
import re

_BLOCK = re.compile(r"^```python\n(.*?)^```\n", re.DOTALL | re.MULTILINE)
_COMMENT = re.compile(r"<!--.*?-->\n*", re.DOTALL)


def notebook(markdown: str) -> str:
    """The JSON of the notebook of a page."""
    cells = []
    for k, text in enumerate(_BLOCK.split(_COMMENT.sub("", markdown))):
        if text.strip():
            cells.append(_code(len(cells), text) if k % 2 else _text(len(cells), text))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    found = {
        "cells": cells,
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(found, ensure_ascii=False, indent=1) + "\n"


def _text(number: int, text: str) -> dict[str, object]:
    return {"id": f"cell-{number}", "cell_type": "markdown", "metadata": {}, "source": text.strip()}


def _code(number: int, text: str) -> dict[str, object]:
    return {
        "id": f"cell-{number}",
        "cell_type": "code",
        "metadata": {},
        "source": text.strip(),
        "execution_count": None,
        "outputs": [],
    }
