"""What a run leaves behind: a table in Markdown, the raw figures as JSON, and a plot.

It receives measures as they come. It measures nothing.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import click
import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from bench.client import Server
from bench.measure import Measure, Size

__all__ = ["save_png", "table", "write"]


def write(out: Path, servers: Sequence[Server], size: Size, measures: Iterable[Measure]) -> None:
    """Print measures as they come and write `bench.md`, `bench.json` and `bench.png` into a folder.

    A run that is interrupted leaves what it had.
    """
    names = [server.name for server in servers]
    done: list[Measure] = []
    try:
        for measure in measures:
            click.echo(_row(measure, names))
            done.append(measure)
    finally:
        out.mkdir(parents=True, exist_ok=True)
        (out / "bench.md").write_text(table(done, names), "utf-8")
        facts = {
            "when": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": {"processor": _processor(), "cores": os.cpu_count(), "system": platform.platform()},
            "servers": {server.name: {"url": server.url, "model": server.model} for server in servers},
            "size": asdict(size),
            "measures": [asdict(measure) for measure in done],
        }
        (out / "bench.json").write_text(json.dumps(facts, ensure_ascii=False, indent=1, default=list), "utf-8")
        _plot(out / "bench.png", done, names)


def table(measures: Sequence[Measure], servers: Sequence[str]) -> str:
    """Return a table: a column for each server, and how many times better the first is than each other."""
    gains = [f"{servers[0]} is better by" if len(servers) == 2 else f"than {name}" for name in servers[1:]]
    head = ["suite", "measure", "unit", *servers, *gains]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    return "\n".join([*lines, *(_row(measure, servers) for measure in measures)]) + "\n"


def _row(measure: Measure, servers: Sequence[str]) -> str:
    cells = [measure.suite, measure.name, measure.unit]
    cells += [_cell(measure, server) for server in servers]
    for other in servers[1:]:
        gain = measure.gain(servers[0], other)
        cells.append("" if gain is None else f"{gain:.2f} x")
    return f"| {' | '.join(cells)} |"


def _cell(measure: Measure, server: str) -> str:
    value = measure.value(server)
    if value is None:
        return "–"
    low, high = measure.interval(server)
    match measure.unit:
        case "%":
            return f"{value:.1f} ({low:.0f} to {high:.0f}) of {len(measure.samples[server])}"
        case "points":
            return f"{value:+.1f} ({low:+.1f} to {high:+.1f})"
        case _:
            return f"{value:.3g} ({low:.3g} to {high:.3g})"


def _plot(path: Path, measures: Sequence[Measure], servers: Sequence[str]) -> None:
    """Draw bars, a panel for each unit, with the gain of the first server beside the others' bars."""
    panels = {
        unit: list(some) for unit, some in itertools.groupby(sorted(measures, key=lambda m: m.unit), lambda m: m.unit)
    }
    heights = [len(some) for some in panels.values()] or [1]
    _, axes = pyplot.subplots(
        len(heights),
        1,
        squeeze=False,
        figsize=(9, 1 + sum(heights) * 0.16 * (len(servers) + 1)),
        height_ratios=heights,
        layout="constrained",
    )
    for axis, (unit, some) in zip(axes[:, 0], panels.items(), strict=False):
        width = 0.8 / len(servers)
        for index, server in enumerate(servers):
            values = [measure.value(server) or 0.0 for measure in some]
            bars = axis.barh([row + index * width for row in range(len(some))], values, width, label=server)
            gains = [measure.gain(servers[0], server) if index else None for measure in some]
            axis.bar_label(bars, ["" if gain is None else f" x {gain:.2f}" for gain in gains], fontsize=6)
        axis.set_yticks([row + 0.4 - width / 2 for row in range(len(some))], [measure.name for measure in some])
        axis.tick_params(labelsize=7)
        axis.invert_yaxis()
        axis.set_xlabel(unit, fontsize=8)
        axis.margins(y=0.01)
    if panels:
        axes[0, 0].legend(fontsize=7)
    save_png(path)


def save_png(path: Path) -> None:
    """Write the current figure, small."""
    pyplot.savefig(path, dpi=100, pil_kwargs={"optimize": True})
    pyplot.close()


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
