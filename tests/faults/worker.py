"""A worker without a model: it speaks the real one's protocol, and writes the numbers of the places in a text.

Run as the real one is, with the number of a socket as its last argument. The word before it, if there is one, says what
it does wrong.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import socket
import sys
import time

from legato.engines.llamacpp.worker import pack
from legato.types import FinishReason, Job, Step, Token

STEP_S = 0.005


def step(running: dict[str, tuple[Job, int]]) -> list[tuple[str, Step]]:
    """Write a token of each Job."""
    steps = []
    for id, (job, num) in [*running.items()]:
        place = len(job.prompt.ids) + num
        finish: FinishReason | None = "length" if num + 1 == job.max_tokens else None
        steps.append((id, Step((Token(place, f"{place} ".encode()),), finish=finish)))
        running[id] = (job, num + 1)
        if finish:
            del running[id]
    return steps


def serve(connection: socket.socket, fault: str) -> None:
    """Serve until the socket closes."""
    data = bytearray()
    running: dict[str, tuple[Job, int]] = {}
    has_begun = False
    while True:
        if not running or select.select([connection], [], [], STEP_S)[0]:
            received = connection.recv(1 << 16)
            if not received:
                return
            data += received
        while len(data) >= 4 and len(data) >= (end := 4 + int.from_bytes(data[:4], "big")):
            command = pickle.loads(data[4:end])
            del data[:end]
            if not has_begun:
                has_begun = True
                begin(connection, fault)
                continue
            match command:
                case ("submit", job):
                    running[job.id] = (job, 0)
                    connection.sendall(pack(("steps", [(job.id, Step(num_cached=1))])))
                case ("cancel", id):
                    running.pop(id, None)
                case ("count",):
                    connection.sendall(pack(("counts", {"running": len(running)})))
                case ("ping",):
                    connection.sendall(pack(("pong", None)))
        if steps := step(running):
            connection.sendall(pack(("steps", steps)))
            go_wrong(connection, fault)
            fault = ""


def begin(connection: socket.socket, fault: str) -> None:
    """Say that the model is loaded, unless that is what goes wrong."""
    if fault == "refuses":
        connection.sendall(pack(("refused", "no model")))
        sys.exit()
    if fault == "leaves at once":
        sys.exit(3)
    connection.sendall(pack(("loaded", 4096)))
    if fault == "leaves half loaded":
        os.write(2, b"a last word\n")
        sys.exit(3)
    connection.sendall(pack(("ready", 0.1)))


def go_wrong(connection: socket.socket, fault: str) -> None:
    """Do, after a step, what goes wrong."""
    match fault:
        case "says nonsense":
            connection.sendall((5).to_bytes(4, "big") + b"nonsense")
        case "says too much":
            connection.sendall(b"\xff" * 4)
        case "says what nobody knows":
            connection.sendall(pack(("unheard of", 7)))
        case "breaks off":
            connection.sendall(pack(("pong", None))[:7])
            os._exit(0)
        case "closes its socket":
            connection.shutdown(socket.SHUT_RDWR)
            time.sleep(60)
        case "closes its standard error":
            os.close(2)
        case "writes without lines":
            os.write(2, b"x" * 300_000)
        case "stops":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "waits for ever":
            signal.pause()
        case "falls silent, but computes":
            while True:
                pass
        case "is killed":
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[-1])) as connection:
        serve(connection, sys.argv[1] if len(sys.argv) > 2 else "")
