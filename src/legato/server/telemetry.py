"""Telemetry: a log line for each request, metrics, and traces if a collector is configured.

It observes requests and runs, and keeps counts and times. It never sees a text, and decides nothing.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import AbstractContextManager, aclosing, contextmanager, nullcontext
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from legato import __version__
from legato.errors import ConfigError
from legato.run.events import Event
from legato.run.models import Models
from legato.run.run import Run
from legato.storage.store import Store
from legato.system.supervisor import Supervisor
from legato.types import Finished

__all__ = ["METRICS_TYPE", "Notes", "Telemetry"]

METRICS_TYPE = CONTENT_TYPE_LATEST
Notes = dict[str, str | int | float]
"""What is logged and traced of a request."""

_log = logging.getLogger("legato.server")

_FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1)

_UNKNOWN = "unknown"
"""The label for unknown paths and unknown methods."""
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")

_Span = Callable[[str, bytes | None, Notes], AbstractContextManager[None]]
"""Opens a span of this name, below the one in `traceparent`; closing it copies the notes to its attributes."""


class Telemetry:
    """Telemetry of one server.

    Raises:
        ConfigError: `traces_url` is set, and the library that sends traces is not installed.
    """

    def __init__(self, models: Models, store: Store, supervisor: Supervisor, *, traces_url: str) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_State(models, store, supervisor))
        self._span, self._close = _spans(traces_url) if traces_url else (_no_span, _nothing)

        def counter(name: str, words: str, *labels: str) -> Counter:
            return Counter(f"legato_{name}", words, labels, registry=self._registry)

        def histogram(name: str, words: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"legato_{name}", words, ("model",), buckets=buckets, registry=self._registry)

        self._requests = counter("requests", "Requests that were answered or left.", "method", "path", "status")
        self._prompt = counter("prompt_tokens", "Tokens of prompts.", "model")
        self._cached = counter("cached_tokens", "Tokens of prompts that came from the cache.", "model")
        self._completion = counter("completion_tokens", "Tokens of answers.", "model")
        self._healed = counter("healed_requests", "Requests whose prompt was cut back to join the answer.", "model")
        self._first = histogram("first_token_seconds", "Time to the first token of a choice.", _FIRST_TOKEN_S)
        self._each = histogram("token_seconds", "Time for each further token of a choice.", _TOKEN_S)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Send the remaining traces when the context closes."""
        try:
            yield
        finally:
            self._close()

    def metrics(self) -> bytes:
        """Return all metrics, in Prometheus' text format."""
        return generate_latest(self._registry)

    @contextmanager
    def request(self, method: str, parent: bytes | None) -> Iterator[Notes]:
        """Observe a request. The notes are logged, traced and counted when the context closes.

        The caller sets `request` and `path`; `status` and `route` once they are known; `reason` if there is one.
        """
        notes: Notes = {"method": method}
        started = time.perf_counter()
        try:
            with self._span(method, parent, notes):
                yield notes
        finally:
            status = notes.setdefault("status", 500)
            notes["ms"] = round(1000 * (time.perf_counter() - started), 1)
            counted = (
                method if method in _METHODS else _UNKNOWN
            )  # Each label value is a series: clients must not invent any.
            self._requests.labels(counted, notes.pop("route", _UNKNOWN), status).inc()
            words = "%(request)s %(method)s %(path)s %(status)d %(ms).1f ms" + (
                ": %(reason)s" if "reason" in notes else ""
            )
            _log.info(words, notes, extra={"notes": notes})

    @contextmanager
    def run(self, run: Run, notes: Notes) -> Iterator[None]:
        """Observe a run; its tokens are noted even if the client leaves."""
        name = run.model.name
        notes["model"] = name
        if any(run.report.healed_bytes):
            self._healed.labels(name).inc()
        try:
            yield
        finally:
            taken = run.taken()
            for metric, kind, num in (
                (self._prompt, "prompt_tokens", taken.prompt_tokens),
                (self._cached, "cached_tokens", taken.cached_tokens),
                (self._completion, "completion_tokens", taken.completion_tokens),
            ):
                notes[kind] = num
                metric.labels(name).inc(num)

    async def events(self, run: Run) -> AsyncGenerator[Event, None]:
        """Pass on the events of a run, and record the times of its choices."""
        name = run.model.name
        async with aclosing(run.events()) as events:
            async for event in events:
                if isinstance(event, Finished) and (num := event.usage.completion_tokens):
                    self._first.labels(name).observe(event.times.reading_s)
                    if num > 1:
                        self._each.labels(name).observe(event.times.writing_s / (num - 1))
                yield event


