"""Which wire is at which path of a replica's port.

Always holds: every wire of core/wires.py is in one of the tables.
"""

from __future__ import annotations

from midstream.core.errors import InvalidRequest
from midstream.core.wires import wire_of
from midstream.replica.wire.base import TextCall, Wire
from midstream.replica.wire.messages import COUNT_TOKENS, MESSAGES
from midstream.replica.wire.openai import CHAT, COMPLETIONS
from midstream.replica.wire.responses import RESPONSES
from midstream.replica.wire.sglang import SGLANG_GENERATE
from midstream.replica.wire.textcalls import DETOKENIZE, TOKENIZE
from midstream.replica.wire.vllm import RENDER_CHAT, RENDER_COMPLETIONS, VLLM_GENERATE

_GENERATING = (CHAT, COMPLETIONS, MESSAGES, RESPONSES, VLLM_GENERATE, SGLANG_GENERATE)
GENERATING = {wire.name: wire for wire in _GENERATING}
_CALLS = (TOKENIZE, DETOKENIZE, COUNT_TOKENS, RENDER_CHAT, RENDER_COMPLETIONS)
TEXT_CALLS: dict[str, TextCall] = {call.name: call for call in _CALLS}


def wire_to_resume(target: str) -> Wire:
    """The wire of a stream that another replica began. Raises InvalidRequest."""
    found = wire_of(target.partition("?")[0].encode())
    wire = None if found is None else GENERATING.get(found.name)
    if wire is None:
        raise InvalidRequest(f"path: nothing that streams is at {target!r}", param="path")
    return wire
