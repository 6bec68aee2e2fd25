"""From a request to its text: plan the Jobs, run them, join their streams.

It receives a `CompletionRequest` and a `Model`; it returns a `Run`, whose events are the answer. It knows no wire
format.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from legato.decoding.grammar_check import Allowance
from legato.errors import InvalidField, UnsupportedFeature
from legato.prompting.render import render
from legato.run.admission import Claim
from legato.run.models import Model
from legato.run.rounds import Continuation
from legato.system.supervisor import beside, together
from legato.system.threads import CONSTRAINTS, PLANS, SHORT_CONSTRAINTS, Threads
from legato.text.assembler import Assembler, Channels, Piece, Utf8
from legato.text.cycles import Cycle
from legato.text.endings import Ending, Indent, Line, block
from legato.types import (
    Accepted,
    Answer,
    Chat,
    CompletionRequest,
    Constraint,
    ConstraintOptions,
    Delta,
    Finished,
    FinishReason,
    Infill,
    Job,
    Mark,
    Prompt,
    Sampling,
    SamplingOptions,
    Source,
    Step,
    Text,
    TextToken,
    Thinking,
    Times,
    Token,
    Tokenizer,
    Usage,
)

__all__ = ["Event", "Report", "Run", "choose_best", "collect", "plan", "planners", "total_usage"]

Event = Accepted | Delta | Finished

DEFAULT_MAX_TOKENS = 16
"""Of a raw prompt or an infill, as OpenAI has it; a chat's default is the rest of the context."""
_GREEDY_BELOW = 1e-4
"""A temperature under this is greedy: dividing logits by it would leave the range of single precision."""
_SHORT_BODY = 32 * 1024
"""Bytes; a longer one takes long to be parsed and tokenised."""
_SHORT_CONSTRAINT = 4096
"""Characters."""
_MAX_DELAY = 8
"""Tokens of thinking beyond the budget, while there is no good place for the closing tag."""


@dataclass(frozen=True, slots=True)
class Report:
    """What was done beyond what the wire format shows."""

    seed: int
    healed_bytes: tuple[int, ...]
    """Per prompt."""
    clipped: tuple[str, ...]
    truncated: Mapping[str, int]
    """What an infill's context had no room for: characters of `prefix` and `suffix`, number of `files`."""
    ignored: tuple[str, ...]
    absent: tuple[str, ...] = ()
    """What the model's engine cannot do for this answer: `canonical` sampling, or noise by the place in the text."""


