"""An answer given from memory is what an engine without memory gives: over a model that is a function of its tokens.

Its rows are hashes of the ids before them, and its seam is the real one: it replays the heal bytes, and conditions on
them where it would write something else, which is mostly so.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from hashlib import blake2b

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from legato.decoding.choice import Choosing
from legato.decoding.sampling import Row
from legato.decoding.seam import ScoredInner, Seam, best_cover
from legato.engines.llamacpp.recall import Recall
from legato.types import FinishReason, Job, Prompt, Sampling, Step, Token

WORDS = [b"a", b"b", b" ", b"\n", b"ab", b"abb", b"ba", b"bab", b" a", b" ab", b" ba", b"  ", b"\n ", b"\n  ", b"\n  a"]


class WordTokenizer:
    """Takes the longest word each time."""

    pieces = (*WORDS, b"<end>", b"<mark>")
    end_ids = frozenset([len(WORDS)])
    control_ids = frozenset([len(WORDS), len(WORDS) + 1])
    start_id: int | None = None

    def encode(self, data: bytes, *, special: bool) -> list[int]:
        """See `types.Tokenizer`."""
        ids = []
        while data:
            id = max((id for id, word in enumerate(WORDS) if data.startswith(word)), key=lambda id: len(WORDS[id]))
            ids.append(id)
            data = data[len(WORDS[id]) :]
        return ids


TOKENIZER = WordTokenizer()
SEAM = Seam(TOKENIZER)
END, MARK = len(WORDS), len(WORDS) + 1
GAPS = (((END,), 0), ((MARK,), 0), ((MARK,), 5))
"""What stands before the text, and how many bytes before that had no room."""


def row(ids: Sequence[int]) -> Row:
    """The logits behind some ids."""
    seed = int.from_bytes(blake2b(bytes(ids), digest_size=8).digest(), "big")
    return np.random.default_rng(seed).normal(size=len(TOKENIZER.pieces)).astype(np.float32) * 2


def healed(job: Job, choosing: Choosing) -> list[int]:
    """The tokens that cover the heal bytes."""
    prompt, kept = job.prompt, list(job.prompt.ids)
    path: list[int] = []
    data = b""
    while len(data) < len(prompt.heal):
        place = {"offset": prompt.origin + len(data), "num_written": 0, "is_healing": True, "counts": {}}
        path.append(choosing.choose(row(kept + path), kept + path, **place))  # type: ignore[arg-type]
        data += TOKENIZER.pieces[path[-1]]
        if path[-1] == END or not (prompt.heal.startswith(data) or data.startswith(prompt.heal)):
            break
    else:
        return path
    spelling = SEAM.encode_after(kept, prompt.floor, prompt.heal)
    scored = []
    for inner in SEAM.inners(kept, prompt.floor, prompt.heal, spelling):
        logprobs = [
            choosing.sampler.cover_logprobs(row([*kept, *inner.ids[:num]]), {}) for num in range(len(inner.ids) + 1)
        ]
        joint = sum(float(logprobs[num][id]) for num, id in enumerate(inner.ids))
        at = prompt.origin + len(prompt.heal) - len(inner.rest)
        noise = (lambda ids, at=at: choosing.sampler.cover_noise(at, ids)) if job.sampling.temperature else None
        scored.append(ScoredInner(inner, joint, logprobs[-1], noise))
    return list(best_cover(SEAM, kept, prompt.floor, scored, spelling)[0])


async def write(job: Job) -> AsyncGenerator[Step, None]:
    """Run a Job without a memory."""
    choosing = Choosing(job, TOKENIZER, SEAM)
    cover = healed(job, choosing) if job.prompt.heal else []
    tokens = [*job.prompt.ids, *cover]
    offset = job.prompt.origin + sum(len(TOKENIZER.pieces[id]) for id in cover)
    num_written = int(offset > job.prompt.origin + len(job.prompt.heal))
    yield Step()
    if cover:
        yield Step(tuple(Token(id, TOKENIZER.pieces[id]) for id in cover))
    while num_written < job.max_tokens:
        place = {"offset": offset, "num_written": num_written, "is_healing": False, "counts": {}}
        id = choosing.choose(row(tokens), tokens, **place)  # type: ignore[arg-type]
        if id in choosing.ends:
            yield Step(finish="stop")
            return
        tokens.append(id)
        offset += len(TOKENIZER.pieces[id])
        num_written += 1
        yield Step((Token(id, TOKENIZER.pieces[id]),))
    yield Step(finish="length")


async def answer(steps: AsyncGenerator[Step, None], num_read: int) -> tuple[bytes, FinishReason | None]:
    """What a reader has got of an answer who leaves after so many Steps with tokens; it is accepted once."""
    data, finish, num_accepted = b"", None, 0
    async with aclosing(steps):
        async for step in steps:
            num_accepted += not step.tokens and step.finish is None
            data += b"".join(token.data for token in step.tokens)
            finish = step.finish
            num_read -= bool(step.tokens)
            if finish is not None or num_read < 0:
                break
    assert num_accepted == 1
    return data, finish


def job_for(text: bytes, place: int, max_tokens: int, min_tokens: int, temperature: float, seed: int) -> Job:
    """A Job in one of the gaps."""
    scaffold, num_cut = GAPS[place]
    ids = [*scaffold, *TOKENIZER.encode(text, special=False)]
    kept, heal = SEAM.split(ids, len(scaffold))
    origin = num_cut + len(text) - len(heal)
    prompt = Prompt(tuple(ids[:kept]), tuple(ids[kept:]), heal, origin, len(scaffold), text.decode())
    sampling = Sampling(seed, temperature)
    return Job("", 0, prompt, max_tokens, sampling, min_tokens=min_tokens, stop_ids=(MARK, 1), is_typed=True)


TEXTS = st.lists(st.sampled_from(["a", "b", " ", "\n", "ab", "  "]), max_size=4).map("".join)
EDITS = st.one_of(
    st.tuples(st.just("type"), TEXTS),
    st.tuples(st.just("accept"), st.integers(1, 9)),
    st.tuples(st.just("delete"), st.integers(1, 5)),
    st.tuples(st.just("again"), st.integers(0, 9)),
    st.tuples(st.just("move"), st.integers(0, len(GAPS) - 1)),
)
LIMITS = st.tuples(st.integers(1, 8), st.sampled_from([0, 0, 0, 2]))
READERS = st.sampled_from([0, 1, 2, 3, 99, 99, 99, 99])


@settings(deadline=None)
@given(
    start=TEXTS,
    edits=st.lists(st.tuples(EDITS, LIMITS, READERS), min_size=2, max_size=12),
    temperature=st.sampled_from([0.0, 0.8]),
    seed=st.integers(0, 3),
)
def test_an_answer_from_memory_is_what_is_written_without_one(
    start: str, edits: list[tuple[tuple[str, int | str], tuple[int, int], int]], temperature: float, seed: int
) -> None:
    """Typing, taking over what was foretold, deleting, going back and moving to another gap."""

    async def check() -> None:
        recall = Recall()
        text, place, foretold = b"ab" + start.encode(), 0, b""
        texts = [text]
        for (kind, amount), limits, num_read in edits:
            match kind, amount:
                case "type", str():
                    text += amount.encode()
                case "accept", int():
                    text += foretold[:amount]
                case "delete", int():
                    text = text[:-amount]
                case "again", int():
                    text = texts[-1 - amount % len(texts)]
                case _, int():
                    place = amount
            texts.append(text)
            job = job_for(text, place, *limits, temperature, seed)
            given, finish = await answer(recall.steps(job, write), num_read)
            alone, end = await answer(write(job), 99)
            assert (given, finish) == (alone, end) if finish is not None else alone.startswith(given)
            foretold = alone[len(job.prompt.heal) :]

    asyncio.run(check())
