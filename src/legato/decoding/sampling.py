"""Choosing a token from one row of logits: Gumbel-max with keyed noise.

It receives logits (float32, one per token of the vocabulary), the byte offset of the token to choose and the ids
before it, and
returns an id. It knows no tokenizer, engine or request.

The noise of a token is a hash of (seed, choice, stream, byte offset, token id). Nothing is drawn in sequence, so
there is no generator to save, ship or rewind: the same place in the same text meets the same noise, whether the text
came in one round or in ten. Adding Gumbel noise to log-probabilities and taking the largest samples from the
distribution (Gumbel 1954; Maddison et al. 1411.0030). Greedy is the case without noise.

Order: bias, penalties, mask, temperature, top-k, top-p, min-p, noise, then the caller's `accept`; if that refuses a
token, the next best.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from legato.types import Sampling

__all__ = ["COVERS", "TOKENS", "Sampler", "gumbel", "log_softmax", "noise_key", "uniform"]

Row = NDArray[np.float32]
Ids = NDArray[np.int64]
Mask = NDArray[np.bool_]

TOKENS = 0
"""The noise stream of ordinary choices."""
COVERS = 1
"""The noise stream of covers at the seam (`seam.best_cover`)."""

_MASK = (1 << 64) - 1
_HEAD = np.float32(13.0)
"""Candidates within this of the best are scored at once; others only if their noise could lift them so far."""
_MAX_GUMBEL = -float(np.log(-np.log1p(-(0.5**33))))
"""The largest value of `gumbel`, about 22.9: uniforms are odd multiples of 2 ** -33."""
_MAX_REFUSALS = 32
"""After so many refused tokens the first choice stands: here no token satisfies the caller."""


def noise_key(seed: int, choice: int, stream: int, offset: int) -> tuple[int, int]:
    """Mix everything but the token id into two 32-bit words (SplitMix64 steps, Steele et al. 2014)."""
    state = 0
    for value in (seed, choice, stream, offset):
        state = (state + value + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state & 0xFFFFFFFF, state >> 32


def _hash(key: tuple[int, int], ids: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Hash ids to 32 uniform bits: two finalisers (MurmurHash3, lowbias32), a word of the key before each."""
    bits = ids * np.uint32(0x9E3779B1)
    bits += np.uint32(key[0])
    bits ^= bits >> np.uint32(16)
    bits *= np.uint32(0x85EBCA6B)
    bits ^= bits >> np.uint32(13)
    bits *= np.uint32(0xC2B2AE35)
    bits ^= bits >> np.uint32(16)
    bits += np.uint32(key[1])
    bits ^= bits >> np.uint32(16)
    bits *= np.uint32(0x7FEB352D)
    bits ^= bits >> np.uint32(15)
    bits *= np.uint32(0x846CA68B)
    bits ^= bits >> np.uint32(16)
    return bits