@dataclass(frozen=True, slots=True)
class Run:
    """A planned request. `events` runs it, once."""

    request: CompletionRequest
    """With the model's name and the seed, where they were left open."""
    model: Model
    jobs: tuple[Job, ...]
    """Prompt by prompt, `num_drawn` each: a Job's place here is its choice's index."""
    num_drawn: int
    report: Report
    written: tuple[Token, ...] = ()
    """Tokens that another run of the only Job has written before it was broken off: this one goes on behind them, with
    the same events.
    """
    tokens: list[Token] | None = None
    """If it is a list, all tokens of the only Job are added to it before the events that they make."""
    usages: dict[int, Usage] = field(default_factory=dict)
    """What each choice has taken so far, by its index; those that an engine has accepted."""

    def taken(self) -> Usage:
        """Return what all have taken so far."""
        taken = [self.usages.get(choice, Usage(0, 0)) for choice in range(len(self.jobs))]
        return total_usage(taken, self.num_drawn)

    async def events(self) -> AsyncGenerator[Event, None]:
        """Yield the events of all choices as they come. Close the iterator to cancel everything.

        Raises:
            CapacityError: before the first event, if there is no place, or none in time.
            EngineError: a choice could not be finished.
        """
        if not self.jobs:
            return
        timeout_s = self.request.timeout_s
        deadline = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        places = self.model.admission.claim(self.request.caller, len(self.jobs), timeout_s=timeout_s)
        async with places as claim:
            choices = [self._choice(choice, claim, deadline) for choice in range(len(self.jobs))]
            async with aclosing(choices[0] if len(choices) == 1 else _joined(choices)) as events:
                async for event in events:
                    yield event

    async def _choice(self, choice: int, claim: Claim, deadline: float | None) -> AsyncGenerator[Event, None]:
        """Run one Job within a place."""
        request, job = self.request, self.jobs[choice]
        clock = asyncio.get_running_loop().time
        begun = clock()
        first: float | None = None
        prefix = job.prompt.prefix
        text = Assembler(
            heal=job.prompt.heal,
            channels=Channels.of(job, self.model.engine.tokenizer.pieces, is_begun=True),
            stops=self._stops(),
            ending=_ending(request.source),
            suffix=request.source.suffix if isinstance(request.source, Infill) else "",
            before=prefix if self._joins_stops() else "",
            offset=len(prefix),
            min_tokens=job.min_tokens,
        )
        cycle = Cycle(job.prompt.ids[job.prompt.floor :]) if request.stops.at_cycle else None
        has_thought = False
        shown: list[TextToken] = []
        num_cached = num_drafted = 0
        reason: FinishReason = "stop"
        rest = job.resumed(self.written)
        rounds = Continuation(self.model.engine, rest)
        timely = _placed(rounds, claim, self.written, rest.max_tokens)
        limits = (deadline, request.max_reading_s, request.max_writing_s)
        if limits != (None, None, None):
            timely = _until(*limits, timely)
        async with aclosing(timely) as steps:
            async for step in steps:
                num_cached += step.num_cached
                num_drafted += step.num_drafted
                if not step.tokens:
                    self.usages[choice] = Usage(job.prompt.num_tokens, text.num_tokens, num_cached)
                if not step.tokens and not step.prompt and step.finish is None:
                    yield Accepted(choice, self._prompt_ids(job.prompt))
                    if request.output.echo and not job.score_prompt:
                        if job.prompt.thought:
                            yield Delta(choice, job.prompt.thought, channel="reasoning")
                        if prefix:
                            yield Delta(choice, prefix)
                    continue
                if step.prompt:
                    yield Delta(choice, prefix, _prompt_tokens(step.prompt, prefix))
                if step.tokens and first is None:
                    first = clock()
                for token in step.tokens:
                    if self.tokens is not None:
                        self.tokens.append(token)
                    pieces = text.feed(token)
                    # Before anything is shown: whoever reads may leave in the middle of that.
                    self.usages[choice] = Usage(job.prompt.num_tokens, text.num_tokens, num_cached)
                    for piece in pieces:
                        shown += piece.tokens
                        is_first = piece.channel == "reasoning" and not has_thought
                        has_thought = has_thought or is_first
                        if is_first or self._has_news(piece):
                            yield self._delta(choice, piece)
                    if text.is_over:
                        break
                    if cycle is not None and cycle.feed(token.id):
                        reason = "repetition"
                        break
                if text.is_over or reason == "repetition":
                    break
                if step.finish is not None:
                    reason = step.finish
        for piece in text.flush(is_cut=reason == "length"):
            shown += piece.tokens
            if self._has_news(piece):
                yield self._delta(choice, piece)
        usage = Usage(job.prompt.num_tokens, text.num_tokens, num_cached, num_drafted, text.num_thought, rounds.num)
        self.usages[choice] = usage
        matched = text.matched
        if matched is not None and matched not in request.stops.strings:
            matched = matched.removeprefix("\r")
        ended = clock()
        first = first or ended
        times = Times(first - begun, ended - first)
        yield Finished(choice, reason, matched, usage, times, _mean_logprob(shown))

    def _prompt_ids(self, prompt: Prompt) -> tuple[int, ...]:
        return (*prompt.ids, *prompt.tail) if self.request.output.token_ids else ()

    def _delta(self, choice: int, piece: Piece) -> Delta:
        """Show of an answer's tokens what was asked for; thinking has no scores."""
        output = self.request.output
        is_scored = output.logprobs is not None and piece.channel == "content"
        return Delta(
            choice,
            piece.text,
            piece.tokens if is_scored else (),
            tuple(token.id for token in piece.tokens) if output.token_ids else (),
            piece.channel,
        )

    def _has_news(self, piece: Piece) -> bool:
        """Whether a piece has anything to show; the first of thinking says by itself that there is some."""
        output = self.request.output
        is_told = output.token_ids or (output.logprobs is not None and piece.channel == "content")
        return bool(piece.text or (is_told and piece.tokens))

    def _joins_stops(self) -> bool:
        """Whether a stop may begin before the seam."""
        across = self.request.stops.across_seam
        return isinstance(self.request.source, Chat) if across is None else across

    def _stops(self) -> tuple[str, ...]:
        """Return what ends the text. In a file whose lines end in CR LF, a stop at a line's end takes both."""
        stops = self.request.stops.strings
        if not isinstance(self.request.source, Infill):
            return stops
        return (*stops, *(f"\r{stop}" for stop in stops if stop.startswith("\n")))


