"""From what was asked to token ids: chats, raw prompts and infills become `Prompt`s, cut at the seam.

It receives a source, a profile and a tokenizer; it returns `Prompt`s. It knows no engine and no wire format.

Two rules hold throughout. Text that a user typed never becomes a control token, except in a raw prompt, where markers
arrive that way. And the text that is continued is tokenised apart from the scaffold before it, so that where it is
cut makes no difference.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

from legato.decoding.seam import Seam
from legato.errors import InvalidField, NotPermitted, PromptTooLong, RequestError, UnsupportedFeature
from legato.prompting.infill import fit, lay_out
from legato.prompting.profiles import Profile
from legato.types import (
    Chat,
    CompletionRequest,
    Infill,
    Mark,
    Message,
    Prompt,
    RawPrompt,
    SeamOptions,
    Text,
    Tokenizer,
)

__all__ = ["render", "render_chat", "render_open"]

_INSTRUCTED = "Continue the text. Write only what comes next."
_FILL = (
    "A text has a gap. You get what stands after the gap, and write the text from its beginning up to there, "
    "so that both join exactly. Write nothing else, and stop where the part after the gap begins."
)
_TASK_ROOM = 256
"""Tokens that are set aside for a task in words, and for the chat template."""


def render(request: CompletionRequest, profile: Profile, tokenizer: Tokenizer, seam: Seam) -> tuple[Prompt, ...]:
    """Render a request's prompts, in order.

    Raises:
        InvalidField: a message, prompt or token id is not usable.
        UnsupportedFeature: the model cannot chat or has no infill tokens.
        PromptTooLong: a prompt leaves no room in the context.
        NotPermitted: a raw prompt has control tokens, which the caller may not write.
    """
    renderer = _Renderer(profile, tokenizer, seam, request.seam, can_think=_can_think(request))
    try:
        match request.source:
            case Chat() as chat:
                return (renderer.chat(chat),)
            case Infill() as infill:
                return (renderer.infill(infill, request),)
            case Text(prompts, None):
                return tuple(renderer.raw(prompt, control_tokens=request.control_tokens) for prompt in prompts)
            case Text(prompts, instructions):
                return tuple(renderer.instructed(prompt, instructions or "") for prompt in prompts)
    except RequestError as error:
        error.param = error.param or ("messages" if isinstance(request.source, Chat) else "prompt")
        raise


def _can_think(request: CompletionRequest) -> bool:
    return isinstance(request.source, Chat) and 0 not in (request.reasoning.effort, request.reasoning.max_tokens)


class _Renderer:
    """Renders for one model."""

    def __init__(
        self, profile: Profile, tokenizer: Tokenizer, seam: Seam, options: SeamOptions, *, can_think: bool
    ) -> None:
        self._profile = profile
        self._tokenizer = tokenizer
        self._seam = seam
        self._options = options
        self._can_think = can_think

    def chat(self, chat: Chat) -> Prompt:
        """Render closed turns and open the assistant's; what it has written so far follows."""
        mark = chat.mark or Mark("")
        opening = _open_chat(chat, self._profile, _control_text(self._tokenizer), can_think=self._can_think)
        ids: list[int] = []
        for part, is_literal in _parts(opening.text, opening.literals):
            ids += self._encode(part.encode(), special=not is_literal)
        ids = self._started(ids)
        scaffold, rest = self._joined(ids, _turn(chat, self._profile, opening, can_think=self._can_think))
        prompt = self._prompt(scaffold, rest, prefix=mark.prefix)
        return replace(prompt, thought=mark.reasoning, turn=len(ids), is_opened=opening.is_opened)

    def _joined(self, scaffold: Sequence[int], parts: Iterable[tuple[str, bool]]) -> tuple[list[int], list[int]]:
        """Tokenise what follows a scaffold. A tag that is a control token belongs to the scaffold with all before it;
        any other is text, tokenised together with what stands around it, as the model writes it.
        """
        ids, text = list(scaffold), ""
        for part, is_tag in parts:
            tag = self._encode(part.encode(), special=True) if is_tag else []
            if self._tokenizer.control_ids.isdisjoint(tag):
                text += part
            else:
                ids += [*self._plain(text), *tag]
                text = ""
        return ids, self._plain(text)

    def raw(self, prompt: RawPrompt, *, control_tokens: bool) -> Prompt:
        """Take a prompt as it is; markers in it are control tokens, if the caller may write them."""
        ids, floor = self._read_text(prompt) if isinstance(prompt, str) else self._read_parts(prompt)
        if not control_tokens and (found := self._tokenizer.control_ids.intersection(ids) - {self._tokenizer.start_id}):
            shown = self._bytes(sorted(found)[:1]).decode("utf-8", "replace")
            raise NotPermitted(f"the key may not use control tokens, and `prompt` has `{shown}`")
        shown = prompt if isinstance(prompt, str) else self._bytes(ids).decode("utf-8", "replace")
        started = self._started(ids)
        ids, floor = started, floor + len(started) - len(ids)
        if not ids:
            raise InvalidField("`prompt` is empty, and this model has no start token to begin from", param="prompt")
        return self._prompt(ids[:floor], ids[floor:], prefix=shown)

    def _read_text(self, prompt: str) -> tuple[list[int], int]:
        """Tokenise a raw prompt; return its ids and how many of them are scaffold."""
        scaffold, text = self._hand_written(prompt)
        if scaffold:
            ids = self._encode(scaffold.encode(), special=True)
            return ids + self._plain(text), len(ids)
        ids = self._encode(prompt.encode(), special=True)
        return ids, self._after_control(ids)

    def _read_parts(self, prompt: Sequence[str | int]) -> tuple[list[int], int]:
        """Check a prompt of ids and texts; what stands before a text at its end is scaffold."""
        last = len(self._tokenizer.pieces) - 1
        ids: list[int] = []
        for index, part in enumerate(prompt):
            if isinstance(part, str):
                text, floor = self._read_text(part)
                if index == len(prompt) - 1:
                    return ids + text, len(ids) + floor
                ids += text
            elif 0 <= part <= last:
                ids.append(part)
            else:
                raise InvalidField(
                    f"`prompt` has token id {part} at index {index}; ids run from 0 to {last}", param="prompt"
                )
        return ids, self._floor(ids)

    def _floor(self, ids: list[int]) -> int:
        """Return how many are scaffold: all, if they are meant, because their text is tokenised to others."""
        floor = self._after_control(ids)
        is_text = self._tokenizer.encode(self._bytes(ids[floor:]), special=False) == ids[floor:]
        return floor if is_text else len(ids)

    def _started(self, ids: Sequence[int]) -> list[int]:
        """Put the start token before ids, exactly once, if the model wants one."""
        start = self._tokenizer.start_id
        return [*ids] if start is None or (ids and ids[0] == start) else [start, *ids]

    def _after_control(self, ids: Sequence[int]) -> int:
        return max((at + 1 for at, id in enumerate(ids) if id in self._tokenizer.control_ids), default=0)

    def _bytes(self, ids: Sequence[int]) -> bytes:
        return b"".join(self._tokenizer.pieces[id] for id in ids)

    def _hand_written(self, prompt: str) -> tuple[str, str]:
        """Split a raw prompt that opens an assistant's turn as the chat template does into scaffold and text."""
        opening = _opening(self._profile, self._tokenizer)
        last = prompt.rfind(opening) if opening else -1
        if last < 0 or _control_text(self._tokenizer).search(prompt, last + len(opening)):
            return "", prompt
        end = last + len(opening)
        return prompt[:end], prompt[end:]

    def instructed(self, prompt: RawPrompt, instructions: str) -> Prompt:
        """Continue a prompt under instructions, which are never part of the text."""
        if not isinstance(prompt, str):
            raise InvalidField("`instructions` needs `prompt` to be text, not token ids", param="instructions")
        if self._profile.can_chat:
            messages = (Message("system", instructions), Message("user", _INSTRUCTED))
            return self.chat(Chat(messages, Mark(prompt)))
        header = self._plain(f"{instructions}\n{_INSTRUCTED}\n\n")
        return self._prompt(self._started(header), self._plain(prompt), prefix=prompt)

    def infill(self, infill: Infill, request: CompletionRequest) -> Prompt:
        """Lay out what is around a gap; the answer joins what stands before it, behind the last marker."""
        limit = self._profile.context_length
        _, wanted = request.limits(0, limit)
        room = limit - min(wanted, limit // 4) - 1
        text = infill.prefix + infill.middle
        if infill.is_prompted:
            if not self._profile.can_chat:
                raise UnsupportedFeature('`infill` "prompted" needs a model that can chat', param="infill")
            fitting, cut = fit(infill, self._plain, room=room - _TASK_ROOM)
            prompt = self.chat(_fill_task(fitting))
            return replace(prompt, prefix=text, origin=len(text.encode()) - len(prompt.heal), cut=cut)
        marks = self._profile.infill
        if marks is None:
            raise UnsupportedFeature(
                "a suffix needs a model with infill tokens, and this one has none: `qwen2.5-coder-0.5b` has them, and "
                'a model that can chat can be asked in words (`infill`: "prompted")',
                param="suffix",
            )
        fitting, cut = fit(infill, self._plain, room=room)
        layout = lay_out(fitting, marks, self._plain, heals=self._options.heal)
        scaffold = self._started(layout.scaffold)
        ids = [*scaffold, *self._plain(layout.text)]
        kept, heal = self._seam.split(ids, len(scaffold)) if self._options.heal else (len(ids), b"")
        return self._checked(
            Prompt(
                ids=tuple(ids[:kept]),
                tail=tuple(ids[kept:]),
                heal=heal,
                origin=len(text.encode()) - len(heal),
                floor=len(scaffold),
                prefix=text,
                cut=cut,
            )
        )

    def _prompt(self, scaffold: Sequence[int], ids: Sequence[int], *, prefix: str) -> Prompt:
        """Cut scaffold and text at the seam."""
        pieces = self._tokenizer.pieces
        every = [*scaffold, *ids]
        kept, heal = len(every), b""
        if self._options.heal:
            kept, heal = self._seam.split(every, len(scaffold))
            if kept == 0:  # Nothing to predict the first token from: it is kept as it is.
                kept, heal = 1, heal[len(pieces[every[0]]) :]
        origin = sum(len(pieces[id]) for id in every[:kept])
        return self._checked(Prompt(tuple(every[:kept]), tuple(every[kept:]), heal, origin, len(scaffold), prefix))

    def _checked(self, prompt: Prompt) -> Prompt:
        limit = self._profile.context_length
        if prompt.num_tokens >= limit:
            raise PromptTooLong(
                f"this model's maximum context length is {limit} tokens, but the prompt has {prompt.num_tokens}; "
                "at least one must be left for the answer",
                num_tokens=prompt.num_tokens,
                context_length=limit,
            )
        return prompt

    def _plain(self, text: str | bytes) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        return self._encode(data, special=False)

    def _encode(self, data: bytes, *, special: bool) -> list[int]:
        """Tokenise, and make sure that nothing was lost: a vocabulary need not have every byte."""
        ids = self._tokenizer.encode(data, special=special)
        spelled = self._bytes(ids)
        if spelled != data:
            at = next((i for i, (a, b) in enumerate(zip(spelled, data, strict=False)) if a != b), len(spelled))
            while at and 0x80 <= data[at] < 0xC0:
                at -= 1
            character = data[at:].decode()[:1]
            raise InvalidField(
                f"a text has the character U+{ord(character):04X} at byte {at}, which this model cannot spell"
            )
        return ids


def _fill_task(infill: Infill) -> Chat:
    """Ask in words what infill tokens would: what stands before the gap is what the assistant has written so far."""
    files = "".join(f"The file {file.name} of the same project:\n{file.text}\n\n" for file in infill.files)
    task = f"{files}After the gap:\n{infill.suffix}"
    return Chat((Message("system", _FILL), Message("user", task)), Mark(infill.prefix + infill.middle))


# ---------------------------------------------------------------------------------------------------------------------
# Chat templates


_TEMPLATE_FAULTS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What Python raises when a template does not fit the messages, or they are nested too deep."""


def render_open(chat: Chat, profile: Profile) -> str:
    """Render a chat whose assistant's turn is open as one text: the raw prompt that means the same.

    Raises:
        UnsupportedFeature, InvalidField: as `render_chat`.
    """
    opening = _open_chat(chat, profile, re.compile("(?!)"), can_think=True)
    text = "".join(part for part, _ in _parts(opening.text, opening.literals))
    return text + "".join(part for part, _ in _turn(chat, profile, opening, can_think=True))


@dataclass(frozen=True, slots=True)
class _Opening:
    """A rendering up to the assistant's open turn."""

    text: str
    literals: Mapping[str, str]
    named: str
    """How the name of the marked message is written in the turn, where the template prints none."""
    is_opened: bool
    """Whether the template has opened the thinking."""


def _open_chat(chat: Chat, profile: Profile, control_text: re.Pattern[str], *, can_think: bool) -> _Opening:
    """Render the closed turns and the opening of the assistant's."""
    text, literals = render_chat(chat, profile, control_text, can_think=can_think)
    tags, name = profile.reasoning, (chat.mark and chat.mark.name) or ""
    is_opened = tags is not None and text.rstrip().endswith(tags.open)
    if not name:
        return _Opening(text, literals, "", is_opened)
    turn = _named_opening(chat, name, profile, control_text)
    if turn is None:
        return _Opening(text, literals, f"{name}: ", is_opened)
    thinking = text[text.rindex(tags.open) :] if tags is not None and is_opened else ""
    return _Opening(turn[0] + thinking, turn[1], "", is_opened)


def _turn(chat: Chat, profile: Profile, opening: _Opening, *, can_think: bool) -> Iterator[tuple[str, bool]]:
    """Yield what the assistant has written, as texts, and with each whether it is a tag.

    Thinking that is not over goes on. Where the template opens it and none is given or wanted, it is closed again.
    """
    mark = chat.mark or Mark("")
    tags, said = profile.reasoning, mark.prefix
    if tags is not None:
        thought, is_over = mark.reasoning, bool(said)
        if thought is None and said.startswith(tags.open):
            thought, closed, said = said.removeprefix(tags.open).partition(tags.close)
            is_over = bool(closed)
        if thought is not None:
            if not opening.is_opened:
                yield tags.open, True
            yield thought, False
            if not is_over:
                return
            yield tags.close, True
        elif opening.is_opened and (opening.named or said or not can_think):
            yield tags.close, True
            yield "\n\n", False
    yield opening.named + said, False


class _TemplateError(Exception):
    """What a template raises by `raise_exception`."""


class _Literals(dict[str, str]):
    """What stands behind the sentinels of one rendering."""

    def __init__(self, control_text: re.Pattern[str]) -> None:
        super().__init__()
        self._control_text = control_text
        self._nonce = secrets.token_hex(8)

    def hide(self, text: str) -> str:
        """Return a sentinel for a text."""
        sentinel = f"\ue000{self._nonce}.{len(self)}\ue001"
        self[sentinel] = text
        return sentinel

    def guard(self, value: Any) -> Any:
        """Return a value with sentinels for all that reads like a control token."""
        match value:
            case str():
                return self._control_text.sub(lambda match: self.hide(match.group()), value)
            case Mapping():
                return {self.guard(key): self.guard(item) for key, item in value.items()}
            case list() | tuple():
                return [self.guard(item) for item in value]
            case _:
                return value


def render_chat(
    chat: Chat, profile: Profile, control_text: re.Pattern[str], *, can_think: bool = True
) -> tuple[str, Mapping[str, str]]:
    """Render a chat's closed turns with the generation prompt.

    Returns the text, in which every piece of typed text that reads like a control token (`control_text`) is a
    sentinel, and what stands behind each sentinel.

    Raises:
        UnsupportedFeature: the model has no chat template.
        InvalidField: the template refuses the messages.
    """
    literals = _Literals(control_text)
    options = {} if can_think else {"enable_thinking": False}
    return _render(chat, profile, literals, add_generation_prompt=True, **options), literals


def _named_opening(
    chat: Chat, name: str, profile: Profile, control_text: re.Pattern[str]
) -> tuple[str, Mapping[str, str]] | None:
    """Render a chat's closed turns and the opening of an assistant's that has a name, without thinking.

    None: the template prints no names there.
    """
    literals = _Literals(control_text)
    shown, content = literals.hide(name), literals.hide("")
    turn = {"role": "assistant", "name": shown, "content": content}
    try:
        text = _render(chat, profile, literals, turn, add_generation_prompt=False)
    except InvalidField:
        return None
    head, is_printed, rest = text.partition(content)[0].rpartition(shown)
    if not is_printed:
        return None
    if profile.reasoning is not None:
        rest = rest.partition(profile.reasoning.open)[0]
    return head + shown + rest, literals


def _render(chat: Chat, profile: Profile, literals: _Literals, *turns: Mapping[str, Any], **options: bool) -> str:
    if profile.chat_template is None:
        raise UnsupportedFeature("this model has no chat template: it continues raw text only", param="messages")
    try:
        return _template(profile.chat_template).render(
            messages=[*(literals.guard(_message(message)) for message in chat.messages), *turns],
            tools=literals.guard(chat.tools) or None,
            bos_token=profile.start_text,
            eos_token=profile.end_text,
            **options,
        )
    except _TemplateError as error:
        raise InvalidField(f"`messages` are refused by the model's chat template: {error}", param="messages") from None
    except (*_TEMPLATE_FAULTS, jinja2.TemplateError) as error:
        raise InvalidField(
            f"`messages` cannot be rendered by the model's chat template: {error}", param="messages"
        ) from None


def _message(message: Message) -> dict[str, Any]:
    values: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name is not None:
        values["name"] = message.name
    if message.reasoning is not None:
        values["reasoning_content"] = message.reasoning
    if message.tool_calls:
        values["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        values["tool_call_id"] = message.tool_call_id
    return values


def _tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Turn arguments, which arrive as JSON text, into the object that templates print; other text stays text."""
    function = dict(call.get("function") or {})
    if isinstance(function.get("arguments"), str):
        with suppress(ValueError, RecursionError):
            function["arguments"] = json.loads(function["arguments"])
    return {**call, "function": function}


@lru_cache(maxsize=16)
def _opening(profile: Profile, tokenizer: Tokenizer) -> str:
    """Return how the template opens an assistant's turn, from its last control token on; "" if it has none there."""
    if profile.chat_template is None:
        return ""
    try:
        text, _ = render_chat(Chat((Message("user", "x"),)), profile, _control_text(tokenizer))
    except InvalidField:
        return ""
    last = max((match.start() for match in _control_text(tokenizer).finditer(text)), default=-1)
    return text[last:] if last >= 0 else ""


@lru_cache(maxsize=16)
def _control_text(tokenizer: Tokenizer) -> re.Pattern[str]:
    """Return a pattern for the names of all control tokens, the longest first."""
    names = {tokenizer.pieces[id].decode("utf-8", "replace") for id in tokenizer.control_ids} - {""}
    return re.compile(
        "|".join(re.escape(name) for name in sorted(names, key=lambda name: (-len(name), name))) or "(?!)"
    )


@lru_cache(maxsize=16)
def _template(source: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(source)


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> None:
    raise _TemplateError(message)


def _parts(text: str, literals: Mapping[str, str]) -> list[tuple[str, bool]]:
    """Split rendered text at the sentinels; return the parts, and with each whether it is a literal."""
    parts = []
    for part in re.split("(\ue000[0-9a-f]+\\.[0-9]+\ue001)", text):
        if part:
            parts.append((literals.get(part, part), part in literals))
    return parts
