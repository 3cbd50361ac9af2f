"""S3 servers on the loopback, as processes of their own, and what they keep, read through their own interface."""

from __future__ import annotations

import subprocess
import sys
import time
import uuid
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import quote, urlencode, urlsplit

from .patience import patience
from .process_tree import die_with_parent
from .processes import free_port

_START_SECONDS = 30.0
# moto refuses who signs nothing, and does not look at what is signed.
_SIGNED = "AWS4-HMAC-SHA256 Credential=testing/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0000"


@dataclass(frozen=True)
class ObjectServer:
    """A server (`moto` or `localbucket`) that speaks as S3 does, without credentials."""

    kind: str
    endpoint: str

    def environment(self, endpoint: str | None = None) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": endpoint or self.endpoint,
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
        }

    def make_bucket(self) -> str:
        name = f"bucket-{uuid.uuid4().hex[:12]}"
        self._done("PUT", f"/{name}")
        return name

    def objects(self, bucket: str, prefix: str = "") -> dict[str, int]:
        """Return the sizes of all objects below a prefix, by key."""
        found: dict[str, int] = {}
        query = {"list-type": "2", "prefix": prefix}
        while True:
            tree = ET.fromstring(self._done("GET", f"/{bucket}", query))
            found.update(
                {_text(entry, "Key"): int(_text(entry, "Size")) for entry in _all(tree, "Contents")}
            )
            token = _text(tree, "NextContinuationToken")
            if not token:
                return found
            query["continuation-token"] = token

    def read(self, bucket: str, key: str) -> bytes:
        return self._done("GET", f"/{bucket}/{quote(key)}")

    def write(self, bucket: str, key: str, content: bytes) -> None:
        self._done("PUT", f"/{bucket}/{quote(key)}", body=content)

    def delete(self, bucket: str, key: str) -> None:
        self._done("DELETE", f"/{bucket}/{quote(key)}")

    def flip(self, bucket: str, key: str, place: int = -1) -> None:
        """Change one byte of an object: the one in the middle, or at a place."""
        content = bytearray(self.read(bucket, key))
        content[len(content) // 2 if place < 0 else place] ^= 1
        self.write(bucket, key, bytes(content))

    def unfinished_uploads(self, bucket: str) -> int:
        """Return how many uploads in parts were begun and neither completed nor given up."""
        return len(_all(ET.fromstring(self._done("GET", f"/{bucket}", {"uploads": ""})), "Upload"))

    def _done(
        self, method: str, path: str, query: dict[str, str] | None = None, body: bytes | None = None
    ) -> bytes:
        connection = HTTPConnection(urlsplit(self.endpoint).netloc, timeout=patience(30.0))
        try:
            connection.request(
                method,
                f"{path}?{urlencode(query)}" if query else path,
                body,
                {"Authorization": _SIGNED},
            )
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        assert answer.status < 300, f"{method} {path}: {answer.status} {content[:300]!r}"
        return content


def _all(tree: ET.Element, name: str) -> list[ET.Element]:
    return [element for element in tree if element.tag.rpartition("}")[2] == name]


def _text(tree: ET.Element, name: str) -> str:
    return next((element.text or "" for element in _all(tree, name)), "")


@contextmanager
def moto_server() -> Iterator[ObjectServer]:
    """Run moto, which keeps everything in memory and honours `If-None-Match` and `If-Match`."""
    port = free_port()
    # moto closes the content of an object that is replaced, also while another request reads it, which is then answered with 500.
    program = (
        "from moto.s3.models import FakeKey; FakeKey.dispose = lambda *arguments, **options: None; "
        f"from moto.server import main; main(['-H', '127.0.0.1', '-p', '{port}'])"
    )
    with _running([sys.executable, "-c", program], port):
        yield ObjectServer("moto", f"http://127.0.0.1:{port}")


@contextmanager
def local_bucket(directory: Path) -> Iterator[ObjectServer]:
    """Run localbucket, which keeps buckets as directories, ignores `If-Match` and refuses to delete several objects at once."""
    port = free_port()
    with _running([sys.executable, "-m", "localbucket", str(directory), "--port", str(port)], port):
        yield ObjectServer("localbucket", f"http://127.0.0.1:{port}")


@contextmanager
def _running(command: list[str], port: int) -> Iterator[None]:
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=die_with_parent,
    )
    try:
        _wait_for(port, process)
        yield
    finally:
        # Nothing of it is worth a farewell.
        process.kill()
        process.wait()


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + patience(_START_SECONDS)
    while True:
        assert process.poll() is None, (
            f"Expected a server on port {port}. Received: exit code {process.returncode}."
        )
        connection = HTTPConnection("127.0.0.1", port, timeout=patience(5.0))
        try:
            connection.request("GET", "/")
            connection.getresponse().read()
            return
        except OSError:
            assert time.monotonic() < end, (
                f"Expected a server on port {port} within {patience(_START_SECONDS)} s."
            )
            time.sleep(0.02)
        finally:
            connection.close()
