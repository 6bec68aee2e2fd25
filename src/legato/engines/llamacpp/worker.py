"""The worker process: a model, its scheduler and a socket to the server's process.

Run as `python -m legato.engines.llamacpp.worker FD`. It receives pickled commands over the socket `FD` and answers
with pickled events, each behind its length (4 bytes). It ends when the socket does; signals that end the server do not
reach it (`legato.system.signals`). The peer is the process that started it, so pickles may be trusted.

Commands: `WorkerSettings` once, then ("submit", Job), ("cancel", Job id), ("count",), ("ping",).
Events: ("loaded", context length) and ("ready", seconds that a full batch takes), or ("refused", reason); then
("steps", [(Job id, Step or error), ...]), ("counts", counters), ("pong", None).
"""

from __future__ import annotations

import faulthandler
import pickle
import select
import socket
import struct
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from legato.errors import ConfigError

if TYPE_CHECKING:
    from legato.engines.llamacpp.spill import Spill

__all__ = ["WorkerSettings", "main", "pack"]

_LENGTH = struct.Struct("!I")


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What a worker needs to load a model."""

    path: Path
    context_length: int
    """Most tokens of one sequence; 0: what the model was trained for."""
    num_cells: int
    """Most tokens of all sequences together; 0: the context length and some."""
    num_threads: int
    spill_bytes: int = 0
    """Most bytes of idle sequences that had to leave the KV cache."""
    spill_dir: Path | None = None
    """Where they are kept; None: in memory, and lost with the worker."""


MAX_BATCH = 256
MAX_SEQUENCES = 130
"""64 running, as many retained or scoring, the spare one and the grave (`scheduler`)."""


def pack(message: Any) -> bytes:
    """Pickle a message behind its length."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(data)) + data


class _Peer:
    """The other end of the socket, as the worker sees it: blocking writes, reads that can look without waiting."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._buffer = bytearray()

    def send(self, message: Any) -> None:
        self._socket.sendall(pack(message))

    def receive(self, *, wait: bool) -> list[Any]:
        """Return the commands that have arrived; with `wait`, at least one. EOFError: the peer has gone."""
        while True:
            messages = self._unpack()
            if messages:
                return messages
            if not wait and not select.select([self._socket], [], [], 0)[0]:
                return []
            data = self._socket.recv(1 << 20)
            if not data:
                raise EOFError
            self._buffer += data

    def _unpack(self) -> list[Any]:
        messages = []
        while len(self._buffer) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._buffer)
            end = _LENGTH.size + size
            if len(self._buffer) < end:
                break
            messages.append(pickle.loads(self._buffer[_LENGTH.size : end]))
            del self._buffer[:end]
        return messages


def main() -> None:
    """Serve one model until the socket closes."""
    faulthandler.disable()  # A crash here is the parent's to report, in its own words.
    peer = _Peer(socket.socket(fileno=int(sys.argv[1])))
    try:
        settings: WorkerSettings = peer.receive(wait=True)[0]
        _serve(peer, settings)
    except (EOFError, ConnectionError):
        return


def _serve(peer: _Peer, settings: WorkerSettings) -> None:
    from legato.decoding.seam import Seam
    from legato.engines.llamacpp.binding import Batch, Model
    from legato.engines.llamacpp.scheduler import Scheduler

    try:
        model = Model(
            settings.path,
            context_length=settings.context_length,
            num_cells=settings.num_cells,
            max_batch=MAX_BATCH,
            max_sequences=MAX_SEQUENCES,
            num_threads=settings.num_threads,
        )
        spill = _open_spill(settings)
    except ConfigError as error:
        peer.send(("refused", error.message))
        return
    peer.send(("loaded", model.context_length))
    batch = Batch(MAX_BATCH)
    # The kernels that `scheduler` uses: native code that this processor lacks ends the process here.
    for num, exact in ((1, True), (2, True), (64, False)):
        batch.clear()
        batch.add(0, 0, [0] * num, num_wanted=1)
        begun = time.perf_counter()
        model.decode(batch, exact=exact)
        batch_s = (time.perf_counter() - begun) * MAX_BATCH / num
        model.forget(0, 0)
    scheduler = Scheduler(
        model,
        Seam(model.vocabulary),
        context_length=model.context_length,
        max_batch=MAX_BATCH,
        max_sequences=MAX_SEQUENCES,
        spill=spill,
    )
    peer.send(("ready", batch_s))
    while True:
        try:
            commands = peer.receive(wait=scheduler.is_idle)
        except (EOFError, ConnectionError):
            scheduler.close()
            return
        for command, *arguments in commands:
            match command:
                case "submit":
                    scheduler.submit(*arguments)
                case "cancel":
                    scheduler.cancel(*arguments)
                case "count":
                    peer.send(("counts", scheduler.counters()))
                case "ping":
                    peer.send(("pong", None))
        if not scheduler.is_idle:
            steps = scheduler.step()
            if steps:
                peer.send(("steps", steps))


def _open_spill(settings: WorkerSettings) -> Spill:
    from legato.engines.llamacpp.binding import fingerprint
    from legato.engines.llamacpp.spill import Spill

    try:
        return Spill(settings.spill_bytes, settings.spill_dir, fingerprint(settings.path))
    except OSError as error:
        raise ConfigError(f"`spill_dir` {settings.spill_dir} cannot be used: {error.strerror}") from None


if __name__ == "__main__":
    main()
