"""What the docs name exists."""

from __future__ import annotations

import re

import pytest

from tests.house.test_house import ROOT

HOME = ROOT.parent
PAGES = [HOME / "README.md", HOME / "CONTRIBUTING.md", *sorted((HOME / "docs").rglob("*.md"))]
_FILE = re.compile(r"`((?:penstock|tests|examples|docs|[a-z_]+)/[\w/.-]+\.(?:py|md|json))`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page: object) -> None:
    text = (HOME / str(page)).read_text()
    for name in _FILE.findall(text):
        assert (HOME / name).exists() or (ROOT / name).exists(), name
