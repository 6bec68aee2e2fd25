"""`python -m bench URL --beside NAME=URL`: run suites against servers, in turn, and write down what came of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import click

from bench.client import Server
from bench.constraint import constraint
from bench.equality import equality
from bench.fidelity import human, infill, seam
from bench.measure import SIZES, Measure, Size
from bench.report import write
from bench.speed import decode, drafts, keys, rounds, streams, warm

SUITES: Mapping[str, Callable[[Sequence[Server], Size], Iterator[Measure]]] = {
    "decode": decode,
    "warm": warm,
    "keys": keys,
    "rounds": rounds,
    "drafts": drafts,
    "constraint": constraint,
    "seam": seam,
    "human": human,
    "infill": infill,
    "streams": streams,
    "equality": equality,
}


@click.command()
@click.argument("url")
@click.option("--beside", multiple=True, metavar="NAME=URL", help="Another server, to be measured in turn.")
@click.option("--suite", default=",".join(SUITES), show_default=True, help="What to measure.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("bench-out"), show_default=True)
@click.option("--key", default="none", help="API key for all servers.")
@click.option("--size", type=click.Choice(list(SIZES)), default="full", show_default=True)
def main(url: str, beside: tuple[str, ...], suite: str, out: Path, key: str, size: str) -> None:
    """Measure the Legato server at URL."""
    suites = suite.split(",")
    if unknown := set(suites) - set(SUITES):
        raise click.BadParameter(f"no such suite: {', '.join(sorted(unknown))}", param_hint="--suite")
    servers = [Server.at("Legato", url, key=key)]
    for other in beside:
        name, equals, address = other.partition("=")
        if not equals:
            raise click.BadParameter(f"expected NAME=URL, got {other}", param_hint="--beside")
        servers.append(Server.at(name, address, key=key))
    measures = (measure for name in suites for measure in SUITES[name](servers, SIZES[size]))
    write(out, servers, SIZES[size], measures)


if __name__ == "__main__":
    main()
