"""One error tree and its HTTP mapping.

    MidstreamError
      InvalidRequest 400            the request must change
        UnknownField 400
          UnknownTools 400          tools of kinds that the server does not have
        ContextExceeded 400         prompt and answer do not fit the context
        SnapshotRefused 400         a hot-load signal that cannot be taken
      Unauthorized 401
      Forbidden 403                 the API key may not do that; no retry helps
      NotFound 404
      RequestTimeout 408            the client did not send its request in time
      Conflict 409
        SnapshotNotServed           retryable: no replica serves what the request asks for
      PayloadTooLarge 413
        BodiesTooLarge              retryable: together with the bodies that are still arriving
      UnsupportedEncoding 415       a compressed body
      RequestLostReplicas 422       replicas were lost with this request: it is not tried again
      SnapshotTransition 425        retryable: a swap has closed the gate
      Overloaded 429                retryable: queue full
      HeadersTooLarge 431
      EngineFailed 500              this request failed inside the engine
      ReplicaUnavailable 503        retryable: no replica can take it now
        EngineLost                  the engine stopped while it worked on the request
        AnotherBoot                 the boot that the request was placed on is gone
          StreamGivenUp             its weights failed their check under the request
        HandedOver                  nothing was done for it, and another replica is to take it
        PolicyNotLoaded             the replica does not hold the request's policy
      RecordsNotStored 507          retryable: the bucket did not take the records that the request asked for as a file
      RebasePending 503             retryable: the chain of a delta is full, and its whole files are still to come
    SnapshotError                   a snapshot that could not be loaded (ledger rows, never an inference response)
      SnapshotMissing, SnapshotCorrupt, SnapshotIncompatible
      SnapshotNotFinite             a number is NaN or infinite

Always holds: an error that a retry may cure has `retry_after_s`; the others have none. Bodies have the shape
`{"error": {"message", "type", "code", "param"}}`, which both the OpenAI and the Fireworks clients read, except on wires of
other APIs (core/wires.py): their clients get their own shape.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

#: The type of a refused version in stitch's words.
NOT_READY = "WeightVersionNotReady"
HEADER_LOST = "x-midstream-lost"
HEADER_ANOTHER_BOOT = "x-midstream-another-boot"
HEADER_NOT_LOADED = "x-midstream-policy-not-loaded"
HEADER_HANDED = "x-midstream-handed"

#: How clients read errors: OpenAI's shape; the same with its Responses API's error event; Anthropic's.
ErrorShape = Literal["openai", "responses", "anthropic"]


class ErrorForm(NamedTuple):
    """types: names of errors, by status; another one below 500 has that of 400. None: an error's own name.

    envelope: the fields beside `error`. too_long: begins the message of a prompt that does not fit. hinted: the statuses that
    clients retry only when a header says so. event: begins the event at the end of a failed stream. flat: the event has the
    error's fields beside its `type`, as the schema says; the SDK raises for an `error`.
    """

    types: Mapping[int, str] | None = None
    envelope: Mapping[str, str] = {}
    too_long: str = ""
    hinted: Collection[int] = ()
    event: bytes = b""
    flat: bool = False


_NAMED_EVENT = b"event: error\n"
ERROR_FORMS: Mapping[ErrorShape, ErrorForm] = {
    "openai": ErrorForm(),
    "responses": ErrorForm(event=_NAMED_EVENT, flat=True),
    "anthropic": ErrorForm(
        types={
            400: "invalid_request_error",
            401: "authentication_error",
            403: "permission_error",
            404: "not_found_error",
            408: "timeout_error",
            413: "request_too_large",
            425: "overloaded_error",
            429: "rate_limit_error",
            500: "api_error",
            503: "overloaded_error",
        },
        envelope={"type": "error"},
        too_long="prompt is too long: {tokens} tokens > {context} maximum; ",
        hinted=(425,),
        event=_NAMED_EVENT,
    ),
}


class MidstreamError(Exception):
    """An error a client sees. `message` is for the person; `param` names the request field at fault."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    #: Its type in OpenAI's shape; "": its code.
    kind: ClassVar[str] = ""
    retry_after_s: int | None = None
    #: Beside Retry-After.
    own_headers: ClassVar[Mapping[str, str]] = {}
    shape: ErrorShape = "openai"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if retry_after_s is not None:
            self.retry_after_s = retry_after_s

    @property
    def form(self) -> ErrorForm:
        return ERROR_FORMS[self.shape]

    def body(self) -> dict[str, Any]:
        form, kind = self.form, self.kind or self.code
        if form.types is not None:
            kind = form.types.get(self.status) or form.types[500 if self.status >= 500 else 400]
        error = {"message": self.message, "type": kind, "code": self.code, "param": self.param}
        return {**form.envelope, "error": error}

    def event_body(self) -> dict[str, Any]:
        """The body as a stream's last event. The stream's own status was sent long ago: clients read this one for retries."""
        body = self.body()
        body["error"]["status_code"] = self.status
        if self.form.flat:
            fields = {"code": self.code, "message": self.message, "param": self.param}
            body = {"type": "error", **fields, "sequence_number": 0, **body}
        return body

    def headers(self) -> dict[str, str]:
        headers = {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}
        hint = {"x-should-retry": "true"} if self.status in self.form.hinted else {}
        return {**headers, **hint, **self.own_headers}


