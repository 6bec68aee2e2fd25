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
grows, through the quantised activations, to tenths of a logit. llama.cpp rounds by the shape of the call, unless it is
asked for the kernels that do not (`Model.decode`), which read long prompts slower by half and more. So tokens that
streams write go in exact calls, as do short prompts; a long prompt is read in calls of its own, where attention rounds
by the cells that it lies in. What was once written is never read: after a crash it is fed in exact calls again.
Deterministic Jobs read long prompts in exact calls too, and share entries only among themselves. So do Jobs that score
their prompt, which take no entries at all.

Flash attention adds up in the order of the cells, so that order must not depend on who else came and went either.
llama.cpp fills the lowest free cell first; therefore cells are used as a log: what is given up is first buried
(`_bury`: moved to a sequence of its own). When the log has grown, or no room is left, what is alive is written again
from the first cell on, bit for bit and in order (`_compact`). Attention looks at every cell below the highest that is
used, so a short log is also a fast one: a thousand cells cost about 2 % of a decode step. Finished sequences that must
leave the cells are kept by `spill`.

Rows left over in a call hold drafts (`drafts`), checked with the sampler's own choices: they never change the text.

`_Sequence.tokens` is what should be in the cache, `num_fed` how much of it is; whatever changes the tail of `tokens`
truncates the cache to what is still true. So preemption, when cells run out, is no more than `num_fed = 0`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from legato.choosing import Choosing
from legato.constraint import Compiler, TooComplex
from legato.engines.llamacpp.binding import Batch, Model
from legato.engines.llamacpp.cache import RadixTree, RowCache, Tokens, shared_head
from legato.engines.llamacpp.drafts import Drafter
from legato.engines.llamacpp.guide import Guide
from legato.engines.llamacpp.spill import Spill
from legato.engines.llamacpp.thinking import Budget
from legato.errors import GenerationFailed, InvalidField, LegatoError
from legato.sampling import Row, log_softmax
from legato.seam import Inner, ScoredInner, Seam, best_cover
from legato.types import FinishReason, Job, ScoredToken, Step, Token

__all__ = ["Scheduler"]

_MAX_ROWS = 63
"""Of an exact call for streams: without a choice of kernels, more would round in another way."""
_SHORT = 8
"""Tokens that a sequence may have to be served in every step, like one that writes."""
_BLOCK = 64
"""The fewest tokens that the fast kernel takes, and the most of prompts that are read while others write."""
_EXACT_PROMPT = 128
"""Prompts of up to so many tokens are always read exactly: that hardly takes longer."""
_CALL_COST = 3
"""What a call costs whatever it holds, in rows: so much is saved by a draft that is right."""
_WORTH_WAITING = 16
"""A prompt waits for another one that is being read if it can then copy at least so many tokens more."""
_WORTH_LOADING = 64
"""A spilled sequence is kept, and read back, for at least so many tokens."""
_KEPT_ROWS = 6
"""Rows that are remembered of an answer's end, where the next round begins: a boundary backs up by four tokens."""
_MAX_ROW_BYTES = 64 * 2**20
_MAX_LOG = 1024
"""Tokens decoded from one compaction to the next."""
_MAX_RETAINED = 4096
"""Tokens of retained sequences that a compaction keeps, shared heads counted once; the most recently used stay."""
_MAX_BRANCHES = 6
"""Inner paths scored on copies for one Job; the least likely beyond it are left out."""
_POLL_S = 0.005
"""How long a step waits for a constraint that is compiled while nothing else is to be done."""
_MARGIN = 10.0
"""When sampling, an inner path is left out if it would need Gumbel noise this far above a cover already found (1 in
22,000).
"""


@dataclass(slots=True, eq=False)
class _Branch:
    """A copy of a sequence, on which one inner path is scored."""

    owner: _Sequence
    sequence: int
    inner: Inner
    num_shared: int
    """Ids at its beginning that the owner has been fed, so they come with the copy and their rows are known."""

    @property
    def num_exact(self) -> int:
        """Tokens that wait for an exact call."""
        return len(self.inner.ids) - self.num_shared if self.sequence >= 0 else 0


