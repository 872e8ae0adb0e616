"""OpenTelemetry behind the port of core/tracing.py: spans exported to a collector by OTLP over HTTP.

Owns: the only imports of opentelemetry, none of which happens while tracing is off.
Always holds: spans are exported by a thread of their own. Of a collector that is slow or gone, spans are lost and nothing else.
The tracer of the whole process, which other libraries use, is not touched.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from midstream import __version__
from midstream.core.config import TracingSettings
from midstream.core.errors import ConfigError
from midstream.core.tracing import Attribute, Attributes, OpenSpan, SpanRecord, Tracer

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

logger = logging.getLogger(__name__)

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_NEEDS = "needs OpenTelemetry: pip install 'midstream[otel]'"
#: For the last spans to be exported when a process ends.
CLOSE_S = 2.0


def wanted(settings: TracingSettings, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether spans are to be exported: an endpoint is named, and the standard variables do not switch tracing off."""
    off = environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if off or environment.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp":
        return False
    return settings.endpoint is not None or any(environment.get(name) for name in _ENDPOINTS)


def check(settings: TracingSettings) -> None:
    """Raises ConfigError where the setting asks for spans, and the extra is missing or a standard variable is wrong: before
    anything is started."""
    if settings.endpoint is not None and wanted(settings):
        _made(settings, "check").close()


@contextlib.contextmanager
def tracer_of(settings: TracingSettings, process: str) -> Iterator[Tracer | None]:
    """The tracer of this process; None: spans are not wanted, or only the environment asks for them and the extra is missing.

    process: its name, such as replica-0. At its end the last spans have CLOSE_S to leave.

    Raises ConfigError where a setting asks for spans and the extra is missing.
    """
    made = None
    if wanted(settings):
        try:
            made = _made(settings, process)
        except ConfigError as error:
            if settings.endpoint is not None:
                raise
            logger.warning("spans are not exported, though OTEL_EXPORTER_OTLP_ENDPOINT is set: %s", error)
    try:
        yield made
    finally:
        if made is not None:
            made.close()


def _made(settings: TracingSettings, process: str) -> OtelTracer:
    """Raises ConfigError, also where a standard variable has a value that cannot be."""
    try:
        return OtelTracer(_exporter(settings), process)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"tracing: a variable OTEL_* has a value that cannot be: {error}") from error


def _exporter(settings: TracingSettings) -> SpanExporter:
    try:
        import opentelemetry.sdk.trace  # noqa: F401
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "opentelemetry":
            raise
        raise ConfigError(f"tracing {_NEEDS}") from error
    # A collector that is gone would be a warning for each attempt. What is lost is an error, once for each batch.
    logging.getLogger("opentelemetry").setLevel(logging.ERROR)
    if settings.endpoint is None:
        return OTLPSpanExporter()
    return OTLPSpanExporter(endpoint=f"{settings.endpoint.rstrip('/')}/v1/traces")


class OtelTracer(Tracer):
    """Use from one event loop. at_once: spans are exported as they end, which is for tests."""

    def __init__(self, exporter: SpanExporter, process: str, *, at_once: bool = False) -> None:
        from opentelemetry.context import Context
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
        from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        class Ids(RandomIdGenerator):
            """given: the id of the next trace without a parent."""

            given: bytes | None = None

            def generate_trace_id(self) -> int:
                given, self.given = self.given, None
                return super().generate_trace_id() if given is None else int.from_bytes(given)

        self._ids = Ids()
        provider = TracerProvider(resource=_resource(process), shutdown_on_exit=False, id_generator=self._ids)
        provider.add_span_processor((SimpleSpanProcessor if at_once else BatchSpanProcessor)(exporter))
        self._provider: TracerProvider = provider
        self._tracer = provider.get_tracer("midstream", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._root: Context = Context()
        self._kinds = {"server": SpanKind.SERVER, "internal": SpanKind.INTERNAL}
        self._failed: Callable[[str], Status] = lambda why: Status(StatusCode.ERROR, _shown(why))

    def begin(self, name: str, headers: Mapping[str, str]) -> OpenSpan:
        parent = self._parent(headers)
        return _OpenSpan(self, self._tracer.start_span(name, parent, self._kinds["server"]))

    def record(
        self, span: SpanRecord, headers: Mapping[str, str] | None = None, trace: bytes | None = None
    ) -> None:
        self._ids.given = trace
        try:
            self._record(span, self._root if headers is None else self._parent(headers))
        except Exception:
            # No span is worth the request or the boot that it describes.
            logger.exception("a span of %s is lost", span.name)
        finally:
            self._ids.given = None

    def _record(self, record: SpanRecord, parent: Context) -> None:
        from opentelemetry.trace import set_span_in_context

        span = self._tracer.start_span(
            record.name, parent, self._kinds[record.kind], start_time=_ns(record.begin_s)
        )
        if not span.is_recording():
            return
        inside = set_span_in_context(span, self._root)
        for child in record.children:
            self._record(child, inside)
        for event in record.events:
            span.add_event(event.name, _attributes(event.attributes), _ns(event.at_s))
        self.finish(span, record.attributes, record.error, _ns(record.end_s))

    def finish(self, span: Span, attributes: Attributes, error: str | None, at_ns: int | None = None) -> None:
        span.set_attributes(_attributes(attributes))
        if error is not None:
            span.set_status(self._failed(error))
        span.end(at_ns)

    def _parent(self, headers: Mapping[str, str]) -> Context:
        return self._propagator.extract(headers, self._root)

    def close(self) -> None:
        """Exports what is left, for CLOSE_S at most. Spans that come later are lost."""
        closing = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        closing.start()
        closing.join(CLOSE_S)


class _OpenSpan(OpenSpan):
    def __init__(self, tracer: OtelTracer, span: Span) -> None:
        self._tracer, self._span = tracer, span
        context = span.get_span_context()
        self.traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
        self.unseen = not span.is_recording()

    def event(self, name: str, attributes: Attributes) -> None:
        self._span.add_event(name, _attributes(attributes))

    def end(self, attributes: Attributes, error: str | None = None) -> None:
        try:
            self._tracer.finish(self._span, attributes, error)
        except Exception:
            # Its client still waits for the end of its response.
            logger.exception("a request's span is lost")


def _resource(process: str) -> Resource:
    """Whose spans they are. OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES win."""
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource

    own = Resource(
        {
            "service.name": "midstream",
            "service.version": __version__,
            "service.instance.id": f"{process}-{os.getpid()}",
            "midstream.process": process,
        }
    )
    return Resource.create().merge(own).merge(OTELResourceDetector().detect())


def _attributes(given: Attributes) -> dict[str, Attribute]:
    """A string that UTF-8 does not take would cost the whole batch."""
    return {name: _fit(value) for name, value in given.items()}


def _fit(value: Attribute) -> Attribute:
    if isinstance(value, str):
        return _shown(value)
    return value if isinstance(value, int | float) else [_shown(one) for one in value]


def _shown(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