class InvalidRequest(MidstreamError):
    status = 400
    code = "invalid_request_error"


class UnknownField(InvalidRequest):
    """Fireworks' wording: clients match it, drop the field and retry. known: the body's fields, where they were looked for."""

    def __init__(self, field: str, known: Collection[str] = ()) -> None:
        self.known = known
        super().__init__(f"Extra inputs are not permitted, field: '{field}'", param=field)


class UnknownTools(UnknownField):
    """Tools of kinds that the server does not have, which are ignored where unknown fields are. at: their places in `tools`."""

    def __init__(self, at: Sequence[int], kind: object) -> None:
        self.known, self.at = (), at
        param = f"tools[{at[0]}].type"
        said = f"{param}: tools of type {kind!r} are not supported; only functions are"
        InvalidRequest.__init__(self, said, param=param)


class ContextExceeded(InvalidRequest):
    """Clients know it by the code and by these words, cut their conversation, and ask again."""

    code = "context_length_exceeded"
    kind = InvalidRequest.code

    def __init__(self, where: str, tokens: int, context: int, *, param: str, why: str = "") -> None:
        """where: the place in the body. tokens: of the prompt, or as many as it has at least. why: how that is known."""
        self.tokens, self.context = tokens, context
        has = why or f"the prompt has {tokens} tokens"
        super().__init__(
            f"{where}: this model's maximum context length is {context} tokens, and {has}", param=param
        )

    def body(self) -> dict[str, Any]:
        body = super().body()
        too_long = self.form.too_long.format(tokens=self.tokens, context=self.context)
        body["error"]["message"] = too_long + self.message
        return body


class SnapshotRefused(InvalidRequest):
    pass


class Unauthorized(MidstreamError):
    status = 401
    code = "authentication_error"


class Forbidden(MidstreamError):
    status = 403
    code = "permission_error"


class NotFound(MidstreamError):
    status = 404
    code = "not_found_error"


class RequestTimeout(MidstreamError):
    status = 408
    code = "request_timeout"


class Conflict(MidstreamError):
    status = 409
    code = "conflict_error"


class SnapshotNotServed(Conflict):
    """`serving`: of each replica, `{"replica", "snapshot", "stage", "resident"}`. `newest`: what staleness counts from.

    target_version: what was asked for, where that is a number. Trainers of external rollout services read it, and `applied`,
    the newest version.
    """

    code = "snapshot_not_served"
    retry_after_s = 1

    def __init__(
        self,
        message: str,
        serving: Sequence[Mapping[str, Any]] | None = None,
        newest: str | None = None,
        *,
        target_version: int | None = None,
        applied: int | None = None,
    ) -> None:
        super().__init__(message)
        self.serving = serving
        self.newest = newest
        self.target_version = target_version
        self.applied = applied

    def body(self) -> dict[str, Any]:
        if self.serving is None:
            return super().body()
        body = {**super().body(), "serving": list(self.serving), "newest": self.newest}
        # An error in another company's shape has words of its own at that place.
        if self.target_version is None or self.form.envelope:
            return body
        reason = {"type": NOT_READY, "message": self.message, "target_version": self.target_version}
        return {**body, **reason, "applied": self.applied}


