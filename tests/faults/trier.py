"""Tries constraints without a compiler: the text of a constraint says what becomes of it."""

from __future__ import annotations

import json
import os
import signal
import sys
import time


def say(value: object) -> None:
    """Answer."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


if sys.argv[1:] == ["leaves at once"]:
    sys.exit(1)
say("ready")
for num_asked, line in enumerate(sys.stdin, 1):
    text = json.loads(line)["options"]["text"]
    match text:
        case "ends":
            os.abort()
        case "ends if it is full" if num_asked > 1:
            os.abort()
        case "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stops":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "stops if it is full" if num_asked > 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        case "says nonsense":
            sys.stdout.write("nonsense\n")
            sys.stdout.flush()
        case "breaks off":
            sys.stdout.write('{"gram')
            sys.stdout.flush()
            sys.exit()
        case "computes":
            while True:
                pass
        case "computes for a second":
            while time.process_time() < 1:
                pass
            say({"grammar": text})
        case _:
            say({"grammar": text})
