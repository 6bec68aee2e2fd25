"""The project's pages, cut into what the tests look at: code blocks, and regions that are built from the code."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["DOCS", "PAGES", "README", "ROOT", "Block", "blocks", "region"]

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
PAGES = (README, ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md")))

_BLOCK = re.compile(r"(?:^<!-- (?P<mark>[^\n]*?) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S)


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    mark: str
    """What the comment in the line before it says; empty if there is none."""
    language: str
    text: str


def blocks(page: Path) -> Sequence[Block]:
    """Return a page's fenced blocks, in order."""
    found = _BLOCK.finditer(page.read_text("utf-8"))
    return [Block(match["mark"] or "", match["language"], match["text"]) for match in found]


def region(name: str) -> tuple[Path, re.Match[str]]:
    """Return the page that has the region `name`, and the match in its text; group 1 is the region."""
    pattern = re.compile(f"<!-- {name} -->\n(.*?)\n<!-- end {name} -->", re.S)
    found = [(page, match) for page in PAGES for match in pattern.finditer(page.read_text("utf-8"))]
    assert len(found) == 1, f"{len(found)} pages have the region `{name}`, expected 1"
    return found[0]
