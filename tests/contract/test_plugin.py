"""The plug-in for vLLM: with it, the engine on other servers writes what the embedded engine writes."""

from __future__ import annotations

import importlib.util
import math
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato.engines.upstream.plugin import decode_request, decode_score, encode_request, encode_score
from legato.types import Job, Prompt, Sampling
from tests.conftest import SMALL, Served, serve_front, tokenizer_folder
from tests.vllm import Vllm, serve_vllm

TEXT = "The lighthouse keeper had not spoken to anyone for three weeks when"
SAMPLED = {"temperature": 0.8, "top_p": 0.95}


@pytest.fixture(scope="module")
def vllm() -> Iterator[Vllm]:
    with serve_vllm(SMALL, tokenizer_folder()) as served:
        yield served


@pytest.fixture(scope="module")
def front(vllm: Vllm) -> Iterator[Served]:
    with serve_front(vllm.url, upstream_plugin=True) as served:
        yield served


def told(served: Served, prompt: str, **fields: Any) -> list[str]:
    """The texts of an answer."""
    return [choice["text"] for choice in served.complete(prompt, **fields)["choices"]]


# ---------------------------------------------------------------------------------------------------------------------
# The same text as the embedded engine's


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {**SAMPLED, "n": 2},
        {"temperature": 1.0, "top_k": 40, "min_p": 0.02, "seed": 2**63},
        {"frequency_penalty": 0.7, "presence_penalty": 0.3, "repetition_penalty": 1.1, "temperature": 0.6},
        {"logit_bias": {"253": 4.0}, "canonical": False, "temperature": 0.9},
        {"min_tokens": 12, "stop_token_ids": [28], "temperature": 0.8},
        {"ignore_eos": True, "temperature": 1.2},
    ],
    ids=lambda fields: ",".join(fields) or "greedy",
)
def test_an_answer_is_that_of_the_embedded_engine(front: Served, small: Served, fields: dict[str, Any]) -> None:
    assert told(front, TEXT, max_tokens=20, **fields) == told(small, TEXT, max_tokens=20, **fields)


@pytest.mark.parametrize("temperature", [0, 0.8])
@pytest.mark.parametrize("prefix", ["The capital of Fran", "def quick_so", "1, 2, 3, 4, 1", "Мама мыла ра"])
def test_a_prefix_is_covered_as_by_the_embedded_engine(
    front: Served, small: Served, prefix: str, temperature: float
) -> None:
    for seed in range(1, 4):
        asked = {"temperature": temperature, "seed": seed, "max_tokens": 6}
        assert told(front, prefix, **asked) == told(small, prefix, **asked)


def test_scores_usage_and_report_are_those_of_the_embedded_engine(front: Served, small: Served) -> None:
    mine, theirs = (
        served.complete(f"{TEXT} he sa", max_tokens=8, logprobs=2, report=True) for served in (front, small)
    )
    assert mine["legato"]["absent"] == theirs["legato"]["absent"] == []
    assert mine["legato"]["healed_bytes"] == theirs["legato"]["healed_bytes"]
    assert (mine["usage"]["prompt_tokens"], mine["usage"]["completion_tokens"]) == (
        theirs["usage"]["prompt_tokens"],
        theirs["usage"]["completion_tokens"],
    )
    mine, theirs = (answer["choices"][0]["logprobs"] for answer in (mine, theirs))
    assert mine["tokens"] == theirs["tokens"]
    assert mine["token_logprobs"] == pytest.approx(theirs["token_logprobs"], abs=1e-4)
    assert mine["top_logprobs"] == [pytest.approx(top, abs=1e-4) for top in theirs["top_logprobs"]]


# ---------------------------------------------------------------------------------------------------------------------
# The second law


@pytest.mark.parametrize("fields", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_the_split_does_not_matter(front: Served, fields: dict[str, Any]) -> None:
    (whole,) = told(front, TEXT, max_tokens=32, **fields)
    for at in range(1, len(whole), 13):
        (rest,) = told(front, TEXT + whole[:at], max_tokens=12, **fields)
        assert rest.startswith(whole[at:]) or whole[at:].startswith(rest), at


def test_eight_rounds_are_one_run(front: Served) -> None:
    (whole,) = told(front, TEXT, max_tokens=32, **SAMPLED)
    text = ""
    for _ in range(8):
        text += told(front, TEXT + text, max_tokens=4, **SAMPLED)[0]
    assert text == whole


def test_an_uncut_word_costs_one_request(front: Served, vllm: Vllm) -> None:
    (whole,) = told(front, TEXT, max_tokens=12)
    num = len(vllm.prompts)
    told(front, TEXT + whole[: len(whole) // 2], max_tokens=4)
    assert len(vllm.prompts) == num + 1


def test_an_answer_whose_server_is_lost_goes_on_as_it_would_have(front: Served, vllm: Vllm) -> None:
    asked = {"max_tokens": 16, **SAMPLED}
    expected = told(front, f"{TEXT} he sa", **asked)
    vllm.drops_after = [2, 7]
    num = len(vllm.prompts)
    assert told(front, f"{TEXT} he sa", **asked) == expected
    assert len(vllm.prompts) > num + 2
    assert not vllm.drops_after


# ---------------------------------------------------------------------------------------------------------------------
# Nothing is pretended


def test_a_server_without_the_plugin_gets_no_jobs(vllm: Vllm) -> None:
    with serve_vllm(SMALL, tokenizer_folder(), has_plugin=False) as plain:
        with serve_front(plain.url, upstream_plugin=True) as served:
            response = served.post("/v1/completions", {"model": "front", "prompt": TEXT, "max_tokens": 4})
            assert response.status_code == 503, response.text
            assert "the plug-in does not act there" in response.json()["error"]["message"]
        with serve_front(plain.url, vllm.url, upstream_plugin=True) as served:
            for _ in range(3):
                assert told(served, TEXT, max_tokens=4)
        assert {len(prompt) for prompt in plain.prompts} == {1}  # What it was asked to prove.


def test_a_request_of_another_version_is_refused() -> None:
    job = Job("a", 0, Prompt((1, 2), (), b"", origin=3, floor=1, prefix="x"), 4, Sampling(seed=1, temperature=0.0))
    assert decode_request(None) is None
    assert decode_request({"other": 1}) is None
    parsed = decode_request(encode_request(job, [5, 6]))
    assert parsed is not None
    assert (parsed[0].prompt.origin, parsed[0].sampling, parsed[1]) == (3, job.sampling, (5, 6))
    for args in ({"legato_job": "{}"}, {"legato_job": 3}, {**encode_request(job), "legato_inner": ["a"]}):
        with pytest.raises(ValueError, match="legato_job"):
            decode_request(args)


@given(st.floats(-1000, 1000), st.integers(1000, 300_000))
def test_a_score_comes_back_as_it_was_told(score: float, size: int) -> None:
    digits = encode_score(score, size)
    assert all(0 <= digit < size for digit in digits)
    assert decode_score(digits, size) == pytest.approx(score, abs=2e-3)
    assert decode_score(encode_score(-math.inf, size), size) == -math.inf


def test_vllm_finds_the_plugin() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))["project"]
    module, _, name = project["entry-points"]["vllm.logits_processors"]["legato"].partition(":")
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert f"class {name}(LogitsProcessor)" in Path(str(spec.origin)).read_text("utf-8")