@dataclass(frozen=True, slots=True)
class _Fed:
    """What a batch holds of one sequence or branch."""

    item: _Sequence | _Branch
    num: int
    """Tokens, without a draft."""
    first: int
    """Its first row of logits, among the batch's rows."""
    num_rows: int


@dataclass(slots=True, eq=False)
class _Sequence:
    """A running Job."""

    job: Job
    choosing: Choosing
    tokens: list[int]
    num_kept: int
    """Tokens before the heal bytes."""
    spelling: list[int]
    head: Tokens
    """`tokens` as they were at first."""
    budget: Budget
    compiling: Future[Guide] | None = None
    """The guide of a Job with a constraint, while it is made; it has no place until then."""
    guide: Guide | None = None
    """Behind `tokens`; while healing, behind the kept ones."""
    id: int = -1
    num_fed: int = 0
    first_wanted: int = 0
    """The first of `tokens` whose row is not known, while the prompt is read."""
    is_accepted: bool = False
    healing: bool = False
    rows: dict[tuple[int, ...], Row] = field(default_factory=dict)
    """While healing: logits after the kept tokens plus a path. Otherwise, of the prompt if they are known: by ()."""
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
    drafter: Drafter | None = None
    guess: list[int] = field(default_factory=list)
    """What the drafter proposed last."""
    draft: list[int] = field(default_factory=list)
    """As much of the guess as is fed behind `tokens` in the call that is being made."""

    @property
    def pending(self) -> int:
        """Tokens that have to be fed before the next choice."""
        return len(self.tokens) - self.num_fed

    @property
    def read_end(self) -> int:
        """The end of what may be read in chunks; what stands behind it is fed in exact calls.

        That is the seam's tail, which a later cut may feed again, and all that was written before a crash.
        """
        if self.job.score_prompt and not self.is_read:
            return len(self.tokens)
        return self.num_kept - 1 - self.job.num_resumed

    @property
    def is_exact(self) -> bool:
        """Whether all of the prompt is read in exact calls."""
        return self.read_end <= _EXACT_PROMPT or self.job.deterministic or self.job.score_prompt

    @property
    def is_reading(self) -> bool:
        """Whether the next thing to feed is a chunk of the prompt, in a call of its own."""
        return not self.is_exact and self.read_end - self.num_fed >= _BLOCK

    @property
    def num_exact(self) -> int:
        """Tokens that wait for exact calls."""
        return 0 if self.id < 0 or self.branches or self.is_reading else self.pending

    @property
    def first_row(self) -> int:
        """The first of `tokens` whose logits are wanted when it is fed."""
        if self.job.score_prompt and not self.is_read:
            return 0
        return len(self.tokens) - 1 if self.is_read else min(self.first_wanted, len(self.tokens) - 1)

    @property
    def namespace(self) -> str:
        """Who may share its entries: a deterministic Job only takes what was computed in exact calls."""
        return f"{self.job.cache_salt}{' deterministic' if self.job.deterministic else ''}"

    def guide_behind(self, path: tuple[int, ...]) -> Guide | None:
        """Return the guide of a choice behind `path`."""
        return None if self.guide is None else self.guide.behind(path)

    def counts_with(self, path: tuple[int, ...]) -> Mapping[int, int]:
        """Return the counts that a choice behind `path` sees."""
        return self.counts + Counter(path) if path and self.choosing.sampler.has_penalties else self.counts