async def _placed(
    rounds: Continuation, claim: Claim, written: Sequence[Token], left: int
) -> AsyncGenerator[Step, None]:
    """Run all rounds of a Job within one place, as if those that wrote the first tokens had been among them.

    `left` is how many more tokens there may be.
    """
    async with claim.place(), aclosing(rounds.steps()) as steps:
        if written:
            yield Step()
            yield Step(tuple(written))
            if not left:
                yield Step(finish="length")
                return
        async for step in steps:
            if not written or step.tokens or step.finish:
                yield step


def _ending(source: Source) -> Ending | None:
    """Return what ends an infill beside its suffix."""
    if not isinstance(source, Infill):
        return None
    if source.end == "line":
        return Line()
    if source.end == "block":
        return block(source.language, source.prefix + source.middle, source.suffix)
    return Indent(source.min_indent) if source.min_indent else None


async def _joined(choices: Sequence[AsyncGenerator[Event, None]]) -> AsyncGenerator[Event, None]:
    """Run all choices side by side. None waits for a reader: what is not read yet is bounded by `max_tokens`."""
    queue: asyncio.Queue[Event | BaseException | None] = asyncio.Queue()

    async def forward(choice: AsyncGenerator[Event, None]) -> None:
        try:
            async with aclosing(choice) as events:
                async for event in events:
                    queue.put_nowait(event)
            queue.put_nowait(None)
        except BaseException as error:  # noqa: BLE001 - handed over, and raised by the reader
            queue.put_nowait(error)

    async with beside(together(*map(forward, choices))):
        left = len(choices)
        while left:
            item = await queue.get()
            if item is None:
                left -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item


async def _until(
    deadline: float | None, reading_s: float | None, writing_s: float | None, steps: AsyncGenerator[Step, None]
) -> AsyncGenerator[Step, None]:
    """Pass Steps on; at the deadline, in the loop's time, end as at the limit of tokens, since the text can go on.

    `reading_s` after the Job is accepted is a deadline of its first token, and `writing_s` after that one of its end.
    """
    clock = asyncio.get_running_loop().time

    def within(seconds: float | None) -> float | None:
        if seconds is None:
            return deadline
        return min(math.inf if deadline is None else deadline, clock() + seconds)

    is_accepted = is_begun = False
    end = deadline
    async with aclosing(steps):
        while True:
            try:
                async with asyncio.timeout_at(end):
                    step = await anext(steps, None)
            except TimeoutError:
                break
            if step is None:
                return
            yield step
            if step.tokens and not is_begun:
                is_begun, end = True, within(writing_s)
            elif not is_accepted:
                end = within(reading_s)
            is_accepted = True
    if not is_accepted:
        yield Step()
    yield Step(finish="length")


