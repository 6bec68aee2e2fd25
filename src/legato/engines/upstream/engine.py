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

A request is made again elsewhere as long as nothing has come of it. A server that dies later loses the Job to another,
which goes on from its tokens.
"""

from __future__ import annotations

import asyncio
import json
import math
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from legato.choosing import ends_of
from legato.engines.upstream.http import HttpClient
from legato.engines.upstream.plugin import NUM_DIGITS, decode_score, encode_request
from legato.engines.upstream.replicas import Replicas
from legato.engines.upstream.tokenizer import JsonTokenizer, read_profile
from legato.errors import ConfigError, EngineUnavailable, GenerationFailed
from legato.seam import Inner, Seam
from legato.supervisor import together
from legato.types import Capabilities, Job, Prompt, Sampling, ScoredToken, Step, Token
from legato.wire import EventReader, encode_json

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
_ID = "token_id:"
"""How vLLM writes a token in log-probabilities if it is asked for ids."""


class _Lost(Exception):
    """A server is gone, or cannot answer now; another may."""


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
        self._proven: set[str] = set()
        self._model = model
        self._client = HttpClient({"authorization": f"Bearer {key}"} if key else {})
        bases = [url.rstrip("/").removesuffix("/v1") for url in urls]
        self._replicas = Replicas(bases, asyncio.get_running_loop().time)
        self._num_running = 0
        self.num_lost = 0
        self.tokenizer = JsonTokenizer(folder)
        self.seam = Seam(self.tokenizer)
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
            engine._model = await engine._first_model()
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
                except _Lost as error:
                    num_lost += 1
                    self.num_lost += 1
                    if not is_accepted:
                        raise EngineUnavailable(f"no server of this model answers: {error}") from None
                    if num_lost >= _MAX_FAILURES:
                        raise GenerationFailed(f"{num_lost} servers were lost, the last one: {error}") from None
                job = job.resumed(tokens)
        finally:
            self._num_running -= 1

    def counters(self) -> Mapping[str, int]:
        """Return how many Jobs run, how often a server was lost, and how many are left alone now."""
        return {"running": self._num_running, "lost": self.num_lost, "down": self._replicas.num_failed}

    async def aclose(self) -> None:
        """Close all connections."""
        self._client.close()

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
        async with aclosing(self._events(ids, body)) as events:
            is_accepted = False
            async for event in events:
                if not is_accepted:
                    is_accepted = True
                    yield Step()
                choice = (event.get("choices") or [{}])[0]
                written += self._tokens(choice, job)
                if choice.get("finish_reason") is not None:
                    reason = choice["finish_reason"]
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
        elif reason is None:
            raise _Lost("the stream ended before the answer")
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
        choice = await self._ask(job, job.prompt.ids, len(self._spelling(job)) + 2)
        replayed: list[Token] = []
        for token in self._tokens(choice, job):
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
        tokens = self._tokens(await self._ask(job, job.prompt.ids, num + NUM_DIGITS, **fields), job)
        score = decode_score([token.id for token in tokens[num:]], len(self.tokenizer.pieces))
        return None if score == -math.inf else (score, list(tokens[:num]))

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
        choice = await self._ask(plain, ids, 1, logit_bias=bias)
        tokens = self._tokens(choice, plain)
        if not tokens:
            return Token(-1, b"")
        return tokens[0]

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
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "repetition_penalty": sampling.repetition_penalty,
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

    async def _ask(self, job: Job, ids: Sequence[int], max_tokens: int, **fields: Any) -> dict[str, Any]:
        """Return the choice of a whole answer: the fold of its events. `fields` go before those of the Job."""
        body = {**self._body(job, ids, max_tokens), **fields}
        choice: dict[str, Any] = {"text": "", "token_ids": [], "logprobs": None, "finish_reason": None}
        async with aclosing(self._events(ids, body)) as events:
            async for event in events:
                for part in event.get("choices") or ():
                    choice["text"] += part.get("text") or ""
                    choice["token_ids"] += part.get("token_ids") or []
                    for key, values in (part.get("logprobs") or {}).items():
                        choice["logprobs"] = choice["logprobs"] or {}
                        choice["logprobs"].setdefault(key, []).extend(values or [])
                    choice["finish_reason"] = part.get("finish_reason") or choice["finish_reason"]
        if choice["finish_reason"] is None:
            raise _Lost("the stream ended before the answer")
        return choice

    async def _events(self, ids: Sequence[int], body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the events of a stream, an empty one first; servers are tried in turn until one has answered.

        Raises:
            _Lost: none answers, or the one that did is gone.
        """
        reason = "there is none"
        for url in self._replicas.order(ids):
            is_answered = False
            try:
                if self._has_plugin and url not in self._proven:
                    await self._prove(url)
                with self._replicas.running(url, ids):
                    async with aclosing(self._post(url, body)) as events:
                        async for event in events:
                            is_answered = is_answered or bool(event)
                            yield event
                if is_answered:
                    self._replicas.worked(url)
                    return
                raise _Lost("it answered nothing")
            except (_Lost, OSError) as error:
                self._replicas.failed(url)
                self._proven.discard(url)
                reason = f"{url}: {str(error) or type(error).__name__}"
                if is_answered:
                    break
        raise _Lost(reason)

    async def _post(self, url: str, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Yield an empty event when a server takes a request on, and then those of its stream, which is read to its end
        so that its connection can be kept.
        """
        reader = EventReader()
        with closing(await self._client.ask("POST", url, "/v1/completions", encode_json(body))) as answer:
            if answer.status != 200:
                self._refuse(answer.status, (await answer.whole()).decode("utf-8", "replace"))
            yield {}
            while (piece := await answer.piece()) is not None:
                for data in reader.feed(piece):
                    if data == b"[DONE]":
                        continue
                    event = json.loads(data)
                    if event.get("error"):
                        raise _Lost(_message(event))
                    yield event

    async def _prove(self, url: str) -> None:
        """See that the plug-in acts on a server: it writes tokens there that no model would.

        Raises:
            _Lost: it does not.
        """
        size = len(self.tokenizer.pieces)
        drawn = [secrets.randbelow(size) for _ in range(_NUM_PROVING)]
        prompt = Prompt(tuple(self.tokenizer.encode(b"a", special=False)), (), b"", origin=0, floor=0, prefix="")
        job = Job("", 0, prompt, _NUM_PROVING, Sampling(seed=0, temperature=0.0), ignore_end=True)
        body = {**self._body(job, prompt.ids, _NUM_PROVING), "vllm_xargs": encode_request(job, drawn)}
        written: list[int] = []
        async with aclosing(self._post(url, body)) as events:
            async for event in events:
                for choice in event.get("choices") or ():
                    written += choice.get("token_ids") or []
        if written != drawn:
            raise _Lost("`upstream_plugin` is set, but the plug-in does not act there")
        self._proven.add(url)

    def _refuse(self, status: int, text: str) -> None:
        """Raise what a server's refusal means.

        Raises:
            _Lost: it cannot answer now.
            GenerationFailed: it never will.
        """
        try:
            message = _message(json.loads(text))
        except ValueError:
            message = text[:200]
        if status in (408, 429) or status >= 500:
            raise _Lost(f"status {status}: {message}")
        raise GenerationFailed(f"the model's server refuses the request ({status}): {message}")

    async def _first_model(self) -> str:
        """Return the name of the first model that a server lists.

        Raises:
            ConfigError: none does.
        """
        reason = "no address is set"
        for url in self._replicas.order(()):
            try:
                with closing(await self._client.ask("GET", url, "/v1/models")) as answer:
                    if answer.status != 200:
                        raise OSError(f"status {answer.status}")
                    return str(json.loads(await answer.whole())["data"][0]["id"])
            except (OSError, ValueError, LookupError, TypeError) as error:
                reason = f"{url}: {str(error) or type(error).__name__}"
        raise ConfigError(f"no server tells the name of its model, so set `upstream_model` ({reason})")

    # -- answers ------------------------------------------------------------------------------------------------------

    def _tokens(self, choice: Mapping[str, Any], job: Job) -> tuple[Token, ...]:
        """Return what a choice has written. A server that tells no ids gives text, which is tokenised."""
        pieces = self.tokenizer.pieces
        ids = choice.get("token_ids")
        if not ids:
            ids = self.tokenizer.encode((choice.get("text") or "").encode(), special=False)
        if job.logprobs is None:
            return tuple(Token(id, pieces[id]) for id in ids)
        scores = choice.get("logprobs") or {}
        own, tops = scores.get("token_logprobs") or (), scores.get("top_logprobs") or ()
        return tuple(
            Token(
                id,
                pieces[id],
                own[at] if at < len(own) else None,
                self._top(tops[at] or {}, job.logprobs) if at < len(tops) else (),
            )
            for at, id in enumerate(ids)
        )

    def _top(self, scores: Mapping[str, float], num: int) -> tuple[ScoredToken, ...]:
        found = []
        for name, logprob in scores.items():
            ids = (
                [int(name[len(_ID) :])] if name.startswith(_ID) else self.tokenizer.encode(name.encode(), special=True)
            )
            if len(ids) == 1:
                found.append(ScoredToken(ids[0], self.tokenizer.pieces[ids[0]], logprob))
        return tuple(sorted(found, key=lambda token: -token.logprob)[:num])


def _healed(job: Job, tokens: Sequence[Token]) -> Step:
    """Return the Step that tells a cover, which ends the answer if there may be nothing behind it."""
    return Step(tuple(tokens), finish=None if job.resumed(tokens).max_tokens > 0 else "length")


def _message(body: Any) -> str:
    error = body.get("error", body) if isinstance(body, Mapping) else body
    return str(error.get("message", error) if isinstance(error, Mapping) else error)[:200]
