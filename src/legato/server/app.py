"""The ASGI application: every path with its endpoint.

`create_app` receives what it needs as arguments; there are no globals. `run` serves it.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from legato.config import LimitSettings, ServerSettings, StoreSettings
from legato.dialects import llamacpp, ollama
from legato.dialects.base import Answerer
from legato.dialects.openai_requests import CommonBody
from legato.errors import MethodNotAllowed, RouteNotFound
from legato.run.models import Models
from legato.server.access import Access
from legato.server.admin import admin_routes
from legato.server.generate import Generation
from legato.server.generations import Generations
from legato.server.generations.routes import generation_routes
from legato.server.ledger import Ledger
from legato.server.middleware import Endpoint, Gate, GatedEndpoint, PathError, TelemetryMiddleware
from legato.server.openapi.document import REPORT_HEADERS, describe
from legato.server.queries import Query
from legato.server.site import Site
from legato.server.status import model_routes, status_routes
from legato.server.streaming import send_body
from legato.server.surfaces import DIALECTS, surface_of
from legato.server.telemetry import Telemetry
from legato.storage.store import Store
from legato.system.supervisor import Supervisor
from legato.wire import encode_json

__all__ = ["create_app"]

_QUERIES: Mapping[tuple[str, str], Answerer] = {
    ("POST", "/tokenize"): llamacpp.tokenize,
    ("POST", "/detokenize"): llamacpp.detokenize,
    ("POST", "/apply-template"): llamacpp.apply_template,
    ("GET", "/props"): llamacpp.props,
    ("GET", "/api/tags"): ollama.tags,
    ("GET", "/api/version"): ollama.version,
}
"""Requests that are answered without an engine, by method and path."""


def create_app(
    models: Models,
    store: Store,
    server: ServerSettings,
    limits: LimitSettings,
    journals: StoreSettings = StoreSettings(),  # noqa: B008 - it is frozen
) -> Router:
    """Build the application over models that are already loaded, and a store that is open."""
    supervisor = Supervisor()
    access = Access(server.key_digests(), store, supervisor)
    gate = Gate(server, limits, access)
    ledger = Ledger(store, supervisor)
    telemetry = Telemetry(models, store, supervisor, traces_url=server.traces_url)
    started = int(time.time())
    resumable = {path: dialect for path, dialect in DIALECTS.items() if issubclass(dialect.body, CommonBody)}
    generations = Generations(store, journals, models, resumable, ledger, telemetry, supervisor)
    document = encode_json(describe(tuple(models.served), has_keys=bool(server.api_keys) or store.has_keys()))

    def routes(path: str, endpoints: Mapping[str, Endpoint], *, is_public: bool = False) -> Route:
        return _route(gate, path, endpoints, is_public=is_public)

    async def show_document(scope: Scope, receive: Receive, send: Send) -> None:
        await send_body(send, document, status=200, headers={})

    @asynccontextmanager
    async def lifespan(app: object) -> AsyncIterator[None]:
        with telemetry.open():
            try:
                async with ledger.running(), generations.running():
                    yield
            finally:
                await supervisor.aclose()

    public = {**status_routes(models, supervisor, access), "/openapi.json": show_document}
    public |= dict.fromkeys(("/docs", "/docs/{name:path}"), Site())
    return Router(
        [
            *(
                routes(path, {"POST": Generation(path, dialect, models, gate, ledger, telemetry, generations)})
                for path, dialect in DIALECTS.items()
            ),
            *(
                routes(path, {method: Query(answer, models, started, gate)})
                for (method, path), answer in _QUERIES.items()
            ),
            *(routes(path, {"GET": endpoint}, is_public=True) for path, endpoint in public.items()),
            *(routes(path, {"GET": endpoint}) for path, endpoint in model_routes(models, telemetry, started).items()),
            *(routes(path, endpoints) for path, endpoints in generation_routes(generations, gate).items()),
            *(routes(path, endpoints) for path, endpoints in admin_routes(store, gate).items()),
        ],
        redirect_slashes=False,
        default=_not_found,
        lifespan=lifespan,
        middleware=[Middleware(TelemetryMiddleware, telemetry), *_cross_origin(server.cors_origins)],
    )


def _route(gate: Gate, path: str, endpoints: Mapping[str, Endpoint], *, is_public: bool) -> Route:
    """Return the route of a path, with the gate before its endpoints, which are by method."""

    async def endpoint(scope: Scope, receive: Receive, send: Send) -> None:
        await endpoints["GET" if scope["method"] == "HEAD" else scope["method"]](scope, receive, send)

    surface = surface_of(path)
    guarded = GatedEndpoint(
        gate, path, surface.encode_error, endpoint, is_public=is_public, takes_x_api_key=surface.takes_x_api_key
    )
    return _Route(path, guarded, [*endpoints])


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:
    path = scope["path"]
    error = RouteNotFound(f"there is nothing at `{path}`")
    await PathError(error, surface_of(path).encode_error, {})(scope, receive, send)


class _Route(Route):
    """A path. Other methods get an error in the form of the path's surface."""

    methods: set[str]

    def __init__(self, path: str, guarded: GatedEndpoint, methods: Collection[str]) -> None:
        super().__init__(path, guarded, methods=methods)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request for this path."""
        if scope["method"] in self.methods:
            await self.app(scope, receive, send)
            return
        scope["notes"]["route"] = self.path
        allowed = ", ".join(self.methods)
        error = MethodNotAllowed(f"`{scope['path']}` takes {allowed}, got {scope['method']}")
        await PathError(error, surface_of(scope["path"]).encode_error, {"allow": allowed})(scope, receive, send)


def _cross_origin(origins: Sequence[str]) -> Sequence[Middleware]:
    """Return the middleware that lets pages of these origins read answers and errors."""
    if not origins:
        return ()
    exposed = (*REPORT_HEADERS, "Retry-After", "X-Request-Id")
    return (
        Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=exposed,
        ),
    )
