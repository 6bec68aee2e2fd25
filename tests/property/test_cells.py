"""The cells, driven by the scheduler over a model that remembers what each cell was fed.

After any order of submissions, cancellations, healings, drafts, evictions, spills, compactions and crashes every slot
has what it is said to have, and each Job writes what it writes alone.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from legato.decoding.seam import Seam
from legato.engines.llamacpp.scheduler import Scheduler
from legato.engines.llamacpp.spill import Spill
from legato.types import Job, Prompt, Sampling, Token
from tests.fake_model import FakeModel, MergeTokenizer

MAX_SEQUENCES = 9
"""Seven that Jobs can have: they have to wait for each other, and what they leave has to go."""
CONTEXT = 320
TOKENIZER = MergeTokenizer()
SEAM = Seam(TOKENIZER)
LONG = ("abc ca bb ab caab cc b abab ca " * 12)[:280]
"""More than 128 tokens, so that it is read by the fast kernels; its beginnings are read by the exact ones."""

SHORT = ["ab ca", "abc abab"]
TEXTS = [*SHORT, LONG, LONG[:-10] + "cc"]


def prompt_of(text: str) -> Prompt:
    """A raw prompt, cut at the seam."""
    ids = TOKENIZER.encode(text.encode(), special=False)
    kept, heal = SEAM.split(ids, 0)
    if kept == 0:
        kept, heal = len(ids), b""
    return Prompt(tuple(ids[:kept]), tuple(ids[kept:]), heal, len(text) - len(heal), 0, text)


class Host:
    """A scheduler over its model, and what its Jobs have written."""

    def __init__(self, spill: Spill, *, fast_is_other: bool) -> None:
        self.model = FakeModel(context_length=CONTEXT, max_sequences=MAX_SEQUENCES, fast_is_other=fast_is_other)
        self.scheduler = Scheduler(
            self.model, SEAM, context_length=CONTEXT, max_batch=256, max_sequences=MAX_SEQUENCES, spill=spill
        )

    def check(self) -> None:
        """See that every slot's cells hold what it is said that they do, and that no others hold anything."""
        cells = self.scheduler._cells
        slots = {**cells._open, **cells._retained}
        assert self.model.sequences() <= {*slots, cells._grave}
        assert len(slots) + len(cells._free) == MAX_SEQUENCES - 2
        by_number: dict[int, tuple[str, int]] = {}
        for slot in slots.values():
            entries = self.model.entries(slot.id)
            assert [entry.token for entry in entries] == slot.ids.tolist()
            assert [entry.position for entry in entries] == [*range(slot.length)]
            assert all(entry.is_exact for entry in entries[: slot.num_exact])
            for number, entry in zip(slot.numbers.tolist(), entries, strict=True):
                assert by_number.setdefault(number, (slot.salt, id(entry))) == (slot.salt, id(entry))
        for running in self.scheduler._running:
            assert running.slot is not None
            held = running.slot.ids.tolist()
            assert running.tokens[: len(held)] == held
            if running.is_exact:
                assert running.slot.is_exact


@lru_cache(maxsize=4096)
def _alone(job: str, fast_is_other: bool) -> tuple[bytes, str | None]:
    host = Host(Spill(0, None, ""), fast_is_other=fast_is_other)
    host.scheduler.submit(Job.from_json(job))
    data, finish = b"", None
    while not host.scheduler.is_idle:
        for _, step in host.scheduler.step():
            assert not isinstance(step, Exception), step
            data += b"".join(token.data for token in step.tokens)
            finish = step.finish
    return data, finish


