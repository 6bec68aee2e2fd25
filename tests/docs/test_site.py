"""The pages build into a site that loads nothing from a network, and a broken link is an error."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.docs.pages import PAGES, ROOT


def build(root: Path, site: Path) -> str:
    """Build the pages of a checkout as `just docs` does; return what went wrong."""
    recipe = re.search(r"^docs:\n +sphinx-build (.*) -d build/doctrees docs src/legato/site$", justfile(), re.M)
    assert recipe is not None
    command = [
        sys.executable,
        "-m",
        "sphinx",
        *recipe[1].split(),
        "-d",
        str(site.with_name("trees")),
        "docs",
        str(site),
    ]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert bool(done.returncode) == bool(done.stderr), done.stderr
    return done.stderr


def justfile() -> str:
    return (ROOT / "justfile").read_text("utf-8")


def test_the_site_has_every_page_and_loads_nothing_from_a_network(tmp_path: Path) -> None:
    site = tmp_path / "site"
    assert build(ROOT, site) == ""
    for page in PAGES:
        if page.is_relative_to(ROOT / "docs"):
            assert (site / page.relative_to(ROOT / "docs").with_suffix(".html")).is_file()
    assert (site / "searchindex.js").is_file()
    for file in site.rglob("*.html"):
        text = file.read_text("utf-8")
        assert re.findall(r"<(?:script|img|link)[^>]*(?:src|href)=\"(?:https?:)?//[^>]*>", text) == [], file
    for file in site.rglob("*.css"):
        assert re.findall(r"(?:url\(|@import) *[\"']?(?:https?:)?//", file.read_text("utf-8")) == [], file


def test_a_broken_link_or_anchor_fails(tmp_path: Path) -> None:
    for name in ("docs", "deploy"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "CHANGELOG.md", tmp_path)
    page = tmp_path / "docs" / "scope.md"
    page.write_text(page.read_text("utf-8") + "\n[a](nowhere.md) and [b](seam.md#nowhere)\n", "utf-8")
    failures = build(tmp_path, tmp_path / "site")
    assert "'nowhere.md'" in failures
    assert "'nowhere'" in failures