def planners(num_bytes: int, constraint: ConstraintOptions | None = None) -> Threads | None:
    """Return the threads in which a body of so many bytes is read, or planned; None: that takes no time.

    Nobody without a constraint waits for one, and short constraints do not wait for long ones.
    """
    if constraint is not None:
        is_short = len(constraint.text) <= _SHORT_CONSTRAINT
        return SHORT_CONSTRAINTS if is_short else CONSTRAINTS
    return PLANS if num_bytes > _SHORT_BODY else None


def plan(request: CompletionRequest, model: Model) -> Run:
    """Settle everything a request leaves open: defaults, limits, the seed.

    Raises:
        RequestError: the request cannot be run by this model.
        Overloaded: its constraint could not be tried.
    """
    engine = model.engine
    _check_capabilities(request, model)
    bias = _bias_by_id(request.sampling.logit_bias, engine.tokenizer)
    _check_ids("logit_bias", bias, model)
    _check_ids("stop_token_ids", request.stops.token_ids, model)
    is_plain = isinstance(request.source, Text) and request.source.instructions is None
    if _scores_prompt(request) and not is_plain:
        raise UnsupportedFeature(
            "`echo` with `logprobs` scores a plain prompt; it cannot be used with `suffix` or `instructions`",
            param="echo",
        )
    prompts = render(request, engine.profile, engine.tokenizer, engine.seam)
    reference = tuple(engine.tokenizer.encode(request.prediction.encode(), special=False))
    seed = request.sampling.seed if request.sampling.seed is not None else _seed(request, prompts)
    sampling = _settle(request.sampling, seed, bias)
    request = replace(request, model=request.model or model.name, sampling=replace(request.sampling, seed=seed))
    num_drawn = request.num_drawn or request.num_choices
    jobs: list[Job] = []
    allowance = Allowance()
    clipped = False
    for prompt in prompts:
        room = engine.profile.context_length - prompt.num_tokens
        size, wanted = request.limits(room if isinstance(request.source, Chat) else DEFAULT_MAX_TOKENS, room)
        if request.stops.min_tokens > wanted:
            raise InvalidField(
                f"`min_tokens` must be at most `max_tokens`{', in all rounds' if request.rounds else ''}, "
                f"got {request.stops.min_tokens} and {wanted}"
                f"{'' if request.max_tokens is not None else ', its default here'}",
                param="min_tokens",
            )
        clipped = clipped or (request.max_tokens or 0) > room
        job = _job(request, prompt, min(wanted, room), sampling, reference, _stop_ids(request, model))
        job = replace(job, max_round_tokens=size, thinking=_thinking(request, job, model))
        job = replace(job, constraint=_constraint(request, job, model, allowance))
        jobs += [replace(job, id=secrets.token_hex(12), choice=choice) for choice in range(num_drawn)]
    report = Report(
        seed=seed,
        healed_bytes=tuple(len(prompt.heal) for prompt in prompts),
        clipped=("max_tokens",) if clipped else (),
        truncated=dict(cut for prompt in prompts for cut in prompt.cut),
        ignored=(*request.ignored, *_ignored(request, model)),
        absent=tuple(_absent(request, sampling, model)),
    )
    return Run(request, model, tuple(jobs), num_drawn, report)


def _seed(request: CompletionRequest, prompts: Sequence[Prompt]) -> int:
    """Draw a seed. While somebody types into a gap it stays the same, or each keystroke would suggest something else:
    it comes from what is around the line.
    """
    if not isinstance(request.source, Infill):
        return secrets.randbits(32)
    scaffold = repr(prompts[0].ids[: prompts[0].floor]).encode()
    return int.from_bytes(blake2b(scaffold, digest_size=4).digest(), "big")


