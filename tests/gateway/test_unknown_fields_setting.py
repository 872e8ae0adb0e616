"""Which replicas are told to ignore unknown fields: the deployment's own word wins over the setting."""

from __future__ import annotations

import pytest
from gateway_harness import Message, Peer, post, staged

TOLD = "x-midstream-ignored-fields"


async def respond(request: Message, peer: Peer) -> None:
    peer.respond(headers=f"{TOLD}: colour\r\n")


@pytest.mark.parametrize("setting", ["refuse", "ignore"])
@pytest.mark.parametrize("own", [None, True, False])
async def test_the_deployments_word_wins(setting: str, own: bool | None) -> None:
    async with staged(respond, unknown_fields=setting) as stage:
        stage.gateway.proxy.deployments.default.ignores_fields = own
        # A client decides nothing here.
        answer = await stage.ask(post(headers="x-midstream-unknown-fields: refuse\r\n"))
        [request] = stage.mocks[0].requests
        expected = own if own is not None else setting == "ignore"
        assert request.headers.get("x-midstream-unknown-fields") == ("ignore" if expected else None)
        assert answer.headers[TOLD] == "colour"
