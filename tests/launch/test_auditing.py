"""The auditor process of a replica: how it ends."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

#: A replica that halts its auditor as soon as it has one, says which process that is, and waits.
REPLICA = """
import asyncio
from midstream.core.config import EngineSettings
from midstream.launch.auditing import AuditorProcess

async def main():
    auditor = await AuditorProcess.start(EngineSettings())
    auditor.halt()
    print(auditor.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""
#: No process needs so long to end.
ENDS_S = 20.0


@contextmanager
def watched(pid: int) -> Iterator[int]:
    handle = os.pidfd_open(pid)
    try:
        yield handle
    finally:
        os.close(handle)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the kernel does not end it")
def test_an_auditor_that_is_halted_as_it_starts_ends_with_its_replica() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", REPLICA], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as replica:
        assert replica.stdout is not None
        pid = int(replica.stdout.readline())
        with watched(pid) as handle:
            score = Path(f"/proc/{pid}/oom_score_adj").read_text()
            replica.kill()
            replica.wait()
            ended, _, _ = select.select([handle], [], [], ENDS_S)
            if not ended:
                os.kill(pid, signal.SIGKILL)
    assert ended, "it is halted for ever"
    # Where memory ends, the kernel takes it and not the engine.
    assert score == "1000\n"
