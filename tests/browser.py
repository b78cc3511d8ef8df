"""A headless Chromium that a test controls with the Chrome DevTools Protocol over a pipe."""

import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--remote-debugging-pipe",
    "--no-first-run",
    "--window-size=1000,800",
)
_OFFLINE = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
_SECONDS = 60


class Visit(NamedTuple):
    """The events during the load of a page."""

    errors: list[str]  # messages of the console, exceptions and failed requests
    requests: list[str]  # addresses
    value: Any  # of the expression


class Browser:
    """One process with one tab. Leaving the context ends the process."""

    def __init__(self, profile: Path) -> None:
        commands, self._commands = os.pipe()
        self._results, results = os.pipe()
        # Chromium reads from descriptor 3 and writes to descriptor 4; pipes with high numbers do not overlap with them
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (commands, results)]
        words = [PROGRAM, *_FLAGS, _OFFLINE, f"--user-data-dir={profile}", "about:blank"]
        shell = ["bash", "-c", f'exec "$@" 3<&{ends[0]} 4>&{ends[1]}', "bash", *map(str, words)]
        self._process = subprocess.Popen(shell, pass_fds=ends, stderr=subprocess.DEVNULL)
        for end in (commands, results, *ends):
            os.close(end)
        self._buffer, self._number, self._session = b"", 0, ""
        self._events: list[dict[str, Any]] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(timeout=_SECONDS)
        os.close(self._commands)
        os.close(self._results)

    def send(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Returns the result of a command."""
        self._number += 1
        command = {"id": self._number, "method": method, "params": arguments}
        session = {"sessionId": self._session} if self._session else {}
        os.write(self._commands, json.dumps(command | session).encode() + b"\0")
        while "id" not in (message := self._receive()):
            self._events.append(message)
        assert "error" not in message, f"{method}: {message['error']}"
        return message["result"]

    def visit(self, url: str, expression: str) -> Visit:
        """Opens a page, waits until it has loaded, and evaluates a JavaScript expression or promise in it."""
        self._events.clear()
        frame = self.send("Page.navigate", url=url)
        assert "errorText" not in frame, f"{url}: {frame}"
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._events.append(self._receive())
        done = self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in done, f"{url}: {done['exceptionDetails']}"
        requests = [
            event["params"]["request"]["url"]
            for event in self._events
            if event["method"] == "Network.requestWillBeSent"
        ]
        errors = [text for event in self._events if (text := _error(event["method"], event["params"]))]
        return Visit(errors, requests, done["result"].get("value"))

    def _receive(self) -> dict[str, Any]:
        """Returns the next message."""
        end = time.monotonic() + _SECONDS
        while b"\0" not in self._buffer:
            ready = select.select([self._results], [], [], max(0.0, end - time.monotonic()))[0]
            data = os.read(self._results, 2**20) if ready else b""
            assert data, "the browser does not answer"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(line)


def _error(method: str, fields: dict[str, Any]) -> str:
    """Returns the text of an event that reports an error, otherwise ''."""
    match method:
        case "Runtime.exceptionThrown":
            return json.dumps(fields["exceptionDetails"])
        case "Runtime.consoleAPICalled" if fields["type"] in ("error", "warning", "assert"):
            return json.dumps(fields["args"])
        case "Log.entryAdded" if fields["entry"]["level"] in ("error", "warning"):
            return f"{fields['entry']['text']} {fields['entry'].get('url', '')}"
        case "Network.loadingFailed":
            return f"{fields['errorText']} {fields.get('blockedReason', '')}"
        case "Network.responseReceived" if fields["response"]["status"] >= 400:
            return f"{fields['response']['status']} {fields['response']['url']}"
    return ""


def is_local(url: str) -> bool:
    """Returns whether an address needs no other machine."""
    return urlsplit(url).scheme in ("data", "blob", "file", "about") or urlsplit(url).hostname == "127.0.0.1"
