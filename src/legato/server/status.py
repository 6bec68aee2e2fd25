"""Routes about the server itself: whether it runs, whether it would answer, its metrics, and which models it has.

They receive no bodies and start no work.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.types import Receive, Scope, Send

from legato.run.models import Model, Models
from legato.run.plan import DEFAULT_MAX_TOKENS
from legato.server.access import Access
from legato.server.admin import check_admin
from legato.server.middleware import Endpoint
from legato.server.streaming import send_body
from legato.server.telemetry import METRICS_TYPE, Telemetry
from legato.storage.keys import ANYONE
from legato.system.supervisor import Supervisor
from legato.system.threads import ASIDE
from legato.wire import encode_json

__all__ = ["model_routes", "status_routes"]


def status_routes(models: Models, supervisor: Supervisor, access: Access) -> Mapping[str, Endpoint]:
    """Return the public endpoints by path; all are for GET."""

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
        """Whether requests would be answered: `health`, and what a restart of this process would not repair."""
        failed = [model.name for model in models.own if model.engine.counters().get("failed")]
        status = "engine failed" if failed else "ready"
        if not await access.is_answered():
            status = "store unavailable"
        body = encode_json({"status": status})
        await send_body(send, body, status=200 if status == "ready" else 503, headers={})

    return {"/health": health, "/ready": ready}


def model_routes(models: Models, telemetry: Telemetry, started: int) -> Mapping[str, Endpoint]:
    """Return the endpoints that want a key, by path; all are for GET. `started`: when the models were loaded."""

    async def metrics(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["key"] != ANYONE:
            check_admin(scope["key"])
        body = await ASIDE.run(telemetry.metrics)
        await send_body(send, body, status=200, headers={}, kind=METRICS_TYPE)

    async def list_models(scope: Scope, receive: Receive, send: Send) -> None:
        served = models.only(scope["key"].models).served
        entries = [_entry(name, model, started) for name, model in served.items()]
        await send_body(send, encode_json({"object": "list", "data": entries}), status=200, headers={})

    async def show_model(scope: Scope, receive: Receive, send: Send) -> None:
        name = scope["path_params"]["name"]
        entry = _entry(name, models.only(scope["key"].models).resolve(name), started)
        await send_body(send, encode_json(entry), status=200, headers={})

    return {
        "/v1/models": list_models,
        "/v1/models/{name:path}": show_model,
        "/openai/v1/models": list_models,
        "/metrics": metrics,
    }


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
