"""The profile by function: what it counts in a process, and how it is shown."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

from hot_functions import SOURCE, Profiled, Window, render, shown

#: Of the package midstream by its command line alone. Each line that it reads is one unit: two calls of `work`.
WORKER = """
import sys, threading
name = "midstream.worker"
def work(): return sum(range(10))
def units():
    for line in sys.stdin:
        work(), work()
        print("done", flush=True)
threading.Thread(target=units).start()
"""


def test_a_window_has_the_calls_within_it_and_those_alone(tmp_path: Path) -> None:
    profiled, found = Profiled(tmp_path), dict[str, Window]()
    command = [sys.executable, "-c", WORKER]
    done = 0
    with subprocess.Popen(
        command, env=profiled.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as worker:
        assert worker.stdin
        assert worker.stdout

        def ask(times: int) -> None:
            nonlocal done
            for _ in range(times):
                worker.stdin.write("\n")
                worker.stdin.flush()
                assert worker.stdout.readline() == "done\n"
            done += times

        ask(3)
        with profiled.window("first", worker.pid, lambda: done, found):
            ask(5)
        ask(2)
        worker.stdin.close()
    [window] = found.values()
    assert window.units == 5
    assert window.calls["<string>:work"] == 10
    assert "<string>:units" not in window.calls, "it still runs"


def test_figures_are_per_unit_and_the_most_time_comes_first() -> None:
    ours, theirs, of_c = f"{SOURCE}midstream/core/a.py:A.go", "/somewhere/b.py:go", "<built-in method len>"
    calls = Counter({ours: 30, theirs: 10, of_c: 50})
    figures = Window(10, calls, Counter({ours: 1e-4, theirs: 3e-4, of_c: 1e-6})).figures()
    assert figures["calls of Python"] == 4
    assert figures["of midstream"] == 3
    assert figures["own us"] == 40.1
    assert [(one["name"], one["calls"], one["own us"]) for one in figures["functions"]] == [
        ("/somewhere/b.py:go", 1, 30),
        ("midstream/core/a.py:A.go", 3, 10),
        ("built-in method len", 5, 0.1),
    ]


def test_the_document_says_whose_process_it_was_and_names_no_folder_of_the_machine() -> None:
    import asyncio

    name = f"{asyncio.__file__.removesuffix('__init__.py')}events.py:Handle._run"
    window = Window(2, Counter({name: 2}), Counter({name: 4e-6}))
    result = {
        "at": "2026-11-28T00:00:00Z",
        "commit": "0123456789abcdef",
        "hardware": {"cpu": "a CPU"},
        "versions": {"python": "3.11.7"},
        "pieces": {"embedded": {"a token of one stream": {"launch.replica": window.figures()}}},
    }
    text = render(result)
    assert "### A token of one stream: launch.replica (embedded)" in text
    assert "| `asyncio/events.py:Handle._run` | 1 | 2.00 |" in text
    assert shown(f"{SOURCE}midstream/cli.py:main") == "midstream/cli.py:main"
