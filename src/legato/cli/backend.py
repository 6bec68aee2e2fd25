"""What `legato write` and `legato chat` write with: a model that is served for as long as they run, or a provider.

Either way they get a client, so that there is one way to write.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeVar

import click

from legato.cli.options import config_option, ensure_pulled, model_option, settings_for
from legato.cli.terminal import loading
from legato.client.protocol import DIALECTS, DialectName
from legato.config import ServerSettings, Settings, read_key
from legato.system.supervisor import beside

if TYPE_CHECKING:
    from legato.client.clients import AsyncClient

__all__ = ["Backend", "backend_options"]

_Command = TypeVar("_Command", bound=Callable[..., Any])


def backend_options(command: _Command) -> _Command:
    """Add `--config`, `--model`, `--provider` and `--url`."""
    options = (
        click.option("--url", help="Address of the provider, as far as before /chat/completions.  [default: its own]"),
        click.option(
            "--provider",
            type=click.Choice(list(DIALECTS)),
            help="Write with a model of this provider, or of a server that speaks its dialect; --model says which. The "
            "key is taken from the environment, where the provider's own clients look for it.",
        ),
        model_option,
        config_option,
    )
    for option in options:
        command = option(command)
    return command


@dataclass(frozen=True, slots=True)
class Backend:
    """What the options say."""

    config_file: Path | None
    model: str | None
    provider: DialectName | None
    url: str | None

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[AsyncClient]:
        """Yield a client of the model.

        Raises:
            ConfigError: the model cannot be loaded.
        """
        from legato.client.clients import AsyncClient

        if self.provider is not None:
            if not self.model:
                raise click.UsageError("--provider needs --model.")
            key = read_key(DIALECTS[self.provider].key_variable)
            async with AsyncClient(self.url, dialect=self.provider, api_key=key, model=self.model) as client:
                yield client
            return
        if self.url is not None:
            raise click.UsageError("--url needs --provider.")
        settings = settings_for(self.config_file, self.model)
        ensure_pulled(settings)
        async with _served(settings) as client:
            yield client


@asynccontextmanager
async def _served(settings: Settings) -> AsyncIterator[AsyncClient]:
    """Serve the models of the settings to nobody but the client."""
    from legato.client.clients import AsyncClient
    from legato.server.run import listen, load, run_app
    from legato.storage.store import Store

    key = secrets.token_hex(32)
    server = ServerSettings(port=0, api_keys=(key,))
    async with loading(next(iter(settings.models))):
        models, create_app = await load(settings)
    try:
        with (
            TemporaryDirectory() as folder,
            closing(Store.open(f"sqlite:///{folder}/legato.db")) as store,
            listen(server) as listener,
        ):
            stop = asyncio.Event()
            app = create_app(models, store, server, settings.limits)
            async with beside(run_app(app, listener, settings.limits, stop=stop)) as serving:
                try:
                    url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
                    async with AsyncClient(url, api_key=key, model=models.own[0].name) as client:
                        yield client
                finally:
                    stop.set()
                    await serving
    finally:
        await models.aclose()
