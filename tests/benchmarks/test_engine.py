"""The engine comparison refuses what it cannot measure, before it starts any server."""

from __future__ import annotations

import engine
import pytest


def test_an_unknown_kind_is_refused_with_those_that_there_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engine, "measure_model", lambda *_: pytest.fail("measured"))
    monkeypatch.setattr(engine, "write_models", lambda *_: [])
    monkeypatch.setattr("sys.argv", ["engine.py", "--engines", "midstream", "--kinds", "decode", "prefil"])
    with pytest.raises(SystemExit) as refused:
        engine.main()
    assert refused.value.code == 2
    said = capsys.readouterr().err
    assert "--kinds: invalid choice: 'prefil'" in said
    assert "'decode', 'prefill', 'late'" in said
