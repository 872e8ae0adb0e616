"""The replica's end of an auditor process. Imports no torch.

Owns: the process. Always holds: a halted process runs no instruction. It ends with its replica, however that ends.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess

import msgspec

from midstream.core.audits import AuditAnswer, AuditBegin, AuditJob
from midstream.core.config import EngineSettings
from midstream.http import ipc
from midstream.replica.audit import Auditor, AuditorLost

_answers: msgspec.msgpack.Decoder[AuditAnswer] = msgspec.msgpack.Decoder(AuditAnswer)


class _AuditorLink(ipc.Link[AuditAnswer]):
    """Our end of the socket."""

    def __init__(self) -> None:
        super().__init__(_answers)
        self.answer: asyncio.Future[AuditAnswer] | None = None

    def received(self, message: AuditAnswer) -> None:
        if self.answer is not None and not self.answer.done():
            self.answer.set_result(message)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.answer is not None and not self.answer.done():
            self.answer.set_exception(AuditorLost("the auditor's process ended"))


class AuditorProcess(Auditor):
    def __init__(self, process: subprocess.Popen[bytes], link: _AuditorLink) -> None:
        self._process, self._link = process, link

    def __repr__(self) -> str:
        return f"AuditorProcess(pid={self.pid})"

    @property
    def pid(self) -> int:
        return self._process.pid

    @classmethod
    async def start(cls, settings: EngineSettings) -> AuditorProcess:
        """Raises AuditorLost, OSError."""
        made = cls(*await ipc.spawn("midstream.launch.auditor", _AuditorLink))
        try:
            # It answers once it ends with this process: what is halted before would outlive us.
            await made._asked(AuditBegin(settings))
        except BaseException:
            await made.close()
            raise
        return made

    def halt(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def proceed(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    async def audit(self, job: AuditJob) -> AuditAnswer:
        return await self._asked(job)

    async def _asked(self, message: AuditBegin | AuditJob) -> AuditAnswer:
        """Raises AuditorLost."""
        if self._link.lost.is_set():
            raise AuditorLost("the auditor's process ended")
        self._link.answer = asyncio.get_running_loop().create_future()
        self._link.send(message)
        return await self._link.answer

    async def close(self) -> None:
        self._link.transport.close()
        # Also of a halted one.
        self._process.kill()
        await asyncio.to_thread(self._process.wait)