class PayloadTooLarge(MidstreamError):
    status = 413
    code = "payload_too_large"


class BodiesTooLarge(PayloadTooLarge):
    """Not this body alone: all that are still arriving. OpenAI's and Fireworks' clients retry a 413 that says they should."""

    retry_after_s = 1
    own_headers: ClassVar[Mapping[str, str]] = {"x-should-retry": "true"}


class UnsupportedEncoding(MidstreamError):
    status = 415
    code = "unsupported_content_encoding"
    own_headers: ClassVar[Mapping[str, str]] = {"accept-encoding": "identity"}


class RequestLostReplicas(MidstreamError):
    """Terminal, and says so in the header that the OpenAI and Fireworks clients heed before the status."""

    status = 422
    code = "request_lost_replicas"
    own_headers: ClassVar[Mapping[str, str]] = {"x-should-retry": "false"}


class SnapshotTransition(MidstreamError):
    status = 425
    code = "snapshot_transition"
    retry_after_s = 1


class Overloaded(MidstreamError):
    status = 429
    code = "overloaded_error"
    retry_after_s = 1


class HeadersTooLarge(MidstreamError):
    status = 431
    code = "headers_too_large"


class EngineFailed(MidstreamError):
    status = 500
    code = "engine_error"


class ReplicaUnavailable(MidstreamError):
    status = 503
    code = "replica_unavailable"
    retry_after_s = 1


class EngineLost(ReplicaUnavailable):
    """A replica's word to its gateway, in HEADER_LOST, that the request may have been the cause."""

    own_headers: ClassVar[Mapping[str, str]] = {HEADER_LOST: "1"}


class AnotherBoot(ReplicaUnavailable):
    """A replica's word to its gateway, in HEADER_ANOTHER_BOOT, that nothing was done for the request."""

    own_headers: ClassVar[Mapping[str, str]] = {HEADER_ANOTHER_BOOT: "1"}


class StreamGivenUp(AnotherBoot):
    """The weights that the request ran under failed their check. The request is not the cause, and no other request may
    enter."""


class PolicyNotLoaded(ReplicaUnavailable):
    """A replica's word to its gateway, in HEADER_NOT_LOADED, that it has no weights of the policy, or none yet."""

    own_headers: ClassVar[Mapping[str, str]] = {HEADER_NOT_LOADED: "1"}


class HandedOver(ReplicaUnavailable):
    """A replica's word to its gateway, in HEADER_HANDED, that another one is to take the turn.

    handed: JSON of a price.Handed.
    """

    def __init__(self, handed: str) -> None:
        super().__init__("another replica is to take this turn; retry this request")
        self.handed = handed

    def headers(self) -> dict[str, str]:
        return {**super().headers(), HEADER_HANDED: self.handed}


class RecordsNotStored(MidstreamError):
    """The answer has no records without their file. No other replica is tried: they all have this bucket."""

    status = 507
    code = "records_not_stored"
    retry_after_s = 10


class RebasePending(MidstreamError):
    """A signal on a chain that has as many deltas as it may. It is taken once the chain begins with the whole files that a
    replica writes."""

    status = 503
    code = "rebase_pending"
    retry_after_s = 5


class SnapshotError(Exception):
    """A snapshot that cannot be served. The message names the file or tensor and what was expected."""


class SnapshotMissing(SnapshotError):
    pass


class SnapshotCorrupt(SnapshotError):
    pass


class SnapshotIncompatible(SnapshotError):
    pass


class SnapshotNotFinite(SnapshotError):
    """A number of the weights is NaN or infinite. The message names the tensor, the index and the file."""


class ConfigError(Exception):
    """A setting that cannot work; the command line prints it as one line and exits with 2."""


def forget_frames(error: BaseException | None) -> None:
    """Of an error that is kept no longer than its answer. Its frames, and those that called them, refer to it and to all that
    they worked on, a request's body for example, and would wait for a collection together."""
    while error is not None:
        error.__traceback__ = None
        error = error.__context__
