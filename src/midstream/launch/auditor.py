"""The auditor process of a replica: it computes finished turns again, with weights of its own (verify/audit.py).

Always holds: what serves on the machine comes before it, it ends with its replica, and it opens no port. It answers the first
message before it imports torch, so that its replica may halt it from then on.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from midstream.core import child
from midstream.core.audits import AuditAnswer, AuditBegin, AuditJob
from midstream.core.config import EngineSettings
from midstream.core.logs import configure_as_parent
from midstream.http.ipc import Channel, Disconnected

if TYPE_CHECKING:
    from midstream.verify.audit import TurnAudits

#: Requests of other replicas on the machine come first; its own replica halts it.
NICENESS = 10
_PR_SET_PDEATHSIG = 1
_jobs: msgspec.msgpack.Decoder[AuditBegin | AuditJob] = msgspec.msgpack.Decoder(AuditBegin | AuditJob)


def main() -> int:
    parent = os.getppid()
    _die_with(parent)
    os.nice(NICENESS)
    with contextlib.suppress(OSError):
        # Its copy of the weights is what a machine without memory can do without.
        Path("/proc/self/oom_score_adj").write_text("1000")
    channel = Channel.of_child(_jobs)
    with contextlib.suppress(Disconnected):
        audits: TurnAudits | None = None
        while True:
            for message in channel.receive(None):
                if isinstance(message, AuditBegin):
                    channel.send(AuditAnswer())
                    configure_as_parent("auditor")
                    audits = _audits(message.settings)
                else:
                    assert audits is not None
                    channel.send(_answer(audits, message))
    # Kernels may still have threads. There is nothing to save.
    os._exit(0)


def _audits(settings: EngineSettings) -> TurnAudits:
    with child.importing():
        import transformers

        from midstream.verify.audit import TurnAudits
    transformers.utils.logging.disable_progress_bar()
    return TurnAudits(settings)


def _answer(audits: TurnAudits, job: AuditJob) -> AuditAnswer:
    try:
        return audits.audit(job)
    except MemoryError:
        return AuditAnswer(unaudited="no memory for a second copy of the weights")


def _die_with(parent: int) -> None:
    """Also while it is halted, when it would not see its socket close."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