def _check_capabilities(request: CompletionRequest, model: Model) -> None:
    can, stops = model.engine.capabilities, request.stops
    reasoning = request.reasoning
    is_bound = reasoning.effort is not None or reasoning.max_tokens is not None
    bounds = reasoning.fields if is_bound and model.engine.profile.reasoning is not None else ()
    for name, is_asked, is_possible in (
        ("logprobs", request.output.logprobs is not None, can.logprobs),
        ("best_of", request.num_drawn is not None, can.logprobs),
        ("min_tokens", stops.min_tokens > 0, can.ends),
        ("ignore_eos", stops.ignore_end, can.ends),
        ("stop_token_ids", bool(stops.token_ids), can.ends),
        *((name, True, can.thinking) for name in bounds),
        *((option.field, True, can.constraints) for option in (request.constraint,) if option is not None),
    ):
        if is_asked and not is_possible:
            raise UnsupportedFeature(f"`{name}` is not something that the engine of `{model.name}` can do", param=name)


def _ignored(request: CompletionRequest, model: Model) -> Iterator[str]:
    """Name what is said about thinking and has no effect on this model."""
    if not isinstance(request.source, Chat):
        return
    mark, place = request.source.mark or Mark(""), f"messages[{len(request.source.messages)}]"
    if model.engine.profile.reasoning is None:
        if 0 not in (request.reasoning.effort, request.reasoning.max_tokens):
            yield from request.reasoning.fields
        if mark.reasoning:
            yield f"{place}.reasoning_content"
    elif mark.name and mark.reasoning is not None and not mark.prefix:
        yield f"{place}.name"


def _absent(request: CompletionRequest, sampling: Sampling, model: Model) -> Iterator[str]:
    """Name the laws that the engine cannot keep for this answer."""
    can = model.engine.capabilities
    if request.seam.canonical and not can.canonical:
        yield "canonical"
    if sampling.temperature > 0 and not can.keyed_noise:
        yield "keyed_noise"


def _check_ids(name: str, ids: Iterable[int], model: Model) -> None:
    last = len(model.engine.tokenizer.pieces) - 1
    for id in ids:
        if not 0 <= id <= last:
            raise InvalidField(f"`{name}` names token id {id}; this model's ids run from 0 to {last}", param=name)


def _job(
    request: CompletionRequest,
    prompt: Prompt,
    max_tokens: int,
    sampling: Sampling,
    reference: tuple[int, ...],
    stop_ids: tuple[int, ...],
) -> Job:
    """Return the first choice's Job, yet without an id, thinking and constraint."""
    return Job(
        id="",
        choice=0,
        prompt=prompt,
        max_tokens=max_tokens,
        sampling=sampling,
        canonical=request.seam.canonical,
        min_tokens=min(request.stops.min_tokens, max_tokens),
        ignore_end=request.stops.ignore_end,
        stop_ids=stop_ids,
        logprobs=0 if request.output.logprobs is None and request.num_drawn else request.output.logprobs,
        score_prompt=_scores_prompt(request),
        reference=reference,
        deterministic=request.deterministic,
        cache_salt=_cache_salt(request),
        is_typed=isinstance(request.source, Infill),
    )


def _stop_ids(request: CompletionRequest, model: Model) -> tuple[int, ...]:
    """Return the ids that end an answer beside the model's own: in an infill also those that begin another part."""
    marks = model.engine.profile.infill
    if marks is None or not isinstance(request.source, Infill) or not model.engine.capabilities.ends:
        return request.stops.token_ids
    return (*request.stops.token_ids, *marks.ids)


def _thinking(request: CompletionRequest, job: Job, model: Model) -> Thinking | None:
    """Settle how long a Job thinks. An effort leaves room for the closing tag and a token of content."""
    tags = model.engine.profile.reasoning
    if tags is None or not isinstance(request.source, Chat):
        return None
    tokenizer, asked = model.engine.tokenizer, request.reasoning
    open_ids, close_ids = (tuple(tokenizer.encode(tag.encode(), special=True)) for tag in (tags.open, tags.close))
    thinking = Thinking(open_ids, close_ids)
    if asked.effort is None and asked.max_tokens is None:
        return thinking
    num_thought = 0
    channels = Channels.of(replace(job, thinking=thinking), tokenizer.pieces, is_begun=False)
    for id in (*job.prompt.ids[job.prompt.turn :], *job.prompt.tail):
        num_thought += channels.channel == "reasoning"
        channels.feed(tokenizer.pieces[id])
    if channels.channel == "content":
        num_thought = 0  # It is over: nothing is left to be ended.
    if asked.max_tokens is not None:
        return replace(thinking, max_tokens=max(asked.max_tokens, num_thought), max_delay=_MAX_DELAY)
    room = num_thought + job.max_tokens - len(close_ids) - 1
    if channels.channel is None:
        room -= len(open_ids)
    limit = max(min(int((asked.effort or 0) * job.max_tokens), room), num_thought)
    return replace(thinking, max_tokens=limit, max_delay=max(0, min(_MAX_DELAY, room - limit)))


