"""The command line as a shell sees it: bytes in and out, exit codes, and one line for every failure."""

from __future__ import annotations

import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest

from legato.config import ServerSettings
from tests.conformance.faulty import chunk, faulty, sse
from tests.conftest import NO_TLS, SMALL, children, running, serve_script, weights

LEGATO = (sys.executable, "-m", "legato")
COMPLETE = ("complete", "--model", SMALL, "--max-tokens", "4")


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands run in an empty folder, without settings."""
    monkeypatch.chdir(tmp_path)
    for name in os.environ:
        if name.startswith("LEGATO_"):
            monkeypatch.delenv(name)


def run(
    *arguments: str | bytes, stdin: bytes = b"", environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run `legato` to its end. Whatever it does, it shows no traceback."""
    everything = {**os.environ, **(environment or {})}
    done = subprocess.run([*LEGATO, *arguments], input=stdin, capture_output=True, env=everything, timeout=100)
    assert b"Traceback" not in done.stderr, done.stderr.decode()
    return done


def output(*arguments: str, stdin: bytes = b"", environment: Mapping[str, str] | None = None) -> bytes:
    """Return what a command that succeeds prints; it says nothing else."""
    done = run(*arguments, stdin=stdin, environment=environment)
    assert (done.returncode, done.stderr) == (0, b""), done.stderr.decode()
    return done.stdout


def failure(*arguments: str | bytes, stdin: bytes = b"") -> str:
    """Return the line that a command that cannot do what was asked says; it prints nothing."""
    done = run(*arguments, stdin=stdin)
    assert (done.returncode, done.stdout) == (2, b""), done.stderr.decode()
    line = done.stderr.decode()
    assert re.fullmatch(r"legato: [^\n]+\n", line), line
    return line.removeprefix("legato: ").removesuffix("\n")


def wait_until_gone(pids: Sequence[int], within_s: float = 2) -> None:
    """Wait until none of the processes runs."""
    deadline = time.monotonic() + within_s
    while running().keys() & set(pids):
        assert time.monotonic() < deadline, "a process was left behind"
        time.sleep(0.02)


@contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start `legato`; end it, if it has not ended by itself, with the test."""
    process = subprocess.Popen([*LEGATO, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def stop(process: subprocess.Popen[bytes], number: signal.Signals) -> tuple[int, bytes]:
    """Send a signal; return the exit code and what is then on standard error."""
    process.send_signal(number)
    _, errors = process.communicate(timeout=20)
    return process.returncode, errors


def on_terminal(*arguments: str) -> tuple[bytes, str]:
    """Return what a command prints that succeeds, and what somebody at a terminal sees meanwhile on standard error."""
    terminal, inner = pty.openpty()
    with subprocess.Popen([*LEGATO, *arguments], stdout=subprocess.PIPE, stderr=inner) as process:
        os.close(inner)
        shown = b""
        with open(terminal, "rb", buffering=0) as seen, suppress(OSError):  # It is an error to read behind the end.
            while data := seen.read(4096):
                shown += data
        printed = process.communicate(timeout=100)[0]
    assert process.returncode == 0, shown.decode()
    return printed, shown.decode()


# -- what is said beside the answer -----------------------------------------------------------------------------------


def test_a_spinner_turns_while_the_model_is_loaded_and_the_limit_is_told() -> None:
    printed, shown = on_terminal(*COMPLETE, "One, two, three,")
    assert printed == output(*COMPLETE, "One, two, three,")  # Which says nothing elsewhere.
    frames = [line for line in shown.split("\r") if line.strip()]
    last = frames.pop()
    assert set(frames) == {f"{frame} Loading {SMALL}" for frame in "|/-\\"}
    assert last == "legato: cut after 4 tokens: --max-tokens allows more"
    assert shown.endswith(f"\r{' ' * len(frames[0])}\r{last}\r\n")


@pytest.mark.parametrize("name", ["nofile.txt", "src/no.py", "folder/nofile", "notes.md"])
def test_a_name_without_a_file_is_continued_and_hinted_at(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    done = run(*COMPLETE, name, "--echo", "--max-tokens", "0")
    assert (done.returncode, done.stdout.decode()) == (0, name)
    assert done.stderr.decode() == f"legato: there is no file {name}, so this name itself is continued\n"


@pytest.mark.parametrize("text", ["Once upon a time.", "and/or", "v1.2", "a\nb.txt", "see b.txt", "x" * 5000, "..."])
def test_other_texts_are_texts(text: str) -> None:
    assert output(*COMPLETE, text, "--echo", "--max-tokens", "0").decode() == text


def test_a_folder_is_none_of_them(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for name in ("folder", "folder/", ".", str(tmp_path)):
        assert failure(*COMPLETE, name).startswith(f"{name} is a folder")
    assert output(*COMPLETE, "-", "--echo", "--max-tokens", "0", stdin=b"folder") == b"folder"


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [(["complet", "x"], "complete"), (["key", "list"], "keys"), (["keys", "creat", "x"], "create"), (["zzz"], None)],
)
def test_a_misspelt_command_is_answered_with_what_is_meant(arguments: Sequence[str], meant: str | None) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    last = done.stderr.decode().splitlines()[-1]
    assert last.endswith(f"'; did you mean '{meant}'?" if meant else "No such command 'zzz'.")


# -- C105: bytes, locales, pipes, Ctrl-C ------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"def f():\n    ", "\ufeff\0 \r\nSchreibe: 🦊\t\n\n".encode()])
def test_c018_c105_every_byte_of_standard_input_counts(data: bytes) -> None:
    assert output(*COMPLETE, "-", "--echo", "--max-tokens", "0", stdin=data) == data


def test_c105_blanks_at_the_end_reach_the_model() -> None:
    """Sent back with only the blanks that it begins with, an answer goes on as it did."""
    answer = output(*COMPLETE, "-", stdin=b"def f():")
    blanks = answer[: len(answer) - len(answer.lstrip())]
    assert blanks.startswith(b"\n ")
    assert output(*COMPLETE, "-", stdin=b"def f():" + blanks).startswith(answer[len(blanks) :])


def test_c105_a_byte_that_is_no_utf8_is_named(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    assert failure(*COMPLETE, "-", stdin=b"caf\xe9") == "standard input is not UTF-8: byte 3 is 0xe9"
    assert failure(*COMPLETE, "latin") == "latin is not UTF-8: byte 3 is 0xe9"
    assert failure(*COMPLETE, b"caf\xe9") == "TEXT is not UTF-8: byte 3 is 0xe9"


@pytest.mark.parametrize("environment", [{}, {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}])
def test_c105_text_is_utf8_whatever_the_locale(environment: dict[str, str]) -> None:
    printed = output(*COMPLETE, "Schreibe: 🦊", "--echo", environment={"LC_ALL": "C", **environment})
    assert printed.decode().startswith("Schreibe: 🦊")


def test_c105_a_reader_that_leaves_is_no_failure(tmp_path: Path) -> None:
    with started(*COMPLETE, "One, two,", "--max-tokens", "200") as process:
        assert process.stdout is not None
        assert process.stdout.read(1)
        workers = children(process.pid)
        process.stdout.close()
        assert process.wait(timeout=60) == 0
        assert process.stderr is not None
        assert process.stderr.read() == b""
        assert workers
        wait_until_gone(workers)


def test_c105_ctrl_c_while_writing() -> None:
    with started(*COMPLETE, "One, two,", "--max-tokens", "4000") as process:
        assert process.stdout is not None
        assert process.stdout.read(1)
        workers = children(process.pid)
        code, errors = stop(process, signal.SIGINT)
        assert (code, errors.strip()) == (130, b"")
        assert workers
        wait_until_gone(workers)


@pytest.mark.parametrize("arguments", [(*COMPLETE, "One, two,"), ("serve", "--model", SMALL, "--port", "0")])
def test_c105_ctrl_c_while_loading(arguments: Sequence[str]) -> None:
    with started(*arguments) as process:
        deadline = time.monotonic() + 30
        while not (workers := children(process.pid)):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        code, errors = stop(process, signal.SIGINT)
        assert (code, errors.strip()) == (130 if "complete" in arguments else 0, b"")
        wait_until_gone(workers, within_s=20)  # The worker looks at its socket when the model is loaded.


# -- complete ---------------------------------------------------------------------------------------------------------


def test_a_text_and_a_file_are_continued_alike_by_a_name_and_a_path(tmp_path: Path) -> None:
    (tmp_path / "count.txt").write_text("One, two, three,")
    expected = output(*COMPLETE, "One, two, three,")
    assert expected == b" four, five,"
    assert output(*COMPLETE, "count.txt") == expected
    path = str(weights(SMALL))
    assert output("complete", "--max-tokens", "4", "--model", path, "One, two, three,") == expected


def test_a_seed_repeats_a_sampled_answer() -> None:
    sampled = (*COMPLETE, "Once upon a time", "--temperature", "1.5", "--max-tokens", "8")
    first, again, other = (output(*sampled, "--seed", seed) for seed in ("5", "5", "6"))
    assert first == again != other


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["", "--model", SMALL], "`prompt` is empty, and this model has no start token to begin from"),
        (["x", "--model", "gpt"], r"model `gpt` is not in the catalogue; known: .*`smollm2-135m`; for any other, .*"),
        (["x", "--model", "no/such.gguf"], "model file no/such.gguf does not exist"),
        (["x", "--config", "no.toml"], "configuration file no.toml does not exist"),
    ],
)
def test_what_complete_cannot_do(arguments: Sequence[str], message: str) -> None:
    assert re.fullmatch(message, failure("complete", *arguments))


@pytest.mark.parametrize("option", ["--temperature=nan", "--temperature=3", "--max-tokens=-1", "--seed=x", "--no"])
def test_options_are_checked(option: str) -> None:
    done = run(*COMPLETE, "x", option)
    assert done.returncode == 2
    assert option.split("=")[0] in done.stderr.decode().splitlines()[-1]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="has no device that is always full")
def test_output_that_cannot_be_written(tmp_path: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run([*LEGATO, *COMPLETE, "x"], stdout=full, stderr=subprocess.PIPE, timeout=60)
    assert (done.returncode, done.stderr) == (1, b"legato: [Errno 28] No space left on device\n")


def test_closed_streams(tmp_path: Path) -> None:
    shell = f'{sys.executable} -m legato complete - --model {SMALL} "$@" <&- >&-'
    done = subprocess.run(["sh", "-c", shell], stderr=subprocess.PIPE, timeout=60)
    assert (done.returncode, b"Traceback" in done.stderr) == (2, False)


# -- serve ------------------------------------------------------------------------------------------------------------


@contextmanager
def serving(*arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Start a server on a free port; wait until it says its address."""
    with started("serve", "--port", "0", *arguments) as process:
        assert process.stderr is not None
        line = process.stderr.readline().decode()
        found = re.fullmatch(r"Legato serves \S+ at (http://\S+:\d+)/v1\n", line)
        assert found, line
        yield process, found[1]


