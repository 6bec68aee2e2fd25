"""The JDK's own client. It asks for HTTP/2 with every request."""

from __future__ import annotations

from pathlib import Path

from tests.conformance.programs import ask_client
from tests.conformance.reading import fold, marked, text_of, user
from tests.conftest import Served


def test_a_stream_is_read_line_by_line(small: Served, tmp_path: Path) -> None:
    chunks = ask_client("stream.java", tmp_path, small)
    assert len(chunks) > 4
    text = text_of(small.chat(user("Count."), marked("Count: 1 2 3"), max_tokens=8))
    (choice,) = fold(chunks)["choices"]
    assert (choice["text"], choice["finish_reason"]) == (text, "length")
