"""The tokenizer files that a model has at its publisher's, made from its GGUF file."""

from __future__ import annotations

import json
from pathlib import Path

__all__ = ["write_small_tokenizer", "write_tokenizer"]

_CONTROL, _USER_DEFINED = 3, 4
_DIGITS = {"type": "Digits", "individual_digits": True}
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def write_tokenizer(gguf_file: Path, folder: Path) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` and `config.json` of a model with SmolLM's tokenizer."""
    import gguf

    fields = gguf.GGUFReader(gguf_file).fields
    tokens, kinds, merges = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "token_type", "merges"))
    added = [
        {
            "id": id,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == _CONTROL,
        }
        for id, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    end = tokens[fields["tokenizer.ggml.eos_token_id"].contents()]
    files = {
        "tokenizer.json": {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            "normalizer": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [_DIGITS, _BYTE_LEVEL]},
            "post_processor": None,
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "vocab": {token: id for id, token in enumerate(tokens)},
                "merges": merges,
            },
        },
        "tokenizer_config.json": {
            "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"].contents()],
            "eos_token": end,
            "chat_template": fields["tokenizer.chat_template"].contents(),
        },
        "config.json": {"max_position_embeddings": 2048},
    }
    for name, facts in files.items():
        (folder / name).write_text(json.dumps(facts), "utf-8")


def write_small_tokenizer(folder: Path) -> None:
    """Write the files of a model that has a token for each byte, and for a few words."""
    from tokenizers.pre_tokenizers import ByteLevel

    merges = [["t", "h"], ["th", "e"], ["Ġ", "the"], ["i", "n"], ["Ġ", "in"], ["in", "g"], ["e", "r"]]
    words = [*sorted(ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    end = {"id": len(words), "content": "<|end|>", "special": True}
    end |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    template = "{% for message in messages %}{{ message.content }}<|end|>{% endfor %}"
    files = {
        "tokenizer.json": {
            "version": "1.0",
            "added_tokens": [end],
            "pre_tokenizer": _BYTE_LEVEL,
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": {"type": "BPE", "vocab": {word: id for id, word in enumerate(words)}, "merges": merges},
        },
        "tokenizer_config.json": {"eos_token": "<|end|>", "chat_template": template},
        "config.json": {"max_position_embeddings": 512},
    }
    for name, facts in files.items():
        (folder / name).write_text(json.dumps(facts), "utf-8")
