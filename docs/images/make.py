"""Makes the pictures of docs/dashboard.md: a real server under rollouts and hot loads, seen by Chromium.

Run by `make screenshots`. Needs Chromium and the development dependencies.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import httpx
from playwright.sync_api import Page, sync_playwright

from midstream.client import SnapshotPublisher

HERE = Path(__file__).parent
ROLLOUTS, TURNS, SNAPSHOTS = 4, 4, 4
COMMAND = (sys.executable, "-m", "midstream.cli")


def rollouts(url: str, over: threading.Event, number: int) -> None:
    headers = {"x-midstream-records": "routes"}
    with httpx.Client(base_url=url, headers=headers, timeout=60) as http:
        trajectory = 0
        while not over.is_set():
            session = {"x-multi-turn-session-id": f"rollout-{number}-{trajectory}"}
            turns = [{"role": "user", "content": f"Write digits, {number}."}]
            for _ in range(TURNS):
                body = {"model": "tiny-moe", "messages": turns, "max_tokens": 96, "logprobs": True}
                answer = http.post("/v1/chat/completions", json=body, headers=session).raise_for_status()
                message = answer.json()["choices"][0]["message"]
                turns += [message, {"role": "user", "content": "And more."}]
            trajectory += 1


def publish(url: str, folder: Path, page: Page) -> None:
    with SnapshotPublisher(url, str(folder / "state" / "bucket")) as publisher:
        for step in range(1, SNAPSHOTS + 1):
            checkpoint = folder / f"step-{step}"
            subprocess.run([*COMMAND, "model", "tiny-moe", str(checkpoint), "--seed", str(step)], check=True)
            page.wait_for_timeout(5000)
            publisher.publish(f"step-{step}", checkpoint, reset_prompt_cache="new_session")


def shoot(url: str, folder: Path) -> None:
    over = threading.Event()
    clients = [threading.Thread(target=rollouts, args=(url, over, number)) for number in range(ROLLOUTS)]
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 1000}, color_scheme="light")
        for client in clients:
            client.start()
        page.goto(f"{url}/dashboard")
        publish(url, folder, page)
        page.locator("#swap-table tr[data-key]").first.wait_for()
        page.wait_for_timeout(4000)
        page.screenshot(path=HERE / "dashboard.png")
        over.set()
        for client in clients:
            client.join()
        page.keyboard.press("2")
        page.locator("#session-table tr[data-key]").first.click()
        page.locator("#trace .sampled").first.wait_for()
        page.hover("#trace .sampled >> nth=9")
        page.screenshot(path=HERE / "trajectory.png")
        browser.close()


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        serve = [*COMMAND, "serve", "--port", "0", "--state-dir", str(folder / "state")]
        server = subprocess.Popen(serve, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        try:
            assert server.stdout is not None
            ready = next(filter(None, (re.search(r"ready on (\S+)", line) for line in server.stdout)))
            shoot(ready[1], folder)
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()
