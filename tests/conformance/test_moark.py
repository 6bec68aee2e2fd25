"""MoArk: the vendor's examples on `/v1/completions`, and that `instructions` set the style and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.conformance.reading import text_of, together
from tests.conformance.vendors import run_example
from tests.conftest import Served

MODEL = "Qwen2.5-72B-Instruct"
PROMPT = "I once heard that the most beautiful things in the world are those that"
STYLES = (
    "Continue in a reflective and poetic style, with elegant language and vivid imagery",
    "Continue in the dry, formal style of a legal contract",
    "Continue in slang, as a cheerful teenager who writes to a friend",
)


def test_the_documented_body(small: Served) -> None:
    asked = {
        "model": MODEL,
        "prompt": "Artificial intelligence is a discipline that studies how to enable computers to",
        "stream": False,
        "max_tokens": 100,
        "temperature": 0.7,
    }
    response = small.post("/v1/completions", asked, headers={"X-Failover-Enabled": "true"})
    assert response.status_code == 200, response.text
    answer = response.json()
    assert answer["id"].startswith("cmpl-")
    assert (answer["object"], answer["model"]) == ("text_completion", MODEL)
    (choice,) = answer["choices"]
    assert (choice["index"], choice["logprobs"]) == (0, None)
    assert answer["usage"]["completion_tokens"] <= 100
    assert choice["text"]
    assert not choice["text"].startswith("Artificial intelligence is a discipline")


@pytest.mark.parametrize("name", ["complete", "stream", "instructions", "context", "few_shot"])
def test_the_documented_programs(small: Served, name: str, tmp_path: Path) -> None:
    """The vendor passes `instructions` as a keyword, which the official client does not know: it goes into
    `extra_body`.
    """
    printed = run_example(small, f"moark_{name}.py", tmp_path)
    assert bool(printed.strip()) == (name in ("complete", "stream"))


def test_the_documented_command(small: Served, tmp_path: Path) -> None:
    answer = json.loads(run_example(small, "moark_complete.sh", tmp_path))
    assert text_of(answer)
    assert answer["usage"]["completion_tokens"] <= 100


def test_a_keyword_of_the_vendors_sample_is_not_the_clients(small: Served) -> None:
    with small.client() as client, pytest.raises(TypeError, match="instructions"):
        client.completions.create(model=MODEL, prompt=PROMPT, instructions=STYLES[0])  # type: ignore[call-overload]


def test_instructions_set_the_style(default: Served) -> None:
    """The same prompt and seed: another style is another text; neither the style nor the prompt is in it."""

    def ask(fields: dict[str, Any]) -> str:
        asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 40, "temperature": 0.7, "seed": 7}
        return text_of(default.post("/v1/completions", {**asked, **fields}).json())

    texts = together(ask, [{}, *({"instructions": style} for style in STYLES)])
    assert len(set(texts)) == 4
    for text in texts:
        assert len(text.split()) > 4
        assert PROMPT not in text
        assert PROMPT[-30:] not in text
        for style in STYLES:
            assert style not in text
            assert style[:30] not in text


def test_few_shots_set_the_form(default: Served) -> None:
    """The vendor's email example: the answer goes on with the completed content, in words that fit the request."""
    examples = (Path(__file__).parent / "examples" / "moark_few_shot.py").read_text("utf-8")
    prompt = examples.split('"""')[1]
    with openai.OpenAI(base_url=f"{default.url}/v1", api_key="any") as client:
        answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=50, temperature=0)
    text = answer.choices[0].text
    assert "financial statements" in text
    assert "Fragment to complete" not in text
