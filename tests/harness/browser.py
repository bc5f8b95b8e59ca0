"""A real Chromium, driven through its DevTools protocol over two pipes: nothing to install but the browser.

Knows pages, keys and pictures; knows nothing of what is served.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import selectors
import shutil
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SECONDS = 30.0
_WITH_PIPES = """
import fcntl, os, sys
ours = [fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3]]
for fd, wanted in zip(ours, (3, 4)):  # where the browser looks for them
    os.dup2(fd, wanted)
    os.close(fd)
os.execvp(sys.argv[3], sys.argv[3:])
"""
_KEYS = {
    "Enter": {"code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"},
    "Tab": {"code": "Tab", "windowsVirtualKeyCode": 9},
    "Escape": {"code": "Escape", "windowsVirtualKeyCode": 27},
    "Space": {"key": " ", "code": "Space", "windowsVirtualKeyCode": 32, "text": " "},
    "ArrowDown": {"code": "ArrowDown", "windowsVirtualKeyCode": 40},
}
SHIFT = 8


def find_chromium() -> str | None:
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


class Browser:
    """One process. Commands are answered in order; what the browser says meanwhile is kept."""

    def __init__(self, program: str, profile: Path) -> None:
        from_us, self._write = os.pipe()
        self._read, to_us = os.pipe()
        command = [
            sys.executable,
            "-c",
            _WITH_PIPES,
            str(from_us),
            str(to_us),
            program,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
            "--force-color-profile=srgb",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            f"--user-data-dir={profile}",
            "--remote-debugging-pipe",
        ]
        self._process = subprocess.Popen(
            command, pass_fds=(from_us, to_us), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(from_us)
        os.close(to_us)
        self._received = bytearray()
        self._ids = itertools.count(1)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._read, selectors.EVENT_READ)
        self.events: list[dict[str, Any]] = []

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._selector.close()
        os.close(self._read)
        os.close(self._write)

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        call_id = next(self._ids)
        message = {"id": call_id, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + SECONDS
        while True:
            for said in self._said(deadline):
                if said.get("id") == call_id:
                    assert "error" not in said, (method, said["error"])
                    return said["result"]
                self.events.append(said)

    def _said(self, deadline: float) -> Iterator[dict[str, Any]]:
        assert self._selector.select(max(0.0, deadline - time.monotonic())), "the browser says nothing"
        piece = os.read(self._read, 1 << 20)
        assert piece, "the browser has ended"
        self._received += piece
        *complete, rest = bytes(self._received).split(b"\0")
        self._received = bytearray(rest)
        return map(json.loads, complete)

    @contextlib.contextmanager
    def page(
        self, url: str, *, width: int = 1280, height: int = 800, dark: bool = False, still: bool = False
    ) -> Iterator[Page]:
        """A page of its own session; `still` for somebody who wants no motion. Fails at the end where it
        complained."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session)
        try:
            for domain in ("Page", "Runtime", "Log", "Network", "Audits"):
                page.call(f"{domain}.enable")
            page.resize(width, height)
            features = {
                "prefers-color-scheme": "dark" if dark else "light",
                "prefers-reduced-motion": "reduce" if still else "no-preference",
            }
            page.call(
                "Emulation.setEmulatedMedia",
                features=[{"name": name, "value": value} for name, value in features.items()],
            )
            page.call("Page.navigate", url=url)
            page.wait("location.href !== 'about:blank' && document.readyState === 'complete'")
            yield page
            complaints = page.complaints()
            assert complaints == [], complaints
        finally:
            self.call("Target.disposeBrowserContext", browserContextId=context)


class Page:
    """As somebody sits before it: keys, and what is to be seen."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session
        self.expected: tuple[str, ...] = ()
        """Parts of complaints that a test provokes."""

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def resize(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )

    def run(self, script: str) -> Any:
        """The value of an expression; a promise is waited for."""
        answer = self.call(
            "Runtime.evaluate",
            expression=script,
            awaitPromise=True,
            returnByValue=True,
            allowUnsafeEvalBlockedByCSP=False,
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, condition: str, seconds: float = SECONDS) -> None:
        """Until an expression holds."""
        deadline = time.monotonic() + seconds
        while not self.run(f"Boolean({condition})"):
            assert time.monotonic() < deadline, f"never: {condition}"
            time.sleep(0.03)

    def text(self, selector: str) -> str:
        return self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")

    def press(self, key: str, *, shift: bool = False) -> None:
        known = {"key": key, **_KEYS[key], "modifiers": SHIFT if shift else 0}
        self.call("Input.dispatchKeyEvent", type="keyDown" if "text" in known else "rawKeyDown", **known)
        known.pop("text", None)
        self.call("Input.dispatchKeyEvent", type="keyUp", **known)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def focus(self, selector: str) -> None:
        self.run(f"document.querySelector({json.dumps(selector)}).focus()")

    def click(self, selector: str) -> None:
        self.run(f"document.querySelector({json.dumps(selector)}).click()")

    def choose(self, selector: str, value: str) -> None:
        self.run(
            f"{{ const box = document.querySelector({json.dumps(selector)}); box.value = {json.dumps(value)};"
            " box.dispatchEvent(new Event('input', {bubbles: true}));"
            " box.dispatchEvent(new Event('change', {bubbles: true})) }"
        )

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def complaints(self) -> list[str]:
        """Errors and warnings of the console, exceptions, and what the page's own policy forbade."""
        said = []
        for event in self._browser.events:
            if event.get("sessionId") != self._session:
                continue
            params = event["params"]
            match event["method"]:
                case "Runtime.exceptionThrown":
                    said.append(params["exceptionDetails"]["exception"].get("description", "exception"))
                case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                    said.append(f"console: {params['args']}")
                case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                    said.append(f"log: {params['entry']['text']} {params['entry'].get('url', '')}")
                case "Audits.issueAdded":
                    said.append(f"issue: {params['issue']['code']} {json.dumps(params['issue']['details'])}")
                case "Page.javascriptDialogOpening":
                    said.append(f"dialog: {params['message']}")
        return [text for text in said if not any(part in text for part in self.expected)]

    def requests(self) -> list[str]:
        """URLs that the page has asked for."""
        return [
            event["params"]["request"]["url"]
            for event in self._browser.events
            if event.get("sessionId") == self._session and event["method"] == "Network.requestWillBeSent"
        ]
