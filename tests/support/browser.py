"""A headless Chromium over a pipe: open a page, press keys as a person would, look at what is there."""

import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


class Browser:
    """One page. What it logs and which addresses it asks for are kept."""

    def __init__(self, profile: Path, width: int, height: int, *, dark: bool = False) -> None:
        assert CHROMIUM is not None
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        # Chromium reads its orders from file descriptor 3 and answers on 4.
        command = (
            f'exec 3<&{theirs_in} 4>&{theirs_out}; exec "$0" "$@"',
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", f"--user-data-dir={profile}",
            f"--window-size={width},{height}",
        )  # fmt: skip
        self._process = subprocess.Popen(
            ["bash", "-c", *command], pass_fds=(theirs_in, theirs_out), stderr=subprocess.DEVNULL
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._in, self._out = os.fdopen(ours_in, "rb", buffering=0), os.fdopen(ours_out, "wb", buffering=0)
        self._number, self._unread = 0, b""
        self.console: list[str] = []
        self.asked: list[str] = []
        target = self._tell("Target.createTarget", {"url": "about:blank"}, None)["targetId"]
        self._session = self._tell("Target.attachToTarget", {"targetId": target, "flatten": True}, None)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.tell(f"{domain}.enable")
        self.tell(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600},
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.tell("Emulation.setEmulatedMedia", {"features": [scheme]})

    def tell(self, method: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
        return self._tell(method, parameters or {}, self._session)

    def _tell(self, method: str, parameters: dict[str, Any], session: str | None) -> dict[str, Any]:
        self._number += 1
        order: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if session:
            order["sessionId"] = session
        self._out.write(json.dumps(order).encode() + b"\0")
        while True:
            said = self._read()
            if said.get("id") == self._number:
                assert "error" not in said, said
                found: dict[str, Any] = said["result"]
                return found

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            data = self._in.read(1 << 16)
            assert data, "the browser ended"
            self._unread += data
        message, _, self._unread = self._unread.partition(b"\0")
        said: dict[str, Any] = json.loads(message)
        parameters = said.get("params", {})
        match said.get("method"):
            case "Runtime.consoleAPICalled":
                self.console.append(str(parameters["args"]))
            case "Runtime.exceptionThrown":
                self.console.append(str(parameters["exceptionDetails"]))
            case "Log.entryAdded":
                self.console.append(f"{parameters['entry']['text']} {parameters['entry'].get('url', '')}")
            case "Network.requestWillBeSent":
                self.asked.append(parameters["request"]["url"])
        return said

    def open(self, url: str) -> None:
        self.tell("Page.navigate", {"url": url})

    def look(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = self.tell(
            "Runtime.evaluate", {"expression": script, "returnByValue": True, "awaitPromise": True}
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, script: str, seconds: float = 20.0) -> Any:
        """The expression's value, once it is true; what it speaks of need not be there before."""
        end = time.monotonic() + seconds
        patient = f"(() => {{ try {{ return {script} }} catch {{ return null }} }})()"
        while not (found := self.look(patient)):
            assert time.monotonic() < end, f"never: {script}; console: {self.console}"
            time.sleep(0.05)
        return found

    def type(self, text: str) -> None:
        self.tell("Input.insertText", {"text": text})

    def press(self, key: str, code: int) -> None:
        text = {"Enter": "\r"}.get(key)
        for kind in ("keyDown", "keyUp"):
            order: dict[str, Any] = {"type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code}
            self.tell(
                "Input.dispatchKeyEvent", order | ({"text": text} if text and kind == "keyDown" else {})
            )

    def close(self) -> None:
        try:
            self._tell("Browser.close", {}, None)
            self._process.wait(10)
        finally:
            self._process.kill()
            self._process.wait()
            self._in.close()
            self._out.close()
