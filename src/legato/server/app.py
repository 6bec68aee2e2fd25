"""The ASGI application: which path speaks which dialect, and the routes beside them.

`create_app` receives what it needs as arguments; there are no globals. `run` serves it.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from legato.config import LimitSettings, ServerSettings, StoreSettings
from legato.dialects import dashscope, deepseek, llamacpp, maas, mistral, ollama, openai
from legato.dialects.base import Answerer, Dialect, Encoder
from legato.dialects.openai_requests import CommonBody
from legato.dialects.openai_responses import OPENAI
from legato.errors import MethodNotAllowed, RouteNotFound
from legato.run.answers import choose_best, collect, total_usage
from legato.run.events import Event
from legato.run.models import Model, Models
from legato.run.plan import DEFAULT_MAX_TOKENS, plan, planners
from legato.run.run import Run
from legato.server.access import Access
from legato.server.admin import admin_routes, check_admin
from legato.server.generations import Generations
from legato.server.generations.routes import handle_routes, send_live
from legato.server.ledger import Ledger
from legato.server.middleware import Endpoint, Gate, Guarded, PathError, Reply, Watched
from legato.server.openapi import REPORT_HEADERS, describe
from legato.server.queries import Query, facts, report_headers
from legato.server.site import Site
from legato.server.streaming import run_aside, send_body, send_stream, while_connected
from legato.server.telemetry import METRICS_TYPE, Watch
from legato.storage.store import ANYONE, Key, Store
from legato.system.supervisor import Supervisor
from legato.system.threads import ASIDE
from legato.types import CompletionRequest, Finished, Usage
from legato.wire import KEEP_ALIVE, encode_json, parse_body

__all__ = ["create_app"]


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
    watch = Watch(models, store, supervisor, traces_url=server.traces_url)
    started = int(time.time())

    def route(method: str, path: str, endpoint: Endpoint, *, is_public: bool = False) -> Route:
        return routes(path, {method: endpoint}, is_public=is_public)

    def routes(path: str, endpoints: Mapping[str, Endpoint], *, is_public: bool = False) -> Route:
        async def endpoint(scope: Scope, receive: Receive, send: Send) -> None:
            await endpoints["GET" if scope["method"] == "HEAD" else scope["method"]](scope, receive, send)

        checks = {"is_public": is_public, "takes_x_api_key": path in _LLAMACPP}
        return _Route(path, Guarded(gate, path, _reply(path), endpoint, **checks), [*endpoints])

    dialects: dict[str, Dialect] = {
        "/v1/completions": openai.CompletionsDialect(),
        "/v1/chat/completions": openai.ChatDialect(),
        "/v1/fim/completions": mistral.InfillDialect(),
        "/v2/chat/completions": maas.PrefixChatDialect(),
        "/openai/v1/chat/completions": maas.FlaggedChatDialect(),
        "/compatible-mode/v1/completions": dashscope.CompletionsDialect(),
        "/compatible-mode/v1/chat/completions": dashscope.ChatDialect(),
        "/beta/completions": deepseek.CompletionsDialect(),
        "/beta/chat/completions": deepseek.ChatDialect(),
        "/completion": llamacpp.CompletionDialect(),
        "/infill": llamacpp.InfillDialect(),
        "/api/generate": ollama.GenerateDialect(),
    }
    resumable = {path: dialect for path, dialect in dialects.items() if issubclass(dialect.body, CommonBody)}
    generations = Generations(store, journals, models, resumable, ledger, watch, supervisor)
    document = encode_json(describe(dialects, tuple(models.served), has_keys=bool(server.api_keys) or store.has_keys()))

    def generation(path: str, dialect: Dialect) -> Route:
        return route("POST", path, Generation(path, dialect, models, gate, ledger, watch, generations))

    def query(method: str, path: str, answer: Answerer) -> Route:
        return route(method, path, Query(answer, models, started, gate))

    async def health(scope: Scope, receive: Receive, send: Send) -> None:
        counts = {}
        has_failed = False
        down = sorted(supervisor.down())
        for model in models.own:
            engine = model.engine.counters()
            if engine.get("down"):
                down.append(f"engine {model.name}")
            has_failed = has_failed or bool(engine.get("failed"))
            places = {"running": model.admission.num_running, "waiting": model.admission.num_waiting}
            counts[model.name] = {**places, "restarts": engine.get("restarts", 0)}
        status = "failed" if has_failed else "degraded" if down else "ok"
        body = encode_json({"status": status, "models": counts, "down": down})
        await send_body(send, body, status=503 if has_failed else 200, headers={})

    async def ready(scope: Scope, receive: Receive, send: Send) -> None:
        """Whether requests would be answered; unlike `health`, also by what no new start of this process mends."""
        failed = [model.name for model in models.own if model.engine.counters().get("failed")]
        status = "engine failed" if failed else "ready"
        if not await access.is_answered():
            status = "store unavailable"
        body = encode_json({"status": status})
        await send_body(send, body, status=200 if status == "ready" else 503, headers={})

    async def metrics(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["key"] != ANYONE:
            check_admin(scope["key"])
        body = await ASIDE.run(watch.metrics)
        await send_body(send, body, status=200, headers={}, kind=METRICS_TYPE)

    async def list_models(scope: Scope, receive: Receive, send: Send) -> None:
        served = models.only(scope["key"].models).served
        entries = [_entry(name, model, started) for name, model in served.items()]
        await send_body(send, encode_json({"object": "list", "data": entries}), status=200, headers={})

    async def show_model(scope: Scope, receive: Receive, send: Send) -> None:
        name = scope["path_params"]["name"]
        entry = _entry(name, models.only(scope["key"].models).resolve(name), started)
        await send_body(send, encode_json(entry), status=200, headers={})

    async def show_document(scope: Scope, receive: Receive, send: Send) -> None:
        await send_body(send, document, status=200, headers={})

    async def not_found(scope: Scope, receive: Receive, send: Send) -> None:
        error = RouteNotFound(f"there is nothing at `{scope['path']}`")
        await PathError(error, _reply(scope["path"]), {})(scope, receive, send)

    @asynccontextmanager
    async def lifespan(app: object) -> AsyncIterator[None]:
        with watch.open():
            try:
                async with ledger.kept(), generations.kept():
                    yield
            finally:
                await supervisor.aclose()

    return Router(
        [
            *(generation(path, dialect) for path, dialect in dialects.items()),
            query("POST", "/tokenize", llamacpp.tokenize),
            query("POST", "/detokenize", llamacpp.detokenize),
            query("POST", "/apply-template", llamacpp.apply_template),
            query("GET", "/props", llamacpp.props),
            query("GET", "/api/tags", ollama.tags),
            query("GET", "/api/version", ollama.version),
            route("GET", "/v1/models", list_models),
            route("GET", "/v1/models/{name:path}", show_model),
            route("GET", "/openai/v1/models", list_models),
            route("GET", "/health", health, is_public=True),
            route("GET", "/ready", ready, is_public=True),
            route("GET", "/metrics", metrics),
            route("GET", "/openapi.json", show_document, is_public=True),
            *(route("GET", path, Site(), is_public=True) for path in ("/docs", "/docs/{name:path}")),
            *(routes(path, endpoints) for path, endpoints in handle_routes(generations, gate).items()),
            *(routes(path, endpoints) for path, endpoints in admin_routes(store, gate).items()),
        ],
        redirect_slashes=False,
        default=not_found,
        lifespan=lifespan,
        middleware=[Middleware(Watched, watch), *_cross_origin(server.cors_origins)],
    )


class _Route(Route):
    """A path. A method that it does not take is answered as its dialect has errors."""

    methods: set[str]

    def __init__(self, path: str, guarded: Guarded, methods: Collection[str]) -> None:
        super().__init__(path, guarded, methods=methods)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request for this path."""
        if scope["method"] in self.methods:
            await self.app(scope, receive, send)
            return
        scope["notes"]["route"] = self.path
        allowed = ", ".join(self.methods)
        error = MethodNotAllowed(f"`{scope['path']}` takes {allowed}, got {scope['method']}")
        await PathError(error, _reply(scope["path"]), {"allow": allowed})(scope, receive, send)


