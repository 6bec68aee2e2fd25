"""The documentation as a site, below `/docs/`: files that the build of the wheel made from the pages."""

from __future__ import annotations

import posixpath
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

from legato.errors import RouteNotFound

__all__ = ["FOLDER", "Site"]

FOLDER = Path(__file__).parents[1] / "site"
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
        "font-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


class Site:
    """The endpoint that serves the files of a folder, read-only."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._folder = folder
        self._files = StaticFiles(directory=folder, html=True, check_dir=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the file that the path names.

        Raises:
            RouteNotFound: there is no such file, or the site was not built.
        """
        if not (self._folder / "index.html").is_file():
            raise RouteNotFound("the documentation was not built with this installation; `just docs` builds it")
        try:
            path = posixpath.normpath(scope["path_params"].get("name") or ".")
            response = await self._files.get_response(path, scope)
        except HTTPException as error:
            raise RouteNotFound(f"there is no page at `{scope['path']}`") from error
        response.headers.update(_HEADERS)
        await response(scope, receive, send)
