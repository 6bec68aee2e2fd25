"""Fixtures: weights, engines, and servers on real sockets."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import httpx2
import hypothesis
import openai
import pytest

from legato.catalog.pull import find_model
from legato.config import LimitSettings, ModelSettings, ServerSettings, Settings, StoreSettings
from legato.decoding.seam import Seam
from legato.engines.llamacpp.binding import Vocabulary
from legato.engines.scripted import Script, ScriptedEngine
from legato.run.models import Model, Models, load_models
from legato.server.app import create_app
from legato.server.run import listen, run_app
from legato.storage.store import Store
from legato.types import Job
from tests.faults import tried
from tests.side_by_side import SideBySide
from tests.tokenizers import write_tokenizer

SMALL = "smollm2-135m"
DEFAULT = "qwen2.5-coder-0.5b"
VENDOR_NAMES = ("deepseek-v3.2", "deepseek-v3", "qwen2.5-coder-32b-instruct", "Qwen2.5-72B-Instruct")
"""What vendors' examples call their models: aliases here."""
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""For httpx2, which would otherwise read all the root certificates again for every request."""


hypothesis.settings.register_profile("thorough", max_examples=2000)
hypothesis.settings.register_profile("fast", max_examples=10)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--crashes", type=int, default=4, help="How often the worker, and a server, is killed under streams."
    )
    parser.addoption("--overlaps", type=int, default=5, help="How many overlaps of 8 Jobs a model is given.")
    parser.addoption("--documents", type=int, default=3, help="How many documents of 40 schemas are cut.")
    parser.addoption(
        "--places", type=int, default=3, help="At how many places of an answer each kind of garbage is sent."
    )
    parser.addoption(
        "--typed", type=int, default=10, help="How many random sequences of typing into a gap are asked for."
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> SideBySide:
    """Say which tests a worker gets (`just test`)."""
    config.option.loadscopereorder = False
    return SideBySide(config, log)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hand the number of faults that a worker has tried to the process that prints the summary."""
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["tried"] = dict(tried)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Add the faults of a worker; one that crashed has handed over nothing."""
    tried.update(getattr(node, "workeroutput", {}).get("tried", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how many faults were tried, by kind."""
    if tried:
        terminalreporter.section("faults tried on purpose")
        for kind, num in sorted(tried.items()):
            terminalreporter.line(f"{num:5} {kind}")
        terminalreporter.line(f"{tried.total():5} in all")


@pytest.fixture
def num_crashes(request: pytest.FixtureRequest) -> int:
    """How often the worker, and a server, is killed under streams."""
    num: int = request.config.getoption("--crashes")
    return num


@pytest.fixture
def num_overlaps(request: pytest.FixtureRequest) -> int:
    """How many overlaps of 8 Jobs a model is given."""
    num: int = request.config.getoption("--overlaps")
    return num


def running() -> dict[int, int]:
    """The processes that run, each with its parent."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, parent, *_ = path.read_text().rpartition(")")[2].split()
            if state != "Z":
                found[int(path.parent.name)] = int(parent)
    return found


def children(pid: int) -> list[int]:
    """The processes that a process has started and that still run."""
    return [child for child, parent in running().items() if parent == pid]


def weights(name: str) -> Path:
    """Return a pulled model's file."""
    return find_model(name, Settings().data_dir)


@pytest.fixture(scope="session", params=[SMALL, DEFAULT])
def vocabulary(request: pytest.FixtureRequest) -> Vocabulary:
    """The tokenizer of each model of the catalogue."""
    return Vocabulary.load(weights(request.param))


@pytest.fixture(scope="session")
def seam(vocabulary: Vocabulary) -> Seam:
    """Its seam."""
    return Seam(vocabulary)