def _constraint(request: CompletionRequest, job: Job, model: Model, allowance: Allowance) -> Constraint | None:
    """Settle where the constrained text begins, and see that it can go on as it does."""
    asked, prompt = request.constraint, job.prompt
    if asked is None:
        return None
    if isinstance(request.source, Infill):
        raise UnsupportedFeature(f"`{asked.field}` cannot be used where a gap is filled", param=asked.field)
    is_marked = isinstance(request.source, Chat)
    start = (0 if is_marked else len(prompt.prefix)) if asked.start is None else asked.start
    if start > len(prompt.prefix):
        raise InvalidField(
            f"`constraint_start` must be at most {len(prompt.prefix)}, the length of what is continued, got {start}",
            param="constraint_start",
        )
    pieces = model.engine.tokenizer.pieces
    channels = Channels.of(job, pieces, is_begun=True)
    if channels.channel != "content":
        grammar = model.checker.check(asked, "", is_after_thinking=True, allowance=allowance)
        return Constraint(grammar, None, asked.field)
    if is_marked and asked.start is None and job.thinking is not None:
        open, close = (
            b"".join(pieces[id] for id in ids).decode() for ids in (job.thinking.open_ids, job.thinking.close_ids)
        )
        if prompt.prefix.startswith(open):  # The thinking was sent as a part of the content.
            start = prompt.prefix.index(close) + len(close)
    begun = prompt.prefix[start:]
    data = begun.encode()
    lead = b""
    if len(data) < len(prompt.heal):
        # The engine writes what stands before the constrained text again, so the grammar has to begin with it.
        lead = prompt.heal[: len(prompt.heal) - len(data)]
        at = len(prompt.ids)
        while 0x80 <= lead[0] < 0xC0 and at > prompt.floor:
            at -= 1
            lead = pieces[prompt.ids[at]] + lead
    before = len(prompt.prefix[:start].encode())
    grammar = model.checker.check(asked, begun, lead=lead.decode(), num_before=before, allowance=allowance)
    return Constraint(grammar, prompt.origin + len(prompt.heal) - len(data) - len(lead), asked.field)


def _cache_salt(request: CompletionRequest) -> str:
    """Return a name, without the secrets in it, for those who may share KV entries: one key, and one salt."""
    if not request.caller and not request.cache_salt:
        return ""
    return blake2b(f"{request.caller}\0{request.cache_salt}".encode(), digest_size=12).hexdigest()


def _scores_prompt(request: CompletionRequest) -> bool:
    """Whether the prompt's own tokens are reported: OpenAI's completions do so when they are echoed with scores."""
    output = request.output
    return output.echo and output.logprobs is not None and not isinstance(request.source, Chat)


def _bias_by_id(bias: Mapping[int | str, float], tokenizer: Tokenizer) -> dict[int, float]:
    values: dict[int, float] = {}
    for key, value in bias.items():
        ids = [key] if isinstance(key, int) else tokenizer.encode(key.encode(), special=False)
        values |= dict.fromkeys(ids, value)
    return values


