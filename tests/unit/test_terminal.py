"""What somebody sees who waits at a terminal."""

from __future__ import annotations

import pytest

from legato.cli.terminal import Estimate

SIZE = 491_400_064


def told(seen: list[tuple[float, int]]) -> list[str]:
    """What an estimate says at each of these times, of so many bytes."""
    times = iter(seconds for seconds, _ in seen)
    estimate = Estimate(SIZE, lambda: next(times))
    return [estimate.tell(num_bytes) for _, num_bytes in seen]


def steady(rate: float, seconds: int, first: int = 0) -> list[tuple[float, int]]:
    return [(at / 10, first + int(rate * at / 10)) for at in range(10 * seconds)]


@pytest.mark.parametrize(
    ("rate", "expected"),
    [
        (10e6, "10.0 MB/s, 40 s left"),
        (1e6, "1.0 MB/s, 8 min left"),
        (0.05e6, "50 kB/s, 3 h left"),
        (1000, "1 kB/s"),
        (0, ""),
    ],
)
def test_a_steady_download_is_estimated_as_roughly_as_it_is_known(rate: float, expected: str) -> None:
    assert told(steady(rate, 10))[-1] == expected


def test_nothing_is_said_before_there_is_something_to_say() -> None:
    assert told(steady(10e6, 3)) == [""] * 30
    assert told([(0, 0), (60, 0), (61, 0)]) == ["", "", ""]


def test_what_was_here_before_took_no_time() -> None:
    assert told(steady(1e6, 10, first=480_000_000))[-1] == "1.0 MB/s, 5 s left"


def test_a_slow_beginning_is_forgotten() -> None:
    """The first bytes come late: that is how it once came to say twelve days."""
    seen = [(at / 10, 8192) for at in range(200)] + [(20 + at, 8192 + at * 10_000_000) for at in range(30)]
    texts = told(seen)
    assert texts[-1] == "10.0 MB/s, 20 s left"
    assert not any(" h left" in text for text in texts)
