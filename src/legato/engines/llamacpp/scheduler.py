"""Continuous batching over one model: each step is one decode of a token for every running Job, filled up with prompt
chunks.

It receives Jobs and cancellations and returns Steps. It runs in the worker, single-threaded, and knows neither
processes nor sockets.

A Job's life, as the states of its `_Sequence`:

    waiting    it has no place yet
    reading    its prompt is fed, in chunks, behind the longest head that another sequence already has in the cache
    healing    the heal bytes are written again (`seam`); their canonical spelling was fed together with the prompt, so
               that the usual case costs no decode of its own
    scoring    part of healing: inner paths that the spelling does not contain are fed on copies of the sequence
    writing    a token is chosen per step

Rounding. The same token must get the same logits whoever else is there, or L2 fails: a difference in the last bit
grows, through the quantised activations, to tenths of a logit. llama.cpp's kernels give equal bits for a row in any
batch of 2 to 7 rows (flash attention splits a single row over threads by the place of its cells, and takes another
kernel from 64 rows on; Q5_0 and Q8_0 weights take another from 8). So tokens that streams write and prompts that are
read go in separate calls, each prompt in its own, and a lone token gets a companion (`_pad`). What was once written is
never read: after a crash it is fed in short calls again.

Flash attention adds up in the order of the cells, so that order must not depend on who else came and went either.
llama.cpp fills the lowest free cell first; therefore cells are used as a log: what is given up is first buried
(`_bury`: moved to a sequence of its own). When the log has grown, or no room is left, what is alive is written again
from the first cell on, bit for bit and in order (`_compact`). Attention looks at every cell below the highest that is
used, so a short log is also a fast one: a thousand cells cost about 2 % of a decode step.

`_Sequence.tokens` is what should be in the cache, `num_fed` how much of it is; whatever changes the tail of `tokens`
truncates the cache to what is still true. So preemption, when cells run out, is no more than `num_fed = 0`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from legato.engines.llamacpp.binding import Batch, Model
from legato.engines.llamacpp.cache import Retained, shared_head
from legato.sampling import Row, Sampler, log_softmax
from legato.seam import Inner, ScoredInner, Seam, best_cover
from legato.types import FinishReason, Job, ScoredToken, Step, Token

__all__ = ["Scheduler"]

_SHORT = 6
"""Tokens that one sequence may have in a call with others: those it writes, and its tail at the seam."""
_MAX_SHORT_BATCH = 63
"""From 64 rows on, flash attention takes another kernel, whose rounding is its own."""
_BLOCK = 64
"""A prompt is read in calls of at least so many tokens, if it has them: the fewest that the fast kernel takes."""
_WORTH_WAITING = 16
"""A prompt waits for another one that is being read if it can then copy at least so many tokens more."""
_MAX_LOG = 1024
"""Tokens decoded from one compaction to the next."""
_MAX_RETAINED = 4096
"""Tokens of retained sequences that a compaction keeps, shared heads counted once; the most recently used stay."""
_MAX_BRANCHES = 6
"""Inner paths scored on copies for one Job; the least likely beyond it are left out."""
_MARGIN = 16.0
"""When sampling, an inner path is left out if it would need Gumbel noise this far above a cover already found (1 in 9
million).
"""


@dataclass(slots=True)
class _Branch:
    """A copy of a sequence, on which one inner path is scored."""

    sequence: int
    inner: Inner
    num_shared: int
    """Ids at its beginning that the sequence itself has been fed, so they come with the copy and their rows are
    known.
    """


@dataclass(frozen=True, slots=True)
class _Fed:
    """What a batch holds of one sequence."""

    sequence: _Sequence
    num: int
    """Tokens of the sequence itself."""
    first: int
    """Its first row of logits, among the batch's rows."""
    num_rows: int


