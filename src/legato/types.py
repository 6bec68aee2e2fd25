"""The values that pass between stages: frozen, built from the standard library alone.

They hold what was asked (`CompletionRequest`), what will run (`Prompt`, `Job`) and what comes back (`Step`, `Delta`,
`Finished`). They do not know HTTP, JSON field names, or any tokenizer's library.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, Protocol

__all__ = [
    "REST_OF_CONTEXT",
    "Accepted",
    "Answer",
    "Capabilities",
    "Channel",
    "Chat",
    "CompletionRequest",
    "Constraint",
    "ConstraintKind",
    "ConstraintOptions",
    "Delta",
    "File",
    "FinishReason",
    "Finished",
    "GapEnd",
    "Handle",
    "Infill",
    "Job",
    "Mark",
    "Message",
    "Output",
    "Prompt",
    "RawPrompt",
    "ReasoningOptions",
    "Rounds",
    "Sampling",
    "SamplingOptions",
    "ScoredToken",
    "SeamOptions",
    "Source",
    "Step",
    "Stops",
    "Tags",
    "Text",
    "TextToken",
    "Thinking",
    "Times",
    "Token",
    "Tokenizer",
    "Usage",
]

REST_OF_CONTEXT = -1
"""As `max_tokens`: as many as the context has room for."""

FinishReason = Literal["stop", "length", "repetition", "error", "cancelled"]
Channel = Literal["content", "reasoning"]
GapEnd = Literal["suffix", "line", "block"]
ConstraintKind = Literal["json", "regex", "choice", "grammar"]


@dataclass(frozen=True, slots=True)
class Tags:
    """What a model writes before and after it thinks, at the beginning of its turn."""

    open: str
    close: str


class Tokenizer(Protocol):
    """Bytes to token ids and back. Ids run from 0 to `len(pieces) - 1`. Compared and hashed by identity."""

    def __hash__(self) -> int: ...

    @property
    def pieces(self) -> Sequence[bytes]:
        """The bytes of every token, by id; a control token has the bytes of its name."""

    @property
    def control_ids(self) -> frozenset[int]:
        """Ids that are not text: control tokens and unused places of the vocabulary."""

    @property
    def end_ids(self) -> frozenset[int]:
        """Control ids that end an answer."""

    @property
    def start_id(self) -> int | None:
        """The start-of-text id that this model wants before every prompt; None if it wants none."""

    def encode(self, data: bytes, *, special: bool) -> list[int]:
        """Tokenise UTF-8 `data`; control-token text becomes control ids only if `special`. Adds no start token."""


# ---------------------------------------------------------------------------------------------------------------------
# What was asked. None means "not said"; `pipeline.plan` fills it.


RawPrompt = str | tuple[str | int, ...]
"""A text, or token ids and texts one after the other."""


@dataclass(frozen=True, slots=True)
class Text:
    """Raw prompts, continued as they are. Without any there is nothing to do but to see whether the model is there."""

    prompts: tuple[RawPrompt, ...]
    instructions: str | None = None
    """How to continue, as a top-level directive (MoArk's `instructions`)."""


@dataclass(frozen=True, slots=True)
class File:
    """Another file of the same project."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Infill:
    """The text before and after the gap, and what may help to fill it."""

    prefix: str
    suffix: str
    middle: str = ""
    """What stands in the gap already."""
    files: tuple[File, ...] = ()
    end: GapEnd = "suffix"
    """What ends the answer beside the model: only where the suffix would be repeated, or also the end of the line, or
    of the block that the gap is in.
    """
    language: str = ""
    """What the text is written in, for the end of a block."""
    min_indent: int = 0
    """A line that is indented by fewer columns ends the answer."""
    is_prompted: bool = False
    """Whether a model is asked in words, instead of by infill tokens."""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat."""

    role: str
    content: str
    name: str | None = None
    reasoning: str | None = None
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    tool_call_id: str | None = None


@dataclass(frozen=True, slots=True)
class Mark:
    """What is continued: the assistant's text so far, which is not among the chat's messages."""

    prefix: str
    name: str | None = None
    reasoning: str | None = None
    """The thinking so far. With a prefix it is over, without one it goes on. None: not said."""


@dataclass(frozen=True, slots=True)
class Chat:
    """Closed turns, and the open one if a mark was given."""

    messages: tuple[Message, ...]
    mark: Mark | None = None
    tools: tuple[Mapping[str, Any], ...] = ()


Source = Text | Infill | Chat


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """Sampling as asked."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int | str, float] = field(default_factory=dict)
    """By token id, or by a text: it stands for each of its tokens."""
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class ReasoningOptions:
    """How long the model may think before it answers; at most one of the two is given."""

    effort: float | None = None
    """The share of `max_tokens` that thinking may take; 0: it does not think."""
    max_tokens: int | None = None
    """The most tokens of thinking, those of the prefix included."""
    fields: tuple[str, ...] = ()
    """Names of the request's fields that say so, or that thinking is wanted."""


@dataclass(frozen=True, slots=True)
class Rounds:
    """How far an answer goes on by itself where a round of `max_tokens` is over."""

    max_num: int | None = None
    """Rounds, the first included; None: as many as there is room for."""
    max_total_tokens: int | None = None
    """Tokens of all rounds together; None: as many as there is room for."""


@dataclass(frozen=True, slots=True)
class Stops:
    """What ends the answer before its limit. Nothing of it is shown."""

    strings: tuple[str, ...] = ()
    across_seam: bool | None = None
    """Whether a string may begin before the seam; None: on a marked prefix, yes; on a raw prompt, no."""
    token_ids: tuple[int, ...] = ()
    """Ids that end the answer, beside the model's own."""
    min_tokens: int = 0
    """Before so many tokens neither a string nor an id ends the answer."""
    ignore_end: bool = False
    """Whether the model's own end is never chosen."""
    at_cycle: bool = False
    """Whether the answer ends where its tokens only repeat themselves (`loops`)."""


@dataclass(frozen=True, slots=True)
class ConstraintOptions:
    """What prefix and answer must be, as one text."""

    kind: ConstraintKind
    text: str
    """A JSON schema, a pattern, a JSON list of texts, or a grammar in GBNF or Lark's notation."""
    field: str
    """Name of the request's field that says so."""
    start: int | None = None
    """Characters of the prefix before the constrained text. None: on a marked prefix, none; on a raw prompt, all."""
    whitespace: str | None = None
    """The pattern of white space in JSON; empty: there is none. None: the usual."""


@dataclass(frozen=True, slots=True)
class SeamOptions:
    """Both are on unless the caller turns them off."""

    heal: bool = True
    canonical: bool = True


@dataclass(frozen=True, slots=True)
class Output:
    """How the answer is to be shown."""

    stream: bool = False
    include_usage: bool = False
    echo: bool = False
    logprobs: int | None = None
    """Number of alternatives to report beside each token's log-probability; None: report none at all."""
    token_ids: bool = False
    report: bool = False


@dataclass(frozen=True, slots=True)
class Handle:
    """What an answer is called, where it is more than a passing name, and when it was asked for."""

    id: str
    created: int
    """Seconds since 1970."""


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """One request, as asked, free of any dialect's spelling."""

    model: str
    """A served name; empty: the first model."""
    source: Source
    sampling: SamplingOptions = SamplingOptions()
    max_tokens: int | None = None
    """None: what is usual for the source; `REST_OF_CONTEXT`: all there is room for."""
    rounds: Rounds | None = None
    """None: the answer ends with its first `max_tokens`."""
    num_choices: int = 1
    num_drawn: int | None = None
    """Choices to write for each prompt, of which the `num_choices` likeliest are returned; None: no more than those."""
    stops: Stops = Stops()
    constraint: ConstraintOptions | None = None
    seam: SeamOptions = SeamOptions()
    reasoning: ReasoningOptions = ReasoningOptions()
    output: Output = Output()
    prediction: str = ""
    """A text that the answer may repeat in parts: that makes it faster, and changes nothing."""
    deterministic: bool = False
    """Let the answer depend on nothing that is cached, at the price of speed."""
    cache_salt: str = ""
    """Share KV entries only with requests that name the same."""
    timeout_s: float | None = None
    """Seconds that the answer may take, waiting included."""
    max_reading_s: float | None = None
    """Seconds that it may take from the start of reading its prompt to its first token."""
    max_writing_s: float | None = None
    """Seconds that it may take from its first token on."""
    ignored: tuple[str, ...] = ()
    """Names of fields that were accepted and have no effect."""
    caller: str = ""
    """Who asks, where callers are told apart; places are shared fairly between them."""
    control_tokens: bool = True
    """Whether raw prompts may have control tokens."""
    resumable: bool = False
    """Whether the answer is journaled, and goes on without its client and after a crash."""
    handle: Handle | None = None

    def limits(self, default: int, rest: int) -> tuple[int, int]:
        """Return the most tokens of a round and of the answer, where `rest` is what there is room for.

        `default` is the usual `max_tokens` of the source.
        """
        size = {None: default, REST_OF_CONTEXT: rest}.get(self.max_tokens, self.max_tokens) or 0
        if self.rounds is None:
            return size, size
        num, total = self.rounds.max_num, self.rounds.max_total_tokens
        return size, min((bound for bound in (num and num * size, total) if bound is not None), default=rest)


# ---------------------------------------------------------------------------------------------------------------------
# What will run. Nothing is None that has a default.


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered prompt, cut at the seam."""

    ids: tuple[int, ...]
    """Kept tokens: what the engine reads as it is."""
    tail: tuple[int, ...]
    """The tokens that were cut off behind them."""
    heal: bytes
    """Bytes after the kept tokens that the engine must write first; they are the end of `prefix`."""
    origin: int
    """Byte offset of the end of `ids` in the rendered text."""
    floor: int
    """The first `floor` ids are scaffold: no token of the text may be merged with them."""
    prefix: str
    """The text that the answer joins: the raw prompt, or the assistant's text so far."""
    thought: str | None = None
    """The assistant's thinking so far; None if there is none."""
    turn: int = 0
    """Tokens before the assistant's turn; among them may be a tag that has opened the thinking (`is_opened`)."""
    is_opened: bool = False
    cut: tuple[tuple[str, int], ...] = ()
    """What was left out to fit the context: names and amounts (`infill.Layout`)."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole rendered text, for usage."""
        return len(self.ids) + len(self.tail)


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling as it will run. Temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 cut nothing."""

    seed: int
    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Thinking:
    """The tags of a Job's thinking, as they are written, and when it is ended."""

    open_ids: tuple[int, ...]
    close_ids: tuple[int, ...]
    max_tokens: int | None = None
    """After so many tokens of thinking the closing tag is written; None: when the model writes it."""
    max_delay: int = 0
    """So many tokens later if the tag would be cut in another way where it stands."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """What a Job's text must be."""

    grammar: str
    """As `constraint.Compiler` takes it."""
    start: int | None
    """Byte offset, in the whole rendered text, of its beginning. None: it begins where the thinking ends."""
    field: str
    """Name of the request's field that asked for it."""


@dataclass(frozen=True, slots=True)
class Job:
    """One continuation to run: everything is settled, so it can be replayed."""

    id: str
    choice: int
    """Index of the choice within its prompt; part of the noise's key."""
    prompt: Prompt
    max_tokens: int
    sampling: Sampling
    max_round_tokens: int | None = None
    """After so many tokens it is interrupted and resumed (`continuation`); None: never."""
    canonical: bool = True
    min_tokens: int = 0
    ignore_end: bool = False
    stop_ids: tuple[int, ...] = ()
    thinking: Thinking | None = None
    constraint: Constraint | None = None
    logprobs: int | None = None
    score_prompt: bool = False
    reference: tuple[int, ...] = ()
    """Ids of a text that the answer may repeat in parts: drafts are taken from it too, and never change the answer."""
    deterministic: bool = False
    """Whether the answer may in no way depend on what else runs or is cached, at the price of speed."""
    cache_salt: str = ""
    """Jobs share KV entries only with Jobs of the same salt."""
    is_typed: bool = False
    """Whether somebody types where the text goes on: a Job like it may follow that continues from its answer."""
    num_resumed: int = 0
    """Ids at the end of the prompt that an engine has written: to be fed as when they were written."""

    def resumed(self, tokens: Sequence[Token]) -> Job:
        """Return the Job that goes on behind the first `tokens` of this one's answer."""
        if not tokens:
            return self
        written = size = 0
        for token in tokens:
            size += len(token.data)
            written += size > len(self.prompt.heal)
        return replace(
            self,
            max_tokens=self.max_tokens - written,
            min_tokens=max(0, self.min_tokens - written),
            num_resumed=self.num_resumed + len(tokens),
            prompt=replace(
                self.prompt,
                ids=(*self.prompt.ids, *(token.id for token in tokens)),
                tail=(),
                heal=b"",
                origin=self.prompt.origin + size,
            ),
        )

    def to_json(self) -> str:
        """The Job as JSON text, from which `from_json` makes an equal Job."""
        values = asdict(self)
        values["prompt"]["heal"] = self.prompt.heal.hex()
        return json.dumps(values, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Job:
        """The inverse of `to_json`."""
        values = json.loads(text)
        prompt = values.pop("prompt")
        sampling = values.pop("sampling")
        bias = {int(key): value for key, value in sampling.pop("logit_bias").items()}
        thinking = values.pop("thinking")
        if thinking is not None:
            open_ids, close_ids = tuple(thinking.pop("open_ids")), tuple(thinking.pop("close_ids"))
            thinking = Thinking(open_ids, close_ids, **thinking)
        constraint = values.pop("constraint")
        return cls(
            prompt=replace(
                Prompt(**prompt),
                ids=tuple(prompt["ids"]),
                tail=tuple(prompt["tail"]),
                heal=bytes.fromhex(prompt["heal"]),
                cut=tuple((name, num) for name, num in prompt["cut"]),
            ),
            sampling=Sampling(**sampling, logit_bias=bias),
            thinking=thinking,
            constraint=None if constraint is None else Constraint(**constraint),
            reference=tuple(values.pop("reference")),
            stop_ids=tuple(values.pop("stop_ids")),
            **values,
        )


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a Job may ask of an engine."""

    logprobs: bool
    score_prompt: bool
    canonical: bool
    """Canonical sampling: a token only where the tokenizer would put it."""
    keyed_noise: bool
    """Noise by the place in the text, so that a sampled text does not depend on how it is cut."""
    ends: bool
    """`min_tokens`, `ignore_end` and `stop_ids`."""
    thinking: bool
    """Ending the thinking after so many tokens."""
    constraints: bool
    """Keeping to a grammar."""


# ---------------------------------------------------------------------------------------------------------------------
# What comes back.


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token that could have stood at a place, with its natural log-probability there."""

    id: int
    data: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class Token:
    """A token of the answer (or of a scored prompt) and, if asked for, its score."""

    id: int
    data: bytes
    logprob: float | None = None
    """Natural log-probability under the untouched model; None where it was not asked for or does not exist."""
    top: tuple[ScoredToken, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """What an engine adds. The first Step of a Job has no tokens and means: accepted, the prompt fits."""

    tokens: tuple[Token, ...] = ()
    prompt: tuple[Token, ...] = ()
    """Scores of the prompt's tokens, once, if the Job asked for them."""
    num_cached: int = 0
    """Prompt tokens whose KV entries were reused; told in the first Step."""
    num_drafted: int = 0
    """Of `tokens`: how many a draft had guessed."""
    finish: FinishReason | None = None
    """Set in the last Step only."""


@dataclass(frozen=True, slots=True)
class TextToken:
    """A token as its choice's text shows it: cut at the seam and at a stop together with its bytes."""

    id: int
    text: str
    data: bytes
    offset: int
    """Characters from the beginning of the prompt's own text."""
    logprob: float | None
    top: tuple[ScoredToken, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """What one choice took, counted."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    drafted_tokens: int = 0
    """Of `completion_tokens`: how many a draft had guessed."""
    reasoning_tokens: int = 0
    """Of `completion_tokens`: how many were thinking and its tags."""
    num_rounds: int = 1


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds that one choice took: until its first token, and from there on."""

    reading_s: float
    writing_s: float


@dataclass(frozen=True, slots=True)
class Accepted:
    """An engine has taken a choice's Job: from here on the request is answered, not refused."""

    choice: int
    prompt_ids: tuple[int, ...] = ()
    """The tokens of the whole rendered text, if ids were asked for."""


@dataclass(frozen=True, slots=True)
class Delta:
    """More text of one choice."""

    choice: int
    text: str
    tokens: tuple[TextToken, ...] = ()
    """If scores were asked for; also those of a scored prompt."""
    token_ids: tuple[int, ...] = ()
    """If ids were asked for; of the answer alone."""
    channel: Channel = "content"
    """Thinking comes before content, and without scores. The first Delta in its channel may be empty."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of one choice."""

    choice: int
    reason: FinishReason
    matched: str | None
    """The stop that ended it; None if none did."""
    usage: Usage
    times: Times
    mean_logprob: float | None = None
    """Of the answer's tokens; None if there are none or they were not scored."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One whole choice: the fold of its stream."""

    choice: int
    text: str
    tokens: tuple[TextToken, ...]
    reason: FinishReason
    matched: str | None
    usage: Usage
    times: Times
    mean_logprob: float | None = None
    prompt_ids: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = ()
    reasoning: str | None = None
    """The thinking before the text; None if there was none."""