def _cross_origin(origins: Sequence[str]) -> Sequence[Middleware]:
    """Return what lets pages of these origins read answers, errors too."""
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


_LLAMACPP = ("/completion", "/infill", "/tokenize", "/detokenize", "/apply-template", "/props")
_REPLIES = (
    ("/v1/fim/", mistral.SHAPE.encode_error),
    ("/v2/", maas.SHAPE.encode_error),
    ("/openai/", maas.SHAPE.encode_error),
    ("/compatible-mode/", dashscope.SHAPE.encode_error),
    ("/beta/", deepseek.SHAPE.encode_error),
    ("/api/", ollama.encode_ollama_error),
    *((path, llamacpp.encode_llamacpp_error) for path in _LLAMACPP),
)
"""How paths write errors: those that begin with one that ends in a slash, and those that are another; the rest do as
OpenAI.
"""


def _reply(path: str) -> Reply:
    """Return what writes the errors of a path, whether or not there is something at it."""
    return next(
        (reply for start, reply in _REPLIES if path == start or (start.endswith("/") and path.startswith(start))),
        OPENAI.encode_error,
    )


def _entry(name: str, model: Model, created: int) -> dict[str, Any]:
    profile = model.engine.profile
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "legato",
        "capabilities": {
            "chat": profile.can_chat,
            "prefix": True,
            "infill": profile.infill is not None,
            "reasoning": profile.reasoning is not None,
            "context_length": profile.context_length,
            "default_max_tokens": {"completions": DEFAULT_MAX_TOKENS, "chat": None},
        },
    }