class Cells(RuleBasedStateMachine):
    """Jobs that share beginnings come, write, go and come again."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(mkdtemp())
        self.jobs: dict[str, Job] = {}
        self.written: dict[str, list[Token]] = {}
        self.texts: list[str] = []
        self.prompts: list[str] = []
        self.num = 0
        self.num_idle = 0
        """Steps in a row in which nothing was done."""

    def teardown(self) -> None:
        self.step(500)
        assert not self.jobs
        rmtree(self.directory)

    @initialize(
        fast_is_other=st.booleans(),
        spill_bytes=st.sampled_from([0, 3000, 10**6]),
        texts=st.sampled_from([SHORT, TEXTS]),
    )
    def start(self, fast_is_other: bool, spill_bytes: int, texts: list[str]) -> None:
        self.texts = [*texts]
        self.fast_is_other = fast_is_other
        self.spill_bytes = spill_bytes
        self.begin()

    def begin(self) -> None:
        spill = Spill(self.spill_bytes, self.directory, "fake")
        self.host = Host(spill, fast_is_other=self.fast_is_other)

    @rule(
        data=st.data(),
        more=st.sampled_from(["", "", "a", "b", " ", "c ab", "bb", " abc", "caa", LONG[:90]]),
        max_tokens=st.sampled_from([0, 1, 2, 5, 12, 30]),
        temperature=st.sampled_from([0.0, 0.0, 0.8]),
        seed=st.integers(1, 2),
        salt=st.sampled_from(["", "", "salt"]),
        kind=st.sampled_from(["", "", "", "deterministic", "scored", "referenced"]),
        is_known=st.booleans(),
    )
    def submit(
        self,
        data: st.DataObject,
        more: str,
        max_tokens: int,
        temperature: float,
        seed: int,
        salt: str,
        kind: str,
        is_known: bool,
    ) -> None:
        if self.prompts and is_known:
            text = data.draw(st.sampled_from(self.prompts), label="prompt")
        else:
            text = data.draw(st.sampled_from(self.texts), label="text")
            cut = data.draw(st.integers(max(1, len(text) - 12), len(text)) | st.integers(1, len(text)), label="cut")
            text = text[:cut] + more
        prompt = prompt_of(text)
        if len(prompt.ids) > CONTEXT - 60:
            return
        self.prompts.append(text)
        self.num += 1
        job = Job(
            str(self.num),
            0,
            prompt,
            max_tokens,
            Sampling(seed, temperature),
            deterministic=kind == "deterministic",
            score_prompt=kind == "scored",
            logprobs=0 if kind == "scored" else None,
            reference=tuple(TOKENIZER.encode(LONG[:40].encode(), special=False)) if kind == "referenced" else (),
            cache_salt=salt,
        )
        self.jobs[job.id] = job
        self.written[job.id] = []
        self.host.scheduler.submit(job)

    @rule(num=st.sampled_from([1, 1, 2, 5, 20]))
    def step(self, num: int) -> None:
        for _ in range(num):
            if self.host.scheduler.is_idle:
                return
            num_decoded = self.host.scheduler.num_decoded
            told = self.host.scheduler.step()
            has_progressed = told or self.host.scheduler.num_decoded > num_decoded
            self.num_idle = 0 if has_progressed else self.num_idle + 1
            assert self.num_idle < MAX_SEQUENCES, "steps do no more than make room"
            for id, step in told:
                assert not isinstance(step, Exception), step
                self.written[id] += step.tokens
                if step.finish is not None:
                    self.ended(self.jobs.pop(id), self.written.pop(id), step.finish)
            self.host.check()

    def ended(self, job: Job, tokens: list[Token], finish: str) -> None:
        """Compare a whole answer with the one that the Job writes alone."""
        data = b"".join(token.data for token in tokens)
        self.texts.append(job.prompt.prefix + data[len(job.prompt.heal) :].decode())
        is_exact = len(job.prompt.ids) <= 129 or job.deterministic or job.score_prompt
        if is_exact or not self.fast_is_other:
            alone = _alone(replace(job, id="").to_json(), self.fast_is_other)
            assert (data, finish) == alone, f"{job} wrote {data!r} ({finish}) and alone {alone}"

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(sorted(self.jobs)))
        job, tokens = self.jobs.pop(id), self.written.pop(id)
        self.host.scheduler.cancel(id)
        text = b"".join(token.data for token in tokens)[len(job.prompt.heal) :].decode()
        self.texts.append(job.prompt.prefix + text)

    @rule(is_crash=st.booleans())
    def begin_again(self, is_crash: bool) -> None:
        """The worker dies, or is stopped: the next one goes on behind the tokens that were told."""
        if not is_crash:
            self.host.scheduler.close()
        self.begin()
        for id, job in self.jobs.items():
            self.host.scheduler.submit(job.resumed(self.written[id]))

    @invariant()
    def cells_hold_what_is_said(self) -> None:
        self.host.check()


TestCells = Cells.TestCase
TestCells.settings = settings(
    max_examples=200, stateful_step_count=40, deadline=None, suppress_health_check=[*HealthCheck]
)
