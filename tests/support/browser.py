"""A headless Chromium, driven over a pipe: open a page, press keys, and read what the page shows."""

import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
# The hosted workflow has a browser: its absence there is a failure, and not a reason to leave tests out.
browser_needed = pytest.mark.skipif(
    CHROMIUM is None and "GITHUB_ACTIONS" not in os.environ,
    reason="needs a browser: install Debian's chromium",
)

SMALLEST_LETTERS = """Math.min(...[...document.querySelectorAll("figure svg[viewBox] text")].filter(
  (text) => text.getClientRects().length).map((text) => parseFloat(getComputedStyle(text).fontSize)
  * text.ownerSVGElement.getBoundingClientRect().width / text.ownerSVGElement.viewBox.baseVal.width))"""


class Browser:
    """One page; `console` holds what it logged and `requested` the URLs that it asked for."""

    def __init__(self, profile: Path, width: int, height: int, *, dark: bool = False) -> None:
        assert CHROMIUM is not None
        answers, their_answers = os.pipe()
        their_commands, commands = os.pipe()
        # Chromium reads commands from file descriptor 3 and answers on 4.
        redirect = f'exec 3<&{their_commands} 4>&{their_answers}; exec "$0" "$@"'
        options = (
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--remote-debugging-pipe",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            f"--user-data-dir={profile}",
            f"--window-size={width},{height}",
        )
        self._process = subprocess.Popen(
            ["bash", "-c", redirect, CHROMIUM, *options],
            pass_fds=(their_commands, their_answers),
            stderr=subprocess.DEVNULL,
        )
        os.close(their_commands)
        os.close(their_answers)
        self._answers = os.fdopen(answers, "rb", buffering=0)
        self._commands = os.fdopen(commands, "wb", buffering=0)
        self._number, self._unread = 0, b""
        self.console: list[str] = []
        self.requested: list[str] = []
        target = self._call("Target.createTarget", {"url": "about:blank"}, None)["targetId"]
        attached = self._call("Target.attachToTarget", {"targetId": target, "flatten": True}, None)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.call(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600},
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", {"features": [scheme]})

    def call(self, method: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
        """Call a method of the Chrome DevTools Protocol on the page, and return its result."""
        return self._call(method, parameters or {}, self._session)

    def _call(self, method: str, parameters: dict[str, Any], session: str | None) -> dict[str, Any]:
        self._number += 1
        command: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if session:
            command["sessionId"] = session
        self._commands.write(json.dumps(command).encode() + b"\0")
        while True:
            message = self._read()
            if message.get("id") == self._number:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result

    def _read(self) -> dict[str, Any]:
        """Return the next message, and keep what the page logs and asks for."""
        while b"\0" not in self._unread:
            data = self._answers.read(1 << 16)
            assert data, "the browser ended"
            self._unread += data
        text, _, self._unread = self._unread.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        parameters = message.get("params", {})
        match message.get("method"):
            case "Runtime.consoleAPICalled":
                self.console.append(str(parameters["args"]))
            case "Runtime.exceptionThrown":
                self.console.append(str(parameters["exceptionDetails"]))
            case "Log.entryAdded":
                self.console.append(f"{parameters['entry']['text']} {parameters['entry'].get('url', '')}")
            case "Network.requestWillBeSent":
                self.requested.append(parameters["request"]["url"])
        return message

    def open(self, url: str) -> None:
        """Load a page."""
        self.call("Page.navigate", {"url": url})

    def evaluate(self, script: str) -> Any:
        """Return the value of an expression in the page."""
        answer = self.call(
            "Runtime.evaluate", {"expression": script, "returnByValue": True, "awaitPromise": True}
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, script: str, seconds: float = 20.0) -> Any:
        """Return the expression's value once it is true; until then it may throw."""
        end = time.monotonic() + seconds
        tolerant = f"(() => {{ try {{ return {script} }} catch {{ return null }} }})()"
        while not (value := self.evaluate(tolerant)):
            assert time.monotonic() < end, f"never true: {script}; console: {self.console}"
            time.sleep(0.05)
        return value

    def smallest_letters(self) -> float:
        """Return the size of the smallest letters in the charts that show, in pixels."""
        size: float = self.evaluate(SMALLEST_LETTERS)
        return size

    def type(self, text: str) -> None:
        """Type text into the element that has the focus."""
        self.call("Input.insertText", {"text": text})

    def press(self, key: str, code: int) -> None:
        """Press and release a key."""
        text = {"Enter": "\r"}.get(key)
        for kind in ("keyDown", "keyUp"):
            event: dict[str, Any] = {"type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code}
            self.call(
                "Input.dispatchKeyEvent", event | ({"text": text} if text and kind == "keyDown" else {})
            )

    def close(self) -> None:
        """End the browser."""
        try:
            self._call("Browser.close", {}, None)
            self._process.wait(10)
        finally:
            self._process.kill()
            self._process.wait()
            self._answers.close()
            self._commands.close()
