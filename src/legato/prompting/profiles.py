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
    """How a model was taught to fill a gap: the ids that stand before the parts of a prompt, and the order of these."""

    prefix: int
    suffix: int
    middle: int | None
    """None: the prefix comes last and is simply continued, as Codestral has it."""
    repo: int | None = None
    """Before the project's name; None if the model does not know projects."""
    file: int | None = None
    """Before each file's name; None if the model does not know files."""
    repo_end: str = "\n"
    """What stands behind the project's name."""
    suffix_first: bool = False
    """Whether the model also knows the order suffix, prefix, middle (SPM), in which typing changes only the end."""

    @property
    def ids(self) -> tuple[int, ...]:
        """All of them: none belongs to a text."""
        return tuple(id for id in (self.prefix, self.suffix, self.middle, self.repo, self.file) if id is not None)


@dataclass(frozen=True, slots=True)
class _Family:
    """The names of a family's infill tokens."""

    prefix: str
    suffix: str
    middle: str | None
    repo: tuple[str, ...] = ()
    file: tuple[str, ...] = ()
    repo_end: str = "\n"
    suffix_first: bool = False


_FAMILIES = (
    # Qwen2.5-Coder (arXiv 2409.12186), CodeGemma (2406.11409), Granite 4.
    _Family(
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        repo=("<|repo_name|>", "<|reponame|>"),
        file=("<|file_sep|>", "<|file_separator|>", "<|filename|>"),
    ),
    # StarCoder (2305.06161), StarCoder2 (2402.19173), Granite Code (2405.04324): both orders, half of the time each.
    _Family(
        "<fim_prefix>",
        "<fim_suffix>",
        "<fim_middle>",
        repo=("<repo_name>", "<reponame>"),
        file=("<file_sep>", "<filename>"),
        repo_end="",
        suffix_first=True,
    ),
    _Family("<fim-prefix>", "<fim-suffix>", "<fim-middle>", suffix_first=True),  # SantaCoder (2301.03988).
    _Family("<PRE>", "<SUF>", "<MID>", suffix_first=True),  # Code Llama (2308.12950).
    _Family("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder (2401.14196).
    _Family("[PREFIX]", "[SUFFIX]", None, suffix_first=True),  # Codestral.
    _Family("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM-4.
)


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


def profile_from_metadata(metadata: Mapping[str, str], pieces: Mapping[int, bytes], context_length: int) -> Profile:
    """Read a profile.

    Args:
        metadata: GGUF keys and values; `tokenizer.*` is read.
        pieces: the bytes of the special tokens, by id.
        context_length: in tokens.
    """

    def text(key: str) -> str:
        id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        return pieces.get(int(id), b"").decode() if id is not None else ""

    template = metadata.get("tokenizer.chat_template")
    return Profile(
        context_length=context_length,
        chat_template=template,
        start_text=text("bos"),
        end_text=text("eos"),
        infill=_infill_tokens(metadata, pieces),
        reasoning=next((tags for tags in _KNOWN_TAGS if template and _has_both(template, tags)), None),
    )


def _has_both(template: str, tags: Tags) -> bool:
    """Whether a template names both tags: one that only cuts thinking out of earlier turns names the closing one."""
    return tags.open in template and tags.close in template


_KEYS = (("prefix", "pre"), ("suffix", "suf"), ("middle", "mid"), ("repo", "rep"), ("file", "sep"))
"""The parts of an infill prompt, and how GGUF's keys call them."""


def _infill_tokens(metadata: Mapping[str, str], pieces: Mapping[int, bytes]) -> InfillTokens | None:
    """Find a family's infill tokens by their names; ids that the metadata states come before those."""
    named = {bytes(piece).decode("utf-8", "replace").lstrip("▁ "): id for id, piece in pieces.items()}
    stated = {
        part: int(metadata[f"tokenizer.ggml.fim_{key}_token_id"])
        for part, key in _KEYS
        if f"tokenizer.ggml.fim_{key}_token_id" in metadata
    }
    for family in _FAMILIES:
        ids = {
            part: next((named[name] for name in names if name in named), None)
            for part, names in (
                ("prefix", (family.prefix,)),
                ("suffix", (family.suffix,)),
                ("middle", (family.middle,) if family.middle else ()),
                ("repo", family.repo),
                ("file", family.file),
            )
        }
        ids |= stated
        if ids["prefix"] is None or ids["suffix"] is None or (ids["middle"] is None and family.middle):
            continue
        is_own = family.prefix in named
        return InfillTokens(
            prefix=ids["prefix"],
            suffix=ids["suffix"],
            middle=ids["middle"],
            repo=ids["repo"],
            file=ids["file"],
            repo_end=family.repo_end,
            suffix_first=family.suffix_first and is_own,
        )
    return None
