"""A bucket behind limited links: a directory as S3 serves it, with one port and one token bucket for each link.

Owns: the part of S3's protocol that reads (list, head, ranges), from files.
Always holds: all connections of one link share its bytes per second. A link has no burst beyond one piece. Nothing is written.

    python limited_bucket.py DIRECTORY LINKS BYTES_PER_S     # it prints a port for each link, then serves until its input ends
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

BUCKET = "bench"
HOST = "127.0.0.1"
PIECE_BYTES = 128 * 1024


class Link:
    """bytes_per_s: of all its connections together; 0 is no limit."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        # When the bytes that were let through are over the link.
        self._free_at = 0.0

    def pass_through(self, count: int) -> None:
        """Return when `count` more bytes are over the link."""
        if not self._bytes_per_s:
            return
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + count / self._bytes_per_s
            wait_s = self._free_at - now
        time.sleep(wait_s)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, directory: Path, link: Link) -> None:
        super().__init__((HOST, 0), _Handler)
        self.directory = directory
        self.link = link


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: what is measured has no log."""

    def do_HEAD(self) -> None:
        self._object(body=False)

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        if parts.path.strip("/") == BUCKET:
            query = parse_qs(parts.query)
            self._answer(200, _listing(self.server.directory, query.get("prefix", [""])[0]))
        else:
            self._object(body=True)

    def _object(self, *, body: bool) -> None:
        key = unquote(urlsplit(self.path).path).removeprefix(f"/{BUCKET}/")
        path = self.server.directory / key
        if not path.is_file():
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        found = path.stat()
        tag = _tag(found)
        if self.headers.get("if-match", tag) != tag:
            self._answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
            return
        asked = self.headers.get("range")
        begin, end = _range(asked, found.st_size)
        self.send_response(200 if asked is None else 206)
        self.send_header("etag", tag)
        self.send_header("last-modified", formatdate(found.st_mtime, usegmt=True))
        self.send_header("content-length", str(end - begin))
        self.send_header("content-range", f"bytes {begin}-{end - 1}/{found.st_size}")
        self.end_headers()
        if body:
            self.wfile.flush()
            self._send(path, begin, end)

    def _send(self, path: Path, begin: int, end: int) -> None:
        with path.open("rb") as file:
            while begin < end:
                count = min(PIECE_BYTES, end - begin)
                self.server.link.pass_through(count)
                begin += os.sendfile(self.connection.fileno(), file.fileno(), begin, count)

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", "application/xml")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _tag(found: os.stat_result) -> str:
    return f'"{found.st_mtime_ns:x}-{found.st_size:x}"'


def _range(asked: str | None, size: int) -> tuple[int, int]:
    """`bytes=FIRST-LAST` as a half-open interval."""
    if asked is None:
        return 0, size
    first, _, last = asked.removeprefix("bytes=").partition("-")
    return int(first), min(int(last) + 1 if last else size, size)


def _listing(directory: Path, prefix: str) -> bytes:
    """Of the files directly below a prefix that ends at a directory."""
    below = directory / prefix
    entries = []
    for path in sorted(below.iterdir()) if below.is_dir() else []:
        if path.is_file():
            found = path.stat()
            changed = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(found.st_mtime))
            entries.append(
                f"<Contents><Key>{escape(str(path.relative_to(directory)))}</Key><LastModified>{changed}</LastModified>"
                f"<ETag>{escape(_tag(found))}</ETag><Size>{found.st_size}</Size>"
                "<StorageClass>STANDARD</StorageClass></Contents>"
            )
    return (
        '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult>'
        f"<Name>{BUCKET}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(entries)}</KeyCount>"
        f"<MaxKeys>1000</MaxKeys><IsTruncated>false</IsTruncated>{''.join(entries)}</ListBucketResult>"
    ).encode()


def environment(port: int) -> dict[str, str]:
    """Of a process that reaches the bucket over that link."""
    return {
        "AWS_ENDPOINT_URL": f"http://{HOST}:{port}",
        "AWS_ACCESS_KEY_ID": "bench",
        "AWS_SECRET_ACCESS_KEY": "unchecked",
        "AWS_REGION": "us-east-1",
        "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "false",
    }


@contextlib.contextmanager
def limited_bucket(directory: Path, links: int, bytes_per_s: float) -> Iterator[list[int]]:
    """Within: the directory is served by a process of its own. The ports, one for each link, and one more without a limit."""
    process = subprocess.Popen(
        [sys.executable, __file__, str(directory), str(links), str(bytes_per_s)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield [int(process.stdout.readline()) for _ in range(links + 1)]
    finally:
        process.kill()
        process.communicate()


def serve(directory: Path, links: int, bytes_per_s: float) -> None:
    for rate in [bytes_per_s] * links + [0.0]:
        server = _Server(directory, Link(rate))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        print(server.server_address[1], flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    serve(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