class _State(Collector):
    """Gauges that are read at each scrape, not counted."""

    def __init__(self, models: Models, store: Store, supervisor: Supervisor) -> None:
        self._models = models
        self._store = store
        self._supervisor = supervisor

    def collect(self) -> Iterable[Metric]:
        """Yield the state of each model, of the supervised tasks, and of the disk."""
        running = GaugeMetricFamily("legato_running", "Choices that are worked on.", labels=["model"])
        waiting = GaugeMetricFamily("legato_waiting", "Choices that wait for a place.", labels=["model"])
        restarts = CounterMetricFamily("legato_engine_restarts", "Starts after a crash.", labels=["model"])
        down = GaugeMetricFamily(
            "legato_task_down", "Whether it should run beside requests and does not.", labels=["task"]
        )
        for model in self._models.own:
            running.add_metric([model.name], model.admission.num_running)
            waiting.add_metric([model.name], model.admission.num_waiting)
            engine = model.engine.counters()
            restarts.add_metric([model.name], engine.get("restarts", 0))
            if "down" in engine:
                down.add_metric([f"engine {model.name}"], engine["down"])
        again = CounterMetricFamily(
            "legato_task_restarts", "Starts after an end that nobody asked for.", labels=["task"]
        )
        now = self._supervisor.down()
        for task, num in self._supervisor.restarts().items():
            down.add_metric([task], int(task in now))
            again.add_metric([task], num)
        yield from (running, waiting, restarts, down, again)
        if self._store.file is not None:
            disk = os.statvfs(self._store.file.parent)
            free = GaugeMetricFamily("legato_disk_free_bytes", "Bytes free where the database is.")
            free.add_metric([], disk.f_bavail * disk.f_frsize)
            yield free


def _nothing() -> None:
    """Do nothing."""


def _no_span(name: str, parent: bytes | None, notes: Notes) -> AbstractContextManager[None]:
    return nullcontext()


def _spans(url: str) -> tuple[_Span, Callable[[], None]]:
    """Return a function that opens spans for the collector at `url`, and one that sends the remaining ones."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
    except ImportError:
        raise ConfigError("`server.traces_url` needs what sends traces: `pip install 'legato[traces]'`") from None
    provider = TracerProvider(resource=Resource({"service.name": "legato", "service.version": __version__}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
    tracer = provider.get_tracer("legato", __version__)
    propagator = TraceContextTextMapPropagator()

    @contextmanager
    def span(name: str, parent: bytes | None, notes: Notes) -> Iterator[None]:
        carrier: dict[str, Any] = {"traceparent": parent.decode("latin-1")} if parent else {}
        with tracer.start_as_current_span(name, propagator.extract(carrier), SpanKind.SERVER) as opened:
            yield
            opened.update_name(f"{notes['method']} {notes.get('route', _UNKNOWN)}")
            opened.set_attributes({_ATTRIBUTES.get(note, f"legato.{note}"): value for note, value in notes.items()})

    return span, provider.shutdown


_ATTRIBUTES = {
    "method": "http.request.method",
    "path": "url.path",
    "route": "http.route",
    "status": "http.response.status_code",
    "model": "gen_ai.request.model",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
}
"""Notes that have a name in OpenTelemetry's conventions."""