@dataclass(frozen=True)
class Served:
    """A server that is running, and how to reach it."""

    url: str
    models: Models
    loop: asyncio.AbstractEventLoop
    store: Store

    @property
    def engine(self) -> Any:
        """The first model's engine."""
        return self.models.own[0].engine

    @property
    def name(self) -> str:
        """The first model's name."""
        return self.models.own[0].name

    def post(self, path: str, body: Any, **options: Any) -> httpx2.Response:
        """Post JSON and return the whole answer."""
        return httpx2.post(self.url + path, json=body, timeout=120, verify=NO_TLS, **options)

    def get(self, path: str, **options: Any) -> httpx2.Response:
        """Get a path."""
        return httpx2.get(self.url + path, timeout=120, verify=NO_TLS, **options)

    def complete(self, prompt: str, **fields: Any) -> dict[str, Any]:
        """Return the answer to a greedy completion."""
        body = {"model": self.name, "prompt": prompt, "temperature": 0, "seed": 7, **fields}
        response = self.post("/v1/completions", body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def chat(self, *messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
        """Return the answer to a greedy chat."""
        body = {"model": self.name, "messages": list(messages), "temperature": 0, "seed": 7, **fields}
        response = self.post("/v1/chat/completions", body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def client(self, **options: Any) -> openai.OpenAI:
        """The official client."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="any", max_retries=0, **options)


@contextmanager
def empty_store() -> Iterator[Store]:
    """A new database, gone afterwards."""
    with TemporaryDirectory() as folder, closing(Store.open(f"sqlite:///{folder}/legato.db")) as store:
        yield store


@contextmanager
def serve(
    load: Callable[[], Any],
    server: ServerSettings | None = None,
    limits: LimitSettings | None = None,
    store: Store | None = None,
    journals: StoreSettings | None = None,
) -> Iterator[Served]:
    """Serve on a free port, in a thread with its own event loop. `load` returns a coroutine that gives the models.
    Without a store there is a new one.
    """
    with nullcontext(store) if store is not None else empty_store() as opened:
        yield from _serve(load, opened, server, limits, journals or StoreSettings())


def _serve(
    load: Callable[[], Any],
    store: Store,
    server: ServerSettings | None,
    limits: LimitSettings | None,
    journals: StoreSettings,
) -> Iterator[Served]:
    settings = server or ServerSettings(port=0)
    ready = threading.Event()
    started: list[Any] = []
    failed: list[BaseException] = []

    async def main() -> None:
        models: Models = await load()
        try:
            with listen(settings) as listener:
                stop = asyncio.Event()
                app = create_app(models, store, settings, limits or LimitSettings(), journals)
                host, port = listener.getsockname()[:2]
                started.extend([Served(f"http://{host}:{port}", models, asyncio.get_running_loop(), store), stop])
                ready.set()
                await run_app(app, listener, limits or LimitSettings(), stop=stop)
        finally:
            await models.aclose()

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:  # noqa: BLE001 - handed to the test
            failed.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    ready.wait(120)
    if failed:
        raise failed[0]
    served, stop = started
    try:
        yield served
    finally:
        served.loop.call_soon_threadsafe(stop.set)
        thread.join(30)
        if failed:
            raise failed[0]


@contextmanager
def serve_script(script: Script | Callable[[Job], Script], **options: Any) -> Iterator[Served]:
    """Serve the scripted engine."""
    from legato.run.admission import Admission

    engine_options = {"context_length": options.pop("context_length")} if "context_length" in options else {}
    admission = options.pop("admission", None)
    profile = {name: options.pop(name) for name in ("chat_template", "infill", "reasoning") if name in options}

    async def load() -> Models:
        engine = ScriptedEngine(script, **engine_options)
        engine.profile = replace(engine.profile, **profile)
        return Models({"m": Model("m", engine, admission or Admission())}, {})

    with serve(load, **options) as served:
        yield served


def serve_weights(name: str, **model: Any) -> AbstractContextManager[Served]:
    """Serve a pulled model."""

    async def load() -> Models:
        return await load_models(
            Settings(models={name: ModelSettings(**model)}, aliases=dict.fromkeys(VENDOR_NAMES, name))
        )

    return serve(load)


@lru_cache
def tokenizer_folder() -> Path:
    """Return where the small model's tokenizer files are."""
    folder = Path(mkdtemp())
    write_tokenizer(weights(SMALL), folder)
    return folder


def serve_front(*urls: str, **model: Any) -> AbstractContextManager[Served]:
    """Serve the small model as `front`, in front of other servers."""

    async def load() -> Models:
        options = ModelSettings(engine="upstream", urls=urls, tokenizer=str(tokenizer_folder()), **model)
        return await load_models(Settings(models={"front": options}))

    return serve(load)


@dataclass(frozen=True)
class Process:
    """A server in a process of its own, as its clients see it."""

    url: str
    pid: int
    _process: subprocess.Popen[str]

    @property
    def is_running(self) -> bool:
        """Whether it is still the process that was started."""
        return self._process.poll() is None

    def client(self) -> openai.OpenAI:
        """The official client."""
        return openai.OpenAI(base_url=self.url, api_key="any", max_retries=0)

    def health(self) -> dict[str, int]:
        """What it says of its only model."""
        url = self.url.removesuffix("/v1") + "/health"
        (counts,) = httpx2.get(url, timeout=60, verify=NO_TLS).json()["models"].values()
        return dict(counts)


@contextmanager
def serve_process(*arguments: str) -> Iterator[Process]:
    """Run `legato serve` on a free port."""
    command = [sys.executable, "-m", "legato", "serve", "--port", "0", *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            reading = threading.Thread(target=process.stderr.read)
            reading.start()
            yield Process(line.split(" at ")[1].strip(), process.pid, process)
        finally:
            process.terminate()
            reading.join()


@pytest.fixture(scope="session")
def small() -> Iterator[Served]:
    """A server with the small model."""
    with serve_weights(SMALL) as served:
        yield served


@pytest.fixture(scope="session")
def default() -> Iterator[Served]:
    """A server with the default model, which has infill tokens."""
    with serve_weights(DEFAULT, context_length=8192) as served:
        yield served