def _unhash(key: tuple[int, int], bits: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Return the ids whose hashes these are: every step of `_hash` can be undone."""
    ids = bits ^ (bits >> np.uint32(16))
    ids *= np.uint32(pow(0x846CA68B, -1, 1 << 32))
    ids ^= (ids >> np.uint32(15)) ^ (ids >> np.uint32(30))
    ids *= np.uint32(pow(0x7FEB352D, -1, 1 << 32))
    ids ^= ids >> np.uint32(16)
    ids -= np.uint32(key[1])
    ids ^= ids >> np.uint32(16)
    ids *= np.uint32(pow(0xC2B2AE35, -1, 1 << 32))
    ids ^= (ids >> np.uint32(13)) ^ (ids >> np.uint32(26))
    ids *= np.uint32(pow(0x85EBCA6B, -1, 1 << 32))
    ids ^= ids >> np.uint32(16)
    ids -= np.uint32(key[0])
    ids *= np.uint32(pow(0x9E3779B1, -1, 1 << 32))
    return ids


def _loud(key: tuple[int, int], threshold: int, vocab_size: int) -> Ids:
    """Return the ids below `vocab_size` whose hash is at least `threshold`, by whichever way is shorter."""
    if 2**32 - threshold < vocab_size:
        ids = _unhash(key, np.arange(threshold, 2**32, dtype=np.uint32))
        return np.sort(ids[ids < vocab_size]).astype(np.int64)
    return np.flatnonzero(_hash(key, np.arange(vocab_size, dtype=np.uint32)) >= np.uint32(threshold))


def uniform(key: tuple[int, int], ids: Ids) -> NDArray[np.float64]:
    """Uniform noise in (0, 1), one value per id: odd multiples of 2 ** -33."""
    return (_hash(key, ids.astype(np.uint32)).astype(np.float64) + 0.5) * 2.0**-32


def gumbel(key: tuple[int, int], ids: Ids) -> NDArray[np.float64]:
    """Standard Gumbel noise, one value per id, between -3.2 and 22.9."""
    return -np.log(-np.log(uniform(key, ids)))


def log_softmax(row: Row) -> NDArray[np.float64]:
    """Natural log-probabilities of a row of logits, in double precision."""
    wide = row.astype(np.float64)
    wide -= wide.max()
    wide -= np.log(np.exp(wide).sum())
    return wide


class Sampler:
    """One Job's way of choosing. It holds no state between calls."""

    def __init__(self, sampling: Sampling, *, choice: int) -> None:
        self._sampling = sampling
        self._choice = choice
        self._bias_ids = np.fromiter(sampling.logit_bias.keys(), np.int64)
        self._bias = np.fromiter(sampling.logit_bias.values(), np.float32)
        self.has_penalties = (
            sampling.presence_penalty != 0 or sampling.frequency_penalty != 0 or sampling.repetition_penalty != 1
        )

    def choose(
        self,
        row: Row,
        *,
        offset: int,
        counts: Mapping[int, int],
        accept: Callable[[int], bool],
        allowed: Mask | None = None,
    ) -> int:
        """Return the best token that `accept` takes.

        Args:
            row: logits, unchanged on return.
            offset: byte offset, in the whole rendered text, of the first byte of the token to choose.
            counts: how often each id stands in the text before it; read only if `has_penalties`.
            accept: refuses tokens that may not stand here. If it refuses everything likely, the first choice is
            returned.
            allowed: says of every id whether it may be chosen at all; None: all may.

        Raises:
            ValueError: none may be.
        """
        scores = self.adjusted(row, counts, allowed)
        if allowed is not None and scores.max() == -np.inf:
            raise ValueError("no token is allowed here")
        first = token = self._best(scores, offset)
        for refusals in range(_MAX_REFUSALS):
            if accept(token):
                return token
            if refusals == 0 and scores is row:
                scores = row.copy()
            scores[token] = -np.inf
            if scores.max() == -np.inf:
                break
            token = self._best(scores, offset)
        return first

    def adjusted(self, row: Row, counts: Mapping[int, int], allowed: Mask | None = None) -> Row:
        """Return the row with bias, penalties and mask applied; the row itself if there are none."""
        scores = self._penalised(row, counts)
        return scores if allowed is None else np.where(allowed, scores, np.float32(-np.inf))

    def _penalised(self, row: Row, counts: Mapping[int, int]) -> Row:
        sampling = self._sampling
        if not self._bias_ids.size and not (self.has_penalties and counts):
            return row
        scores = row.copy()
        scores[self._bias_ids] += self._bias
        if self.has_penalties and counts:
            ids = np.fromiter(counts.keys(), np.int64, len(counts))
            num = np.fromiter(counts.values(), np.float32, len(counts))
            seen = scores[ids]
            penalty = np.float32(sampling.repetition_penalty)
            seen = np.where(seen > 0, seen / penalty, seen * penalty)
            scores[ids] = seen - sampling.presence_penalty - sampling.frequency_penalty * num
        return scores

    def cover_logprobs(self, row: Row, counts: Mapping[int, int], allowed: Mask | None = None) -> NDArray[np.float64]:
        """Log-probabilities for scoring covers: bias, penalties, mask and temperature, without the cuts."""
        scores = self.adjusted(row, counts, allowed)
        temperature = self._sampling.temperature
        return log_softmax(scores / np.float32(temperature) if temperature else scores)

    def cover_noise(self, offset: int, ids: Ids) -> NDArray[np.float64]:
        """Noise for covers whose last token begins at `offset`."""
        return gumbel(noise_key(self._sampling.seed, self._choice, COVERS, offset), ids)

    def _best(self, scores: Row, offset: int) -> int:
        sampling = self._sampling
        if not sampling.temperature:
            return int(scores.argmax())
        scale = np.float32(1 / sampling.temperature)
        key = noise_key(sampling.seed, self._choice, TOKENS, offset)
        if sampling.top_k or sampling.top_p < 1 or sampling.min_p:
            scaled = scores * scale
            ids = self._cut(scaled, scaled.max())
            return int(ids[(scaled[ids] + gumbel(key, ids)).argmax()])
        # The whole row is read twice, and never copied: it is not in the processor's cache.
        lowest = scores.max() - np.float32(_HEAD / scale)
        ids = np.flatnonzero(scores >= lowest)
        noisy = scores[ids] * scale + gumbel(key, ids)
        at = int(noisy.argmax())
        winner, score = int(ids[at]), float(noisy[at])
        # A token outside the head stands below `lowest`: only noise above `needed` could still make it win.
        needed = score - float(lowest * scale)
        if needed < _MAX_GUMBEL:
            threshold = int(min(2.0**32 - 1, max(0.0, np.floor(np.exp(-np.exp(-needed)) * 2.0**32))))
            ids = _loud(key, threshold, scores.size)
            if ids.size:
                noisy = scores[ids] * scale + gumbel(key, ids)
                at = int(noisy.argmax())
                if noisy[at] > score:
                    winner = int(ids[at])
        return winner

    def _cut(self, scaled: Row, best: np.float32) -> Ids:
        """Return the ids that top-k, top-p and min-p leave, the likeliest first; never none."""
        sampling = self._sampling
        if 0 < sampling.top_k < scaled.size:
            ids = np.argpartition(scaled, -sampling.top_k)[-sampling.top_k :]
            total = np.exp(scaled[ids] - best).sum(dtype=np.float64)
        else:
            ids, total = self._likely(scaled, best)
        # Ties are ordered by id, so that the cut does not depend on how a partition happened to order them.
        ids = ids[np.lexsort((ids, -scaled[ids]))]
        if sampling.top_p < 1:
            mass = np.cumsum(np.exp(scaled[ids] - best), dtype=np.float64)
            ids = ids[: int(np.searchsorted(mass, sampling.top_p * total)) + 1]
        if sampling.min_p:
            ids = ids[scaled[ids] >= best + np.float32(np.log(sampling.min_p))]
        return ids

    def _likely(self, scaled: Row, best: np.float32) -> tuple[Ids, float]:
        """Return ids, all that min-p leaves or enough for top-p, and the sum of all weights."""
        sampling = self._sampling
        weights = np.exp(scaled - best)
        total = float(weights.sum(dtype=np.float64))
        if sampling.min_p:
            return np.flatnonzero(scaled >= best + np.float32(np.log(sampling.min_p))), total
        spread = np.float32(4.0)
        while True:
            ids = np.flatnonzero(scaled >= best - spread)
            if ids.size == scaled.size or weights[ids].sum(dtype=np.float64) > sampling.top_p * total:
                return ids, total
            spread *= 2
