"""Serve the scripted engine on one core and a free port, without pauses: `python -m bench.scripted CORE DATABASE`."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import closing

from legato.config import LimitSettings, ServerSettings
from legato.engines.scripted import ScriptedEngine
from legato.run.admission import Admission
from legato.run.models import Model, Models
from legato.server.app import create_app
from legato.server.run import listen, run_app
from legato.storage.store import Store

SCRIPT = tuple(b" w%03d" % num for num in range(200))
"""Each byte is a token, and an event of a stream; what is lost or doubled shows."""


async def main(core: int, database: str) -> None:
    """Serve until SIGTERM, with the keys of a database."""
    os.sched_setaffinity(0, {core})
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    settings = ServerSettings(port=0)
    model = Model("script", ScriptedEngine(SCRIPT), Admission(max_running=1000))
    with listen(settings) as listener:
        host, port = listener.getsockname()[:2]
        print(f"Scripts are served at http://{host}:{port}", file=sys.stderr, flush=True)
        limits = LimitSettings()
        with closing(Store.open(database)) as store:
            app = create_app(Models({"script": model}, {}), store, settings, limits)
            await run_app(app, listener, limits, stop=stop)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2]))
