"""Running the server: the socket, the models and the application together, until it is told to stop.

It receives settings and an open store. What is served is `app`'s, which is imported while the models are loaded: both
take about as long.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module

import uvicorn
from starlette.types import ASGIApp

from legato.config import LimitSettings, ServerSettings, Settings
from legato.errors import ConfigError
from legato.models import Models, load_models
from legato.server.connection import connections
from legato.signals import ENDING
from legato.store import Store
from legato.supervisor import beside
from legato.threads import ASIDE

__all__ = ["listen", "load", "run_app", "serve"]

_SEND_BUFFER_BYTES = 64 * 1024
"""What the system may hold for a client that does not read; by default it would grow to megabytes."""


async def load(settings: Settings) -> tuple[Models, Callable[..., ASGIApp]]:
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
        ConfigError: the address is taken, or a model cannot be loaded.
    """
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
    except (OSError, TypeError, ValueError) as error:  # The latter for what can be no name of a host.
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"cannot listen on {server.host} port {server.port}: {reason}") from None
    return listener


async def run_app(app: ASGIApp, listener: socket.socket, limits: LimitSettings, *, stop: asyncio.Event) -> None:
    """Serve an application on a socket until `stop` is set; requests that run then have `limits.grace_s` to end."""
    config = uvicorn.Config(
        app,
        http=connections(limits.write_timeout_s),
        access_log=False,
        log_config=None,
        lifespan="on",
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=limits.grace_s,
    )
    server = _Server(config)
    async with beside(server.serve(sockets=[listener])) as serving, beside(stop.wait()) as stopping:
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        await serving


class _Server(uvicorn.Server):
    """Leaves signals to whoever runs it."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield
