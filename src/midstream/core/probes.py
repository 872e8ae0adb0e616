"""TCP probes on connections that are silent for long, as one is that waits for a plain answer.

Always holds: with them no network between the two ends forgets the connection, and either end notices that the other is gone.
"""

from __future__ import annotations

import socket

#: Seconds of silence before a probe, and between two. NATs forget connections that are silent for some minutes.
PROBE_S = 60
_PROBES = {"TCP_KEEPIDLE": PROBE_S, "TCP_KEEPINTVL": PROBE_S, "TCP_KEEPCNT": 3}
#: Arguments of setsockopt. Connections have these from the socket that they came to. Not every system has all.
PROBED = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *((socket.IPPROTO_TCP, getattr(socket, n), v) for n, v in _PROBES.items() if hasattr(socket, n)),
)
