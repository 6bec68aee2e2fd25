"""A plug-in for vLLM: a logits processor that chooses as the embedded engine does.

vLLM loads it by the entry point `vllm.logits_processors` where Legato is installed beside it. It receives the Jobs in
`vllm_xargs` and rows of logits, and lifts in each row the one token that was chosen; the request asks vLLM to be
greedy. Requests of others are not touched. The choosing is `engines.upstream.plugin`, in numpy; nothing but this module
needs vLLM and torch, and nothing of Legato imports it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from legato.decoding.seam import Seam
from legato.engines.upstream.plugin import Chooser, decode_request
from legato.engines.upstream.tokenizer import JsonTokenizer

__all__ = ["SeamProcessor"]


class SeamProcessor(LogitsProcessor):  # type: ignore[misc]
    """Implements vLLM's interface for processors of a batch's logits."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        """Read the model's tokenizer.

        Raises:
            ConfigError: it is of a kind that cannot spell bytes.
        """
        self._tokenizer = JsonTokenizer(_folder(vllm_config.model_config))
        self._seam = Seam(self._tokenizer)
        self._requests: dict[int, tuple[Chooser, list[int]]] = {}
        """By their row: how to choose, and what was written, which vLLM keeps up to date."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Refuse a request whose Job cannot be read.

        Raises:
            ValueError: it is not one of this version.
        """
        decode_request(sampling_params.extra_args)

    def is_argmax_invariant(self) -> bool:
        """Whether greedy choices stay as they are: no, they are what this is about."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow requests as they come, move and leave."""
        process_dict_updates(self._requests, batch_update, self._request)

    def _request(self, params: Any, prompt: list[int] | None, written: list[int]) -> tuple[Chooser, list[int]] | None:
        request = decode_request(params.extra_args)
        if request is None:
            return None
        return Chooser(*request, self._tokenizer, self._seam, prompt or ()), written

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Lift one token above all others in each row that has a Job."""
        if not self._requests:
            return logits
        indices = torch.tensor(list(self._requests), device=logits.device)
        rows = logits[indices][:, : len(self._tokenizer.pieces)].cpu().numpy()
        chosen = [
            chooser.choose(row, written) for row, (chooser, written) in zip(rows, self._requests.values(), strict=True)
        ]
        logits[indices, torch.tensor(chosen, device=logits.device)] = torch.finfo(logits.dtype).max
        return logits


def _folder(config: Any) -> Path:
    """Return where the tokenizer's files are, downloaded if they are not here."""
    if Path(config.tokenizer).is_dir():
        return Path(config.tokenizer)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(config.tokenizer, revision=config.tokenizer_revision, allow_patterns=["*.json"]))