class Generation:
    """The endpoint of one dialect's path."""

    def __init__(
        self,
        path: str,
        dialect: Dialect,
        models: Models,
        gate: Gate,
        ledger: Ledger,
        watch: Watch,
        generations: Generations,
    ) -> None:
        self._path = path
        self._dialect = dialect
        self._models = models
        self._gate = gate
        self._ledger = ledger
        self._watch = watch
        self._generations = generations

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Parse, plan, run and answer."""
        key: Key = scope["key"]
        body = await self._gate.read_body(scope, receive)

        def read() -> tuple[dict[str, Any], CompletionRequest]:
            fields = parse_body(body)
            return fields, self._dialect.parse(fields)

        fields, asked = await run_aside(receive, planners(len(body)), read)
        request = replace(asked, caller=key.name, control_tokens=key.control_tokens)
        model = self._models.only(key.models).resolve(request.model)
        threads = planners(len(body), request.constraint)
        run = await run_aside(receive, threads, lambda: plan(request, model))
        if run.request.resumable and run.jobs:
            live = await self._generations.start(key, self._path, fields, run)
            scope["notes"] |= {"model": model.name, "generation": live.record.id}
            await send_live(self._generations, live, receive, send)
            return
        async with self._ledger.account(key, run):
            with self._watch.run(run, scope["notes"]):
                await self._answer(run, receive, send)

    async def _answer(self, run: Run, receive: Receive, send: Send) -> None:
        request = run.request
        headers = report_headers(run.report)
        encoder = self._dialect.encoder(request)
        if request.output.stream:
            kind = self._dialect.stream_type
            headers["content-type"] = kind
            async with aclosing(self._watch.events(run)) as events:
                frames = _frames(run, encoder, events)
                stream = send_stream(send, frames, encoder.failure, headers, KEEP_ALIVE[kind])
                await while_connected(receive, stream)
        else:
            drawn = await while_connected(receive, collect(self._watch.events(run)))
            answers = choose_best(drawn, run.num_drawn, request.num_choices)
            usage = total_usage([answer.usage for answer in drawn], run.num_drawn)
            await send_body(send, encoder.whole(answers, usage, facts(run, usage)), status=200, headers=headers)


async def _frames(run: Run, encoder: Encoder, events: AsyncGenerator[Event, None]) -> AsyncGenerator[bytes, None]:
    """Encode a stream, a frame for each event; it may be empty. The opening is spent with the first."""
    usages: dict[int, Usage] = {}
    opening = encoder.start()
    async for event in events:
        if isinstance(event, Finished):
            usages[event.choice] = event.usage
        yield b"".join((*opening, *encoder.event(event)))
    usage = total_usage([usages[choice] for choice in sorted(usages)], run.num_drawn)
    for frame in encoder.end(usage, facts(run, usage)):
        yield frame