@dataclass(slots=True, eq=False)
class _Sequence:
    """A running Job."""

    job: Job
    sampler: Sampler
    tokens: list[int]
    num_kept: int
    """Tokens before the heal bytes."""
    spelling: list[int]
    id: int = -1
    num_fed: int = 0
    is_accepted: bool = False
    healing: bool = False
    rows: dict[tuple[int, ...], Row] = field(default_factory=dict)
    """While healing: logits after the kept tokens plus a path."""
    path: tuple[int, ...] = ()
    branches: list[_Branch] = field(default_factory=list)
    offset: int = 0
    """Byte offset of the next token in the rendered text."""
    num_written: int = 0
    """Tokens written that have bytes after the seam."""
    counts: Counter[int] = field(default_factory=Counter)
    scores: list[Token] = field(default_factory=list)
    is_read: bool = False
    num_chunks: int = 0
    is_branched: bool = False

    @property
    def pending(self) -> int:
        """Tokens that have to be fed before the next choice."""
        return len(self.tokens) - self.num_fed

    @property
    def read_end(self) -> int:
        """The end of what is read in chunks; what stands behind it is fed in short calls.

        That is the seam's tail, which a later cut may feed again, and all that was written before a crash.
        """
        if self.job.score_prompt and not self.is_read:
            return len(self.tokens)
        return self.num_kept - 1 - self.job.num_resumed

    @property
    def is_reading(self) -> bool:
        """Whether the next thing to feed is a chunk of the prompt."""
        return self.num_fed < self.read_end and self.pending > _SHORT

    @property
    def first_row(self) -> int:
        """The first of `tokens` whose logits are wanted when it is fed."""
        if self.job.score_prompt and not self.is_read:
            return 0
        return self.num_kept - 1 if self.healing and not self.is_read else len(self.tokens) - 1

    def counts_with(self, path: tuple[int, ...]) -> Mapping[int, int]:
        """Return the counts that a choice behind `path` sees."""
        return self.counts + Counter(path) if path and self.sampler.has_penalties else self.counts


