"""A real S3 server (moto's) in a process of its own on a free loopback port, and what tests do to its objects."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

ACCESS_KEY, SECRET_KEY = "AKIATESTONLY0001", "a-secret/of+the=tests"
# Of a listing; S3 itself gives a thousand.
KEYS_PER_PAGE = 50


@dataclass(frozen=True)
class S3Server:
    endpoint: str

    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_REGION": "us-east-1",
        }

    def make_bucket(self, name: str) -> None:
        self._request("PUT", f"/{name}")

    def put(self, bucket: str, key: str, data: bytes) -> None:
        self._request("PUT", f"/{bucket}/{quote(key)}", data)

    def get(self, bucket: str, key: str) -> bytes:
        return self._request("GET", f"/{bucket}/{quote(key)}")

    def delete(self, bucket: str, key: str) -> None:
        self._request("DELETE", f"/{bucket}/{quote(key)}")

    def put_directory(self, bucket: str, prefix: str, directory: Path) -> None:
        for file in sorted(directory.iterdir()):
            if file.is_file():
                self.put(bucket, f"{prefix}/{file.name}", file.read_bytes())

    def _request(self, method: str, path: str, data: bytes | None = None) -> bytes:
        request = urllib.request.Request(self.endpoint + path, data=data, method=method)
        request.add_header("authorization", f"AWS {ACCESS_KEY}:unchecked")
        if data is not None:
            request.add_header("content-type", "application/octet-stream")
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=30) as answer:
            body: bytes = answer.read()
            return body


@contextmanager
def s3_server(keys_per_page: int = KEYS_PER_PAGE) -> Iterator[S3Server]:
    process = subprocess.Popen(
        [sys.executable, "-c", "from moto.server import main; main()", "-H", "127.0.0.1", "-p", "0"],
        env={**os.environ, "PYTHONWARNINGS": "ignore", "MOTO_S3_DEFAULT_MAX_KEYS": str(keys_per_page)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        # Until it says that it listens.
        for line in process.stderr:
            if running := re.search(r"Running on (http://127\.0\.0\.1:\d+)", line):
                break
        else:
            raise RuntimeError(f"the S3 server ended with {process.wait()}")
        drain = threading.Thread(target=process.stderr.read, daemon=True)
        drain.start()
        yield S3Server(running[1])
        process.kill()
        drain.join()
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()
