"""Running the server: the socket, the models and the application together, until it is told to stop.

It receives settings and an open store. The application (`app`) is imported while the models are loaded: both take about
as long.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING

from legato.config import LimitSettings, ServerSettings, Settings
from legato.errors import ConfigError
from legato.run.models import Models, load_models
from legato.server.http.connections import Connections
from legato.storage.store import Store
from legato.system.machine import max_open_files
from legato.system.signals import ENDING
from legato.system.supervisor import Supervisor, beside
from legato.system.threads import ASIDE

if TYPE_CHECKING:
    from starlette.routing import Router

__all__ = ["listen", "load", "max_connections", "run_app", "serve"]

_SEND_BUFFER_BYTES = 64 * 1024
"""Bytes that the system buffers for a client that does not read; its default grows to megabytes."""
_NUM_OTHER_FILES = 64
"""Descriptors for everything but clients' connections: databases, engines, connections to other servers."""
_MAX_CONNECTIONS = 4096
"""Connections by default, however many descriptors there are: each takes memory."""


async def load(settings: Settings) -> tuple[Models, Callable[..., Router]]:
    """Load the models and, meanwhile, the application's code; return them, and `app.create_app`.

    Raises:
        ConfigError: a model cannot be loaded.
    """
    async with beside(load_models(settings)) as loading:
        app = await ASIDE.run(import_module, "legato.server.app")
        return await loading, app.create_app


async def serve(settings: Settings, store: Store, *, ready: Callable[[str], None]) -> None:
    """Load the models and serve until a signal ends it. `ready` is called with the base URL.

    Raises:
        ConfigError: the address is taken, a model cannot be loaded, or there cannot be so many connections.
    """
    max_connections(settings.limits)  # Fails before the models are loaded.
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in ENDING:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # As `nohup` has it.
            loop.add_signal_handler(number, stop.set)
    with listen(settings.server) as listener:
        async with beside(load(settings)) as loading, beside(stop.wait()) as stopped:
            await asyncio.wait({loading, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not loading.done():
                return
        models, create_app = loading.result()
        try:
            host, port = listener.getsockname()[:2]
            ready(f"http://{f'[{host}]' if ':' in host else host}:{port}")
            app = create_app(models, store, settings.server, settings.limits, settings.store)
            await run_app(app, listener, settings.limits, stop=stop)
        finally:
            await models.aclose()


def listen(server: ServerSettings) -> socket.socket:
    """Open the listening socket.

    Raises:
        ConfigError: the address is taken or not ours.
    """
    try:
        family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
        # asyncio sends small writes at once only where the protocol is named; otherwise they wait 40 ms for an ACK.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)  # Of every connection, too.
        listener.bind((server.host.strip("[]"), server.port))
        listener.listen(2048)
    except (OSError, TypeError, ValueError) as error:  # The last two for an impossible host name.
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"cannot listen on {server.host} port {server.port}: {reason}") from None
    return listener


async def run_app(app: Router, listener: socket.socket, limits: LimitSettings, *, stop: asyncio.Event) -> None:
    """Serve an application on a socket until `stop` is set; requests that run then have `limits.grace_s` to end.

    Raises:
        ConfigError: there cannot be so many connections.
    """
    supervisor = Supervisor()
    bounded = replace(limits, max_connections=max_connections(limits))
    connections = Connections(app, listener, bounded, supervisor)
    async with app.lifespan_context(app):
        try:
            connections.listen()
            await stop.wait()
        finally:
            await connections.aclose()
            await supervisor.aclose()


def max_connections(limits: LimitSettings) -> int:
    """Return how many connections there may be: as configured, or what leaves descriptors for everything else.

    Raises:
        ConfigError: there are not so many descriptors.
    """
    num_files = max_open_files()
    most = num_files - _NUM_OTHER_FILES
    if most < 1:
        raise ConfigError(f"this process may open {num_files} files (`ulimit -n`); it needs {_NUM_OTHER_FILES + 32}")
    if limits.max_connections > most:
        raise ConfigError(
            f"`limits.max_connections` must be at most {most} where a process may open {num_files} files "
            f"(`ulimit -n`), got {limits.max_connections}"
        )
    return limits.max_connections or min(most, num_files - num_files // 4, _MAX_CONNECTIONS)
