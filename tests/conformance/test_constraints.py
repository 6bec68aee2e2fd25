"""Constraints hold for prefix and answer as one text: whatever the cut, the route and the spelling."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.conformance.documents import document, schema
from tests.conformance.reading import CHAT, COMPLETIONS, check_error, read_events, stream
from tests.conftest import SMALL, Served, children, serve_script, serve_weights

PHONE: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "price": {"type": "integer", "maximum": 9999}},
    "required": ["name", "price"],
    "additionalProperties": False,
}
AS_PHONE: dict[str, Any] = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": PHONE}}}
AS_OBJECT: dict[str, Any] = {"response_format": {"type": "json_object"}}
ASK = {"role": "user", "content": "Describe a phone"}


def post(served: Served, prefix: str | None = None, path: str = CHAT, **fields: Any) -> Any:
    """Ask for a phone, whose description begins with a prefix."""
    marked = [] if prefix is None else [{"role": "assistant", "content": prefix, "prefix": True}]
    body = {"model": served.name, "messages": [ASK, *marked], "temperature": 0, "seed": 7, "max_tokens": 80, **fields}
    return served.post(path, body)


def answer(served: Served, prefix: str | None = None, **fields: Any) -> tuple[str, str]:
    """Return the answer and why it ended."""
    response = post(served, prefix, **fields)
    assert response.status_code == 200, (response.text, prefix)
    choice = response.json()["choices"][0]
    return choice["message"]["content"], choice["finish_reason"]


def refused(served: Served, param: str, prefix: str | None = None, **fields: Any) -> str:
    """Return the words of a refusal."""
    message: str = check_error(post(served, prefix, **fields), 400, param)["message"]
    return message


# ---------------------------------------------------------------------------------------------------------------------
# The whole


@pytest.fixture
def num_documents(request: pytest.FixtureRequest) -> int:
    """How many documents are cut, of schemas of up to 40 properties."""
    num: int = request.config.getoption("--documents")
    return num


@pytest.mark.timeout(1800)
def test_json_cut_anywhere_is_valid_when_it_has_been_continued(small: Served, num_documents: int) -> None:
    rng = random.Random(6)
    sizes = [1 + index * 40 // num_documents for index in range(num_documents)]
    texts = [(size, document(size, rng)) for size in sizes]
    cuts = [(size, text[: rng.randint(0, len(text))], index) for index, (size, text) in enumerate(texts)]

    def check(size: int, prefix: str, index: int) -> str | None:
        fields = {"guided_json": schema(size), "temperature": 0.8 * (index % 2), "max_tokens": 100}
        text, finish = answer(small, prefix, **fields)
        for _ in range(20):
            if finish == "length":
                more, finish = answer(small, prefix + text, **fields)
                text += more
        try:
            assert finish == "stop"
            jsonschema.validate(json.loads(prefix + text), schema(size))
        except (AssertionError, ValueError, jsonschema.ValidationError) as error:
            return f"{size} {prefix!r} {text!r} {finish} {error!r:.200}"
        return None

    with ThreadPoolExecutor(8) as pool:
        wrong = [found for found in pool.map(check, *zip(*cuts, strict=True)) if found]
    assert wrong == []


def test_c081_a_prefix_is_part_of_the_json(small: Served) -> None:
    prefix = '{"name": "Pix'
    text, finish = answer(small, prefix, **AS_PHONE)
    assert finish == "stop"
    jsonschema.validate(json.loads(prefix + text), PHONE)
    assert not text.startswith("{")


def test_c081_every_cut_of_a_valid_document_can_be_continued(small: Served) -> None:
    whole = '{ "name" : "Gr\\u00fc\\ud83d\\ude00\\n é",\r\n\t"price":-120}'
    assert len(json.loads(whole)["name"]) == 7

    def check(at: int) -> None:
        text, _ = answer(small, whole[:at], max_tokens=4, **AS_PHONE)
        answer(small, whole[:at] + text, max_tokens=1, **AS_PHONE)

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(check, at) for at in range(len(whole) + 1)]:
            done.result()


@pytest.mark.parametrize(
    ("prefix", "offset", "stands", "could"),
    [
        ("Sure! {", 0, "Sure! {", "'{'"),
        ('{"name": "Ü", "cost": 1}', 16, 'cost": 1}', "'price\"'"),
        ('{"name": 1', 9, "1", "'\"', white space"),
        ('{"name": "a", "price": 1}x', 25, "x", "the end"),
        ('{"name": "a", "price": 99999', 27, "9", "',', '}'"),
        (" " * 3 + "[", 3, "[", "'{'"),
    ],
)
def test_c081_a_prefix_that_cannot_go_on_is_refused(
    small: Served, prefix: str, offset: int, stands: str, could: str
) -> None:
    message = refused(small, "response_format", prefix, **AS_PHONE)
    assert f"at byte {offset} " in message
    assert f"stands {stands!r}" in message
    assert could.replace("',', ", "") in message


def test_c080_white_space_comes_to_an_end(small: Served) -> None:
    blank = {str(id): 100 for id, piece in enumerate(small.engine.tokenizer.pieces) if piece and not piece.strip()}
    text, finish = answer(small, max_tokens=400, logit_bias=blank, **AS_OBJECT)
    assert finish == "stop"
    assert max(len(run) for run in re.findall(r"\s*", re.sub(r'"(\\.|[^"\\])*"', "", text))) <= 16
    assert text.endswith("}")
    assert isinstance(json.loads(text), dict)


def test_c080_digits_come_to_an_end(small: Served) -> None:
    digits = {str(id): 100 for id, piece in enumerate(small.engine.tokenizer.pieces) if piece[:1].isdigit()}
    pair = {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2}
    text, finish = answer(small, max_tokens=200, logit_bias=digits, guided_json=pair)
    assert finish == "stop"
    assert len(json.loads(text)) == 2


def test_white_space_of_the_prefix_may_be_longer(small: Served) -> None:
    prefix = '{"name": "a",\n' + " " * 40
    text, finish = answer(small, prefix, **AS_PHONE)
    assert finish == "stop"
    jsonschema.validate(json.loads(prefix + text), PHONE)


@pytest.mark.parametrize("prefix", ["`", "```js", "```json\n", "```\n{", ' \n```json\n{"name": "Pixel"', "```json\r\n"])
def test_a_code_fence_that_the_prefix_opens_is_closed(small: Served, prefix: str) -> None:
    text, finish = answer(small, prefix, **AS_PHONE)
    assert finish == "stop"
    found = re.fullmatch(r"\s*```(?:json)?\r?\n(.*)```", prefix + text, re.DOTALL)
    assert found is not None
    jsonschema.validate(json.loads(found[1]), PHONE)


def test_a_whole_document_is_at_its_end(small: Served) -> None:
    for prefix in ('{"name": "a", "price": 1}', '{"name": "Pixel 9", "price": 1000}'):
        assert answer(small, prefix, **AS_PHONE) == ("", "stop")


# ---------------------------------------------------------------------------------------------------------------------
# The second law


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    "fields",
    [
        AS_PHONE,
        AS_OBJECT,
        {"guided_regex": r"(Mon|Tues|Wednes)day, [0-9]{1,2} (January|February) 20[0-9]{2}: [a-zü ]{5,40}\."},
        {"guided_choice": ["an extremely expensive phone", "an extraordinarily cheap phone", "ein Gerät 😀"]},
        {"guided_grammar": 'root ::= item+ "done"\nitem ::= "- " [A-Za-z ]{3,20} " (" [0-9]+ " EUR)\\n"'},
    ],
    ids=["schema", "object", "regex", "choice", "grammar"],
)
def test_l2_a_constrained_text_goes_on_as_it_would_have(
    small: Served, fields: dict[str, Any], temperature: float
) -> None:
    fields = {**fields, "temperature": temperature}
    whole, finish = answer(small, "", max_tokens=40, **fields)

    def check(at: int) -> str | None:
        text, _ = answer(small, whole[:at], max_tokens=10, **fields)
        rest = whole[at:]
        is_same = rest.startswith(text) or (finish == "length" and text.startswith(rest))
        return None if is_same else f"{whole[:at]!r} {text!r}, not {rest!r}"

    with ThreadPoolExecutor(8) as pool:
        assert [found for found in pool.map(check, range(0, len(whole) + 1, 2)) if found] == []


def test_rounds_make_the_text_of_one_run(small: Served) -> None:
    whole, _ = answer(small, "", **AS_PHONE)
    text, finish, num = "", "length", 0
    while finish == "length":
        more, finish = answer(small, text, max_tokens=3, **AS_PHONE)
        text += more
        num += 1
    assert text == whole
    assert num > 2


def test_scores_and_streams_have_the_same_text(small: Served) -> None:
    whole, _ = answer(small, "", **AS_PHONE)
    scored = post(small, "", logprobs=True, top_logprobs=2, **AS_PHONE).json()["choices"][0]
    assert scored["message"]["content"] == whole
    assert "".join(token["token"] for token in scored["logprobs"]["content"]) == whole
    body = {"model": small.name, "messages": [ASK], "temperature": 0, "seed": 7, "max_tokens": 80, **AS_PHONE}
    chunks = stream(small, CHAT, body)
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == whole


def test_a_worker_that_dies_goes_on_with_the_constraint() -> None:
    with serve_weights(SMALL) as served:
        fields = {"guided_json": schema(12), "max_tokens": 120}
        whole, finish = answer(served, "", **fields)
        threading.Timer(0.7, os.kill, [served.engine.worker_pid, signal.SIGKILL]).start()
        assert answer(served, "", cache_salt="another", **fields) == (whole, finish)
        assert served.engine.num_restarts == 1


# ---------------------------------------------------------------------------------------------------------------------
# Thinking


@pytest.fixture(scope="module")
def thinker() -> Iterator[Served]:
    with serve_weights(SMALL, reasoning_open="<think>", reasoning_close="</think>") as served:
        yield served


def test_thinking_is_free_and_content_is_constrained(thinker: Served) -> None:
    ways: list[dict[str, Any]] = [{"thinking_budget": 12}, {"thinking": {"type": "disabled"}}]
    for fields in ways:
        message = post(thinker, **AS_PHONE, **fields).json()["choices"][0]
        assert message["finish_reason"] == "stop"
        jsonschema.validate(json.loads(message["message"]["content"]), PHONE)
    marked = {"role": "assistant", "content": "", "reasoning_content": "A phone { is", "prefix": True}
    message = post(thinker, messages=[ASK, marked], thinking_budget=16, **AS_PHONE).json()["choices"][0]["message"]
    assert message["reasoning_content"]
    jsonschema.validate(json.loads(message["content"]), PHONE)


def test_content_behind_thinking_is_continued_where_it_was_cut(thinker: Served) -> None:
    message = post(thinker, thinking_budget=12, **AS_PHONE).json()["choices"][0]["message"]
    thought, whole = message.get("reasoning_content"), message["content"]
    for at in range(0, len(whole), 3):
        marked = {"role": "assistant", "content": whole[:at], "reasoning_content": thought, "prefix": True}
        choice = post(thinker, messages=[ASK, marked], thinking_budget=12, **AS_PHONE).json()["choices"][0]
        assert choice["finish_reason"] == "stop"
        if at:
            assert whole[:at] + choice["message"]["content"] == whole


# ---------------------------------------------------------------------------------------------------------------------
# Every dialect's spelling


def openai_text(body: dict[str, Any]) -> str:
    choice = body["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


WHOLE: dict[str, Any] = {"stream": False, "options": {"seed": 7, "temperature": 0, "num_predict": 60}}
GREEDY: dict[str, Any] = {"temperature": 0, "seed": 7}
CHATS = [CHAT, "/beta/chat/completions", "/compatible-mode/v1/chat/completions", "/openai/v1/chat/completions"]
ANSWERED: list[tuple[str, dict[str, Any], Callable[[dict[str, Any]], str]]] = [
    *((path, {"messages": [ASK], **AS_PHONE, **GREEDY}, openai_text) for path in [*CHATS, "/v2/chat/completions"]),
    *(
        (path, {"prompt": "A phone as JSON:\n", "max_tokens": 60, **AS_PHONE, **GREEDY}, openai_text)
        for path in (COMPLETIONS, "/beta/completions", "/compatible-mode/v1/completions")
    ),
    (
        "/completion",
        {"prompt": "A phone as JSON:\n", "json_schema": PHONE, **GREEDY},
        lambda body: str(body["content"]),
    ),
    ("/api/generate", {"prompt": "A phone.", "format": PHONE, **WHOLE}, lambda body: str(body["response"])),
    (
        "/api/generate",
        {"prompt": "A phone as JSON:\n", "raw": True, "format": PHONE, **WHOLE},
        lambda body: str(body["response"]),
    ),
]


@pytest.mark.parametrize(("path", "fields", "read"), ANSWERED, ids=[f"{path}" for path, _, _ in ANSWERED])
def test_every_path_keeps_to_a_schema(
    small: Served, path: str, fields: dict[str, Any], read: Callable[[dict[str, Any]], str]
) -> None:
    response = small.post(path, {"model": small.name, **fields})
    assert response.status_code == 200, response.text
    assert "legato-ignored" not in response.headers
    jsonschema.validate(json.loads(read(response.json())), PHONE)


def is_phone(text: str) -> bool:
    jsonschema.validate(json.loads(text), PHONE)
    return True


@pytest.mark.parametrize(
    ("fields", "is_right"),
    [
        (AS_OBJECT, lambda text: text.startswith("{")),
        ({"response_format": {"type": "json_object", "schema": PHONE}}, is_phone),
        ({"response_format": {"type": "text"}}, lambda text: not text.startswith("{")),
        ({"guided_json": PHONE}, is_phone),
        ({"guided_json": json.dumps(PHONE)}, is_phone),
        ({"guided_json": PHONE, "guided_whitespace_pattern": " "}, lambda text: is_phone(text) and "\n" not in text),
        ({"guided_regex": "[a-c]{3}-[0-9]{4}"}, re.compile("[a-c]{3}-[0-9]{4}").fullmatch),
        ({"guided_choice": ["yes", 'n"o', "😀 maybe"]}, lambda text: text in ["yes", 'n"o', "😀 maybe"]),
        ({"guided_grammar": 'root ::= ("x" | "yy") " " [0-9]{1,3} "!"'}, re.compile("(x|yy) [0-9]{1,3}!").fullmatch),
        ({"guided_grammar": 'start: "x" /[0-9]{2}/ "!"'}, re.compile("x[0-9]{2}!").fullmatch),
        ({"structured_outputs": {"json": PHONE}}, is_phone),
        ({"structured_outputs": {"json": PHONE, "disable_any_whitespace": True}}, lambda text: is_phone(text)),
        ({"structured_outputs": {"json_object": True}}, lambda text: text.startswith("{")),
        ({"structured_outputs": {"regex": "a{5}"}}, "aaaaa".__eq__),
        ({"structured_outputs": {"choice": ["alpha", "beta"]}}, ["alpha", "beta"].__contains__),
        ({"structured_outputs": {"grammar": 'root ::= "forced " "text"'}}, "forced text".__eq__),
    ],
)
def test_every_spelling(small: Served, fields: dict[str, Any], is_right: Callable[[str], Any]) -> None:
    text, _ = answer(small, max_tokens=60, **fields)
    assert is_right(text)


def test_llamacpps_and_ollamas_own_words(small: Served) -> None:
    body = {"prompt": "x", "grammar": 'root ::= "only " ("this" | "that")', "json_schema": {}}
    response = small.post("/completion", body)
    assert response.json()["content"] in ("only this", "only that")
    assert response.headers["legato-ignored"] == "json_schema"
    body = {"model": small.name, "prompt": "A phone.", "format": "json", **WHOLE}
    assert small.post("/api/generate", body).json()["response"].startswith("{")


def test_a_raw_prompt_is_outside_unless_it_says_where_the_text_begins(small: Served) -> None:
    prompt = "A phone as JSON: "
    body = {"model": small.name, "temperature": 0, "seed": 7, "max_tokens": 80, "guided_json": PHONE}
    text = small.post(COMPLETIONS, {**body, "prompt": prompt}).json()["choices"][0]["text"]
    jsonschema.validate(json.loads(text), PHONE)
    for at in range(0, len(text), 2):
        cut = {**body, "prompt": prompt + text[:at], "constraint_start": len(prompt)}
        assert small.post(COMPLETIONS, cut).json()["choices"][0]["text"] == text[at:], text[:at]
    beyond = {**body, "prompt": "abc", "constraint_start": 4}
    assert "at most 3" in check_error(small.post(COMPLETIONS, beyond), 400, "constraint_start")["message"]
    inside, _ = answer(small, 'Sure: {"name"', constraint_start=6, **AS_PHONE)
    jsonschema.validate(json.loads('{"name"' + inside), PHONE)


def test_the_official_client_gets_json(small: Served) -> None:
    with small.client() as client:
        made = client.chat.completions.create(
            model=small.name,
            messages=[{"role": "user", "content": "Describe a phone"}],
            response_format={"type": "json_schema", "json_schema": {"name": "phone", "schema": PHONE, "strict": True}},
            temperature=0,
            seed=7,
        )
    jsonschema.validate(json.loads(made.choices[0].message.content or ""), PHONE)


# ---------------------------------------------------------------------------------------------------------------------
# Refusals and limits


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"guided_json": {"not": {}}}, "guided_json", '"not"'),
        ({"guided_json": {"type": "array", "uniqueItems": True}}, "guided_json", '"uniqueItems"'),
        ({"guided_json": {"type": "strin"}}, "guided_json", "Invalid type: strin"),
        ({"guided_json": {"$ref": "http://x.test/y"}}, "guided_json", "http://x.test/y"),
        ({"guided_json": False}, "guided_json", "nothing satisfies"),
        ({"guided_json": "{"}, "guided_json", "no JSON"),
        ({"guided_json": "[1]"}, "guided_json", "got [1]"),
        ({"guided_json": {"x-guidance": {"lenient": True}}}, "guided_json", "x-guidance"),
        ({"guided_json": {"description": "x" * 300_000}}, "guided_json", "at most 262144 bytes"),
        ({"guided_regex": "("}, "guided_regex", "unclosed group"),
        ({"guided_regex": "(?=a)b"}, "guided_regex", "look-around"),
        ({"guided_regex": ""}, "guided_regex", "must not be empty"),
        ({"guided_choice": []}, "guided_choice", "at least one"),
        ({"guided_grammar": 'root ::= "a'}, "guided_grammar", "Unexpected end of input"),
        ({"guided_grammar": "start: foo"}, "guided_grammar", 'unknown name: "foo"'),
        ({"guided_grammar": "start: <|im_end|>"}, "guided_grammar", "unknown special token"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "got `guided_regex` and `guided_choice`"),
        ({**AS_OBJECT, "guided_regex": "a"}, "guided_regex", "only one"),
        ({"structured_outputs": {}}, "structured_outputs", "must have one of"),
        ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs", "must have one of"),
        ({"structured_outputs": {"structural_tag": {"a": 1}}}, "structured_outputs", "not supported"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs.regex", "only one"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "is required"),
        ({"response_format": {"type": "xml"}}, "response_format", "'json_object'"),
        ({"constraint_start": -1, **AS_OBJECT}, "constraint_start", "-1"),
    ],
)
def test_a_refusal_names_the_reason(small: Served, fields: dict[str, Any], param: str, words: str) -> None:
    assert words in refused(small, param, **fields)


def test_what_constrains_nothing_is_named(small: Served) -> None:
    fields: dict[str, Any] = {
        "constraint_start": 0,
        "guided_whitespace_pattern": " ",
        "response_format": {"type": "text", "x": 1},
    }
    ignored = post(small, **fields, max_tokens=1).headers["legato-ignored"]
    assert ignored == "response_format.x, constraint_start, guided_whitespace_pattern"


def test_a_gap_and_the_scripted_engine_take_none(default: Served) -> None:
    body = {"model": default.name, "prompt": "a", "suffix": "b", **AS_OBJECT}
    assert "gap" in check_error(default.post(COMPLETIONS, body), 400, "response_format")["message"]
    with serve_script((b"x",)) as script:
        body = {"model": "m", "prompt": "a", "guided_regex": "x"}
        assert check_error(script.post(COMPLETIONS, body), 400, "guided_regex")["code"] == "unsupported"


def test_what_becomes_too_complex_while_it_is_written_says_so(small: Served) -> None:
    # Every letter multiplies the ways in which the text can be read.
    rules = "".join(f'\nx{at}: "a" | x{at} x{at}' for at in range(50))
    grammar = 'start: "a" | ' + " | ".join(f"x{at} start" for at in range(50)) + rules
    fields: dict[str, Any] = {"guided_grammar": grammar, "ignore_eos": True, "temperature": 1}
    errors = [check_error(post(small, **fields), 400, "guided_grammar")]
    body = {"model": small.name, "prompt": "aaa", "seed": 7, "max_tokens": 80, "stream": True, **fields}
    errors += [event["error"] for event in read_events(small.post(COMPLETIONS, body).content) if "error" in event]
    assert len(errors) == 2
    for error in errors:
        assert error["param"] == "guided_grammar"
        assert re.match("`guided_grammar` became too complex after [0-9]+ tokens of the answer: .", error["message"])
    assert small.engine.num_restarts == 0


def hostile() -> dict[str, dict[str, Any]]:
    """What takes compilers long, or forever."""
    rules = "\n".join(f'r{at} ::= "x" r{at + 1} | "y" r{at + 1} r{at + 1}' for at in range(5000))
    wide = {f"p{at}": {"type": "string"} for at in range(6000)}
    return {
        "rules": {"guided_grammar": f'root ::= r0\n{rules}\nr5000 ::= "z"'},
        "properties": {"guided_json": {"type": "object", "properties": wide}},
        "repetition": {"guided_regex": "((a{0,1000}b?){0,1000}c){0,1000}"},
        "backtracking": {"guided_regex": "(a|a)*(a|a)*(a|a)*b"},
        "states": {"guided_regex": "(a|b)*a(a|b){18}"},
        "nesting": {"guided_regex": "(" * 5000 + "a" + ")" * 5000},
        "forced": {"guided_regex": "a{100000000}"},
        "loop": {"guided_json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}},
    }


def test_hostile_constraints_stop_nobody_else(small: Served) -> None:
    gaps: list[float] = []
    is_over = threading.Event()

    def write() -> None:
        with small.client() as client:
            last = time.monotonic()
            for _ in client.completions.create(
                model=small.name, prompt="Once", max_tokens=4000, stream=True, seed=1, extra_body={"ignore_eos": True}
            ):
                gaps.append(time.monotonic() - last)
                last = time.monotonic()
                if is_over.is_set():
                    return

    writer = threading.Thread(target=write)
    writer.start()
    while len(gaps) < 3:
        time.sleep(0.01)
    threads = {thread.ident for thread in threading.enumerate()}
    for name, fields in hostile().items():
        response = post(small, max_tokens=8, **fields)
        assert response.status_code in (200, 400), (name, response.text)
    is_over.set()
    writer.join()
    assert max(gaps[3:]) < 1.5
    assert small.engine.num_restarts == 0
    # Threads of the pool are kept by it; no other is left.
    left = [thread for thread in threading.enumerate() if thread.ident not in threads and "legato" not in thread.name]
    assert left == []
    assert answer(small, **AS_PHONE)[1] == "stop"


@pytest.mark.alone
def test_slow_constraints_make_nobody_else_wait(small: Served) -> None:
    """Nobody is told that a constraint is too complex because others are."""

    def slow(num: int) -> dict[str, Any]:
        count = 5000 + num
        rules = "\n".join(f'r{at} ::= "x" r{at + 1} | "y" r{at + 1} r{at + 1}' for at in range(count))
        return {"guided_grammar": f'root ::= r0\n{rules}\nr{count} ::= "z"'}

    def timed(ask: Callable[[], Any]) -> tuple[float, Any]:
        begun = time.monotonic()
        response = ask()
        return time.monotonic() - begun, response

    with ThreadPoolExecutor(16) as clients:
        asked = [clients.submit(timed, lambda num=num: post(small, max_tokens=1, **slow(num))) for num in range(14)]  # type: ignore[misc]
        time.sleep(0.3)
        for _ in range(3):
            for path in ("/health", "/ready"):
                took_s, response = timed(lambda path=path: small.get(path))  # type: ignore[misc]
                assert (took_s < 1, response.status_code) == (True, 200)
            took_s, response = timed(lambda: post(small, guided_choice=["yes", "no"], max_tokens=2))
            assert took_s < 10
            assert response.status_code == 200 or (response.status_code, response.headers["retry-after"]) == (503, "5")
            long = "a word and another one " * 2000
            took_s, response = timed(lambda: small.post("/tokenize", {"content": long}))  # noqa: B023
            assert (took_s < 2, response.status_code) == (True, 200)
        for one in asked:
            took_s, response = one.result()
            assert took_s < 30
            assert response.status_code in (400, 503)
            words = "too complex" if response.status_code == 400 else "try again in 5 s"
            assert words in response.json()["error"]["message"]
            assert response.status_code == 400 or response.headers["retry-after"] == "5"
    assert answer(small, guided_choice=["yes"]) == ("yes", "stop")


def test_a_compiler_is_ended_with_the_server() -> None:
    with serve_weights(SMALL) as served:
        before = children(os.getpid())
        assert answer(served, guided_choice=["a"]) == ("a", "stop")
        (checker,) = [pid for pid in children(os.getpid()) if pid not in before]
        assert b"legato.decoding.grammar" in Path(f"/proc/{checker}/cmdline").read_bytes()
        os.kill(checker, signal.SIGKILL)  # As the system does, where memory ends.
        assert answer(served, guided_choice=["b"]) == ("b", "stop")  # Which is nobody's fault.
        assert answer(served, guided_choice=["c"]) == ("c", "stop")
    assert not Path(f"/proc/{checker}").exists()
