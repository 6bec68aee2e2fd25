"""Gaps, filled over every route: both ends join, the suffix is not repeated, and typing is cheap."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from legato.prompting.profiles import InfillTokens
from tests.conformance.reading import check_error, fold, read_events, stream
from tests.conftest import DEFAULT, Served, serve_script, serve_weights

COMPLETIONS = "/v1/completions"
PREFIX = "def mean(values):\n    total = sum(values)\n    ret"
SUFFIX = "\n\ndef test_mean():\n    assert mean([1, 3]) == 2\n"
MARKS = InfillTokens(1, 2, 3)
"""For the scripted engine: bytes that no text here has."""


def fill(served: Served, prefix: str, suffix: str | None, **fields: Any) -> dict[str, Any]:
    """The greedy choice, and the answer's usage."""
    answer = served.complete(prefix, suffix=suffix, **{"max_tokens": 24, **fields})
    return {**answer["choices"][0], "usage": answer["usage"]}


def decoded(served: Served) -> int:
    """Tokens decoded since the start."""
    counts = asyncio.run_coroutine_threadsafe(served.engine.measure(), served.loop).result(30)
    return int(counts["decoded_tokens"])


# ---------------------------------------------------------------------------------------------------------------------
# Cases


def test_c083_a_suffix_needs_a_model_that_knows_gaps(small: Served, default: Served) -> None:
    body = {"model": small.name, "prompt": "def add(", "suffix": "\n    return c\n", "max_tokens": 8}
    assert "infill tokens" in check_error(small.post(COMPLETIONS, body), 400, "suffix")["message"]
    for served, can in ((small, False), (default, True)):
        assert served.get("/v1/models").json()["data"][0]["capabilities"]["infill"] is can


