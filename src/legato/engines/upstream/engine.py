"""A Job as requests to a server that continues token ids: vLLM, SGLang, llama-server, or Legato itself.

The seam is made of plain requests. *Replay* is one for a few tokens from the boundary. If they agree with the heal
bytes, the answer goes on from them. Else the *covers* are scored: for every inner path one request for each of its
tokens, and one for the last token, which a bias confines to those that begin with what is left of the heal bytes. The
log-probabilities that come back are the model's own, and the server's prefix cache makes the requests short.

What such a server cannot do is not done: noise by the key of a place, so that sampled text depends on how it was cut,
and canonical sampling. `capabilities` says so, and the report names it.

A vLLM with Legato's plug-in (`legato.vllm`) can. There the Job travels with the request, and every token is chosen as
the embedded engine chooses it: replay and answer are one request. If the replay does not agree, the covers are scored
there, with a request for each inner path. A server gets no Job before it has shown that the plug-in acts.

A request is made again elsewhere as long as nothing has come of it. A server that dies later, or sends what is no
answer, loses the Job to another, which goes on from its tokens.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from legato.decoding.choice import ends_of
from legato.decoding.seam import Inner, Seam
from legato.engines.upstream.events import Part, joined
from legato.engines.upstream.plugin import NUM_DIGITS, decode_score, encode_request
from legato.engines.upstream.servers import BrokenOff, Lost, Proof, Servers
from legato.engines.upstream.tokenizer import JsonTokenizer, read_profile
from legato.errors import EngineUnavailable, GenerationFailed
from legato.system.supervisor import together
from legato.types import Capabilities, Job, Prompt, Sampling, ScoredToken, Step, Token, Tokenizer

__all__ = ["UpstreamEngine"]

_MAX_BIASED = 300
"""Tokens that a request may confine the choice to: vLLM takes no more."""
_BIAS = 100.0
_MAX_INNER = 6
_MAX_TRIED = 4
"""Last tokens tried for one inner path until one is canonical."""
_NUM_PROVING = 4
"""Tokens, drawn at random, that a server has to write to show that the plug-in acts."""
_MAX_FAILURES = 3
"""Servers that a Job may lose until it is given up."""


class UpstreamEngine:
    """One model on one or more servers. Make it with `start`."""

    def __init__(
        self, urls: Sequence[str], *, model: str, key: str, folder: Path, context_length: int, has_plugin: bool
    ) -> None:
        self.capabilities = Capabilities(
            logprobs=True,
            score_prompt=False,
            canonical=has_plugin,
            keyed_noise=has_plugin,
            ends=True,
            thinking=False,
            constraints=False,
        )
        self._has_plugin = has_plugin
        self._model = model
        self._num_running = 0
        self.num_lost = 0
        self.tokenizer = JsonTokenizer(folder)
        self.seam = Seam(self.tokenizer)
        self._servers = Servers(
            urls, key=key, num_ids=len(self.tokenizer.pieces), make_proof=self._proof if has_plugin else None
        )
        self.profile = read_profile(folder, self.tokenizer, context_length)

    @classmethod
    async def start(
        cls,
        urls: Sequence[str],
        *,
        model: str,
        key: str,
        folder: Path,
        context_length: int = 0,
        has_plugin: bool = False,
    ) -> UpstreamEngine:
        """Read the tokenizer's files; servers are asked when there is something to ask.

        Args:
            urls: where the model is served, such as `http://gpu-1:8000`.
            model: what it is called there; empty: the first one that a server lists.
            key: sent as a bearer token; empty: none.
            folder: the model's `tokenizer.json`, `tokenizer_config.json` and `config.json`.
            context_length: in tokens; 0: what `config.json` says.
            has_plugin: whether the servers have the plug-in `legato.vllm`. One that has not gets no Jobs.

        Raises:
            ConfigError: the files do not suffice, or no server tells the model's name.
        """
        engine = cls(urls, model=model, key=key, folder=folder, context_length=context_length, has_plugin=has_plugin)
        if not model:
            engine._model = await engine._servers.first_model()
        return engine

    async def generate(self, job: Job) -> AsyncGenerator[Step, None]:
        """Run a Job. Close the iterator to cancel it.

        Raises:
            EngineUnavailable: no server can be reached, or none has room.
            GenerationFailed: one server after the other was lost, or one refuses what it was asked.
        """
        self._num_running += 1
        num_lost = 0
        is_accepted = False
        try:
            while True:
                tokens: list[Token] = []
                try:
                    async with aclosing(self._run(job)) as steps:
                        async for step in steps:
                            if step.tokens or step.finish is not None or not is_accepted:
                                yield step
                            is_accepted = True
                            tokens.extend(step.tokens)
                            if step.finish is not None:
                                return
                except Lost as error:
                    num_lost += 1
                    self.num_lost += 1
                    if not is_accepted and (num_lost >= _MAX_FAILURES or not isinstance(error, BrokenOff)):
                        raise EngineUnavailable(f"no server of this model answers: {error}") from None
                    if num_lost >= _MAX_FAILURES:
                        raise GenerationFailed(f"{num_lost} servers were lost, the last one: {error}") from None
                job = job.resumed(tokens)
        finally:
            self._num_running -= 1

    def counters(self) -> Mapping[str, int]:
        """Return how many Jobs run, how often a server was lost, and how many are left alone now."""
        return {"running": self._num_running, "lost": self.num_lost, "down": self._servers.num_failed}

    async def aclose(self) -> None:
        """Close all connections."""
        self._servers.close()

    # -- one Job ------------------------------------------------------------------------------------------------------

    async def _run(self, job: Job) -> AsyncGenerator[Step, None]:
        """Run a Job on one server: to its end, or to a place behind which it goes on as another request."""
        if job.max_tokens == 0:
            await self._ask(job, job.prompt.ids, 1)  # Into the cache.
            yield Step()
            yield Step(finish="length")
        elif job.prompt.heal and not self._has_plugin:
            healed = await self._replay(job) or await self._condition(job)
            yield Step()
            yield _healed(job, healed)
        else:
            async with aclosing(self._stream(job)) as steps:
                async for step in steps:
                    yield step

    async def _stream(self, job: Job) -> AsyncGenerator[Step, None]:
        """Run a Job as one request. Heal bytes are the plug-in's to write; they are told when they are covered."""
        ids, limit = job.prompt.ids, job.max_tokens
        room = self.profile.context_length - len(ids)
        written: list[Token] = []
        num_told, reason = 0, None
        agrees = None if job.prompt.heal else True
        body = self._body(job, ids, min(limit + len(self._spelling(job)), room))
        async with aclosing(self._servers.parts(ids, body)) as parts:
            is_accepted = False
            async for part in parts:
                if not is_accepted:
                    is_accepted = True
                    yield Step()
                written += _tokens(part, job, self.tokenizer)
                if part.reason is not None:
                    reason = part.reason
                    if written and written[-1].id in ends_of(job, self.tokenizer):
                        written.pop()
                if agrees is None and (agrees := self._agreement(job, written)):
                    limit = len(written) + job.resumed(written).max_tokens
                if agrees is False:
                    break
                if agrees and (tokens := tuple(written[num_told:limit])):
                    num_told += len(tokens)
                    yield Step(tokens)
                if num_told == limit and reason is None:
                    break
        if not agrees and (agrees is False or reason is not None):
            yield _healed(job, await self._condition(job))
        elif num_told == limit or len(written) == room:
            yield Step(finish="length")
        elif reason != "length" or not job.prompt.heal:
            yield Step(finish="length" if reason == "length" else "stop")

    # -- the seam -----------------------------------------------------------------------------------------------------

    def _spelling(self, job: Job) -> list[int]:
        """Return the canonical encoding of the heal bytes."""
        prompt = job.prompt
        return self.seam.encode_after(prompt.ids, prompt.floor, prompt.heal) if prompt.heal else []

    def _agreement(self, job: Job, tokens: Sequence[Token]) -> bool | None:
        """Whether tokens write the heal bytes; None: as far as they go."""
        heal, data = job.prompt.heal, b""
        for token in tokens:
            data += token.data
            if token.id in self.tokenizer.end_ids or not (data.startswith(heal) or heal.startswith(data)):
                return False
            if len(data) >= len(heal):
                return True
        return None

    async def _replay(self, job: Job) -> list[Token]:
        """Return the tokens that the model writes for the heal bytes; none: it writes something else."""
        answer = await self._ask(job, job.prompt.ids, len(self._spelling(job)) + 2)
        replayed: list[Token] = []
        for token in _tokens(answer, job, self.tokenizer):
            replayed.append(token)
            if (agrees := self._agreement(job, replayed)) is not None:
                return replayed if agrees else []
        return []

    async def _condition(self, job: Job) -> list[Token]:
        """Return the best cover of the heal bytes; the last token may go beyond them."""
        prompt, spelling = job.prompt, self._spelling(job)
        inners = self.seam.inners(prompt.ids, prompt.floor, prompt.heal, spelling)
        inners.sort(key=lambda inner: len(inner.ids) + len(inner.rest))
        cover = self._scored_cover if self._has_plugin else self._cover
        scored = await together(*(cover(job, inner) for inner in inners[:_MAX_INNER]))
        found = [entry for entry in scored if entry is not None]
        if not found:
            return [Token(id, self.tokenizer.pieces[id]) for id in spelling]
        if self._has_plugin or job.sampling.temperature == 0:
            return max(found, key=lambda entry: entry[0])[1]
        weights = np.array([score for score, _ in found]) / job.sampling.temperature
        noise = np.random.default_rng([job.sampling.seed % 2**63, job.choice, prompt.origin]).gumbel(size=len(found))
        return found[int((weights + noise).argmax())][1]

    async def _scored_cover(self, job: Job, inner: Inner) -> tuple[float, list[Token]] | None:
        """Return the best cover over an inner path and its noisy score, as the plug-in has it; None: there is none."""
        num = len(inner.ids) + 1
        fields = {"ignore_eos": True, "stop_token_ids": None, "vllm_xargs": encode_request(job, inner.ids)}
        tokens = _tokens(await self._ask(job, job.prompt.ids, num + NUM_DIGITS, **fields), job, self.tokenizer)
        if len(tokens) != num + NUM_DIGITS:
            raise Lost("the plug-in does not act there")
        score, cover = decode_score([token.id for token in tokens[num:]], len(self.tokenizer.pieces)), tokens[:num]
        if score == -math.inf:
            return None
        if not self._agreement(job, cover):
            raise Lost("the plug-in does not act there")
        return score, list(cover)

    async def _cover(self, job: Job, inner: Inner) -> tuple[float, list[Token]] | None:
        """Return the likeliest cover over an inner path and its joint log-probability; None: there is none."""
        prompt, pieces = job.prompt, self.tokenizer.pieces
        score, tokens = 0.0, []
        for num, id in enumerate(inner.ids):
            token = await self._choose(job, (*prompt.ids, *inner.ids[:num]), [id])
            score += -math.inf if token.logprob is None else token.logprob
            tokens.append(replace(token, id=id, data=pieces[id]))
        rest = self.seam.candidates(inner.rest)
        allowed = [int(id) for id in sorted(rest, key=lambda id: len(pieces[id]))[:_MAX_BIASED]]
        context = (*prompt.ids, *inner.ids)
        for _ in range(_MAX_TRIED):
            if not allowed:
                return None
            token = await self._choose(job, context, allowed)
            if token.id not in allowed:
                return None
            if self.seam.is_canonical(context, prompt.floor, token.id):
                return score + (token.logprob or 0.0), [*tokens, token]
            allowed.remove(token.id)
        return None

    async def _choose(self, job: Job, ids: Sequence[int], allowed: Sequence[int]) -> Token:
        """Return the likeliest of some tokens behind `ids`, with its log-probability among all."""
        bias = {str(id): _BIAS for id in allowed}
        plain = replace(job, sampling=replace(job.sampling, temperature=0.0), min_tokens=0, logprobs=0)
        tokens = _tokens(await self._ask(plain, ids, 1, logit_bias=bias), plain, self.tokenizer)
        return tokens[0] if tokens else Token(-1, b"")

    # -- requests -----------------------------------------------------------------------------------------------------

    def _body(self, job: Job, ids: Sequence[int], max_tokens: int) -> dict[str, Any]:
        """Return a streamed request. Fields that a server does not know do no harm: the defaults of others are turned
        off. The plug-in chooses by what travels with the request, and leaves nothing to choose for the server.
        """
        args = encode_request(job) if self._has_plugin else None
        if self._has_plugin:
            job = replace(job, sampling=Sampling(seed=0, temperature=0.0), min_tokens=0)
        sampling = job.sampling
        return {
            "model": self._model,
            "prompt": list(ids),
            "stream": True,
            "max_tokens": max_tokens,
            # The fields of `Sampling` have the names that vLLM gives them; those below differ in their values.
            **{field.name: getattr(sampling, field.name) for field in fields(sampling)},
            "top_k": sampling.top_k or -1,
            "logit_bias": {str(id): value for id, value in sampling.logit_bias.items()} or None,
            "seed": (sampling.seed + job.choice) % 2**63,
            "min_tokens": min(job.min_tokens, max_tokens),
            "ignore_eos": job.ignore_end,
            "stop_token_ids": sorted(ends_of(job, self.tokenizer)) or None,
            "vllm_xargs": args,
            "logprobs": job.logprobs,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "skip_special_tokens": False,
            "add_special_tokens": False,
            "seam": "none",
        }

    async def _ask(self, job: Job, ids: Sequence[int], max_tokens: int, **fields: Any) -> Part:
        """Return a whole answer: the fold of its events. `fields` go before those of the Job."""
        body = {**self._body(job, ids, max_tokens), **fields}
        async with aclosing(self._servers.parts(ids, body)) as parts:
            return joined([part async for part in parts])

    def _proof(self) -> Proof:
        """Return what shows that the plug-in acts on a server: it writes tokens there that no model would."""
        size = len(self.tokenizer.pieces)
        drawn = [secrets.randbelow(size) for _ in range(_NUM_PROVING)]
        prompt = Prompt(tuple(self.tokenizer.encode(b"a", special=False)), (), b"", origin=0, floor=0, prefix="")
        job = Job("", 0, prompt, _NUM_PROVING, Sampling(seed=0, temperature=0.0), ignore_end=True)
        body = {**self._body(job, prompt.ids, _NUM_PROVING), "vllm_xargs": encode_request(job, drawn)}
        return Proof(body, drawn, "`upstream_plugin` is set, but the plug-in does not act there")


