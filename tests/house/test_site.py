"""The site of the docs: every public name, every page, the notebook, and the project's papers."""

from __future__ import annotations

import ast
import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import penstock as ps
from tests.house.snippets import HOME, blocks, hook
from tests.house.test_commands import problem

DOCS = HOME / "docs"
NAMED = {
    path: re.findall(r"^::: ([\w.]+)$", path.read_text(), re.MULTILINE)
    for path in sorted((DOCS / "api").glob("*.md"))
}

LISTS = re.compile(r"^(?:Args|Attributes|Raises):\n((?:(?: .*)?\n)+)", re.MULTILINE)


def value(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def loaded(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def pages(nav: Any) -> list[str]:
    """The files in a navigation."""
    if isinstance(nav, str):
        return [nav]
    values = nav.values() if isinstance(nav, dict) else nav
    return [page for value in values for page in pages(value)]


def test_the_api_has_every_public_name() -> None:
    shown = [value(path) for paths in NAMED.values() for path in paths]
    missing = [name for name in ps.__all__ if not any(getattr(ps, name) is each for each in shown)]
    assert not missing


def test_what_the_api_shows_is_documented() -> None:
    for path in [path for paths in NAMED.values() for path in paths]:
        assert value(path).__doc__, path


def test_what_a_docstring_lists_is_read_by_the_site() -> None:
    """Names and their colon have to be on one line, or the site's strict build ends there."""
    unread = [
        f"{path.relative_to(HOME)}: {line.strip()}"
        for path in sorted((HOME / "penstock").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        for part in LISTS.findall(f"{ast.get_docstring(node) or ''}\n")
        for line in re.findall(r"^    \S.*$", part, re.MULTILINE)
        if ":" not in line
    ]
    assert not unread


def test_every_page_is_in_the_navigation() -> None:
    listed = pages(loaded(HOME / "mkdocs.yml")["nav"])
    written = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    assert sorted(listed) == sorted(written | {"changelog.md", "contributing.md"})


def test_the_start_is_a_notebook() -> None:
    cells = json.loads(hook("notebook").notebook((DOCS / "start.md").read_text()))["cells"]
    code = [cell["source"] for cell in cells if cell["cell_type"] == "code"]
    page = [b.code.strip() for b in blocks(DOCS / "start.md") if b.language == "python"]
    assert code == page  # which test_snippets.py runs
    assert "<!--" not in str(cells)
    assert cells[0]["source"].startswith("# Start")


def test_the_site_loads_nothing_from_elsewhere() -> None:
    settings = loaded(HOME / "mkdocs.yml")
    assert settings["theme"]["font"] is False
    urls = [settings.get(name, []) for name in ("extra_css", "extra_javascript")]
    assert "//" not in str(urls)
    assert not re.search(
        r"!\[[^\]]*\]\(https?:", "".join(p.read_text() for p in DOCS.rglob("*.md"))
    )


def test_the_site_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strictly: a link to nothing, or a name that does not exist, is an error."""
    commands = pytest.importorskip("mkdocs.commands.build", reason="needs 'penstock[docs]'")
    config = importlib.import_module("mkdocs.config")
    monkeypatch.chdir(HOME)
    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    settings = config.load_config(str(HOME / "mkdocs.yml"), site_dir=str(tmp_path), strict=True)
    commands.build(settings)
    index = (tmp_path / "index.html").read_text()
    assert "images/step.png" in index
    loads = re.compile(r'<(?:script|link rel="stylesheet"|img)[^>]*(?:src|href)="(?:https?:)?//')
    assert not [page for page in tmp_path.rglob("*.html") if loads.search(page.read_text())]
    assert (
        "the inputs have different batch sizes: …"
        in (tmp_path / "troubleshooting.html").read_text()
    )
    json.loads((tmp_path / "start.ipynb").read_text())


def test_the_workflow_runs_what_a_visitor_runs() -> None:
    job = loaded(HOME / ".github" / "workflows" / "ci.yml")["jobs"]["test"]
    commands = job["strategy"]["matrix"]["command"]
    assert {"make demo", "make test"} <= set(commands)
    assert not [command for command in commands if problem(command)]


def test_papers_can_be_read() -> None:
    citation = loaded(HOME / "CITATION.cff")
    assert (citation["title"], citation["version"]) == ("Penstock", ps.__version__)
    forms = sorted((HOME / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
    assert len(forms) > 2
    for form in [form for form in forms if form.name != "config.yml"]:
        assert {"name", "description", "body"} <= set(loaded(form))


def test_the_version_is_in_one_place() -> None:
    project = (HOME / "pyproject.toml").read_text()
    assert not re.search(r'^version = "', project, re.MULTILINE)
    assert 'dynamic = ["version"]' in project
    found = [
        path
        for path in (HOME / "penstock").rglob("*.py")
        if re.search(r'^__version__ = "', path.read_text(), re.MULTILINE)
    ]
    assert found == [HOME / "penstock" / "__init__.py"]
    assert f"## {ps.__version__} " in (HOME / "CHANGELOG.md").read_text()
