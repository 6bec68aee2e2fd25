"""Whether the seam samples the model's own distribution, given the bytes of the text: `python -m bench.conditional`.

For prefixes that end inside a word it compares distributions of the next 4 bytes with the model's own:

    own         every canonical path of tokens from the boundary on whose bytes agree with the text, by the product of
                its probabilities: what an uncut run writes, given that it wrote the text
    Legato      drawn: one Job for each seed, run by the engine's own `Scheduler`
    stepwise    enumerated: token healing as usually built, which restricts each token to those that agree with the text
    none        enumerated: the tokenizer's own cut of the prefix, plainly continued

The distance is total variation. Drawing has noise, so a perfect sampler's expected distance is told beside Legato's.
The scheduler runs over logits that are computed once for each path of tokens (`MemoModel`), so 5,000 Jobs cost little
more than their distinct paths; the last prefix is run on the model itself as well.
"""

from __future__ import annotations

import heapq
import json
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import numpy as np
from matplotlib import pyplot
from numpy.typing import NDArray

from bench.report import save_png
from legato.catalog.pull import find_model
from legato.config import Settings
from legato.decoding.sampling import Row, log_softmax
from legato.decoding.seam import Seam
from legato.engines.llamacpp.binding import Batch, Model
from legato.engines.llamacpp.scheduler import Scheduler
from legato.engines.llamacpp.spill import Spill
from legato.errors import LegatoError
from legato.prompting.profiles import Profile
from legato.prompting.render import render
from legato.types import CompletionRequest, Job, Prompt, Sampling, SeamOptions, Text

__all__ = ["PREFIXES", "Continuations", "Distribution", "Result", "distance", "measure", "perfect_distance"]

PREFIXES = (
    "The museum is closed on Wednes",
    "The patient was given antibio",
    "We visited the museum of natural his",
    "The recipe calls for two tablespo",
    "The dog is a domestica",
    "He opened the envel",
    "The temperature in Antarc",
    "He plays the gui",
    "The company's headquar",
    "The experiment was carried out in a labor",
)
"""Each ends inside a word and few continuations are likely, so that 5,000 draws tell something."""

_NUM_BYTES = 4
_END = b"\xff"
"""Stands for the end of the answer among the next bytes; no UTF-8 has it."""
_LEFT_OUT = 0.005
"""The share of the probability at which enumerating stops."""
_NUCLEUS = 0.9995
"""The share of a free choice that is looked at."""
_LIKELY = 1e-3
"""Tokens that the engine would refuse are looked for among those at least so likely."""
_MAX_BATCH, _MAX_SEQUENCES = 256, 66
_AT_ONCE = 60
"""Jobs that are given to a scheduler together."""

Distribution = Mapping[bytes, float]
"""Of the next bytes."""


class MemoModel(Model):
    """Computes the logits behind each path of tokens once. Its sequences are lists of tokens, by position."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, **_SHAPE)
        self._small_batch = Batch(_MAX_BATCH)
        self._fed: tuple[int, ...] = ()
        self._known: dict[tuple[int, ...], Row] = {}
        self._sequences: dict[int, dict[int, int]] = defaultdict(dict)
        self._rows: list[Row] = []

    def row(self, path: tuple[int, ...]) -> Row:
        """Return the logits behind a path."""
        if path not in self._known:
            shared = 0
            while shared < min(len(self._fed), len(path) - 1) and self._fed[shared] == path[shared]:
                shared += 1
            super().forget(0, shared)
            self._small_batch.clear()
            self._small_batch.add(0, shared, path[shared:], num_wanted=1)
            self._small_batch.add(1, 0, [0], num_wanted=0)  # No lone row, as in the scheduler.
            super().decode(self._small_batch, exact=True)
            super().forget(1, 0)
            self._fed = path
            self._known[path] = super().rows(1)[0].copy()
        return self._known[path]

    def forget_rows(self) -> None:
        """Begin anew: the rows of one prompt take hundreds of megabytes."""
        self._known.clear()

    def decode(self, batch: Batch, *, exact: bool = False) -> bool:
        """Take the batch's tokens and look up the rows that it wants."""
        native = batch.native
        self._rows = []
        for index in range(native.n_tokens):
            tokens, position = self._sequences[native.seq_id[index][0]], native.pos[index]
            tokens[position] = native.token[index]
            if native.logits[index]:
                self._rows.append(self.row(tuple(tokens[at] for at in range(position + 1))))
        return True

    def rows(self, num: int) -> NDArray[np.float32]:
        """Return the rows of the last batch."""
        return np.stack(self._rows) if num else np.empty((0, 0), np.float32)

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        """Let `target` have the tokens of `source` at some positions."""
        tokens = self._sequences[source].items()
        self._sequences[target] |= {at: id for at, id in tokens if start <= at and (at < end or end < 0)}

    def forget(self, sequence: int, start: int) -> None:
        """Take tokens out of a sequence."""
        self._sequences[sequence] = {at: id for at, id in self._sequences[sequence].items() if at < start}

    def save(self, sequence: int) -> bytes:
        """Return a sequence's tokens."""
        return json.dumps([*self._sequences[sequence].items()]).encode()

    def load(self, sequence: int, data: bytes) -> int:
        """Give a sequence what `save` returned; return its number of tokens."""
        self._sequences[sequence] = dict(json.loads(data))
        return len(self._sequences[sequence])

    def clear(self) -> None:
        """Forget every sequence."""
        self._sequences.clear()