def ask(url: str, **fields: Any) -> str:
    """Return the text of an answer."""
    response = httpx2.post(f"{url}/v1/completions", json={"prompt": "x", **fields}, timeout=60, verify=NO_TLS)
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_demonstration_answers_and_stops(number: signal.Signals) -> None:
    with serving("--demo") as (process, url):
        assert ask(url, model="demo", max_tokens=100).startswith(" This is the scripted engine:")
        assert stop(process, number) == (0, b"")


def test_a_real_model_is_served_until_sigterm() -> None:
    with serving("--model", SMALL) as (process, url):
        workers = children(process.pid)
        assert ask(url, model=SMALL, max_tokens=4, temperature=0)
        assert stop(process, signal.SIGTERM) == (0, b"")
        assert workers
        wait_until_gone(workers)


def test_the_demonstration_needs_no_model(tmp_path: Path) -> None:
    (tmp_path / "legato.toml").write_text("[models.big]\npath = 'no.gguf'\n[aliases]\ngpt = 'big'")
    with serving("--demo") as (_, url):
        (model,) = httpx2.get(f"{url}/v1/models", verify=NO_TLS).json()["data"]
        assert model["id"] == "demo"
    assert b"--model" in run("serve", "--demo", "--model", SMALL).stderr


def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        message = f"cannot listen on 127.0.0.1 port {port}: Address already in use"
        assert failure("serve", "--model", SMALL, "--port", port) == message
        file = config(f"[server]\nport = {port}\n[models.demo]\nengine = 'scripted'")
        done = run("doctor", "--config", file)
        assert done.returncode == 1
        assert f"FAIL {message}; choose another with `--port`" in done.stdout.decode()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--host", "192.0.2.1", "--insecure"],
            "cannot listen on 192.0.2.1 port 8080: Cannot assign requested address",
        ),
        (["--host", "no.invalid", "--insecure"], "cannot listen on no.invalid port 8080: .*"),
        (["--host", "0.0.0.0"], "`server.host` is 0.0.0.0, which others can reach, .*"),
        (["--port", "65536"], r"`server.port` \(command line\) must be between 0 and 65535, got 65536"),
    ],
)
def test_an_address_that_is_not_ours(arguments: Sequence[str], message: str) -> None:
    assert re.fullmatch(message, failure("serve", "--demo", *arguments))


