"""Hooks of mkdocs.yml: the navigation, and the files outside docs/ that pages link to.

On GitHub a link leads to a file of the repository. The site has the same files: docs/x.md at x, README.md as its first page,
and what is linked outside docs/ under its path in the repository.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
CONTENTS = "docs/README.md"
LINK = re.compile(r"(?<=\]\()([^)#:\s]+)(?=[)#])")
GROUP = re.compile(r"^\*\*(.+?)\*\*: (.+?)(?:\n\n|\Z)", re.MULTILINE | re.DOTALL)
ENTRY = re.compile(r"\[([^\]]+)\]\(([^)]+)\)")


def site_path(path: str) -> str:
    """Where a file of the repository is among the site's sources."""
    return "index.md" if path in ("README.md", CONTENTS) else path.removeprefix("docs/")


def linked(path: str) -> set[str]:
    """Files of the repository that this page links to."""
    folder = Path(path).parent
    targets = {os.path.normpath(folder / target) for target in LINK.findall((ROOT / path).read_text())}
    return {target for target in targets if (ROOT / target).is_file()}


def navigation() -> list[Any]:
    """The groups of docs/README.md; an entry's name ends at a colon."""
    nav: list[Any] = [{"Overview": "index.md"}]
    for group, entries in GROUP.findall((ROOT / CONTENTS).read_text()):
        pages = []
        for words, target in ENTRY.findall(entries):
            name = " ".join(words.split()).split(":")[0]
            pages.append({name[0].upper() + name[1:]: site_path(os.path.normpath(Path("docs") / target))})
        nav.append({group: pages})
    return nav


def on_config(config: Any) -> Any:
    """Set the navigation."""
    config.nav = navigation()
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add README.md and what is linked outside docs/, directly or from a page added here."""
    pages = {f"docs/{file.src_uri}" for file in files.documentation_pages()}
    reached, new = set(pages), pages | {"README.md"}
    while new:
        reached |= new
        new = {target for page in new if page.endswith(".md") for target in linked(page)} - reached
    for path in sorted(reached):
        if not path.startswith("docs/"):
            files.append(File.generated(config, site_path(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """Point links to where the site has the files."""
    here = Path(page.file.abs_src_path or "").relative_to(ROOT)

    def moved(link: re.Match[str]) -> str:
        target = os.path.normpath(here.parent / link[0])
        if not (ROOT / target).is_file():
            return link[0]
        return os.path.relpath(site_path(target), Path(page.file.src_uri).parent)

    return LINK.sub(moved, markdown)