_SHAPE = {
    "context_length": 512,
    "num_cells": 4096,
    "max_batch": _MAX_BATCH,
    "max_sequences": _MAX_SEQUENCES,
    "num_threads": 1,
}


class Continuations:
    """Distributions of the bytes that follow a prefix, enumerated or drawn."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._model = MemoModel(path)
        vocabulary = self._model.vocabulary
        self._pieces = vocabulary.pieces
        self._end_ids = vocabulary.end_ids
        self._banned = vocabulary.control_ids - vocabulary.end_ids
        self._seam = Seam(vocabulary)
        self._ids: dict[bytes, list[int]] = defaultdict(list)
        for id, piece in enumerate(self._pieces):
            if piece and id not in vocabulary.control_ids:
                self._ids[piece].append(id)

    def begin(self, prefix: str, *, heal: bool = True) -> Prompt:
        """Render a prefix as the server does, and forget the rows of others."""
        self._model.forget_rows()
        request = CompletionRequest("", Text((prefix,)), seam=SeamOptions(heal, heal))
        profile = Profile(context_length=512)
        return render(request, profile, self._model.vocabulary, self._seam)[0]

    def own(self, prompt: Prompt) -> Distribution:
        """Enumerate what an uncut run would write, given that it wrote the heal bytes."""
        return self._enumerate(prompt, None)

    def stepwise(self, prompt: Prompt, own: Distribution) -> Distribution:
        """Enumerate what comes of restricting one token after the other, as far as it is in `own`.

        For a prompt without heal bytes this is plain continuation.
        """
        return self._enumerate(prompt, own)

    def drawn(self, prompt: Prompt, num_seeds: int, *, is_memoised: bool = True) -> Distribution:
        """Let the engine's scheduler run a Job for each seed, on memoised rows or on the model itself."""
        model = self._model if is_memoised else Model(self._path, **_SHAPE)
        scheduler = Scheduler(
            model,
            self._seam,
            context_length=512,
            max_batch=_MAX_BATCH,
            max_sequences=_MAX_SEQUENCES,
            spill=Spill(0, None, ""),
        )
        written: dict[str, bytes] = defaultdict(bytes)
        goal = len(prompt.heal) + _NUM_BYTES
        for first in range(0, num_seeds, _AT_ONCE):
            for seed in range(first, min(first + _AT_ONCE, num_seeds)):
                scheduler.submit(Job(str(seed), 0, prompt, _NUM_BYTES, Sampling(seed, temperature=1.0)))
            while not scheduler.is_idle:
                for id, step in scheduler.step():
                    if isinstance(step, LegatoError):
                        raise step
                    written[id] += b"".join(token.data for token in step.tokens)
                    if step.finish == "stop":
                        written[id] += _END
                    if len(written[id]) >= goal:
                        scheduler.cancel(id)
        counts = Counter(data[len(prompt.heal) : goal] for data in written.values())
        return {data: num / num_seeds for data, num in counts.items()}

    def _enumerate(self, prompt: Prompt, among: Distribution | None) -> Distribution:
        """Follow the likeliest paths until what is left does not matter.

        Without `among`, each token is chosen among all that are canonical, paths that leave the heal bytes are left
        out in the end, and the whole is 1. With it, each token is chosen among those that agree with the heal bytes,
        and only what `among` has is followed.
        """
        heal, goal = prompt.heal, len(prompt.heal) + _NUM_BYTES
        heads = {data[:num] for data in among or () for num in range(_NUM_BYTES + 1)}
        found: dict[bytes, float] = defaultdict(float)
        total, left = 0.0, 1.0
        paths: list[tuple[float, tuple[int, ...], bytes]] = [(0.0, (), b"")]
        while paths and left > _LEFT_OUT * (left + total if among is None else 1.0):
            cost, path, data = heapq.heappop(paths)
            left -= math.exp(-cost)
            if among is None and path and not self._is_allowed(prompt, path[:-1], path[-1]):
                continue
            if len(data) >= goal or data.endswith(_END):
                found[data[len(heal) : goal]] += math.exp(-cost)
                total += math.exp(-cost)
                continue
            logprobs = log_softmax(self._model.row((*prompt.ids, *path)))
            rest = heal[len(data) :]
            ids = self._agreeing(rest) if rest else _nucleus(logprobs)
            if among is None:
                logprobs -= math.log(self._allowed_share(prompt, path, logprobs))
            elif rest:
                logprobs -= np.logaddexp.reduce(logprobs[ids])
            for id in ids.tolist():
                longer = data + (_END if id in self._end_ids else self._pieces[id])
                if among is None or longer[len(heal) : goal] in heads:
                    heapq.heappush(paths, (cost - float(logprobs[id]), (*path, id), longer))
                    left += math.exp(logprobs[id] - cost)
        return found if among else {data: mass / total for data, mass in found.items()}

    def _agreeing(self, rest: bytes) -> NDArray[np.int64]:
        """Return the tokens that begin with what is left of the heal bytes, or that it begins with."""
        inside = [id for end in range(1, len(rest)) for id in self._ids.get(rest[:end], ())]
        return np.concatenate([self._seam.candidates(rest), np.array(inside, np.int64)])

    def _allowed_share(self, prompt: Prompt, path: tuple[int, ...], logprobs: NDArray[np.float64]) -> float:
        """Return the probability of the tokens that the engine would not refuse here."""
        likely = np.flatnonzero(logprobs > math.log(_LIKELY)).tolist()
        return 1.0 - sum(math.exp(logprobs[id]) for id in likely if not self._is_allowed(prompt, path, id))

    def _is_allowed(self, prompt: Prompt, path: tuple[int, ...], id: int) -> bool:
        if id in self._end_ids:
            return True
        return id not in self._banned and self._seam.is_canonical([*prompt.ids, *path], prompt.floor, id)


