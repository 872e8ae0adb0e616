"""Just enough of Google Cloud Storage and Azure Blob Storage to list a directory and read files with conditions and ranges."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

DATE = formatdate(0, usegmt=True)


@dataclass
class Cloud:
    endpoint: str = ""
    # "container/key".
    objects: dict[str, bytes] = field(default_factory=dict)
    requests: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)


def _etag(data: bytes) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'


def _names(cloud: Cloud, container: str, prefix: str) -> list[str]:
    keys = [key.removeprefix(f"{container}/") for key in cloud.objects if key.startswith(f"{container}/")]
    return [key for key in sorted(keys) if key.startswith(prefix) and "/" not in key[len(prefix) :]]


def _google_list(cloud: Cloud, container: str, prefix: str) -> str:
    rows = ""
    for name in _names(cloud, container, prefix):
        data = cloud.objects[f"{container}/{name}"]
        rows += (
            f"<Contents><Key>{escape(name)}</Key><LastModified>1970-01-01T00:00:00.000Z</LastModified>"
            f"<ETag>{escape(_etag(data))}</ETag><Size>{len(data)}</Size></Contents>"
        )
    return f"<ListBucketResult><IsTruncated>false</IsTruncated>{rows}</ListBucketResult>"


def _azure_list(cloud: Cloud, container: str, prefix: str) -> str:
    rows = ""
    for name in _names(cloud, container, prefix):
        data = cloud.objects[f"{container}/{name}"]
        rows += (
            f"<Blob><Name>{escape(name)}</Name><Properties><Creation-Time>{DATE}</Creation-Time>"
            f"<Last-Modified>{DATE}</Last-Modified><Etag>{escape(_etag(data))}</Etag>"
            f"<Content-Length>{len(data)}</Content-Length><Content-Type>a/b</Content-Type>"
            "<BlobType>BlockBlob</BlobType></Properties></Blob>"
        )
    blobs = f"<Blobs>{rows}</Blobs><NextMarker/>"
    return f'<EnumerationResults ServiceEndpoint="x" ContainerName="{container}">{blobs}</EnumerationResults>'


class _Handler(BaseHTTPRequestHandler):
    cloud: Cloud
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        key = unquote(parts.path).lstrip("/")
        self.cloud.requests.append((self.command, self.path, {k.lower(): v for k, v in self.headers.items()}))
        if "list-type" in query:
            return self._answer(200, _google_list(self.cloud, key, query.get("prefix", "")).encode())
        if query.get("comp") == "list":
            return self._answer(200, _azure_list(self.cloud, key, query.get("prefix", "")).encode())
        if key not in self.cloud.objects:
            return self._answer(404, b"")
        data = self.cloud.objects[key]
        if self.headers.get("if-match", _etag(data)) != _etag(data):
            return self._answer(412, b"")
        asked = self.headers.get("range") or self.headers.get("x-ms-range")
        if asked is None:
            return self._answer(200, data, _etag(data))
        start, end = (int(n) for n in asked.removeprefix("bytes=").split("-"))
        piece = data[start : end + 1]
        return self._answer(206, piece, _etag(data), f"bytes {start}-{start + len(piece) - 1}/{len(data)}")

    do_HEAD = do_GET

    def _answer(self, status: int, data: bytes, etag: str | None = None, span: str | None = None) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.send_header("content-type", "application/xml")
        self.send_header("last-modified", DATE)
        self.send_header("x-ms-blob-type", "BlockBlob")
        if etag is not None:
            self.send_header("etag", etag)
        if span is not None:
            self.send_header("content-range", span)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


@contextmanager
def cloud_server() -> Iterator[Cloud]:
    cloud = Cloud()
    handler = type("Handler", (_Handler,), {"cloud": cloud})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        cloud.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield cloud
        finally:
            server.shutdown()
