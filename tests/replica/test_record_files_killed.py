"""A replica that is killed while it writes record files: each reference that it handed out is of a whole file."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from tiers import of_tier

from midstream.core.record_files import is_file_name
from midstream.core.references import RecordReference

WRITER = """
import asyncio, sys, msgspec
from midstream.core.references import ReferencedRows
from midstream.replica.record_files import Encoded, RecordFiles

async def main():
    files = RecordFiles(sys.argv[1], "default")
    async def one(number):
        data = number.to_bytes(4, "little") * 100_000
        reference = await files.put(lambda: Encoded(data, 1, [ReferencedRows(0, 0, 1)]))
        sys.stdout.buffer.write(msgspec.json.encode(reference) + b"\\n")
        sys.stdout.buffer.flush()
    for at in range(0, 100_000, 4):
        await asyncio.gather(*(one(at + more) for more in range(4)))

asyncio.run(main())
"""


def handed_out(url: str, draw: random.Random) -> list[RecordReference]:
    """What a writer said before it was killed, in the middle of something."""
    with subprocess.Popen([sys.executable, "-c", WRITER, url], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        lines = [child.stdout.readline() for _ in range(draw.randrange(1, 30))]
        for _ in range(draw.randrange(20_000)):
            pass
        child.send_signal(signal.SIGKILL)
        child.wait()
        lines += child.stdout.read().splitlines()
    return [msgspec.json.decode(line, type=RecordReference) for line in lines if line.rstrip().endswith(b"}")]


#: KILLS and SEED of the environment are for longer runs.
FIRST, KILLS = int(os.environ.get("SEED", 0)), int(os.environ.get("KILLS", of_tier(fast=1, test=3, all=25)))


@pytest.mark.parametrize("seed", range(FIRST, FIRST + KILLS))
def test_a_reference_that_was_handed_out_is_of_a_whole_file(seed: int, tmp_path: Path) -> None:
    told = handed_out(tmp_path.as_uri(), random.Random(seed))
    assert told
    for reference in told:
        data = (tmp_path / reference.file).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (reference.bytes, reference.sha256)
    for path in (tmp_path / "record-files" / "default").iterdir():
        if is_file_name(path.name):
            assert hashlib.sha256(path.read_bytes()).hexdigest() == path.stem
        else:
            assert path.name.startswith("writing-")