def _nucleus(logprobs: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the likeliest tokens that together have nearly all of the probability."""
    ids = np.argsort(-logprobs)
    return ids[: int(np.searchsorted(np.cumsum(np.exp(logprobs[ids])), _NUCLEUS)) + 1]


def distance(own: Distribution, other: Distribution) -> float:
    """Return the total variation distance: what `own` has more of than `other`, all of which is 1."""
    return sum(max(0.0, share - other.get(data, 0.0)) for data, share in own.items())


def perfect_distance(own: Distribution, num_seeds: int) -> NDArray[np.float64]:
    """Return, for 1,000 perfect samplers, the distance of so many draws from what they are drawn from, ascending."""
    shares = np.array(list(own.values()))
    draws = np.random.default_rng(1).multinomial(num_seeds, shares / shares.sum(), size=1000)
    return np.sort(np.abs(draws / num_seeds - shares).sum(axis=1) / 2)


@dataclass(frozen=True)
class Result:
    """The distances of one prefix from the model's own distribution."""

    prefix: str
    heal: str
    likeliest: str
    """The next 4 bytes that the model finds likeliest."""
    share: float
    """Their probability."""
    num_seeds: int
    legato: float
    perfect: float
    """What a perfect sampler's draws would have, on average."""
    perfect_high: float
    """What one in a hundred perfect samplers exceeds."""
    stepwise: float
    none: float
    on_the_model: float | None
    """Legato's again, without memoised rows."""


def measure(continuations: Continuations, prefix: str, num_seeds: int, *, on_the_model: bool = False) -> Result:
    """Measure all distances of a prefix."""
    prompt = continuations.begin(prefix)
    own = continuations.own(prompt)
    drawn = continuations.drawn(prompt, num_seeds)
    again = continuations.drawn(prompt, num_seeds, is_memoised=False) if on_the_model else None
    stepwise = continuations.stepwise(prompt, own)
    none = continuations.stepwise(continuations.begin(prefix, heal=False), own)
    perfect = perfect_distance(own, num_seeds)
    likeliest = max(own, key=lambda data: own[data])
    return Result(
        prefix=prefix,
        heal=prompt.heal.decode("utf-8", "replace"),
        likeliest=likeliest.decode("utf-8", "replace"),
        share=own[likeliest],
        num_seeds=num_seeds,
        legato=distance(own, drawn),
        perfect=float(perfect.mean()),
        perfect_high=float(perfect[989]),
        stepwise=distance(own, stepwise),
        none=distance(own, none),
        on_the_model=None if again is None else distance(own, again),
    )


def table(results: Sequence[Result]) -> str:
    """Return a table in Markdown, the means last."""
    lines = [
        '| prefix | likeliest next 4 bytes | Legato, drawn | perfect sampler, drawn | step by step | `seam: "none"` |',
        "|---|---|---|---|---|---|",
    ]
    for result in results:
        prefix = result.prefix[-28:].replace("\n", "↵")
        lines.append(
            f"| `…{prefix}` | `{result.likeliest}` {result.share:.2f} | {result.legato:.4f} | {result.perfect:.4f} "
            f"(1 % above {result.perfect_high:.4f}) | {result.stepwise:.3f} | {result.none:.3f} |"
        )
    mean = [float(np.mean([getattr(r, name) for r in results])) for name in ("legato", "perfect", "stepwise", "none")]
    lines.append(f"| mean | | {mean[0]:.4f} | {mean[1]:.4f} | {mean[2]:.3f} | {mean[3]:.3f} |")
    return "\n".join(lines) + "\n"


def _plot(path: Path, results: Sequence[Result]) -> None:
    _, axis = pyplot.subplots(figsize=(8, 4), layout="constrained")
    series = {"Legato": "legato", "step by step": "stepwise", 'seam: "none"': "none"}
    for index, (label, name) in enumerate(series.items()):
        heights = [getattr(result, name) for result in results]
        axis.bar([at + 0.28 * index for at in range(len(results))], heights, 0.26, label=label)
    perfect = [result.perfect for result in results]
    axis.scatter(range(len(results)), perfect, marker="_", color="black", label="a perfect sampler's noise", zorder=3)
    axis.set_xticks([at + 0.28 for at in range(len(results))], [f"…{r.prefix[-12:]}" for r in results])
    axis.tick_params(axis="x", labelrotation=30, labelsize=7)
    axis.set_ylabel("distance from the model's own distribution")
    axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, fontsize=8)
    save_png(path)


@click.command()
@click.option("--model", default="smollm2-135m", show_default=True, help="A pulled model of the catalogue.")
@click.option("--seeds", default=5000, show_default=True, help="Draws for each prefix.")
@click.option("--prefixes", default=len(PREFIXES), show_default=True, help="How many of them.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("bench-conditional"), show_default=True)
def main(model: str, seeds: int, prefixes: int, out: Path) -> None:
    """Compare what is sampled behind a cut with the model's own distribution."""
    continuations = Continuations(find_model(model, Settings().data_dir))
    results: list[Result] = []
    for prefix in PREFIXES[:prefixes]:
        results.append(measure(continuations, prefix, seeds, on_the_model=len(results) + 1 == prefixes))
        click.echo(results[-1])
    out.mkdir(parents=True, exist_ok=True)
    (out / "conditional.md").write_text(table(results), "utf-8")
    (out / "conditional.json").write_text(json.dumps([asdict(result) for result in results], indent=1), "utf-8")
    _plot(out / "conditional.png", results)


if __name__ == "__main__":
    main()