def _tokens(part: Part, job: Job, tokenizer: Tokenizer) -> tuple[Token, ...]:
    """Return what a part has written. A server that tells no ids gives text, which is tokenised."""
    pieces = tokenizer.pieces
    ids = part.ids or tokenizer.encode(part.text.encode(), special=False)
    if job.logprobs is None:
        return tuple(Token(id, pieces[id]) for id in ids)
    return tuple(
        Token(
            id,
            pieces[id],
            part.logprobs[at] if at < len(part.logprobs) else None,
            _top(part.tops[at], job.logprobs, tokenizer) if at < len(part.tops) else (),
        )
        for at, id in enumerate(ids)
    )


def _top(scores: Mapping[str | int, float], num: int, tokenizer: Tokenizer) -> tuple[ScoredToken, ...]:
    found = []
    for token, logprob in scores.items():
        ids = [token] if isinstance(token, int) else tokenizer.encode(token.encode(), special=True)
        if len(ids) == 1:
            found.append(ScoredToken(ids[0], tokenizer.pieces[ids[0]], logprob))
    return tuple(sorted(found, key=lambda token: -token.logprob)[:num])


def _healed(job: Job, tokens: Sequence[Token]) -> Step:
    """Return the Step that tells a cover, which ends the answer if there may be nothing behind it."""
    return Step(tuple(tokens), finish=None if job.resumed(tokens).max_tokens > 0 else "length")
