"""A tokenizer from the files that come with a model: `tokenizer.json`, `tokenizer_config.json`, `config.json`.

It receives a folder and returns a `JsonTokenizer`, which gives back every byte, and the model's `Profile`. It knows no
server.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from legato.errors import ConfigError
from legato.prompting.profiles import Profile, profile_from_metadata

__all__ = ["JsonTokenizer", "read_profile"]

_NAME = re.compile(r"<[^ ]+>|\[[A-Z_]+\]|<｜[^｜]+｜>")
"""What an added token is called that is no text: models do not mark all of these as special."""
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_END_NAMES = frozenset({"<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<|end|>", "</s>", "<eos>"})


class JsonTokenizer:
    """Implements `types.Tokenizer` over the `tokenizers` library.

    Text is never normalised: what is encoded comes back byte for byte, also bytes that are no UTF-8 (each as its own
    token), but for those that the vocabulary does not have. `encode` may be called from any thread.
    """

    def __init__(self, folder: Path) -> None:
        """Read the files.

        Raises:
            ConfigError: there is no tokenizer, or it is of a kind that cannot spell bytes.
        """
        import tokenizers

        facts = _read(folder / "tokenizer.json")
        if not facts:
            raise ConfigError(f"{folder} has no tokenizer.json")
        config = _read(folder / "tokenizer_config.json")
        added = {token["id"]: token for token in facts.get("added_tokens", [])}
        named = {id for id, token in added.items() if token["special"] or _NAME.fullmatch(token["content"])}
        self._special = tokenizers.Tokenizer.from_str(json.dumps(_exact(facts)))
        plain = [token for token in facts.get("added_tokens", []) if token["id"] not in named]
        self._plain = tokenizers.Tokenizer.from_str(json.dumps({**_exact(facts), "added_tokens": plain}))
        words = {id: word for word, id in self._special.get_vocab(with_added_tokens=True).items()}
        size = max(words) + 1
        spell = _spelling(facts)
        self.pieces: Sequence[bytes] = [
            added[id]["content"].encode() if id in added else spell(words[id]) if id in words else b""
            for id in range(size)
        ]
        unused = {id for id in range(size) if id not in words}
        self._bytes = {piece: id for id, piece in enumerate(self.pieces) if len(piece) == 1 and id not in named}
        self.end_ids = frozenset(_end_ids(folder, config, {added[id]["content"]: id for id in named}))
        self.control_ids = frozenset(named) | unused | self.end_ids
        started = self._started(folder, facts, config)
        self.start_id: int | None = started

    def _started(self, folder: Path, facts: Mapping[str, Any], config: Mapping[str, Any]) -> int | None:
        """Return the start token, if the model's own tokenizer puts one before every text."""
        import tokenizers

        if "add_bos_token" in config and not config["add_bos_token"]:
            return None
        ids: list[int] = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).encode("a").ids
        return ids[0] if ids and ids[0] in self.control_ids else None

    def encode(self, data: bytes, *, special: bool) -> list[int]:
        """Tokenise `data`; control-token text becomes control ids only if `special`. Adds no start token."""
        tokenizer = self._special if special else self._plain
        ids: list[int] = []
        for part in _parts(data):
            if isinstance(part, str):
                ids += tokenizer.encode(part, add_special_tokens=False).ids
            else:
                ids += [id for byte in part if (id := self._bytes.get(bytes([byte]))) is not None]
        return ids


def _parts(data: bytes) -> Iterator[str | bytes]:
    """Yield what is UTF-8 as text, and what is not as bytes."""
    while data:
        try:
            yield data.decode()
        except UnicodeDecodeError as error:
            if error.start:
                yield data[: error.start].decode()
            yield data[error.start : error.end]
            data = data[error.end :]
        else:
            return


def _exact(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tokenizer that changes no text: nothing is normalised but for blanks as SentencePiece spells them."""
    normalizer = facts.get("normalizer")
    steps = normalizer.get("normalizers", [normalizer]) if normalizer else []
    kept = [step for step in steps if step.get("type") == "Replace" and step.get("content") == "▁"]
    before = facts.get("pre_tokenizer")
    if before and before.get("type") == "Metaspace":
        before = {**before, "prepend_scheme": "never"}
    return {
        **facts,
        "normalizer": {"type": "Sequence", "normalizers": kept} if kept else None,
        "pre_tokenizer": before,
        "post_processor": None,
        "truncation": None,
        "padding": None,
    }


def _spelling(facts: Mapping[str, Any]) -> Any:
    """Return what turns the name of a token into its bytes."""
    decoder = json.dumps(facts.get("decoder") or {}) + json.dumps(facts.get("pre_tokenizer") or {})
    if "ByteLevel" in decoder:
        table = _byte_level()
        return lambda word: b"".join(table.get(character, character.encode()) for character in word)
    if "ByteFallback" in decoder or "Metaspace" in decoder:
        return _spell_sentencepiece
    raise ConfigError("tokenizer.json is of a kind that does not spell bytes: neither ByteLevel nor SentencePiece")


def _spell_sentencepiece(word: str) -> bytes:
    byte = _BYTE.fullmatch(word)
    return bytes([int(byte[1], 16)]) if byte else word.replace("▁", " ").encode()


def _byte_level() -> dict[str, bytes]:
    """Return the characters that stand for bytes in byte-level vocabularies (GPT-2): printable ones for themselves."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in kept]
    return {chr(byte): bytes([byte]) for byte in kept} | {chr(256 + at): bytes([byte]) for at, byte in enumerate(rest)}


def _end_ids(folder: Path, config: Mapping[str, Any], named: Mapping[str, int]) -> Iterator[int]:
    for file in ("generation_config.json", "config.json"):
        ids = _read(folder / file).get("eos_token_id")
        yield from [ids] if isinstance(ids, int) else ids or []
    end = _content(config.get("eos_token"))
    yield from (id for name, id in named.items() if name == end or name in _END_NAMES)


def _content(token: Any) -> str:
    """Return a special token's text, which stands alone or in an object."""
    return str(token["content"]) if isinstance(token, Mapping) else token or ""


def read_profile(folder: Path, tokenizer: JsonTokenizer, context_length: int) -> Profile:
    """Read what is known about a model.

    Args:
        folder: where its files are.
        tokenizer: its tokenizer.
        context_length: the most tokens of prompt and answer; 0: what `config.json` says.

    Raises:
        ConfigError: nothing says how long a context may be.
    """
    config, model = _read(folder / "tokenizer_config.json"), _read(folder / "config.json")
    length = context_length or int(model.get("max_position_embeddings") or 0)
    if not length:
        raise ConfigError(f"{folder}/config.json has no `max_position_embeddings`: set `context_length`")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = next((entry["template"] for entry in template if entry["name"] == "default"), None)
    if (folder / "chat_template.jinja").exists():
        template = (folder / "chat_template.jinja").read_text("utf-8")
    ids = {tokenizer.pieces[id].decode("utf-8", "replace"): id for id in tokenizer.control_ids}
    metadata = {"tokenizer.chat_template": template} if template else {}
    for key in ("bos", "eos"):
        if (name := _content(config.get(f"{key}_token"))) in ids:
            metadata[f"tokenizer.ggml.{key}_token_id"] = str(ids[name])
    return profile_from_metadata(metadata, {id: tokenizer.pieces[id] for id in tokenizer.control_ids}, length)


def _read(path: Path) -> dict[str, Any]:
    """Return a JSON file's object, or an empty one."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    return value if isinstance(value, dict) else {}
