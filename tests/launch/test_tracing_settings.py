"""Whether spans are exported: by the setting and the standard variables, and what happens without the extra."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from midstream.core.config import TracingSettings
from midstream.core.errors import ConfigError
from midstream.core.settings import load_settings
from midstream.core.tracing import trace_of_signal
from midstream.core.types import Desired
from midstream.launch.tracing import check, tracer_of, wanted

NAMED = TracingSettings(endpoint="http://127.0.0.1:4318")
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


@pytest.mark.parametrize(
    ("settings", "environment", "expected"),
    [
        (TracingSettings(), {}, False),
        (TracingSettings(), {ENDPOINT: ""}, False),
        (TracingSettings(), {ENDPOINT: "http://c:4318"}, True),
        (TracingSettings(), {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces"}, True),
        (TracingSettings(), {ENDPOINT: "http://c:4318", "OTEL_TRACES_EXPORTER": "none"}, False),
        (NAMED, {}, True),
        (NAMED, {"OTEL_SDK_DISABLED": "true"}, False),
        (NAMED, {"OTEL_TRACES_EXPORTER": "none"}, False),
    ],
)
def test_when_spans_are_exported(
    settings: TracingSettings, environment: dict[str, str], expected: bool
) -> None:
    assert wanted(settings, environment) is expected


def test_without_the_extra_a_setting_is_an_error_and_the_environment_is_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"pip install 'midstream\[otel\]'"), tracer_of(NAMED, "gateway"):
        pass
    with pytest.raises(ConfigError, match="otel"):
        check(NAMED)
    check(TracingSettings())
    monkeypatch.setenv(ENDPOINT, "http://127.0.0.1:4318")
    check(TracingSettings())
    with tracer_of(TracingSettings(), "gateway") as tracer:
        assert tracer is None
    assert "midstream[otel]" in caplog.text


@pytest.mark.parametrize(
    ("variable", "value"), [("OTEL_BSP_MAX_QUEUE_SIZE", "256"), ("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "x")]
)
def test_a_wrong_standard_variable_ends_the_start_with_a_line_or_spans_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match="tracing: a variable OTEL_"):
        check(NAMED)
    monkeypatch.setenv(ENDPOINT, "http://127.0.0.1:4318")
    with tracer_of(TracingSettings(), "gateway") as tracer:
        assert tracer is None
    assert "OTEL_" in caplog.text


def test_while_tracing_is_off_nothing_of_it_is_imported() -> None:
    script = """
import sys
import midstream.launch.gateway, midstream.replica.app
from midstream.core.config import TracingSettings
from midstream.launch.tracing import tracer_of
with tracer_of(TracingSettings(), "gateway") as tracer:
    assert tracer is None
assert not [name for name in sys.modules if name.startswith("opentelemetry")]
"""
    subprocess.run([sys.executable, "-c", script], check=True, env={"PYTHONPATH": ":".join(sys.path)})


def test_an_endpoint_is_a_url_without_a_password() -> None:
    for wrong in ("127.0.0.1:4318", "http://user:secret@host:4318", "http://h:1/?token=x", "http://"):
        with pytest.raises(
            ConfigError, match=r"tracing\.endpoint must be of the form http://HOST:PORT"
        ) as raised:
            load_settings(None, {"tracing": {"endpoint": wrong}})
        assert "secret" not in str(raised.value)
    assert load_settings(None, {"tracing": {"endpoint": "https://c:4318/otlp"}}).tracing.endpoint


def test_all_replicas_of_a_signal_have_one_trace_and_signals_have_their_own() -> None:
    one = Desired(snapshot="s", generation=1, url="file:///b/s", fingerprint="f")
    others = [
        {"generation": 2}, {"policy": "p"}, {"policy": "p", "made": 1.0}, {"url": "file:///c/s"}, {"fingerprint": "g"},
    ]  # fmt: skip
    traces = [trace_of_signal("d", msgspec.structs.replace(one, **other)) for other in ({}, *others)]
    traces.append(trace_of_signal("e", one))
    assert len(set(traces)) == 7
    assert traces[0] == trace_of_signal("d", msgspec.structs.replace(one, hold=True, let_go=3))
    assert all(len(trace) == 16 and any(trace) for trace in traces)
