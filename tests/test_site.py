"""The documentation as a site: every page is found, and mkdocs has nothing to complain about."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_the_contents_name_every_page_of_the_docs() -> None:
    contents = set(re.findall(r"\]\(([^)#]+)", (ROOT / "docs/README.md").read_text()))
    assert {page.name for page in (ROOT / "docs").glob("*.md")} - contents == {"README.md"}


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="mkdocs-material is not installed: pip install -c constraints.txt mkdocs-material")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr
    join = (tmp_path / "site/join/index.html").read_text()
    assert "Behind a router" in join
    assert "../tools/slurm_join" in join
    assert (tmp_path / "site/tools/slurm_join").read_text() == (ROOT / "tools/slurm_join").read_text()
    first = (tmp_path / "site/index.html").read_text()
    for shown in ('src="images/swarm.svg"', 'href="bootstrap/"', 'href="dashboard/"', "Evidence"):
        assert shown in first
    assert (tmp_path / "site/images/swarm.svg").is_file()