def test_c084_no_suffix_goes_on_and_an_empty_one_is_the_end_of_the_file(default: Served) -> None:
    prompt = "def add(a, b):\n"
    plain = default.complete(prompt, max_tokens=16)
    null = default.complete(prompt, suffix=None, max_tokens=16)
    assert null["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
    assert null["choices"] == plain["choices"]
    for suffix, num in (("", 3), (" ", 4)):
        answer = fill(default, prompt, suffix, max_tokens=16)
        assert answer["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"] + num
        assert "<|" not in answer["text"]


def test_c085_a_gap_may_be_at_the_beginning(default: Served) -> None:
    body = {"model": default.name, "temperature": 0, "prompt": "", "suffix": "int main(void) { return 0; }\n"}
    answer = default.post(COMPLETIONS, {**body, "max_tokens": 12}).json()
    assert answer["usage"]["completion_tokens"] >= 1 or answer["choices"][0]["finish_reason"] == "stop"
    (streamed,) = fold(stream(default, COMPLETIONS, {**body, "max_tokens": 12}))["choices"]
    assert streamed["text"] == answer["choices"][0]["text"]
    check_error(default.post(COMPLETIONS, {"model": default.name, "suffix": "x\n"}), 400, "prompt")


def test_c086_a_gap_is_laid_out_as_the_model_was_taught(default: Served) -> None:
    def num(text: str) -> int:
        return len(default.post("/tokenize", {"content": text, "parse_special": False}).json()["tokens"])

    usage = fill(default, "3, ", ", 9", max_tokens=4)["usage"]
    assert usage["prompt_tokens"] == num("3, ") + num(", 9") + 3
    raw = "<|fim_prefix|>3, <|fim_suffix|>, 9<|fim_middle|>"
    plain = default.complete(raw, max_tokens=4)
    assert plain["usage"]["prompt_tokens"] == usage["prompt_tokens"]
    assert fill(default, "3, ", ", 9", max_tokens=4, seam="none")["text"] == plain["choices"][0]["text"]


def test_c087_text_behind_the_middle_marker_is_continued(default: Served) -> None:
    head = "<|fim_prefix|>total = <|fim_suffix|>\nprint(total)<|fim_middle|>"
    middle = default.complete(head, max_tokens=8)["choices"][0]["text"]
    for at in range(1, len(middle), 3):
        answer = default.complete(head + middle[:at], max_tokens=8)
        assert answer["choices"][0]["text"].startswith(middle[at:])
    echoed = default.complete(f"{head}sum(", max_tokens=8, echo=True)["choices"][0]["text"]
    assert echoed.startswith(f"{head}sum(")


@pytest.mark.parametrize(
    "marker", ["<|fim_middle|>", "<|fim_prefix|>", "<|file_sep|>", "<|repo_name|>", "<|endoftext|>"]
)
def test_c088_markers_in_the_file_are_text(default: Served, marker: str) -> None:
    def num(prefix: str, suffix: str) -> int:
        return int(fill(default, prefix, suffix, max_tokens=1)["usage"]["prompt_tokens"])

    plain = num("MARK = 'X'\nprint(", ")\n# X\n")
    assert num(f"MARK = '{marker}'\nprint(", ")\n# X\n") >= plain + 2
    assert num("MARK = 'X'\nprint(", f")\n# {marker}\n") >= plain + 2
    assert fill(default, f"MARK = '{marker}'\nprint(", f")\n# {marker}\n", max_tokens=8)["text"]


def test_c089_no_marker_leaks_and_each_of_them_ends_the_answer(default: Served) -> None:
    for name in ("fim_prefix", "fim_suffix", "fim_middle", "repo_name", "file_sep"):
        ids = default.post("/tokenize", {"content": f"<|{name}|>", "parse_special": True}).json()["tokens"]
        answer = fill(default, "print(", ")\n", logit_bias={str(ids[0]): 100}, max_tokens=8)
        assert answer["finish_reason"] == "stop"
        assert answer["text"] in ("", '"')  # The bracket is written again, perhaps with what stands behind it.
    for index in range(4):
        answer = fill(default, f"print({index}, ", ")\n", max_tokens=24, logprobs=0)
        assert "<|" not in answer["text"]
        assert "".join(answer["logprobs"]["tokens"]) == answer["text"]


def test_c090_line_ends_are_kept(default: Served) -> None:
    prefix = "int f(int n) {\r\n    "
    assert fill(default, prefix, "\r\n}\r\n", max_tokens=16, echo=True)["text"].startswith(prefix)
    with serve_script([b"int a;\r\nint b;\r\n"], infill=MARKS) as served:
        answer = served.complete("a\r\nb\n", suffix="\r\n", stop=["\n"], max_tokens=40)["choices"][0]
        assert (answer["text"], answer["finish_reason"]) == ("int a;", "stop")
        plain = served.complete("a\r\nb\n", stop=["\n"], max_tokens=40)["choices"][0]
        assert plain["text"] == "int a;\r"


SCRIPTS = [
    ([b"x, 2);\nreturn total;\n"], ", 2);\nreturn total;\n", "x"),
    ([b"2,\n]", b"\nprint(items)\n"], "\n]\nprint(items)\n", "2,"),
    ([b"a, b)"], ")\n", "a, b"),
    ([b"f(a, b)"], ")\n", "f(a, b)"),
]


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(("script", "suffix", "shown"), SCRIPTS)
def test_c091_the_suffix_is_not_written_again(
    script: Sequence[bytes], suffix: str, shown: str, is_streamed: bool
) -> None:
    with serve_script(script, infill=MARKS) as served:
        body = {"model": "m", "prompt": "total = add(", "suffix": suffix, "max_tokens": 48}
        answer = fold(stream(served, COMPLETIONS, body)) if is_streamed else served.post(COMPLETIONS, body).json()
        choice = answer["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (shown, "stop")


# ---------------------------------------------------------------------------------------------------------------------
# Both ends


@pytest.mark.parametrize(
    ("prefix", "suffix", "joined"),
    [
        ("import os\npath = os.path.jo", "\nprint(path)\n", "os.path.join("),
        ("for index in ran", "):\n    print(index)\n", "range("),
        ("def quick_sort(items):\n    if len(items) <= 1:\n        retu", "\n    pivot = items[0]\n", "return items"),
    ],
)
def test_a_word_that_the_cursor_is_in_is_ended(default: Served, prefix: str, suffix: str, joined: str) -> None:
    text = prefix + fill(default, prefix, suffix, stop=["\n"])["text"]
    assert joined in text
    assert fill(default, prefix, suffix, stop=["\n"], seam="none")["usage"]["prompt_tokens"] > 0


def test_a_gap_that_is_typed_into_goes_on_as_it_was_foretold(default: Served) -> None:
    prefix = '"""Shapes."""\n\nimport math\n\n\ndef circle(radius):\n    return math.pi * radius**2\n\n\n'
    prefix += "def area(width, height):\n    # The area of a rectangle.\n    "
    suffix = "\n\nprint(area(2, 3))\n"
    asked = {"max_tokens": 16, "temperature": 0.7, "seed": None}
    whole = fill(default, prefix, suffix, **asked)["text"]
    assert len(whole) > 6
    before = decoded(default)
    for at in range(1, len(whole)):
        assert fill(default, prefix + whole[:at], suffix, **asked)["text"][: len(whole) - at] == whole[at:]
    spent = decoded(default) - before
    assert spent <= 16 + len(whole)  # Only what lies beyond the first answer is decoded.
    again = decoded(default)
    assert fill(default, prefix, suffix, **asked)["text"] == whole
    assert decoded(default) == again


def test_what_is_typed_and_deleted_again_leaves_no_trace(default: Served) -> None:
    before = "def area(w, h):\n    return w * h\n\n\ndef perimeter(w, h):\n"
    for salt, prefix in enumerate((before, before + "    ret", "print('hello, wor")):

        def content(typed: str, prefix: str = prefix, salt: str = str(salt)) -> str:
            body = {"input_prefix": prefix + typed, "input_suffix": "\n\nprint('done')\n", "n_predict": 6}
            answer = default.post("/infill", {**body, "temperature": 0, "cache_salt": salt})
            return str(answer.json()["content"])

        first = content("")
        for typed in ("\t", " ", "u", "l", "\n"):
            content(typed)
            assert content("") == first


def test_typing_leaves_all_before_the_line_in_the_cache(default: Served) -> None:
    lines = [f"def function_{index}(x):\n    return x + {index}\n\n" for index in range(60)]
    prefix, suffix = "".join(lines[:40]) + "def last(x):\n", "\n\n" + "".join(lines[40:])
    fill(default, f"{prefix}    r", suffix, max_tokens=1)
    answer = default.complete(f"{prefix}    y = x", suffix=suffix, max_tokens=4)
    usage = answer["usage"]
    assert usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"] <= 8


# ---------------------------------------------------------------------------------------------------------------------
# How it ends, and what is cut


def test_an_infill_can_end_with_its_line_or_its_block(default: Served) -> None:
    prefix, suffix = "def gcd(a, b):\n    while", "\n"
    free = fill(default, prefix, suffix, max_tokens=120)["text"]
    line = fill(default, prefix, suffix, max_tokens=120, infill_end="line")
    assert (line["text"], line["finish_reason"]) == (free.partition("\n")[0], "stop")
    block = fill(default, prefix, suffix, max_tokens=120, infill_end="block", language="python")
    assert free.startswith(block["text"])
    assert all(row.startswith("    ") or not row for row in block["text"].split("\n")[1:])
    body = {"model": default.name, "prompt": prefix, "suffix": suffix}
    assert (
        "`language`"
        in check_error(default.post(COMPLETIONS, {**body, "infill_end": "block"}), 400, "language")["message"]
    )
    check_error(default.post(COMPLETIONS, {**body, "infill_end": "page"}), 400, "infill_end")
    check_error(default.post(COMPLETIONS, {**body, "infill": "x"}), 400, "infill")


def test_what_is_said_of_a_gap_is_named_where_there_is_none(default: Served) -> None:
    body = {"model": default.name, "prompt": "a", "max_tokens": 1, "infill_end": "line", "language": "c"}
    assert default.post(COMPLETIONS, body).headers["legato-ignored"] == "infill_end, language"


def test_a_model_without_infill_tokens_can_be_asked_in_words(small: Served) -> None:
    asked = {"infill": "prompted", "max_tokens": 24}
    prefix, suffix = "The capital of France is Par", ", and it lies on the Seine."
    answer = fill(small, prefix, suffix, **asked)
    assert answer["text"].startswith("is")
    assert ", and it lies" not in answer["text"]
    with serve_script([b"x"], chat_template=None) as served:
        body = {"model": "m", "prompt": "a", "suffix": "b", "infill": "prompted"}
        check_error(served.post(COMPLETIONS, body), 400, "infill")


def test_what_has_no_room_is_cut_in_whole_lines_and_reported() -> None:
    lines = [f"value_{index} = {index}\n" for index in range(400)]
    files = [{"filename": f"{index}.py", "text": "".join(lines[:20])} for index in range(3)]
    body = {
        "input_prefix": "".join(lines[:300]) + "value_300 = ",
        "input_suffix": "\n" + "".join(lines[301:]),
        "input_extra": files,
        "n_predict": 8,
        "temperature": 0,
        "stop": ["\n"],
    }
    with serve_weights(DEFAULT, context_length=512) as served:
        response = served.post("/infill", body)
        assert response.status_code == 200, response.text
        told = dict(part.split("=") for part in response.headers["legato-truncated"].split(", "))
        assert set(told) == {"prefix", "suffix", "files"}
        assert told["files"] == "3"
        assert response.json()["tokens_evaluated"] <= 512
        assert response.json()["content"] == "300"
        asked = {"model": DEFAULT, "prompt": body["input_prefix"], "suffix": body["input_suffix"], "report": True}
        report = served.post(COMPLETIONS, {**asked, "max_tokens": 8}).json()["legato"]["truncated"]
        assert report == {"prefix": int(told["prefix"]), "suffix": int(told["suffix"])}
        plain = served.post(COMPLETIONS, {**asked, "prompt": "a = ", "suffix": "\n", "max_tokens": 1})
        assert "legato-truncated" not in plain.headers


# ---------------------------------------------------------------------------------------------------------------------
# What editors send

STOPS = ["/src/", "#- coding: utf-8", "```", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|endoftext|>"]
RAW = f"<|fim_prefix|>{PREFIX}<|fim_suffix|>{SUFFIX}<|fim_middle|>"
EDITORS: dict[str, tuple[str, dict[str, Any]]] = {
    "Continue with mistral": (
        "/v1/fim/completions",
        {"prompt": PREFIX, "suffix": SUFFIX, "max_tokens": 24, "temperature": 0.01, "stop": STOPS, "stream": True},
    ),
    "Continue with deepseek": (
        "/beta/completions",
        {"prompt": PREFIX, "suffix": SUFFIX, "max_tokens": 24, "temperature": 0.01, "stop": STOPS, "stream": True},
    ),
    "Continue with vllm": (
        "/v1/completions",
        {"prompt": RAW, "max_tokens": 24, "temperature": 0.01, "stop": STOPS, "stream": True},
    ),
    "llama.vscode": (
        "/infill",
        {
            "id_slot": 0,
            "input_prefix": PREFIX.rpartition("\n")[0] + "\n",
            "input_suffix": SUFFIX,
            "input_extra": [{"filename": "other.py", "text": "def median(values):\n    pass\n"}],
            "prompt": PREFIX.rpartition("\n")[2],
            "n_predict": 24,
            "n_indent": 4,
            "top_k": 40,
            "top_p": 0.99,
            "stream": False,
            "samplers": ["top_k", "top_p", "infill"],
            "cache_prompt": True,
            "t_max_prompt_ms": 60000,
            "t_max_predict_ms": 60000,
        },
    ),
    "Tabby with mistral": (
        "/v1/fim/completions",
        {"prompt": PREFIX, "suffix": SUFFIX, "max_tokens": 24, "temperature": 0.1, "stream": True, "random_seed": 1},
    ),
    "Tabby with openai": (
        "/v1/completions",
        {
            "prompt": PREFIX,
            "suffix": SUFFIX,
            "max_tokens": 24,
            "temperature": 0.1,
            "stream": True,
            "presence_penalty": 0.5,
        },
    ),
    "Zed": ("/v1/completions", {"prompt": RAW, "max_tokens": 24, "stop": STOPS[:4], "temperature": 0.2}),
    "Zed with ollama": (
        "/api/generate",
        {"prompt": RAW, "raw": True, "stream": False, "options": {"num_predict": 24, "temperature": 0.2}},
    ),
}


def text_of(body: Any) -> str:
    """The text in an answer or an event of any dialect."""
    if "choices" not in body:
        return str(body.get("content", body.get("response", "")))
    choice = body["choices"][0]
    return str(choice.get("text") or (choice.get("delta") or choice.get("message") or {}).get("content") or "")


@pytest.mark.parametrize("editor", EDITORS)
def test_editors_get_text_that_fits(default: Served, editor: str) -> None:
    path, body = EDITORS[editor]
    response = default.post(path, {"model": default.name, **body})
    assert response.status_code == 200, response.text
    is_stream = response.headers["content-type"].startswith("text/event-stream")
    answers = read_events(response.content) if is_stream else [response.json()]
    text = "".join(map(text_of, answers))
    assert text.startswith("urn total / len(values)"), text
    if body.get("prompt") != RAW:
        assert SUFFIX.strip() not in text
