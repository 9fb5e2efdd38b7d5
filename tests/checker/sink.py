"""An outside system that handlers act on: it takes each idempotency key once and refuses a
fencing token lower than one it has seen, as the documentation asks of such systems.
"""

import json
import threading
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self


@dataclass(slots=True)
class Effects:
    """What arrived: how often each key was sent, with which token its effect took place, and
    the tokens that came too late."""

    sent: Counter[str] = field(default_factory=Counter)
    done: dict[str, int] = field(default_factory=dict)
    stale: list[tuple[str, int]] = field(default_factory=list)
    _newest: dict[str, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, key: str, token: int) -> bool:
        """Whether the effect takes place now."""
        with self._lock:
            self.sent[key] += 1
            if token < self._newest.get(key, 0):
                self.stale.append((key, token))
                return False
            self._newest[key] = token
            if key in self.done:
                return False
            self.done[key] = token
            return True


class Sink:
    """POST {"key": ..., "token": ...} to `url`; the answer says whether it had its effect."""

    def __init__(self) -> None:
        effects = self.effects = Effects()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                done = effects.take(body["key"], body["token"])
                answer = json.dumps({"done": done}).encode()
                self.send_response(200)
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: Any) -> None:
                """The counters tell all that tests want to know."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._server.server_address[1]}/"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
