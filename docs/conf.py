"""How Sphinx builds these pages into a site that needs no network."""

from __future__ import annotations

import re

from sphinx.application import Sphinx

project = "Legato"
html_title = "Legato"
extensions = ["myst_parser"]
html_theme = "furo"
html_show_copyright = False
html_copy_source = False
myst_heading_anchors = 6


def _prepare(app: Sphinx, page: str, source: list[str]) -> None:
    """Make the navigation from the links of the overview, and a download of the changelog, which is no page here."""
    source[0] = source[0].replace("](../CHANGELOG.md)", "](<path:../CHANGELOG.md>)")
    if page == "index":
        pages = dict.fromkeys(re.findall(r"\]\(([\w/]+)\.md\)", source[0].split("## Where to read what")[1]))
        source[0] += "\n".join(["", "```{toctree}", ":hidden:", "", *pages, "```", ""])


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _prepare)
