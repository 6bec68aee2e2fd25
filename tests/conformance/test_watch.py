"""What is seen of a server from outside: metrics, readiness, the log, traces, and how it stops."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx2
import openai
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from legato.config import LimitSettings, ServerSettings
from legato.engines.scripted import Pause, Script
from legato.errors import StoreUnavailable
from legato.logs import _Json
from legato.storage.keys import Key
from tests.conformance.reading import COMPLETIONS
from tests.conftest import NO_TLS, Served, serve_script
from tests.docs.pages import DOCS

SCRIPT: Script = [b"a", Pause(0.02), b"b", Pause(0.02), b"c"]
BODY = {"model": "m", "prompt": "secret words"}


def metrics(served: Served, **options: str) -> dict[str, float]:
    """Read all metrics, by name and labels."""
    answer = served.get("/metrics", headers=options)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")
    lines = [line for line in answer.text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


# ---------------------------------------------------------------------------------------------------------------------
# Metrics


def test_metrics_count_what_happens() -> None:
    with serve_script(SCRIPT) as served:
        for num in (1, 2):
            assert served.post(COMPLETIONS, {**BODY, "n": num, "max_tokens": 8}).status_code == 200
        assert served.post(COMPLETIONS, {**BODY, "n": 0}).status_code == 400
        found = metrics(served)
    assert found['legato_requests_total{method="POST",path="/v1/completions",status="200"}'] == 2
    assert found['legato_requests_total{method="POST",path="/v1/completions",status="400"}'] == 1
    assert found['legato_prompt_tokens_total{model="m"}'] == 24
    assert found['legato_completion_tokens_total{model="m"}'] == 9
    assert found['legato_first_token_seconds_count{model="m"}'] == 3
    assert 0.02 <= found['legato_token_seconds_sum{model="m"}'] / found['legato_token_seconds_count{model="m"}'] < 1
    assert found['legato_running{model="m"}'] == found['legato_waiting{model="m"}'] == 0
    assert found["legato_disk_free_bytes"] > 0


def test_running_choices_show() -> None:
    with serve_script([b"a", Pause(30)]) as served:
        body = {"prompt": "x", "stream": True}
        with served.client().completions.create(model="m", **body) as stream:  # type: ignore[call-overload]
            next(iter(stream))
            assert metrics(served)['legato_running{model="m"}'] == 1


def test_metrics_are_for_who_runs_the_server() -> None:
    with serve_script(SCRIPT, server=ServerSettings(port=0, api_keys=("plain",))) as served:
        assert served.get("/metrics").status_code == 401
        assert served.get("/metrics", headers={"Authorization": "Bearer plain"}).status_code == 403
        key = served.store.create_key(Key("root", admin=True))
        assert "legato_disk_free_bytes" in metrics(served, Authorization=f"Bearer {key}")


def test_the_pages_and_the_dashboard_have_every_metric() -> None:
    with serve_script(SCRIPT) as served:
        assert served.post(COMPLETIONS, BODY).status_code == 200
        kinds = re.findall(r"^# TYPE (\w+) (\w+)$", served.get("/metrics").text, re.M)
    names = {name for name, _ in kinds if not name.endswith("_created")}
    page, dashboard = (DOCS / "operations.md").read_text("utf-8"), (DOCS / "grafana.json").read_text("utf-8")
    assert names == set(re.findall(r"`(legato_\w+)`", page))
    shown = {
        re.match(r".*?(legato_\w+)", target["expr"])[1].removesuffix("_bucket")  # type: ignore[index]
        for panel in json.loads(dashboard)["panels"]
        for target in panel["targets"]
    }
    assert shown == names


# ---------------------------------------------------------------------------------------------------------------------
# Readiness


def test_a_server_is_ready_while_its_database_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve_script(SCRIPT) as served:
        assert (served.get("/ready").status_code, served.get("/ready").json()) == (200, {"status": "ready"})

        def fail() -> bool:
            raise StoreUnavailable("no")

        monkeypatch.setattr(served.store, "has_keys", fail)
        assert (served.get("/ready").status_code, served.get("/ready").json()) == (503, {"status": "store unavailable"})
        assert served.get("/health").status_code == 200


# ---------------------------------------------------------------------------------------------------------------------
# The log


def test_the_log_has_ids_and_counts_and_no_text(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "legato.server")
    settings = ServerSettings(port=0, api_keys=("plain",))
    with serve_script(SCRIPT, server=settings) as served:
        answer = served.post(COMPLETIONS, BODY, headers={"Authorization": "Bearer plain"})
    (record,) = [record for record in caplog.records if record.name == "legato.server"]
    line = json.loads(_Json().format(record))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"])
    assert line["request"] == answer.headers["x-request-id"]
    assert (line["level"], line["path"], line["status"], line["model"]) == ("info", COMPLETIONS, 200, "m")
    assert line["key"].startswith("sha256:")
    assert (line["prompt_tokens"], line["completion_tokens"]) == (12, 3)
    assert "secret" not in str(line)
    assert "plain" not in str(line)


def test_a_server_writes_its_log_as_json(tmp_path: Path) -> None:
    file = tmp_path / "legato.toml"
    file.write_text(f"data_dir = '{tmp_path}'\n[server]\nlog_format = 'json'\n")
    with started("--config", str(file), "--verbose") as (process, url):
        assert httpx2.get(url.removesuffix("/v1") + "/health", verify=NO_TLS).status_code == 200
        assert process.stderr is not None
        lines = (json.loads(line) for line in process.stderr)  # Some are about the start.
        line = next(line for line in lines if "request" in line)
    assert (line["method"], line["path"], line["status"], line["logger"]) == ("GET", "/health", 200, "legato.server")


# ---------------------------------------------------------------------------------------------------------------------
# Traces


def test_requests_are_traced() -> None:
    received: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            """Say nothing."""

    collector = HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    settings = ServerSettings(port=0, traces_url=f"http://127.0.0.1:{collector.server_port}/v1/traces")
    trace = "0af7651916cd43dd8448eb211c80319c"
    try:
        with serve_script(SCRIPT, server=settings) as served:
            headers = {"traceparent": f"00-{trace}-b7ad6b7169203331-01"}
            assert served.post(COMPLETIONS, BODY, headers=headers).status_code == 200
    finally:
        collector.shutdown()
        collector.server_close()
    request = ExportTraceServiceRequest.FromString(b"".join(received))
    (span,) = request.resource_spans[0].scope_spans[0].spans
    attributes = {entry.key: entry.value for entry in span.attributes}
    assert (span.name, span.trace_id.hex()) == ("POST /v1/completions", trace)
    assert attributes["http.response.status_code"].int_value == 200
    assert attributes["gen_ai.usage.output_tokens"].int_value == 3
    assert "secret" not in str(request)


# ---------------------------------------------------------------------------------------------------------------------
# The end


@contextmanager
def started(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `legato serve --demo` on a free port."""
    command = [sys.executable, "-m", "legato", "serve", "--demo", "--port", "0", *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            line = next(line for line in process.stderr if line.startswith("Legato serves"))  # After what the log has.
            yield process, line.split(" at ")[1].strip()
        finally:
            process.terminate()


def test_a_stream_may_end_while_the_server_stops(tmp_path: Path) -> None:
    environment = {"LEGATO_LIMITS_GRACE_S": "30", "LEGATO_DATA_DIR": str(tmp_path)}
    os.environ.update(environment)
    try:
        with started() as (process, url), httpx2.Client(verify=NO_TLS, timeout=60) as client:
            body = {"model": "demo", "prompt": "x", "max_tokens": 200, "stream": True}
            with client.stream("POST", url + "/completions", json=body) as answer:
                lines = answer.iter_lines()
                next(lines)
                process.send_signal(signal.SIGTERM)
                time.sleep(0.2)
                with pytest.raises(httpx2.ConnectError):
                    client.get(url + "/models")
                assert [line for line in lines if line][-1] == "data: [DONE]"
            assert process.wait(20) == 0
    finally:
        for name in environment:
            del os.environ[name]


def test_a_stream_that_does_not_end_in_time_is_cut_off() -> None:
    begun = time.monotonic()
    with serve_script([b"a", Pause(60)], limits=LimitSettings(grace_s=1)) as served:
        client = served.client()
        stream = client.completions.create(model="m", prompt="x", stream=True)
        next(iter(stream))
    with closing(client), pytest.raises(openai.APIConnectionError):
        next(iter(stream))
    assert time.monotonic() - begun < 20
