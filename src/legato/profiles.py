"""What is known about a model: a `Profile`, read from its metadata and overridable in the configuration.

It receives GGUF metadata as text and returns a frozen value. It does not render prompts and does not load models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from legato.types import Tags

__all__ = ["InfillTokens", "Profile", "profile_from_metadata"]

_KNOWN_TAGS = (
    Tags("<think>", "</think>"),
    Tags("[THINK]", "[/THINK]"),
    Tags("<seed:think>", "</seed:think>"),
    Tags("◁think▷", "◁/think▷"),
)


@dataclass(frozen=True, slots=True)
class InfillTokens:
    """The ids that stand before the parts of an infill prompt."""

    prefix: int
    suffix: int
    middle: int
    repo: int | None = None
    """Before the project's name; None if the model does not know files."""
    file: int | None = None
    """Before each file's name; None if the model does not know files."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Facts about one model."""

    context_length: int
    """The most tokens that prompt and answer may have together."""
    chat_template: str | None = None
    """A jinja2 template as Hugging Face writes them; None if the model cannot chat."""
    start_text: str = ""
    """What `bos_token` prints in the template."""
    end_text: str = ""
    """What `eos_token` prints in the template."""
    infill: InfillTokens | None = None
    """None if the model has no infill tokens."""
    reasoning: Tags | None = None
    """None if the model does not think before it answers."""

    @property
    def can_chat(self) -> bool:
        """Whether messages can be rendered."""
        return self.chat_template is not None


def profile_from_metadata(
    metadata: Mapping[str, str], pieces: Mapping[int, bytes], infill_ids: Mapping[str, int], context_length: int
) -> Profile:
    """Read a profile.

    Args:
        metadata: GGUF keys and values; `tokenizer.*` is read.
        pieces: the bytes of the special tokens, by id.
        infill_ids: ids for the parts that `InfillTokens` names, as far as the vocabulary has them.
        context_length: in tokens.
    """

    def text(key: str) -> str:
        id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        return pieces.get(int(id), b"").decode() if id is not None else ""

    infill = None
    if {"prefix", "suffix", "middle"} <= infill_ids.keys():
        infill = InfillTokens(**infill_ids)
    template = metadata.get("tokenizer.chat_template")
    return Profile(
        context_length=context_length,
        chat_template=template,
        start_text=text("bos"),
        end_text=text("eos"),
        infill=infill,
        reasoning=next((tags for tags in _KNOWN_TAGS if template and _has_both(template, tags)), None),
    )


def _has_both(template: str, tags: Tags) -> bool:
    """Whether a template names both tags: one that only cuts thinking out of earlier turns names the closing one."""
    return tags.open in template and tags.close in template
