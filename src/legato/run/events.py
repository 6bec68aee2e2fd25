"""One choice of a run: from the Steps of its Job to the events of its text.

It receives a Job, the engine and the place that the Job may take; it returns events. It knows no wire format, and
nothing of the run's other choices.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Iterator, MutableMapping, Sequence
from contextlib import aclosing

from legato.engines.base import Engine
from legato.run.admission import Claim
from legato.run.rounds import Continuation
from legato.text.assembler import Assembler, Channels, Piece, Utf8
from legato.text.cycles import Cycle
from legato.text.endings import Ending, Indent, Line, block
from legato.types import (
    Accepted,
    Chat,
    CompletionRequest,
    Delta,
    Finished,
    FinishReason,
    Infill,
    Job,
    Source,
    Step,
    TextToken,
    Times,
    Token,
    Usage,
)

__all__ = ["ChoiceEvents", "Event"]

Event = Accepted | Delta | Finished


class ChoiceEvents:
    """The events of one Job. `events` runs it, once."""

    def __init__(
        self,
        request: CompletionRequest,
        job: Job,
        choice: int,
        engine: Engine,
        *,
        written: Sequence[Token],
        tokens: list[Token] | None,
        usages: MutableMapping[int, Usage],
    ) -> None:
        """Prepare a Job to run.

        Args:
            request: what the Job belongs to.
            job: as it was before any of it was written.
            choice: its index among the choices of the request.
            engine: where it runs.
            written: tokens that it has written already, before it was broken off.
            tokens: where to add its tokens, each before the events that it makes; None: nowhere.
            usages: where to write what it has taken so far, under `choice`.
        """
        self._request, self._job, self._choice = request, job, choice
        self._written, self._tokens, self._usages = written, tokens, usages
        rest = job.resumed(written)
        self._left = rest.max_tokens
        self._rounds = Continuation(engine, rest)
        prefix = job.prompt.prefix
        self._text = Assembler(
            heal=job.prompt.heal,
            channels=Channels.of(job, engine.tokenizer.pieces, is_begun=True),
            stops=_stops(request),
            ending=_ending(request.source),
            suffix=request.source.suffix if isinstance(request.source, Infill) else "",
            before=prefix if _stops_join_the_prompt(request) else "",
            offset=len(prefix),
            min_tokens=job.min_tokens,
        )
        self._cycle = Cycle(job.prompt.ids[job.prompt.floor :]) if request.stops.at_cycle else None
        self._has_thought = False
        self._shown: list[TextToken] = []
        self._num_cached = self._num_drafted = 0
        self._reason: FinishReason = "stop"
        self._is_over = False
        """Whether the text has ended before the engine has."""

    async def events(self, claim: Claim, deadline: float | None) -> AsyncGenerator[Event, None]:
        """Run the Job within a place of the claim, until a deadline in the loop's time, and yield its events.

        Raises:
            EngineError: it could not be finished.
        """
        clock = asyncio.get_running_loop().time
        begun = clock()
        first: float | None = None
        async with aclosing(self._steps(claim, deadline)) as steps:
            async for step in steps:
                if step.tokens and first is None:
                    first = clock()
                for event in self._read(step):
                    yield event
                if self._is_over:
                    break
        for piece in self._text.flush(is_cut=self._reason == "length"):
            self._shown += piece.tokens
            if self._has_news(piece):
                yield self._delta(piece)
        ended = clock()
        first = first or ended
        yield self._finished(Times(first - begun, ended - first))

    def _steps(self, claim: Claim, deadline: float | None) -> AsyncGenerator[Step, None]:
        """Return the Steps of all rounds, held to the deadlines that the request has."""
        steps = _placed(self._rounds, claim, self._written, self._left)
        deadlines = (deadline, self._request.max_reading_s, self._request.max_writing_s)
        return steps if deadlines == (None, None, None) else _until(*deadlines, steps)

    def _read(self, step: Step) -> Iterator[Event]:
        """Yield what a Step brings; end early where the text ends."""
        self._num_cached += step.num_cached
        self._num_drafted += step.num_drafted
        if not step.tokens:
            self._count()
        if not step.tokens and not step.prompt and step.finish is None:
            yield from self._opening()
            return
        if step.prompt:
            prefix = self._job.prompt.prefix
            yield Delta(self._choice, prefix, _prompt_tokens(step.prompt, prefix))
        for token in step.tokens:
            if self._tokens is not None:
                self._tokens.append(token)
            pieces = self._text.feed(token)
            self._count()  # Before anything is shown: the reader may leave at any of these pieces.
            for piece in pieces:
                self._shown += piece.tokens
                is_first_thought = piece.channel == "reasoning" and not self._has_thought
                self._has_thought = self._has_thought or is_first_thought
                if is_first_thought or self._has_news(piece):
                    yield self._delta(piece)
            if not self._text.is_over and self._cycle is not None and self._cycle.feed(token.id):
                self._reason = "repetition"
            if self._text.is_over or self._reason == "repetition":
                self._is_over = True
                return
        if step.finish is not None:
            self._reason = step.finish

    def _opening(self) -> Iterator[Event]:
        """Yield that the engine has accepted the Job, and the prompt's text if it is to be echoed."""
        output, prompt = self._request.output, self._job.prompt
        yield Accepted(self._choice, (*prompt.ids, *prompt.tail) if output.token_ids else ())
        if output.echo and not self._job.score_prompt:
            if prompt.thought:
                yield Delta(self._choice, prompt.thought, channel="reasoning")
            if prompt.prefix:
                yield Delta(self._choice, prompt.prefix)

    def _count(self) -> None:
        num_tokens = self._text.num_tokens
        self._usages[self._choice] = Usage(self._job.prompt.num_tokens, num_tokens, self._num_cached)

    def _finished(self, times: Times) -> Finished:
        text = self._text
        usage = Usage(
            self._job.prompt.num_tokens,
            text.num_tokens,
            self._num_cached,
            self._num_drafted,
            text.num_thought,
            self._rounds.num,
        )
        self._usages[self._choice] = usage
        matched = text.matched
        if matched is not None and matched not in self._request.stops.strings:
            matched = matched.removeprefix("\r")
        return Finished(self._choice, self._reason, matched, usage, times, _mean_logprob(self._shown))

    def _delta(self, piece: Piece) -> Delta:
        """Show of a piece what the request wants to see; thinking has no scores."""
        output = self._request.output
        is_scored = output.logprobs is not None and piece.channel == "content"
        return Delta(
            self._choice,
            piece.text,
            piece.tokens if is_scored else (),
            tuple(token.id for token in piece.tokens) if output.token_ids else (),
            piece.channel,
        )

    def _has_news(self, piece: Piece) -> bool:
        """Whether a piece has anything that the request wants to see."""
        output = self._request.output
        shows_tokens = output.token_ids or (output.logprobs is not None and piece.channel == "content")
        return bool(piece.text or (shows_tokens and piece.tokens))


def _stops_join_the_prompt(request: CompletionRequest) -> bool:
    """Whether a stop may begin in the prompt's text, before the seam."""
    across = request.stops.across_seam
    return isinstance(request.source, Chat) if across is None else across


def _stops(request: CompletionRequest) -> tuple[str, ...]:
    """Return the stops of the text. In a file whose lines end in CR LF, a stop at a line's end takes both."""
    stops = request.stops.strings
    if not isinstance(request.source, Infill):
        return stops
    return (*stops, *(f"\r{stop}" for stop in stops if stop.startswith("\n")))


def _ending(source: Source) -> Ending | None:
    """Return what ends an infill beside its suffix."""
    if not isinstance(source, Infill):
        return None
    if source.end == "line":
        return Line()
    if source.end == "block":
        return block(source.language, source.prefix + source.middle, source.suffix)
    return Indent(source.min_indent) if source.min_indent else None


async def _placed(
    rounds: Continuation, claim: Claim, written: Sequence[Token], left: int
) -> AsyncGenerator[Step, None]:
    """Run all rounds of a Job within one place. Rounds of an earlier process, which wrote the first tokens, count in.

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
