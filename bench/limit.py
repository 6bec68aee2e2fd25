"""How near the scheduler comes to what llama.cpp can do: `python -m bench.limit`.

In one process and on one context, in turn: a bare loop that decodes one token for each of some sequences and takes the
likeliest, and the scheduler with as many Jobs. Both write behind prompts of one length; reading is not timed. Drafts
are told apart, since a bare loop has none.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path

import click

from bench.measure import Measure
from bench.report import table
from legato.catalog.pull import find_model
from legato.config import Settings, worker_environment
from legato.decoding.seam import Seam
from legato.engines.llamacpp.binding import Batch, Model
from legato.engines.llamacpp.scheduler import Scheduler
from legato.engines.llamacpp.spill import Spill
from legato.types import Job, Prompt, Sampling

__all__ = ["main"]

_TEXT = "Log {}. On the first day of the voyage, the crew of the old ship went ashore on the island of {}, where they"
_MAX_BATCH, _MAX_SEQUENCES = 256, 32


def bare(model: Model, prompts: list[list[int]], num_tokens: int) -> float:
    """Return the tokens per second of a bare loop."""
    model.clear()
    batch = Batch(_MAX_BATCH)
    for id, ids in enumerate(prompts):
        batch.clear()
        batch.add(id, 0, ids[:-1], num_wanted=0)
        model.decode(batch)
    last, positions = [ids[-1] for ids in prompts], [len(ids) - 1 for ids in prompts]
    start = time.perf_counter()
    for _ in range(num_tokens):
        batch.clear()
        for id, token in enumerate(last):
            batch.add(id, positions[id], [token], num_wanted=1)
        model.decode(batch)
        last = model.rows(len(prompts)).argmax(axis=1).tolist()
        positions = [position + 1 for position in positions]
    return len(prompts) * num_tokens / (time.perf_counter() - start)


def scheduled(model: Model, seam: Seam, prompts: list[list[int]], num_tokens: int, temperature: float) -> float:
    """Return the tokens per second of the scheduler, from where all write."""
    model.clear()
    scheduler = Scheduler(
        model,
        seam,
        context_length=model.context_length,
        max_batch=_MAX_BATCH,
        max_sequences=_MAX_SEQUENCES,
        spill=Spill(0, None, ""),
    )
    for index, ids in enumerate(prompts):
        prompt = Prompt(tuple(ids), (), b"", 0, len(ids), "")
        sampling = Sampling(seed=index, temperature=temperature)
        scheduler.submit(Job(str(index), 0, prompt, num_tokens, sampling, ignore_end=True))
    waiting = {str(index) for index in range(len(prompts))}
    num, start = 0, 0.0
    while not scheduler.is_idle:
        steps = scheduler.step()
        num += sum(len(step.tokens) for _, step in steps if not isinstance(step, Exception)) if start else 0
        waiting -= {id for id, step in steps if not isinstance(step, Exception) and step.tokens}
        if not waiting and not start:
            start = time.perf_counter()
    return num / (time.perf_counter() - start)


@click.command()
@click.option("--model", "name", default="qwen2.5-coder-0.5b", show_default=True, help="A pulled model.")
@click.option("--tokens", default=64, show_default=True, help="Written by each stream.")
@click.option("--repeats", default=3, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=Path("bench-limit"), show_default=True)
def main(name: str, tokens: int, repeats: int, out: Path) -> None:
    """Compare the scheduler with a bare loop over llama.cpp, for 1, 4 and 8 streams."""
    if os.environ != (environment := worker_environment()):  # OpenMP reads it when it is loaded.
        os.execve(sys.executable, [sys.executable, "-m", "bench.limit", *sys.argv[1:]], environment)
    model = Model(
        find_model(name, Settings().data_dir),
        context_length=0,
        num_cells=0,
        max_batch=_MAX_BATCH,
        max_sequences=_MAX_SEQUENCES,
        num_threads=len(os.sched_getaffinity(0)),
    )
    seam = Seam(model.vocabulary)
    measures = []
    for num in (1, 4, 8):
        texts = [_TEXT.format(index, "ABCDEFGH"[index]) for index in range(num)]
        prompts = [model.vocabulary.encode(text.encode(), special=False) for text in texts]
        for kind, temperature in (("greedy, with drafts", 0.0), ("temperature 0.8", 0.8)):
            samples: dict[str, list[float]] = {"scheduler": [], "bare loop": []}
            for _ in range(repeats):
                samples["bare loop"].append(bare(model, prompts, tokens))
                samples["scheduler"].append(scheduled(model, seam, prompts, tokens, temperature))
            measures.append(Measure("limit", f"{num} streams, {kind}", "tokens/s", samples))
            click.echo(f"{measures[-1].name}: {statistics.median(samples['scheduler']):.1f}")
    out.mkdir(parents=True, exist_ok=True)
    (out / "limit.md").write_text(table(measures, ["scheduler", "bare loop"]), "utf-8")


if __name__ == "__main__":
    main()
