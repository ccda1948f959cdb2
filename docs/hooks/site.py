"""What `mkdocs` adds to the pages as it builds the site."""

from __future__ import annotations

import re

import messages
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from notebook import notebook

# Pages of the repository that are not below docs/, and how they are called on the site.
_PAGES = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
_OUTSIDE = re.compile(r"\[([^\]]*)\]\((?:\.\./)+(?!\w+\.md)([\w/.-]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds pages from above docs/, and the notebook."""
    for name, page in _PAGES.items():
        text = (messages.HOME / name).read_text().replace("](docs/", "](")
        files.append(File.generated(config, page, content=text))
    start = (messages.HOME / "docs" / "start.md").read_text()
    files.append(File.generated(config, "start.ipynb", content=notebook(start)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lists the messages of all errors, and names files that the site does not have.

    Links to the pages from above docs/ lead to where the site has them.
    """
    if page.file.src_uri == "troubleshooting.md":
        markdown = markdown.replace("<!-- every message -->", messages.markdown())
    for name, generated in _PAGES.items():
        markdown = markdown.replace(f"](../{name}", f"]({generated}")
    return _OUTSIDE.sub(r"\1 (`\2`)", markdown)