class Scheduler:
    """Runs Jobs on one model."""

    def __init__(
        self,
        model: Model,
        seam: Seam,
        *,
        context_length: int,
        max_batch: int,
        max_sequences: int,
        spill: Spill,
    ) -> None:
        vocabulary = model.vocabulary
        self._model = model
        self._seam = seam
        self._pieces = vocabulary.pieces
        self._end_ids = vocabulary.end_ids
        self._compiler = Compiler(vocabulary.pieces, vocabulary.control_ids, vocabulary.end_ids)
        self._compiling = ThreadPoolExecutor(max_workers=1)
        self._context_length = context_length
        self._batch = Batch(max_batch)
        self._spare, self._grave = max_sequences - 1, max_sequences - 2
        self._free = list(range(self._grave - 1, -1, -1))
        self._is_full = False
        """Cells ran out: whoever waits does so until somebody has ended."""
        self._num_logged = 0
        self._retained = RadixTree()
        self._spill = spill
        self._known = RowCache(_MAX_ROW_BYTES)
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._unserved: deque[_Sequence | _Branch] = deque()
        """Those whose turn in this step is still to come."""
        self._reading: list[_Sequence] = []
        """Those that have a part of their prompt read in this step if there is room."""
        self._out: list[tuple[str, Step | LegatoError]] = []
        self.num_steps = 0
        self.num_decoded = 0
        self.num_drafted = 0
        self.num_accepted = 0

    # -- commands -----------------------------------------------------------------------------------------------------

    def submit(self, job: Job) -> None:
        """Accept a Job; its first Step comes with the next `step`."""
        prompt = job.prompt
        spelling = self._seam.encode_after(prompt.ids, prompt.floor, prompt.heal) if prompt.heal else []
        tokens = [*prompt.ids, *spelling]
        choosing = Choosing(job, self._model.vocabulary, self._seam)
        sequence = _Sequence(
            job=job,
            choosing=choosing,
            tokens=tokens,
            num_kept=len(prompt.ids),
            spelling=spelling,
            head=np.asarray(tokens, np.int32),
            budget=Budget(job, self._pieces, self._seam),
            healing=bool(prompt.heal),
            offset=prompt.origin,
        )
        if choosing.sampler.has_penalties:
            sequence.counts.update(prompt.ids[prompt.floor :])
        if job.constraint is not None:
            guide = partial(Guide, job, self._compiler, self._pieces, self._seam, choosing.ends, prompt.ids)
            sequence.compiling = self._compiling.submit(guide)
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

    def close(self) -> None:
        """Spill what is retained, if that outlives this process."""
        if self._spill.is_kept:
            for id, tokens, namespace in reversed(self._retained.newest_first()):
                self._save(id, tokens, namespace)

    @property
    def is_idle(self) -> bool:
        """Whether a step would have nothing to do."""
        return not self._waiting and not self._running

    def counters(self) -> Mapping[str, int]:
        """Return counts: Jobs, sequences and their tokens now; steps and tokens since the start."""
        return {
            "running": len(self._running),
            "waiting": len(self._waiting),
            "retained": len(self._retained),
            "retained_tokens": self._retained.num_tokens,
            "spilled": len(self._spill),
            "steps": self.num_steps,
            "decoded_tokens": self.num_decoded,
            "drafted_tokens": self.num_drafted,
            "accepted_tokens": self.num_accepted,
        }

    # -- one step -----------------------------------------------------------------------------------------------------

    def step(self) -> list[tuple[str, Step | LegatoError]]:
        """Decode a token for every Job that writes, and some of the prompts; return what came of it, by Job id.

        What can be said without a decode is returned before one is made.
        """
        self._out = []
        if not self._running and (compiling := [item.compiling for item in self._waiting if item.compiling]):
            wait(compiling, _POLL_S, "FIRST_COMPLETED")
        self._admit()
        if self._out:
            return self._out
        self._unserved = deque()
        self._reading = sorted(
            (sequence for sequence in self._running if sequence.num_exact > _SHORT), key=lambda item: item.num_chunks
        )
        for sequence in self._running:
            if sequence.num_exact <= _SHORT:
                self._unserved.extend(sequence.branches or [sequence])
        while self._run(self._fill_exact, exact=True):
            pass
        self._run(self._fill_chunk, exact=False)
        if self._num_logged > _MAX_LOG:
            self._compact(_MAX_RETAINED)
        return self._out

    def _run(self, fill: Callable[[], list[_Fed]], *, exact: bool) -> bool:
        """Decode what `fill` puts into the batch, and act on the logits. False: it put nothing."""
        self._batch.clear()
        fed = fill()
        if not fed:
            return False
        if not self._model.decode(self._batch, exact=exact):
            for entry in reversed(fed):
                if isinstance(entry.item, _Sequence):
                    entry.item.draft = []
                self._unserved.appendleft(entry.item)
            self._make_room()
            return True
        self.num_steps += 1
        self.num_decoded += self._batch.num_tokens
        self._num_logged += self._batch.num_tokens
        rows = self._model.rows(self._batch.num_wanted)
        for entry in fed:
            own = rows[entry.first : entry.first + entry.num_rows]
            if isinstance(entry.item, _Branch):
                self._guard(entry.item.owner, partial(self._read_branch, entry.item, own))
            else:
                self._guard(entry.item, partial(self._read_rows, entry.item, entry.num, own))
        return True

    def _guard(self, sequence: _Sequence, act: Callable[[], None]) -> None:
        """Act for one Job: what goes wrong there ends that Job alone."""
        try:
            act()
        except Exception as error:  # noqa: BLE001 - told to whoever waits for the Job
            self._out.append((sequence.job.id, _failure(sequence, error)))
            if sequence in self._running:
                self._running.remove(sequence)
            self._free_branches(sequence)
            if sequence.id >= 0:
                self._forget(sequence.id)

    def _admit(self) -> None:
        """Give waiting Jobs a place, in order, as far as sequence ids go."""
        held_back: list[_Sequence] = []
        while self._waiting and not (self._is_full and self._running):
            if not self._free and not self._release_one():
                break
            sequence = self._waiting.popleft()
            if sequence.compiling is not None:
                if not sequence.compiling.done():
                    held_back.append(sequence)
                else:
                    self._guard(sequence, partial(self._take_guide, sequence))
                continue
            if not self._start(sequence):
                held_back.append(sequence)
                continue
            self._running.append(sequence)
            if not sequence.is_read and sequence.first_wanted == len(sequence.tokens):
                self._guard(sequence, partial(self._decide, sequence, [sequence.rows[()]], []))
        self._waiting.extendleft(reversed(held_back))

    def _take_guide(self, sequence: _Sequence) -> None:
        assert sequence.compiling is not None
        sequence.guide, sequence.compiling = sequence.compiling.result(), None
        self._waiting.appendleft(sequence)

    def _start(self, sequence: _Sequence) -> bool:
        """Take the longest head that is in the cache or spilled. False: a longer one is being read, so wait for it."""
        wanted = np.asarray(sequence.tokens[: self._recall(sequence)], np.int32)
        _, length, coming = self._longest(wanted, sequence.namespace)
        if coming >= length + _WORTH_WAITING:
            return False
        sequence.id = self._free.pop()
        sequence.num_fed = self._load(sequence.id, wanted, sequence.namespace, length + _WORTH_LOADING)
        if not sequence.num_fed:
            source, sequence.num_fed, _ = self._longest(wanted, sequence.namespace)
            if sequence.num_fed:
                self._model.copy(source, sequence.id, 0, sequence.num_fed)
        if not sequence.is_accepted:
            sequence.is_accepted = True
            self._out.append((sequence.job.id, Step(num_cached=sequence.num_fed)))
        return True

    def _longest(self, wanted: Tokens, namespace: str) -> tuple[int, int, int]:
        """Return the sequence with the longest head in the cache, how long it is, and how long it will soon be."""
        source, length = self._retained.longest(wanted, namespace)
        coming = 0
        for other in self._running:
            if other.namespace == namespace:
                shared = shared_head(other.head, wanted)
                coming = max(coming, shared)
                if min(shared, other.num_fed) > length:
                    source, length = other.id, min(shared, other.num_fed)
        return source, length, coming

    def _recall(self, sequence: _Sequence) -> int:
        """Take the rows that are known; return the number of tokens before the first whose row has to be computed."""
        if sequence.is_read or sequence.job.score_prompt:
            return sequence.first_row
        sequence.first_wanted = sequence.num_kept - 1
        while sequence.first_wanted < len(sequence.tokens):
            end = sequence.first_wanted + 1
            row = self._known.get(sequence.tokens[:end], sequence.namespace)
            if row is None:
                break
            sequence.rows[tuple(sequence.tokens[sequence.num_kept : end])] = row
            sequence.first_wanted = end
        return sequence.first_wanted

    def _fill_exact(self) -> list[_Fed]:
        """Take those that wait for few tokens and were not served in this step, and then parts of prompts."""
        chosen: list[tuple[_Sequence | _Branch, int]] = []
        num_rows = 0
        while self._unserved and (not chosen or num_rows + self._unserved[0].num_exact <= _MAX_ROWS):
            item = self._unserved.popleft()
            if item.num_exact:
                chosen.append((item, min(item.num_exact, _MAX_ROWS)))
                num_rows += chosen[-1][1]
        num_rows += self._draft([item for item, _ in chosen if isinstance(item, _Sequence)], _MAX_ROWS - num_rows)
        room = _BLOCK if chosen else self._batch.capacity
        while self._reading and not self._unserved:
            sequence = self._reading.pop(0)
            num = min(sequence.num_exact, room)
            if num > 0:
                sequence.num_chunks += 1
                chosen.append((sequence, num))
                room -= num
        return [self._feed(item, num) for item, num in chosen]

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

    def _feed(self, item: _Sequence | _Branch, num: int) -> _Fed:
        batch = self._batch
        if isinstance(item, _Branch):
            position = item.owner.num_kept + item.num_shared
            first = batch.add(item.sequence, position, item.inner.ids[item.num_shared :], num_wanted=num)
            return _Fed(item, num, first, num)
        end = item.num_fed + num
        num_rows = max(0, min(num, end - item.first_row)) + len(item.draft)
        ids = [*item.tokens[item.num_fed : end], *item.draft]
        return _Fed(item, num, batch.add(item.id, item.num_fed, ids, num_wanted=num_rows), num_rows)

    def _draft(self, sequences: list[_Sequence], room: int) -> int:
        """Give drafts to sequences that write, the likeliest tokens first, as far as each is worth its row.

        Returns the number of rows given.
        """
        least = len(sequences) / (len(sequences) + _CALL_COST)
        likeliest: list[tuple[float, int, _Sequence, int]] = []
        for index, sequence in enumerate(sequences):
            sequence.draft = []
            if not sequence.is_read or sequence.healing or sequence.pending > _SHORT:
                continue
            if sequence.drafter is None:
                sequence.drafter = Drafter(sequence.job.reference, sequence.tokens)
            num = min(
                sequence.job.max_tokens - sequence.num_written - 1, self._context_length - len(sequence.tokens) - 1
            )
            sequence.guess = sequence.drafter.propose(max(1, min(num, room)))
            chance = 1.0
            for token in sequence.guess:
                chance *= sequence.drafter.chance
                if chance < least or num < 1:
                    break
                likeliest.append((-chance, index, sequence, token))
        given = sorted(likeliest, key=lambda entry: entry[:2])[: max(0, room)]
        for _, _, sequence, token in given:
            sequence.draft.append(token)
        return len(given)

    # -- what the logits say ------------------------------------------------------------------------------------------

    def _read_rows(self, sequence: _Sequence, num: int, rows: NDArray[np.float32]) -> None:
        """Take note of `num` fed tokens and the rows of the last of them; choose, if nothing is left to feed."""
        sequence.num_fed += num
        draft, sequence.draft = sequence.draft, []
        if not sequence.is_read:
            for index, row in enumerate(rows, sequence.num_fed - len(rows)):
                if sequence.job.score_prompt and index == len(sequence.scores) and index + 1 < len(sequence.tokens):
                    sequence.scores.append(self._token(sequence, row, sequence.tokens[index + 1]))
                if index >= sequence.num_kept - 1:
                    self._remember(sequence, index + 1, row)
        if sequence.pending:
            return
        if sequence.is_read and sequence.healing:
            self._remember(sequence, len(sequence.tokens), rows[-1])
        self._decide(sequence, rows[len(rows) - len(draft) - 1 :], draft)

    def _remember(self, sequence: _Sequence, num: int, row: Row) -> None:
        """Keep the row that follows the first `num` tokens, for this Job's seam and for later ones."""
        row = self._known.put(sequence.tokens[:num], row, sequence.namespace)
        if sequence.healing and num >= sequence.num_kept:
            sequence.rows[tuple(sequence.tokens[sequence.num_kept : num])] = row

    def _row(self, sequence: _Sequence, path: tuple[int, ...]) -> Row | None:
        """Return the row behind a path from the seam, if it is known."""
        row = sequence.rows.get(path)
        if row is None:
            row = self._known.get([*sequence.tokens[: sequence.num_kept], *path], sequence.namespace)
            if row is not None:
                sequence.rows[path] = row
        return row

    def _decide(self, sequence: _Sequence, rows: Iterable[Row], draft: list[int]) -> None:
        """Act when nothing is left to feed: `rows` follow the last token and each token of a draft."""
        if not sequence.is_read:
            sequence.is_read = True
            if sequence.job.score_prompt:
                unscored = Token(sequence.tokens[0], self._pieces[sequence.tokens[0]])
                self._out.append((sequence.job.id, Step(prompt=(unscored, *sequence.scores))))
                sequence.scores = []
            if sequence.job.max_tokens == 0:
                self._emit(sequence, (), "length")
                return
        if sequence.healing:
            self._replay(sequence)
        else:
            self._write(sequence, rows, draft)

    def _write(self, sequence: _Sequence, rows: Iterable[Row], draft: list[int]) -> None:
        """Choose the next token of the answer, and one more for each token of the draft that was right."""
        written: list[Token] = []
        num_right = 0
        guide = sequence.guide
        reason: FinishReason | None = None
        for row, guess in zip(rows, [*draft, -1], strict=True):
            if guide is not None and guide.is_over:
                reason = "stop"
                break
            if sequence.job.max_tokens - sequence.num_written <= _KEPT_ROWS:
                self._remember(sequence, len(sequence.tokens), row)
            forced = self._forced(sequence, sequence.tokens, guide)
            token = (
                forced[0]
                if forced
                else self._choose(sequence, row, sequence.tokens, guide, offset=sequence.offset, counts=sequence.counts)
            )
            if token in sequence.choosing.ends:
                reason = "stop"
                break
            reason = self._append(sequence, self._token(sequence, row, token), written)
            if reason is not None or token != guess:
                break
            num_right += 1
        if reason is None and guide is not None and sequence.job.logprobs is None:
            for token in guide.forced(sequence.tokens):
                reason = self._append(sequence, Token(token, self._pieces[token]), written)
                if reason is not None:
                    break
        if draft:
            sequence.num_fed += num_right
            self._bury(sequence.id, sequence.num_fed)
            self.num_drafted += len(draft)
            self.num_accepted += num_right
        if sequence.drafter is not None:
            ids = [token.id for token in written]
            sequence.drafter.learn(sequence.guess, ids)
            sequence.drafter.extend(ids)
        self._emit(sequence, tuple(written), reason, num_right)

    def _forced(self, sequence: _Sequence, tokens: Sequence[int], guide: Guide | None) -> list[int]:
        """Return tokens that must follow, if there are any."""
        closing = sequence.budget.forced(tokens)
        if closing is not None:
            return [closing]
        return [] if guide is None else guide.forced(tokens)

    def _choose(
        self,
        sequence: _Sequence,
        row: Row,
        tokens: list[int],
        guide: Guide | None,
        *,
        offset: int,
        counts: Mapping[int, int],
    ) -> int:
        """Let the model choose what follows."""
        choose = partial(
            sequence.choosing.choose,
            row,
            tokens,
            offset=offset,
            num_written=sequence.num_written,
            is_healing=sequence.healing,
            counts=counts,
        )
        if guide is None:
            return choose()

        def accept(token: int) -> bool:
            if token in sequence.choosing.ends:
                return guide.is_complete
            return guide.fits(tokens, token, canonical=sequence.job.canonical)

        return choose(allowed=guide.allowed(), accept=accept)

    def _append(self, sequence: _Sequence, token: Token, written: list[Token]) -> FinishReason | None:
        """Write a token, and say whether the answer ends behind it."""
        sequence.tokens.append(token.id)
        written.append(token)
        self._count(sequence, token, is_new=True)
        if sequence.guide is not None:
            sequence.guide.take(token.id)
        return self._end(sequence)

    def _end(self, sequence: _Sequence) -> FinishReason | None:
        """Say whether the answer ends here, whatever the model wants."""
        if sequence.guide is not None and sequence.guide.is_over:
            return "stop"
        return "length" if self._is_at_limit(sequence) else None

    def _count(self, sequence: _Sequence, token: Token, *, is_new: bool) -> None:
        """Take note of a token that the text has got; a new one counts against the limit."""
        sequence.num_written += is_new
        sequence.offset += len(token.data)
        if sequence.choosing.sampler.has_penalties:
            sequence.counts[token.id] += 1

    def _is_at_limit(self, sequence: _Sequence) -> bool:
        is_full = len(sequence.tokens) >= self._context_length
        return is_full or (sequence.num_written >= sequence.job.max_tokens and sequence.num_written > 0)

    def _emit(
        self, sequence: _Sequence, tokens: tuple[Token, ...], reason: FinishReason | None, num_drafted: int = 0
    ) -> None:
        """Report tokens, and the end if there is a reason for it."""
        self._out.append((sequence.job.id, Step(tokens, num_drafted=num_drafted, finish=reason)))
        if reason is not None:
            self._running.remove(sequence)
            self._drop(sequence)

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
        while (row := self._row(sequence, sequence.path)) is not None:
            done = self._bytes(sequence.path)
            tokens = [*kept, *sequence.path]
            guide = sequence.guide_behind(sequence.path)
            forced = self._forced(sequence, tokens, guide)
            token = (
                forced[0]
                if forced
                else self._choose(
                    sequence,
                    row,
                    tokens,
                    guide,
                    offset=job.prompt.origin + len(done),
                    counts=sequence.counts_with(sequence.path),
                )
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
        job, sampler = sequence.job, sequence.choosing.sampler
        kept = sequence.tokens[: sequence.num_kept]
        logprobs: dict[tuple[int, ...], NDArray[np.float64]] = {}

        def after(head: tuple[int, ...]) -> NDArray[np.float64]:
            """Return the log-probabilities of what follows a path whose row is known."""
            if head not in logprobs:
                guide = sequence.guide_behind(head)
                allowed = None if guide is None else guide.allowed()
                logprobs[head] = sampler.cover_logprobs(sequence.rows[head], sequence.counts_with(head), allowed)
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
            is_known = all(self._row(sequence, inner.ids[:num]) is not None for num in range(len(inner.ids) + 1))
            bound = joint(inner.ids)
            if not is_known:
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
            branch = _Branch(sequence, self._free.pop(), inner, num_shared)
            self._model.copy(sequence.id, branch.sequence, 0, sequence.num_kept + num_shared)
            sequence.branches.append(branch)

    def _read_branch(self, branch: _Branch, rows: NDArray[np.float32]) -> None:
        """Keep the rows of a branch and give its copy back; choose, if it was the last."""
        sequence, ids = branch.owner, branch.inner.ids
        for num, row in enumerate(rows, branch.num_shared + 1):
            kept = [*sequence.tokens[: sequence.num_kept], *ids[:num]]
            sequence.rows[ids[:num]] = self._known.put(kept, row, sequence.namespace)
        sequence.branches.remove(branch)
        self._forget_branch(branch)
        if not sequence.branches:
            self._condition(sequence)

    def _heal(self, sequence: _Sequence, path: tuple[int, ...]) -> None:
        """Go on behind `path`, which covers the heal bytes."""
        data = self._bytes(path)
        overhangs = len(data) > len(sequence.job.prompt.heal)
        tokens = [Token(id, self._pieces[id]) for id in path]
        if overhangs and path[:-1] in sequence.rows:
            tokens[-1] = self._token(sequence, sequence.rows[path[:-1]], path[-1])
        row = self._row(sequence, path)
        self._retail(sequence, path)
        sequence.healing = False
        sequence.rows = {}
        sequence.guide = sequence.guide_behind(path)
        for token in tokens:
            self._count(sequence, token, is_new=overhangs and token is tokens[-1])
        self._emit(sequence, tuple(tokens), self._end(sequence))
        if row is not None and sequence in self._running:
            self._write(sequence, [row], [])

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

    def _drop(self, sequence: _Sequence) -> None:
        """Give a sequence's place back; what it has in the cache is retained."""
        self._is_full = False
        self._free_branches(sequence)
        if sequence.id < 0:
            return
        if sequence.num_fed:
            for useless in self._retained.add(sequence.id, sequence.tokens[: sequence.num_fed], sequence.namespace):
                self._forget(useless)
        else:
            self._free.append(sequence.id)

    def _free_branches(self, sequence: _Sequence) -> None:
        for branch in sequence.branches:
            self._forget_branch(branch)
        sequence.branches = []

    def _forget_branch(self, branch: _Branch) -> None:
        self._forget(branch.sequence)
        branch.sequence = -1

    def _bury(self, id: int, length: int) -> None:
        """Give up a sequence's cells from position `length` on, without freeing them yet."""
        self._model.copy(id, self._grave, length, -1)
        self._model.forget(id, length)

    def _forget(self, id: int) -> None:
        self._bury(id, 0)
        self._free.append(id)

    def _release_one(self) -> bool:
        """Give up the retained sequence that was used least recently."""
        evicted = self._retained.evict()
        if evicted is None:
            return False
        self._save(*evicted)
        self._forget(evicted[0])
        return True

    def _save(self, id: int, tokens: Tokens, namespace: str) -> None:
        """Keep a sequence that leaves the cache, if reading it back would be worth it."""
        if self._spill.max_bytes and tokens.size >= _WORTH_LOADING:
            self._spill.put(tokens, namespace, self._model.save(id))

    def _load(self, id: int, wanted: Tokens, namespace: str, least: int) -> int:
        """Read back a sequence that shares at least `least` tokens; return how many it does, 0 if there is none."""
        name, length = self._spill.longest(wanted, namespace)
        state = self._spill.get(name) if length >= least else None
        if state is None:
            return 0
        num_running = sum(sequence.num_fed for sequence in self._running)
        for room in (None, self._model.num_cells - num_running - wanted.size - _MAX_LOG, 0):
            if room is not None:
                self._compact(max(0, min(room, _MAX_RETAINED)))
            try:
                self._num_logged += self._model.load(id, state)
            except RuntimeError:
                self._model.forget(id, 0)
            else:
                self._bury(id, length)
                return length
        return 0

    def _make_room(self) -> None:
        """Free cells: the older half of what is retained, else the Job that began last, which goes on later."""
        num_buried = self._num_logged
        num_retained = self._retained.num_tokens
        self._compact(num_retained // 2)
        if num_buried or num_retained:
            return
        if len(self._running) < 2:
            raise RuntimeError("the KV cache has no room for a single sequence")
        sequence = self._running.pop()
        self._free_branches(sequence)
        sequence.is_branched = False
        self._save(sequence.id, np.asarray(sequence.tokens[: sequence.num_fed], np.int32), sequence.namespace)
        self._forget(sequence.id)
        sequence.id, sequence.num_fed = -1, 0
        self._waiting.appendleft(sequence)
        self._is_full = True
        self._compact(0)

    def _compact(self, max_retained: int) -> None:
        """Write all that is alive again from the first cell on, and retain about `max_retained` tokens."""
        alive = [
            (sequence.id, np.asarray(sequence.tokens[: sequence.num_fed], np.int32), sequence.namespace)
            for sequence in self._running
        ]
        kept: list[tuple[int, Tokens, str, int, int]] = []
        room = max_retained
        for id, tokens, namespace in (*alive, *self._retained.newest_first()):
            source, shared = -1, 0
            for other, others, others_namespace, _, _ in kept:
                if namespace == others_namespace and (length := shared_head(others, tokens)) > shared:
                    source, shared = other, length
            if len(kept) >= len(alive):
                room -= tokens.size - shared
                if room < 0:
                    self._save(id, self._retained.remove(id), namespace)
                    self._free.append(id)
                    continue
            kept.append((id, tokens, namespace, source, shared))
        tails = []
        self._model.forget(self._grave, 0)
        for id, tokens, _, _, shared in kept:
            if shared < tokens.size:
                self._model.copy(id, self._spare, shared, -1)
                tails.append(self._model.save(self._spare))
                self._model.forget(self._spare, 0)
            else:
                tails.append(b"")
        self._model.clear()
        for (id, _, _, source, shared), tail in zip(kept, tails, strict=True):
            if shared:
                self._model.copy(source, id, 0, shared)
            if tail:
                self._model.load(self._spare, tail)
                self._model.copy(self._spare, id, 0, -1)
                self._model.forget(self._spare, 0)
        for sequence in self._running:
            for branch in sequence.branches:
                self._model.copy(sequence.id, branch.sequence, 0, sequence.num_kept + branch.num_shared)
        self._num_logged = 0


def _failure(sequence: _Sequence, error: Exception) -> LegatoError:
    constraint = sequence.job.constraint
    if constraint is not None and isinstance(error, TooComplex):
        return InvalidField(
            f"`{constraint.field}` became too complex after {sequence.num_written} tokens of the answer: {error}",
            param=constraint.field,
        )
    return GenerationFailed(f"the engine failed on this request: {type(error).__name__}: {error}")
