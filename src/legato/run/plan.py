"""From a `CompletionRequest` to a `Run`: everything that a request leaves open is settled here.

It receives a request and a `Model`, and returns Jobs in which no value is missing. It runs nothing, and knows no wire
format.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from hashlib import blake2b

from legato.decoding.grammar_check import Allowance
from legato.errors import InvalidField, UnsupportedFeature
from legato.prompting.render import render
from legato.run.models import Model
from legato.run.run import Report, Run
from legato.system.threads import CONSTRAINTS, PLANS, SHORT_CONSTRAINTS, Threads
from legato.text.assembler import Channels
from legato.types import (
    Chat,
    CompletionRequest,
    Constraint,
    ConstraintOptions,
    Infill,
    Job,
    Mark,
    Prompt,
    Sampling,
    SamplingOptions,
    Text,
    Thinking,
    Tokenizer,
)

__all__ = ["DEFAULT_MAX_TOKENS", "plan", "planners"]

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


def _settle(options: SamplingOptions, seed: int, bias: Mapping[int, float]) -> Sampling:
    """Return the sampling that will run: what the request leaves open has the default that `Sampling` has."""
    given = {field.name: value for field in fields(options) if (value := getattr(options, field.name)) is not None}
    sampling = Sampling(**{"temperature": 1.0, **given, "seed": seed, "logit_bias": bias})
    is_greedy = sampling.temperature < _GREEDY_BELOW
    return replace(sampling, temperature=0.0 if is_greedy else sampling.temperature, top_k=max(0, sampling.top_k))
