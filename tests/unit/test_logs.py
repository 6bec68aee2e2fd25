"""The log: a line for each record whatever is in it, and nobody waits for who reads it."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato.logs import _Json, _Text, _Writer, escape

NASTY = "\n2026-01-01 00:00:00,000 legato.x forged\r\x00\t\x1b[2J\x07\x7f\x85\x9b31m\u2028\u2029\u202e\ud800\udcff"


def made(message: str, *arguments: object, error: BaseException | None = None) -> logging.LogRecord:
    """A record."""
    trace = (type(error), error, error.__traceback__) if error else None
    return logging.LogRecord("legato.x", logging.INFO, "", 0, message, arguments, trace)


# -- one record, one line ---------------------------------------------------------------------------------------------


@given(st.text(st.characters()) | st.text(st.sampled_from(NASTY + "a ")))
def test_a_record_is_one_printable_line(text: str) -> None:
    for record in (made("%s ends", text), made("%(a)s %(b)r ends", {"a": text, "b": text}), made(text)):
        line = _Text().format(record)
        assert line.isprintable()
        assert " legato.x " in line
    record = made("%s", text)
    record.notes = {"path": text, text: 1}
    line = _Json().format(record)
    assert line.isprintable()
    assert line.isascii()
    found = json.loads(line)["path"]
    assert found.encode("utf-16", "surrogatepass") == text.encode("utf-16", "surrogatepass")


@given(st.text(st.characters()) | st.text(st.sampled_from(NASTY + "a ")))
def test_the_lines_of_an_exception_are_never_taken_for_records(text: str) -> None:
    try:
        raise ValueError(text) from KeyError(text)
    except ValueError as error:
        first, *others = _Text().format(made("failed: %s", text, error=error)).split("\n")
        line = _Json().format(made("failed", error=error))
    assert " legato.x failed: " in first
    assert len(others) > 4
    assert all(other.startswith("  | ") for other in others)
    assert all(other.isprintable() for other in (first, *others))
    assert line.isprintable()


def test_what_is_readable_stays() -> None:
    assert escape("grün 🦊 中文 a\\b") == "grün 🦊 中文 a\\b"
    assert escape("a\nb\x1b\u2028\ud800") == "a\\nb\\x1b\\u2028\\ud800"


# -- nobody waits -----------------------------------------------------------------------------------------------------


@contextmanager
def piped() -> Iterator[tuple[int, _Writer, logging.Logger]]:
    """A log that is written to a pipe: the end to read from, the handler, a logger."""
    source, sink = os.pipe()
    writer = _Writer(sink)
    writer.setFormatter(_Text())
    logger = logging.Logger("legato.x")
    logger.addHandler(writer)
    try:
        yield source, writer, logger
    finally:
        writer.close()
        for descriptor in (source, sink):
            with suppress(OSError):
                os.close(descriptor)
        assert not writer._thread.is_alive()


def read(source: int, until: str) -> str:
    """Read until a text comes."""
    text = ""
    while until not in text:
        text += os.read(source, 1 << 16).decode()
    return text


def fill(sink: int) -> None:
    """Write to a pipe until it has no room."""
    os.set_blocking(sink, False)
    with suppress(BlockingIOError):
        while True:
            os.write(sink, b"." * 4096)
    os.set_blocking(sink, True)


def test_what_is_logged_arrives_in_order() -> None:
    with piped() as (source, _, logger):
        for number in range(500):
            logger.warning("line %d of it", number)
        lines = read(source, "line 499 of it\n").splitlines()
    assert [int(line.split()[-3]) for line in lines] == [*range(500)]


@pytest.mark.parametrize("num_threads", [1, 4])
def test_a_pipe_that_nobody_reads_holds_up_nobody(num_threads: int) -> None:
    num = 40_000 // num_threads

    def log() -> None:
        for _ in range(num):
            logger.warning("%s", "x" * 60)

    with piped() as (source, writer, logger):
        fill(writer._descriptor)  # A thread that logs faster than another writes would be told of more than once.
        threads = [threading.Thread(target=log) for _ in range(num_threads)]
        began = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert time.monotonic() - began < 20
        text = read(source, "dropped here")
        logger.warning("the last")
        text += read(source, "the last\n")
    num_read, num_told = (
        text.count("x" * 60),
        [int(line.split()[-1]) for line in text.splitlines() if "dropped" in line],
    )
    assert len(num_told) == 1
    assert num_read + num_told[0] == 40_000
    assert 20_000 > num_read > 100


def test_the_end_does_not_wait_for_ever_for_who_does_not_read() -> None:
    with piped() as (_, writer, logger):
        for _ in range(5000):
            logger.warning("%s", "x" * 100)
        began = time.monotonic()
        writer.close()
        assert 1 < time.monotonic() - began < 4


def test_the_end_waits_for_who_reads_slowly() -> None:
    with piped() as (source, writer, logger):
        for number in range(3000):
            logger.warning("%s %d", "x" * 100, number)
        texts: list[str] = []
        reader = threading.Thread(target=lambda: texts.append(read(source, " 2999\n")))
        reader.start()
        writer.close()
        reader.join()
        assert texts[0].count("\n") == 3000


def test_a_reader_that_has_gone_ends_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with piped() as (source, writer, logger):
        os.close(source)
        for _ in range(3):
            logger.warning("x")
        while writer._waiting:
            time.sleep(0.01)
        before = time.process_time()
        time.sleep(0.3)
        assert time.process_time() - before < 0.2
        assert writer._num_dropped == 3
    assert capfd.readouterr() == ("", "")


def test_a_record_that_cannot_be_formatted_is_told() -> None:
    with piped() as (source, _, logger):
        logger.warning("%d\n", "x")
        assert "legato.x '%d\\n' cannot be written: TypeError" in read(source, "\n")