def config(text: str) -> str:
    """Write a settings file; return its name."""
    Path("test.toml").write_text(text)
    return "test.toml"


@pytest.mark.parametrize(
    ("num_bytes", "extra"),
    [(4, bytes(range(256)) * 8), (4, b""), (5000, b""), (50_000_000, b"")],
    ids=["garbage", "no header", "cut in the header", "cut in the weights"],
)
def test_a_file_that_is_no_whole_model(num_bytes: int, extra: bytes, tmp_path: Path) -> None:
    with weights(SMALL).open("rb") as whole:
        (tmp_path / "broken.gguf").write_bytes(whole.read(num_bytes) + extra)
    message = failure("serve", "--port", "0", "--model", "broken.gguf")
    assert message.startswith("model file broken.gguf cannot be loaded: ")


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    assert failure("serve", "--port", "0", "--model", "no.gguf") == "model file no.gguf does not exist"
    (tmp_path / "a.gguf").write_text("text")
    assert failure("serve", "--port", "0", "--model", "a.gguf").startswith("model file a.gguf is not a GGUF file: ")
    (tmp_path / "b.gguf").mkdir()
    assert failure("serve", "--port", "0", "--model", "b.gguf") == "model file b.gguf cannot be read: Is a directory"


def test_a_context_too_large_for_memory() -> None:
    """184 GB for keys and values: llama.cpp asks for them at once."""
    file = config(f'[models."{SMALL}"]\nnum_cells = 8_000_000')
    message = failure("serve", "--port", "0", "--config", file)
    assert message.startswith("no memory for a context of 8000000 tokens with model ")


# -- models, pull, doctor, help ---------------------------------------------------------------------------------------


FIB = (
    b"\xef\xbb\xbfdef fib(n):\r\n    # caf\xc3\xa9\r\n    if n < 2:\r\n        ret\r\n"
    b"    return fib(n - 1) + fib(n - 2)\r\n"
)


