"""A server that speaks vLLM's protocol, with the small model and Legato's plug-in, as vLLM runs it: one row at a time.

The choosing is the plug-in's own code; vLLM itself, and the tensors, are in `bench/vllm.py`.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

from legato.decoding.sampling import Row, log_softmax
from legato.decoding.seam import Seam
from legato.engines.llamacpp.binding import Batch, Model
from legato.engines.upstream.plugin import Chooser, decode_request
from legato.engines.upstream.tokenizer import JsonTokenizer
from tests.conftest import weights

__all__ = ["Vllm", "serve_vllm"]


@dataclass
class Vllm:
    """A server that runs."""

    url: str
    has_plugin: bool
    prompts: list[list[int]] = field(default_factory=list)
    """Of the requests so far."""
    drops_after: list[int] = field(default_factory=list)
    """After so many tokens the next requests lose their connection, one by one."""


class _Rows:
    """The model: ids in, the row of logits that follows them out, with the bits of the embedded engine."""

    def __init__(self, name: str) -> None:
        self._model = Model(weights(name), context_length=0, num_cells=0, max_batch=512, max_sequences=2, num_threads=2)
        self._batch = Batch(512)
        self._ids: list[int] = []

    def after(self, ids: Sequence[int]) -> Row:
        if not self._ids or list(ids[: len(self._ids)]) != self._ids or len(ids) == len(self._ids):
            self._model.clear()
            self._ids = []
        self._batch.clear()
        self._batch.add(0, len(self._ids), ids[len(self._ids) :], num_wanted=1)
        assert self._model.decode(self._batch, exact=True)
        self._ids = list(ids)
        row: Row = self._model.rows(1)[0].copy()
        return row


@contextmanager
def serve_vllm(name: str, folder: Path, *, has_plugin: bool = True) -> Iterator[Vllm]:
    """Serve a pulled model whose tokenizer files are in a folder."""
    rows, tokenizer = _Rows(name), JsonTokenizer(folder)
    seam, lock = Seam(tokenizer), threading.Lock()
    vllm = Vllm("", has_plugin)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(200, {"data": [{"id": name}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            try:
                request = decode_request(body["vllm_xargs"]) if has_plugin else None
            except ValueError as error:
                self._answer(400, {"error": {"message": str(error)}})
                return
            chooser = request and Chooser(*request, tokenizer, seam, body["prompt"])
            vllm.prompts.append(body["prompt"])
            num_left = vllm.drops_after.pop(0) if vllm.drops_after else -1
            self.send_response(200)
            self.end_headers()
            with lock, suppress(BrokenPipeError, ConnectionResetError):  # Whoever asked may have left.
                for event in self._events(body, chooser):
                    if num_left == 0:
                        return
                    num_left -= 1
                    self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
                self.wfile.write(b"data: [DONE]\n\n")

        def _events(self, body: dict[str, Any], chooser: Chooser | None) -> Iterator[dict[str, Any]]:
            written: list[int] = []
            ends = {*(body["stop_token_ids"] or ()), *([] if body["ignore_eos"] else tokenizer.end_ids)}
            reason = None
            while reason is None:
                row = rows.after([*body["prompt"], *written])
                # vLLM computes ahead: the last token is not known yet when the next is chosen.
                known = [*written[:-1], -1] if written else []
                token = chooser.choose(row, known) if chooser else int(row.argmax())
                written.append(token)
                reason = "stop" if token in ends else "length" if len(written) == body["max_tokens"] else None
                choice = {"index": 0, "text": "", "token_ids": [token], "finish_reason": reason}
                yield {"choices": [{**choice, "logprobs": _scores(row, token, body["logprobs"])}]}

        def _answer(self, status: int, value: Any) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(value).encode())

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    vllm.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield vllm
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _scores(row: Row, token: int, num: int | None) -> dict[str, Any] | None:
    if num is None:
        return None
    logprobs = log_softmax(row)
    best = {int(id) for id in np.argsort(-logprobs)[:num]} | {token}
    return {
        "token_logprobs": [float(logprobs[token])],
        "top_logprobs": [{f"token_id:{id}": float(logprobs[id]) for id in best}],
    }