class Scheduler:
    """Runs Jobs on one model."""

    def __init__(self, model: Model, seam: Seam, *, context_length: int, max_batch: int, max_sequences: int) -> None:
        self._model = model
        self._seam = seam
        self._pieces = model.vocabulary.pieces
        self._end_ids = model.vocabulary.end_ids
        self._banned = model.vocabulary.control_ids - model.vocabulary.end_ids
        self._context_length = context_length
        self._batch = Batch(max_batch)
        self._pad, self._grave = max_sequences - 1, max_sequences - 2
        self._free = list(range(self._grave - 1, -1, -1))
        self._is_full = False
        """Cells ran out: whoever waits does so until somebody has ended."""
        self._num_logged = 0
        self._retained = Retained()
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._unserved: deque[_Sequence] = deque()
        """Of those that run, the ones whose turn in this step is still to come."""
        self._out: list[tuple[str, Step]] = []
        self.num_steps = 0
        self.num_decoded = 0

    # -- commands -----------------------------------------------------------------------------------------------------

    def submit(self, job: Job) -> None:
        """Accept a Job; its first Step comes with the next `step`."""
        prompt = job.prompt
        spelling = self._seam.encode_after(prompt.ids, prompt.floor, prompt.heal) if prompt.heal else []
        sequence = _Sequence(
            job=job,
            sampler=Sampler(job.sampling, choice=job.choice, vocab_size=len(self._pieces)),
            tokens=[*prompt.ids, *spelling],
            num_kept=len(prompt.ids),
            spelling=spelling,
            healing=bool(prompt.heal),
            offset=prompt.origin,
        )
        if sequence.sampler.has_penalties:
            sequence.counts.update(prompt.ids[prompt.floor :])
        self._waiting.append(sequence)

    def cancel(self, job_id: str) -> None:
        """Drop a Job, wherever it is. Nothing more is said of it."""
        for sequence in self._waiting:
            if sequence.job.id == job_id:
                self._waiting.remove(sequence)
                self._drop(sequence)
                return
        for sequence in self._running:
            if sequence.job.id == job_id:
                self._running.remove(sequence)
                self._drop(sequence)
                return

    @property
    def is_idle(self) -> bool:
        """Whether a step would have nothing to do."""
        return not self._waiting and not self._running

    def counters(self) -> Mapping[str, int]:
        """Return counts: Jobs and sequences now, steps and decoded tokens since the start."""
        return {
            "running": len(self._running),
            "waiting": len(self._waiting),
            "retained": len(self._retained),
            "steps": self.num_steps,
            "decoded_tokens": self.num_decoded,
        }

    # -- one step -----------------------------------------------------------------------------------------------------

    def step(self) -> list[tuple[str, Step]]:
        """Decode a token for every Job that writes, and one chunk of the prompts; return what came of it, by Job id."""
        self._out = []
        self._admit()
        self._unserved = deque(self._running)
        while self._run(self._fill_short):
            pass
        self._run(self._fill_chunk)
        if self._num_logged > _MAX_LOG:
            self._compact(_MAX_RETAINED)
        return self._out

    def _run(self, fill: Callable[[], list[_Fed]]) -> bool:
        """Decode what `fill` puts into the batch, and act on the logits. False: it put nothing."""
        while True:
            self._batch.clear()
            fed = fill()
            if not fed:
                return False
            if self._batch.num_tokens == 1:
                self._batch.add(self._pad, 0, [0], num_wanted=0)
            done = self._model.decode(self._batch)
            self._model.forget(self._pad, 0)
            if done:
                break
            self._unserved.extendleft(reversed([entry.sequence for entry in fed]))
            self._make_room()
        self.num_steps += 1
        num = sum(entry.num for entry in fed)
        self.num_decoded += num
        self._num_logged += num
        rows = self._model.rows(self._batch.num_wanted)
        for entry in fed:
            self._read_rows(entry.sequence, entry.num, rows[entry.first : entry.first + entry.num_rows])
        return True

    def _admit(self) -> None:
        """Give waiting Jobs a place, in order, as far as sequence ids go."""
        held_back: list[_Sequence] = []
        while self._waiting and not (self._is_full and self._running):
            if not self._free and not self._release_one():
                break
            sequence = self._waiting.popleft()
            if sequence.job.max_tokens == 0 and not sequence.job.score_prompt:
                self._out.append((sequence.job.id, Step()))
                self._out.append((sequence.job.id, Step(finish="length")))
                continue
            if self._start(sequence):
                self._running.append(sequence)
            else:
                held_back.append(sequence)
        self._waiting.extendleft(reversed(held_back))

    def _start(self, sequence: _Sequence) -> bool:
        """Copy the longest head that is in the cache. False: a longer one is being read now, so wait for it."""
        wanted = np.asarray(sequence.tokens[: sequence.first_row], np.int32)
        source, length = -1, 0
        if wanted.size:
            source, length = self._retained.longest(wanted)
            coming = 0
            for other in self._running:
                shared = shared_head(np.asarray(other.tokens, np.int32), wanted)
                coming = max(coming, shared)
                if min(shared, other.num_fed) > length:
                    source, length = other.id, min(shared, other.num_fed)
            if coming >= length + _WORTH_WAITING:
                return False
            if source >= 0 and all(other.id != source for other in self._running):
                self._retained.touch(source)
        sequence.id = self._free.pop()
        if length:
            self._model.copy(source, sequence.id, 0, length)
        sequence.num_fed = length
        if not sequence.is_accepted:
            sequence.is_accepted = True
            self._out.append((sequence.job.id, Step(num_cached=length)))
        return True

    def _fill_short(self) -> list[_Fed]:
        """Take the sequences that wait for few tokens and were not served in this step: those that write, or heal."""
        batch = self._batch
        fed: list[_Fed] = []
        while self._unserved:
            sequence = self._unserved[0]
            tails = [branch.inner.ids[branch.num_shared :] for branch in sequence.branches]
            size = sum(map(len, tails)) if tails else sequence.pending
            if fed and batch.num_tokens + (size if tails else _SHORT) > _MAX_SHORT_BATCH:
                break
            self._unserved.popleft()
            if tails:
                first = batch.num_wanted
                for branch, tail in zip(sequence.branches, tails, strict=True):
                    batch.add(branch.sequence, sequence.num_kept + branch.num_shared, tail, num_wanted=len(tail))
                fed.append(_Fed(sequence, 0, first, batch.num_wanted - first))
            elif size and sequence.id >= 0 and not sequence.is_reading:
                fed.append(self._feed(sequence, min(size, _SHORT)))
        return fed

    def _fill_chunk(self) -> list[_Fed]:
        """Take a chunk of one prompt: of those that are being read, the one that had the fewest so far."""
        reading = [sequence for sequence in self._running if sequence.is_reading]
        if not reading:
            return []
        sequence = min(reading, key=lambda sequence: sequence.num_chunks)
        sequence.num_chunks += 1
        num = sequence.read_end - sequence.num_fed
        if num >= 2 * _BLOCK:
            num = min(num - _BLOCK, self._batch.capacity if len(reading) == len(self._running) else _BLOCK)
        return [self._feed(sequence, num)]

    def _feed(self, sequence: _Sequence, num: int) -> _Fed:
        end = sequence.num_fed + num
        num_rows = max(0, min(num, end - sequence.first_row))
        ids = sequence.tokens[sequence.num_fed : end]
        return _Fed(sequence, num, self._batch.add(sequence.id, sequence.num_fed, ids, num_wanted=num_rows), num_rows)

    # -- what the logits say ------------------------------------------------------------------------------------------

    def _read_rows(self, sequence: _Sequence, num: int, rows: NDArray[np.float32]) -> None:
        """Take note of `num` fed tokens and the rows of the last of them; choose, if nothing is left to feed."""
        if sequence.branches:
            self._read_branches(sequence, rows)
            return
        sequence.num_fed += num
        first = sequence.num_fed - len(rows)
        if not sequence.is_read:
            for index, row in enumerate(rows, first):
                if sequence.job.score_prompt and index == len(sequence.scores) and index + 1 < len(sequence.tokens):
                    sequence.scores.append(self._token(sequence, row, sequence.tokens[index + 1]))
                if sequence.healing and index >= sequence.num_kept - 1:
                    sequence.rows[tuple(sequence.spelling[: index - sequence.num_kept + 1])] = row.copy()
        if sequence.pending:
            return
        if not sequence.is_read:
            sequence.is_read = True
            if sequence.job.score_prompt:
                unscored = Token(sequence.tokens[0], self._pieces[sequence.tokens[0]])
                self._out.append((sequence.job.id, Step(prompt=(unscored, *sequence.scores))))
                sequence.scores = []
            if sequence.job.max_tokens == 0:
                self._finish(sequence, "length")
                return
        elif sequence.healing:
            sequence.rows[sequence.path] = rows[-1].copy()
        if sequence.healing:
            self._replay(sequence)
        else:
            self._write(sequence, rows[-1])

    def _write(self, sequence: _Sequence, row: Row) -> None:
        """Choose the next token of the answer."""
        token = sequence.sampler.choose(
            row,
            offset=sequence.offset,
            counts=sequence.counts,
            accept=partial(self._is_allowed, sequence, sequence.tokens),
        )
        if token in self._end_ids:
            self._finish(sequence, "stop")
            return
        sequence.tokens.append(token)
        self._append(sequence, (self._token(sequence, row, token),), num_new=1)

    def _append(self, sequence: _Sequence, tokens: tuple[Token, ...], *, num_new: int) -> None:
        """Report tokens that are now in `sequence.tokens`, of which the last `num_new` count; finish at a limit."""
        sequence.num_written += num_new
        sequence.offset += sum(len(token.data) for token in tokens)
        if sequence.sampler.has_penalties:
            sequence.counts.update(token.id for token in tokens)
        is_full = len(sequence.tokens) >= self._context_length
        is_last = is_full or (sequence.num_written >= sequence.job.max_tokens and sequence.num_written > 0)
        if is_last:
            self._finish(sequence, "length", tokens)
        else:
            self._out.append((sequence.job.id, Step(tokens)))

    def _is_allowed(self, sequence: _Sequence, context: list[int], token: int) -> bool:
        if token in self._end_ids:
            return True
        if token in self._banned:
            return False
        return not sequence.job.canonical or self._seam.is_canonical(context, sequence.job.prompt.floor, token)

    def _token(self, sequence: _Sequence, row: Row, token: int) -> Token:
        """Describe a token, with its score if the Job wants scores."""
        num = sequence.job.logprobs
        if num is None:
            return Token(token, self._pieces[token])
        logprobs = log_softmax(row)
        best = np.argpartition(logprobs, -num)[-num:] if num else np.empty(0, np.int64)
        best = best[np.lexsort((best, -logprobs[best]))]
        top = tuple(ScoredToken(int(id), self._pieces[id], float(logprobs[id])) for id in best)
        return Token(token, self._pieces[token], float(logprobs[token]), top)

    # -- the seam -----------------------------------------------------------------------------------------------------

    def _replay(self, sequence: _Sequence) -> None:
        """Choose freely for as long as the choices agree with the heal bytes; condition where they do not."""
        job, heal = sequence.job, sequence.job.prompt.heal
        kept = sequence.tokens[: sequence.num_kept]
        while (row := sequence.rows.get(sequence.path)) is not None:
            done = self._bytes(sequence.path)
            token = sequence.sampler.choose(
                row,
                offset=job.prompt.origin + len(done),
                counts=sequence.counts_with(sequence.path),
                accept=partial(self._is_allowed, sequence, [*kept, *sequence.path]),
            )
            data = done + self._pieces[token]
            if token in self._end_ids or not (heal.startswith(data) or data.startswith(heal)):
                self._condition(sequence)
                return
            sequence.path = (*sequence.path, token)
            if len(data) >= len(heal):
                self._heal(sequence, sequence.path)
                return
        self._retail(sequence, sequence.path)

    def _condition(self, sequence: _Sequence) -> None:
        """Take the best cover of the heal bytes; first feed the inner paths that could hold it and are unknown."""
        job, sampler = sequence.job, sequence.sampler
        kept = sequence.tokens[: sequence.num_kept]
        logprobs: dict[tuple[int, ...], NDArray[np.float64]] = {}

        def after(head: tuple[int, ...]) -> NDArray[np.float64]:
            """Return the log-probabilities of what follows a path whose row is known."""
            if head not in logprobs:
                logprobs[head] = sampler.cover_logprobs(sequence.rows[head], sequence.counts_with(head))
            return logprobs[head]

        def joint(ids: tuple[int, ...]) -> float:
            """Sum the log-probabilities of ids as far as rows are known: a bound, and exact where all are."""
            total = 0.0
            for num in range(len(ids)):
                if ids[:num] not in sequence.rows:
                    break
                total += float(after(ids[:num])[ids[num]])
            return total

        known, unknown = [], []
        for inner in self._seam.inners(kept, job.prompt.floor, job.prompt.heal, sequence.spelling):
            bound = joint(inner.ids)
            if inner.ids not in sequence.rows:
                unknown.append((bound, inner))
                continue
            offset = job.prompt.origin + len(job.prompt.heal) - len(inner.rest)
            noise = partial(sampler.cover_noise, offset) if job.sampling.temperature else None
            known.append(ScoredInner(inner, bound, after(inner.ids), noise))
        cover, score = best_cover(self._seam, kept, job.prompt.floor, known, sequence.spelling)
        if not sequence.is_branched:
            margin = _MARGIN if job.sampling.temperature else 0.0
            worth = sorted((entry for entry in unknown if entry[0] + margin > score), key=lambda entry: -entry[0])
            self._branch(sequence, [inner for _, inner in worth[:_MAX_BRANCHES]])
        if not sequence.branches:
            self._heal(sequence, cover)

    def _branch(self, sequence: _Sequence, inners: Iterable[Inner]) -> None:
        """Make a copy of the sequence for each inner path, as far as sequence ids go."""
        sequence.is_branched = True
        fed = sequence.tokens[sequence.num_kept : sequence.num_fed]
        for inner in inners:
            if not self._free and not self._release_one():
                return
            num_shared = 0
            while num_shared < min(len(fed), len(inner.ids) - 1) and fed[num_shared] == inner.ids[num_shared]:
                num_shared += 1
            branch = _Branch(self._free.pop(), inner, num_shared)
            self._model.copy(sequence.id, branch.sequence, 0, sequence.num_kept + num_shared)
            sequence.branches.append(branch)

    def _read_branches(self, sequence: _Sequence, rows: NDArray[np.float32]) -> None:
        """Keep the rows of all branches, give the copies back and choose."""
        at = 0
        for branch in sequence.branches:
            for num in range(branch.num_shared + 1, len(branch.inner.ids) + 1):
                sequence.rows[branch.inner.ids[:num]] = rows[at].copy()
                at += 1
        self._free_branches(sequence)
        self._condition(sequence)

    def _heal(self, sequence: _Sequence, path: tuple[int, ...]) -> None:
        """Go on behind `path`, which covers the heal bytes."""
        data = self._bytes(path)
        overhangs = len(data) > len(sequence.job.prompt.heal)
        tokens = [Token(id, self._pieces[id]) for id in path]
        if overhangs and path[:-1] in sequence.rows:
            tokens[-1] = self._token(sequence, sequence.rows[path[:-1]], path[-1])
        row = sequence.rows.get(path)
        self._retail(sequence, path)
        sequence.healing = False
        sequence.rows = {}
        self._append(sequence, tuple(tokens), num_new=int(overhangs))
        if row is not None and not sequence.pending and sequence in self._running:
            self._write(sequence, row)

    def _retail(self, sequence: _Sequence, tail: tuple[int, ...]) -> None:
        """Replace what follows the kept tokens, and forget what the cache holds of the old tail."""
        tokens = [*sequence.tokens[: sequence.num_kept], *tail]
        same = sequence.num_kept
        while same < min(len(tokens), sequence.num_fed) and tokens[same] == sequence.tokens[same]:
            same += 1
        if same < sequence.num_fed:
            self._bury(sequence.id, same)
            sequence.num_fed = same
        sequence.tokens = tokens

    def _bytes(self, ids: Iterable[int]) -> bytes:
        return b"".join(self._pieces[id] for id in ids)

    # -- sequence ids and cells ---------------------------------------------------------------------------------------

    def _finish(self, sequence: _Sequence, reason: FinishReason, tokens: tuple[Token, ...] = ()) -> None:
        self._out.append((sequence.job.id, Step(tokens, finish=reason)))
        self._running.remove(sequence)
        self._drop(sequence)

    def _drop(self, sequence: _Sequence) -> None:
        """Give a sequence's place back; what it has in the cache is retained."""
        self._is_full = False
        self._free_branches(sequence)
        if sequence.id < 0:
            return
        if sequence.num_fed:
            for covered in self._retained.add(sequence.id, sequence.tokens[: sequence.num_fed]):
                self._forget(covered)
        else:
            self._free.append(sequence.id)

    def _free_branches(self, sequence: _Sequence) -> None:
        for branch in sequence.branches:
            self._forget(branch.sequence)
        sequence.branches = []

    def _bury(self, id: int, length: int) -> None:
        """Give up a sequence's cells from position `length` on, without freeing them yet."""
        self._model.copy(id, self._grave, length, -1)
        self._model.forget(id, length)

    def _forget(self, id: int) -> None:
        self._bury(id, 0)
        self._free.append(id)

    def _release_one(self) -> bool:
        """Give up the retained sequence that was used least recently."""
        id = self._retained.evict()
        if id is None:
            return False
        self._forget(id)
        return True

    def _make_room(self) -> None:
        """Free cells: the older half of what is retained, else the Job that began last, which goes on later."""
        num_buried = self._num_logged
        num_retained = sum(tokens.size for _, tokens in self._retained.newest_first())
        self._compact(num_retained // 2)
        if num_buried or num_retained:
            return
        if len(self._running) < 2:
            raise RuntimeError("the KV cache has no room for a single sequence")
        sequence = self._running.pop()
        self._free_branches(sequence)
        sequence.is_branched = False
        self._forget(sequence.id)
        sequence.id, sequence.num_fed = -1, 0
        self._waiting.appendleft(sequence)
        self._is_full = True
        self._compact(0)

    def _compact(self, max_retained: int) -> None:
        """Write all that is alive again from the first cell on, and retain about `max_retained` tokens."""
        alive = [(sequence.id, np.asarray(sequence.tokens[: sequence.num_fed], np.int32)) for sequence in self._running]
        kept: list[tuple[int, NDArray[np.int32], int, int]] = []
        room = max_retained
        for id, tokens in (*alive, *self._retained.newest_first()):
            source, shared = -1, 0
            for other, others, _, _ in kept:
                if (length := shared_head(others, tokens)) > shared:
                    source, shared = other, length
            if len(kept) >= len(alive):
                room -= tokens.size - shared
                if room < 0:
                    self._retained.drop(id)
                    self._free.append(id)
                    continue
            kept.append((id, tokens, source, shared))
        tails = []
        self._model.forget(self._grave, 0)
        for id, tokens, _, shared in kept:
            if shared < tokens.size:
                self._model.copy(id, self._pad, shared, -1)
                tails.append(self._model.save(self._pad))
                self._model.forget(self._pad, 0)
            else:
                tails.append(b"")
        self._model.clear()
        for (id, _, source, shared), tail in zip(kept, tails, strict=True):
            if shared:
                self._model.copy(source, id, 0, shared)
            if tail:
                self._model.load(self._pad, tail)
                self._model.copy(self._pad, id, 0, -1)
                self._model.forget(self._pad, 0)
        for sequence in self._running:
            for branch in sequence.branches:
                self._model.copy(sequence.id, branch.sequence, 0, sequence.num_kept + branch.num_shared)
        self._num_logged = 0