def test_infill_prints_or_writes_what_belongs_into_a_gap(tmp_path: Path) -> None:
    path = tmp_path / "fib.py"
    path.write_bytes(FIB)
    path.chmod(0o640)
    told = output("infill", "fib.py:4:12", "--end", "block")
    assert told.startswith(b"urn ")
    assert b"\n    return fib" not in told.replace(b"\r", b"")
    assert path.read_bytes() == FIB
    assert output("infill", "fib.py:4:12", "--end", "block", "--write") == told
    assert path.read_bytes() == FIB.replace(b"ret\r", b"ret" + told + b"\r")
    assert path.stat().st_mode & 0o777 == 0o640
    assert [file.name for file in tmp_path.iterdir()] == ["fib.py"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("fib.py",), "FILE:LINE:COL must end in two numbers, got fib.py"),
        (("fib.py:7:1",), "fib.py has 6 lines, got line 7"),
        (("fib.py:0:1",), "fib.py has 6 lines, got line 0"),
        (("fib.py:2:12",), "line 2 of fib.py has columns 1 to 11, got column 12"),
        (("text:1:1", "--end", "block"), "--end block needs a file of a known kind"),
        (("bytes:1:1",), "bytes is not UTF-8: byte 1 is 0xff"),
    ],
)
def test_what_infill_cannot_do(arguments: Sequence[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "fib.py").write_bytes(FIB)
    (tmp_path / "text").write_bytes(b"x")
    (tmp_path / "bytes").write_bytes(b"a\xff")
    assert failure("infill", *arguments).startswith(message)


def test_models_tells_what_is_here(tmp_path: Path) -> None:
    here = output("models").decode()
    assert re.search(rf"^{SMALL}\n  .*\n  98 MB, Apache-2.0, here$", here, re.M)
    assert "qwen2.5-coder-0.5b (default)\n" in here
    file = config("[models.mine]\npath = 'mine.gguf'")
    elsewhere = output("models", "--config", file, environment={"LEGATO_DATA_DIR": str(tmp_path)}).decode()
    assert elsewhere.count("not pulled") == 2
    assert elsewhere.endswith("mine\n  mine.gguf, missing\n")


def test_pull_of_what_is_here_says_where() -> None:
    assert output("pull", SMALL).decode() == f"{weights(SMALL)}\n"
    assert failure("pull", SMALL, "gpt").startswith("model `gpt` is not in the catalogue; known: ")


def test_doctor_is_content_when_all_is_well() -> None:
    file = config("[server]\nport = 0")
    lines = output("doctor", "--model", SMALL, "--config", file).decode().splitlines()
    assert [line[:5] for line in lines] == ["ok   "] * 4
    assert re.fullmatch(rf"ok   model {SMALL} loads in [\d.]+ s and writes \d+ tokens/s", lines[2])


def test_doctor_says_what_to_do(tmp_path: Path) -> None:
    done = run("doctor", "--model", SMALL, environment={"LEGATO_DATA_DIR": str(tmp_path)})
    assert (done.returncode, done.stderr) == (1, b"")
    assert f"FAIL model `{SMALL}` is not here yet: run `legato pull {SMALL}`\n" in done.stdout.decode()


@pytest.mark.parametrize("command", ["complete", "doctor", "models", "pull", "serve"])
def test_every_command_explains_itself(command: str) -> None:
    text = output(command, "--help").decode()
    assert text.startswith(f"Usage: python -m legato {command} ")
    assert output(command, "-h").decode() == text
    assert f"  {command} " in output("--help").decode()


def test_version_and_wrong_commands() -> None:
    assert re.fullmatch(rb"legato, version [\d.]+\n", output("--version"))
    assert run("compleet").returncode == 2
    assert b"No such command 'compleet'" in run("compleet").stderr


# ---------------------------------------------------------------------------------------------------------------------
# write and chat

START = "The history of the lighthouse at the northern cape beg"
WRITE = ("write", "story.txt", "--model", SMALL)


def write(*arguments: str, environment: Mapping[str, str] | None = None) -> str:
    """Run `legato write` to its end, and return what it says on standard error."""
    done = run(*WRITE[:2], *arguments, environment=environment)
    assert (done.returncode, done.stdout) == (0, b""), done.stderr.decode()
    return done.stderr.decode()


def test_a_file_is_continued_in_place_and_by_the_next_run_again(tmp_path: Path) -> None:
    file = tmp_path / "story.txt"
    file.write_bytes(START.encode())
    expected = output("complete", START, "--model", SMALL, "--max-tokens", "12", "--echo")
    assert re.fullmatch(r"5 tokens, [0-9.]+ tokens/s, round 1, length\n", write("--model", SMALL, "--max-tokens", "5"))
    assert START.encode() < file.read_bytes() < expected
    write("--model", SMALL, "--max-tokens", "7")
    assert file.read_bytes() == expected


def test_what_is_written_ends_before_a_text(tmp_path: Path) -> None:
    file = tmp_path / "story.txt"
    file.write_bytes(b"One, two, th")
    assert "stop" in write("--model", SMALL, "--until", "three, four,")
    assert file.read_text("utf-8") == "One, two, three, four,".removesuffix("ree, four,")


def test_after_ctrl_c_what_is_there_stays_and_the_next_run_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "story.txt"
    file.write_bytes(START.encode())
    with started(*WRITE, "--max-tokens", "4000") as process:
        deadline = time.monotonic() + 60
        while file.stat().st_size < len(START) + 40:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        code, said = stop(process, signal.SIGINT)
    assert code == 130
    assert said.rstrip().endswith(b", interrupted")
    left = file.read_text("utf-8")
    assert left.startswith(START)
    write("--model", SMALL, "--max-tokens", "4")
    grown = file.read_text("utf-8")
    assert output("complete", START, "--model", SMALL, "--max-tokens", "100", "--echo").decode().startswith(grown[:120])
    assert grown.startswith(left)
    assert len(grown) > len(left)


def test_a_provider_continues_a_file_across_breaks(tmp_path: Path) -> None:
    def script(number: int, path: str, body: Any) -> bytes:
        assert (path, body["model"]) == ("/chat/completions", "m")
        return sse(chunk(f" part {number},"), *([chunk(" the end.", "stop")] if number == 3 else []))

    file = tmp_path / "story.txt"
    file.write_bytes(b"Once")
    with faulty(script) as server:
        said = write("--provider", "maas", "--url", server.url, "--model", "m")
    assert file.read_bytes() == b"Once part 0, part 1, part 2, part 3, the end."
    assert said.endswith("round 1, stop\n")
    assert server.bodies[2]["messages"][-1] == {
        "role": "assistant",
        "content": "Once part 0, part 1,",
        "prefix": True,
    }


def test_the_key_of_a_provider_is_in_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "story.txt"
    file.write_bytes(b"Once")
    with serve_script([b" more"], server=ServerSettings(port=0, api_keys=("sk-key",))) as served:
        provider = ("--provider", "maas", "--url", f"{served.url}/v2", "--model", "m")
        write(*provider, environment={"MAAS_API_KEY": "sk-key"})
        assert file.read_bytes() == b"Once more"
        done = run(*WRITE[:2], *provider, environment={"MAAS_API_KEY": "sk-other"})
    assert done.returncode == 1
    assert b"legato: the server said 401" in done.stderr
    assert file.read_bytes() == b"Once more"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("write", "nothing.txt"), b"'nothing.txt' does not exist"),
        (("write", "story.txt", "--provider", "kimi"), b"--provider needs --model"),
        (("chat", "--url", "http://127.0.0.1:1"), b"--url needs --provider"),
        (("chat", "--provider", "bard", "--model", "m"), b"'bard' is not one of"),
        (("write", "latin.txt"), b"latin.txt is not UTF-8: byte 1 is 0xe9"),
    ],
)
def test_what_cannot_be_written(tmp_path: Path, arguments: Sequence[str], words: bytes) -> None:
    (tmp_path / "story.txt").write_bytes(b"Once")
    (tmp_path / "latin.txt").write_bytes(b"h\xe9")
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (2, b"")
    assert words in done.stderr


def test_a_chat_keeps_its_turns_its_prefix_and_its_role() -> None:
    lines = b"Who are you?\r\nAnd where?\n"
    arguments = ("--model", SMALL, "--prefix", "My", "--as", "Kelsier", "--max-tokens", "12")
    first, second = output("chat", *arguments, stdin=lines).decode().splitlines()
    assert first.startswith("My name is Kelsier")
    assert second.startswith("My")
    (alone,) = output("chat", *arguments, stdin=b"And where?\n").decode().splitlines()
    assert alone != second
    assert output("chat", *arguments, stdin=b"") == b""


def test_a_chat_through_a_provider() -> None:
    with faulty(lambda number, path, body: sse(chunk(f"{number}!", "stop"))) as server:
        said = output("chat", "--provider", "kimi", "--url", server.url, "--model", "m", stdin=b"a\nb\n")
    assert said == b"0!\n1!\n"
    assert [turn["content"] for turn in server.bodies[1]["messages"]] == ["a", "0!", "b"]