def _settle(asked: SamplingOptions, seed: int, bias: Mapping[int, float]) -> Sampling:
    temperature = 1.0 if asked.temperature is None else asked.temperature
    return Sampling(
        seed=seed,
        temperature=0.0 if temperature < _GREEDY_BELOW else temperature,
        top_p=1.0 if asked.top_p is None else asked.top_p,
        top_k=max(0, asked.top_k or 0),
        min_p=asked.min_p or 0.0,
        presence_penalty=asked.presence_penalty or 0.0,
        frequency_penalty=asked.frequency_penalty or 0.0,
        repetition_penalty=1.0 if asked.repetition_penalty is None else asked.repetition_penalty,
        logit_bias=bias,
    )


def _prompt_tokens(tokens: Sequence[Token], prefix: str) -> tuple[TextToken, ...]:
    """Show a scored prompt's tokens; a start token that is not in the caller's text shows as no text."""
    utf8 = Utf8()
    shown = []
    offset = 0
    for index, token in enumerate(tokens):
        text = utf8.feed(token.data)
        if index == 0 and not prefix.startswith(text):
            text = ""
        shown.append(TextToken(token.id, text, token.data, offset, token.logprob, token.top))
        offset += len(text)
    return tuple(shown)


def _mean_logprob(tokens: Sequence[TextToken]) -> float | None:
    logprobs = [token.logprob for token in tokens if token.logprob is not None]
    return sum(logprobs) / len(logprobs) if logprobs else None


async def collect(events: AsyncIterator[Event]) -> tuple[Answer, ...]:
    """Fold a stream into whole choices, by index."""
    prompts: dict[int, tuple[int, ...]] = {}
    deltas: defaultdict[int, list[Delta]] = defaultdict(list)
    answers = {}
    async for event in events:
        match event:
            case Accepted(choice, prompt_ids):
                prompts[choice] = prompt_ids
            case Delta(choice):
                deltas[choice].append(event)
            case Finished(choice, reason, matched, usage, times, mean_logprob):
                thoughts = [delta.text for delta in deltas[choice] if delta.channel == "reasoning"]
                answers[choice] = Answer(
                    choice,
                    text="".join(delta.text for delta in deltas[choice] if delta.channel == "content"),
                    tokens=tuple(token for delta in deltas[choice] for token in delta.tokens),
                    reason=reason,
                    matched=matched,
                    usage=usage,
                    times=times,
                    mean_logprob=mean_logprob,
                    prompt_ids=prompts.get(choice, ()),
                    token_ids=tuple(id for delta in deltas[choice] for id in delta.token_ids),
                    reasoning="".join(thoughts) if thoughts else None,
                )
    return tuple(answers[choice] for choice in sorted(answers))


def choose_best(answers: Sequence[Answer], num_drawn: int, num_choices: int) -> tuple[Answer, ...]:
    """Keep of each prompt's answers the likeliest per token, the likeliest first; their places are their new indices.

    An answer without tokens comes last. Where as many are drawn as are kept, all stay as they are.
    """
    if num_drawn == num_choices:
        return tuple(answers)
    kept: list[Answer] = []
    for first in range(0, len(answers), num_drawn):
        drawn = answers[first : first + num_drawn]
        kept += sorted(drawn, key=_unlikeliness)[:num_choices]
    return tuple(replace(answer, choice=index) for index, answer in enumerate(kept))


def _unlikeliness(answer: Answer) -> float:
    return math.inf if answer.mean_logprob is None else -answer.mean_logprob


def total_usage(usages: Sequence[Usage], num_drawn: int) -> Usage:
    """Sum up usage over choices, by index; a prompt counts once, however many choices it has. Of the rounds the most
    that a choice took are told.
    """
    firsts = usages[::num_drawn]
    return Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in firsts),
        completion_tokens=sum(usage.completion_tokens for usage in usages),
        cached_tokens=sum(usage.cached_tokens for usage in firsts),
        drafted_tokens=sum(usage.drafted_tokens for usage in usages),
        reasoning_tokens=sum(usage.reasoning_tokens for usage in usages),
        num_rounds=max((usage.num_rounds for usage in usages), default=0),
    )
