"""A proxy in front of an object store that lets requests fail as networks and servers do, and counts what was moved."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, unquote, urlsplit

_HOP = {"connection", "transfer-encoding", "content-length", "keep-alive", "date", "server"}
_NEVER = 1 << 60
_GIVE_UP_SECONDS = 120.0


@dataclass
class Request:
    """A request that came to the proxy: its path begins with the bucket; bytes of the bodies that came and were answered."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    sent: int = 0

    @property
    def is_upload(self) -> bool:
        """Whether it sends contents: of a whole object, or of a part of one."""
        return self.method == "PUT"

    @property
    def is_listing(self) -> bool:
        """Whether it asks which objects there are."""
        return "list-type" in self.query


When = Callable[[Request], bool]


@dataclass
class Fault:
    """What happens to some requests: an error is answered, the request is cut after so many bytes, the answer is lost, it waits."""

    when: When
    times: int
    status: int = 0
    code: str = ""
    cut_request: int | None = None
    loses_answer: bool = False
    waits: bool = False
    changes: Callable[[dict[str, str]], object] | None = None
    came: threading.Event = field(default_factory=threading.Event)
    hit: int = 0
    _released: threading.Event = field(default_factory=threading.Event)

    def release(self) -> None:
        """Let the requests that wait go on, and no more of them wait."""
        self.times = 0
        self._released.set()

    def wait_here(self) -> None:
        """Wait for `release`; a test that forgot it does not wait for ever."""
        self._released.wait(_GIVE_UP_SECONDS)


def always(request: Request) -> bool:
    """Take every request."""
    return True


class FaultProxy:
    """Passes requests to a server, and writes them down in order."""

    def __init__(self, target: str) -> None:
        self.target = urlsplit(target).netloc
        self.requests: list[Request] = []
        self._faults: list[Fault] = []
        self._lock = threading.Lock()
        self.server = _Server(("127.0.0.1", 0), _Handler)
        self.server.proxy = self
        self.endpoint = f"http://127.0.0.1:{self.server.server_address[1]}"

    def answer(
        self, status: int, code: str = "", *, when: When = always, times: int = _NEVER
    ) -> Fault:
        """Answer an error instead of forwarding."""
        return self._add(Fault(when, times, status=status, code=code))

    def cut_upload(
        self, after: int, *, when: When = lambda r: r.is_upload, times: int = 1
    ) -> Fault:
        """Close the connection after so many bytes of a request's body."""
        return self._add(Fault(when, times, cut_request=after))

    def lose_answer(self, *, when: When, times: int = 1) -> Fault:
        """Do what is asked for, and close the connection without an answer."""
        return self._add(Fault(when, times, loses_answer=True))

    def hold(self, *, when: When = always, times: int = _NEVER) -> Fault:
        """Let requests hang until the fault is released, which forwards them."""
        return self._add(Fault(when, times, waits=True))

    def change_headers(
        self, change: Callable[[dict[str, str]], object], *, when: When = always
    ) -> Fault:
        """Change what is forwarded: without `if-match` the server is one that ignores it."""
        return self._add(Fault(when, _NEVER, changes=change))

    def heal(self) -> None:
        """Let everything through again, and what waits go on."""
        with self._lock:
            faults, self._faults = self._faults, []
        for fault in faults:
            fault.release()

    def forget(self) -> None:
        with self._lock:
            self.requests = []

    def downloaded(self) -> int:
        """Return the bytes of objects that were sent to the client; listings do not count."""
        return sum(r.sent for r in self.requests if r.method == "GET" and not r.is_listing)

    def _add(self, fault: Fault) -> Fault:
        with self._lock:
            self._faults.append(fault)
        return fault

    def take(self, request: Request) -> list[Fault]:
        """Write a request down, and return what is to happen to it."""
        with self._lock:
            self.requests.append(request)
            found = [fault for fault in self._faults if fault.times > 0 and fault.when(request)]
            for fault in found:
                fault.times -= 1
                fault.hit += 1
                fault.came.set()
        return found


@contextmanager
def fault_proxy(target: str) -> Iterator[FaultProxy]:
    """Run a proxy in front of a server, in a thread."""
    proxy = FaultProxy(target)
    thread = threading.Thread(
        target=proxy.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
    )
    thread.start()
    try:
        yield proxy
    finally:
        proxy.heal()
        proxy.server.shutdown()
        proxy.server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    proxy: FaultProxy

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: clients are killed here."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def _handle(self) -> None:
        parts = urlsplit(self.path)
        headers = {name.lower(): value for name, value in self.headers.items()}
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
        request = Request(self.command, unquote(parts.path), query, headers)
        faults = self.server.proxy.take(request)
        cut = next((f.cut_request for f in faults if f.cut_request is not None), None)
        length = int(headers.get("content-length", "0"))
        if cut is not None:
            self.rfile.read(min(cut, length))
            self._hang_up()
            return
        body = self.rfile.read(length)
        for fault in faults:
            if fault.waits:
                fault.wait_here()
            if fault.changes is not None:
                fault.changes(headers)
        told = next((f for f in faults if f.status), None)
        if told is not None:
            self._refuse(told)
            return
        self._forward(
            request, headers, body, loses_answer=any(fault.loses_answer for fault in faults)
        )

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _handle

    def _refuse(self, fault: Fault) -> None:
        code = fault.code or "Error"
        text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>told to</Message></Error>".encode()
        self.send_response(fault.status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)

    def _forward(
        self, request: Request, headers: dict[str, str], body: bytes, *, loses_answer: bool
    ) -> None:
        connection = HTTPConnection(self.server.proxy.target, timeout=_GIVE_UP_SECONDS)
        try:
            kept = {
                name: value
                for name, value in headers.items()
                if name not in ("connection", "content-length")
            }
            connection.request(self.command, self.path, body=body or None, headers=kept)
            answer = connection.getresponse()
            content = answer.read()
        except (OSError, HTTPException):
            loses_answer = True
        finally:
            connection.close()
        if loses_answer:
            self._hang_up()
            return
        with suppress(OSError):
            self._answer(request, answer, content)

    def _answer(self, request: Request, answer: HTTPResponse, content: bytes) -> None:
        self.send_response_only(answer.status, answer.reason)
        for name, value in answer.getheaders():
            if name.lower() not in _HOP:
                self.send_header(name, value)
        length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(content))
        self.send_header("Content-Length", length or "0")
        self.end_headers()
        if self.command != "HEAD":
            # Before the client has it all, and the test looks.
            request.sent = len(content)
            self.wfile.write(content)

    def _hang_up(self) -> None:
        self.close_connection = True
        with suppress(OSError):
            self.wfile.flush()
            self.connection.shutdown(2)
