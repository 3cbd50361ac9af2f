"""Servers that speak as Google Cloud Storage and as Azure do, as far as a run asks them: what they do with a condition differs from S3.

Written from their pages, since no such server runs here: [XML API](https://cloud.google.com/storage/docs/xml-api/overview) with
[generations](https://cloud.google.com/storage/docs/request-preconditions), and
[Blob service](https://learn.microsoft.com/rest/api/storageservices/blob-service-rest-api) with entity tags. Nothing is signed.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import uuid
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.sax.saxutils import escape

BUCKET = "bucket"


@dataclass(frozen=True)
class Stored:
    """An object; no other put of this server has its generation."""

    content: bytes
    generation: int
    modified: datetime

    @property
    def tag(self) -> str:
        """Its entity tag: on Google's server that of the contents, so that equal contents have the same one."""
        return f'"{hashlib.md5(self.content).hexdigest()}"'


@dataclass
class Cloud:
    """A server (`google` or `azure`) with one bucket, and the URL of a prefix in it as a user writes it."""

    kind: str
    endpoint: str = ""
    url: str = ""
    objects: dict[str, Stored] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    uploads: dict[str, dict[str, bytes]] = field(default_factory=dict)
    puts: int = 0

    def environment(self) -> dict[str, str]:
        """Return the variables by which a client finds the server."""
        if self.kind == "google":
            # As emulators of it are found: an account that is at the address of the server and signs nothing.
            account = {"gcs_base_url": self.endpoint, "disable_oauth": True}
            account |= {"client_email": "", "private_key": "", "private_key_id": ""}
            return {"GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(account)}
        return {
            "AZURE_STORAGE_ENDPOINT": self.endpoint,
            "AZURE_STORAGE_ACCOUNT_NAME": "account",
            "AZURE_SKIP_SIGNATURE": "true",
        }

    def store(self, key: str, content: bytes) -> Stored:
        """Put an object; the lock is held."""
        self.puts += 1
        self.objects[key] = Stored(content, self.puts, datetime.now(UTC))
        return self.objects[key]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = (
        True  # the body of an answer is a second write, which would wait for 40 ms
    )
    server: _Server
    missing: ClassVar[str] = ""

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def _handle(self) -> None:
        parts = urlsplit(self.path)
        self.query = dict(parse_qsl(parts.query, keep_blank_values=True))
        bucket, _, self.key = unquote(parts.path).lstrip("/").partition("/")
        self.body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        self.cloud = self.server.cloud
        with self.cloud.lock:
            if bucket != BUCKET:
                self.refuse(404, self.missing)
            elif self.is_special():
                self.special()
            elif self.command == "PUT":
                self.put()
            elif self.key not in self.cloud.objects:
                self.refuse(404, "NoSuchKey" if self.cloud.kind == "google" else "BlobNotFound")
            elif self.command == "DELETE":
                del self.cloud.objects[self.key]
                self.reply(204 if self.cloud.kind == "google" else 202)
            else:
                found = self.cloud.objects[self.key]
                self.reply(200, found.content, named=found)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _handle

    @abstractmethod
    def is_special(self) -> bool:
        """Whether a request is none of a single object."""

    @abstractmethod
    def special(self) -> None:
        """Answer it."""

    @abstractmethod
    def refused(self) -> int:
        """Return the status by which a condition of a put is refused; 0 if it holds."""

    def put(self) -> None:
        status = self.refused()
        if status:
            self.refuse(status, "PreconditionFailed" if status == 412 else "BlobAlreadyExists")
        else:
            self.reply(
                200 if self.cloud.kind == "google" else 201,
                named=self.cloud.store(self.key, self.body),
            )

    def listing(self) -> tuple[list[tuple[str, Stored]], list[str]]:
        """Return what is to be listed: objects, and common prefixes."""
        prefix, delimiter = self.query.get("prefix", ""), self.query.get("delimiter", "")
        entries: list[tuple[str, Stored]] = []
        common: list[str] = []
        for key, found in sorted(self.cloud.objects.items()):
            if not key.startswith(prefix) or key <= self.query.get("start-after", ""):
                continue
            cut = key.find(delimiter, len(prefix)) if delimiter else -1
            if cut < 0:
                entries.append((key, found))
            elif key[: cut + 1] not in common:
                common.append(key[: cut + 1])
        return entries, common

    def refuse(self, status: int, code: str) -> None:
        self.reply(
            status,
            f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}</Message></Error>".encode(),
        )

    def reply(
        self,
        status: int,
        content: bytes = b"",
        headers: dict[str, str] | None = None,
        named: Stored | None = None,
    ) -> None:
        self.send_response_only(status)
        self.send_header("Content-Length", str(len(content)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if named is not None:
            self.send_header("Last-Modified", format_datetime(named.modified, usegmt=True))
            self.send_header("ETag", self.tag_of(named))
            if self.cloud.kind == "google":
                self.send_header("x-goog-generation", str(named.generation))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def tag_of(self, stored: Stored) -> str:
        return stored.tag if self.cloud.kind == "google" else f'"0x{stored.generation:X}"'


class _Google(_Handler):
    missing = "NoSuchBucket"

    def refused(self) -> int:
        expected = self.headers.get("x-goog-if-generation-match")
        found = self.cloud.objects.get(self.key)
        return (
            412
            if expected is not None and int(expected) != (found.generation if found else 0)
            else 0
        )

    def is_special(self) -> bool:
        return "list-type" in self.query or "uploads" in self.query or "uploadId" in self.query

    def special(self) -> None:
        if "list-type" in self.query:
            entries, common = self.listing()
            found = "".join(
                f"<Contents><Key>{escape(key)}</Key><Size>{len(each.content)}</Size><ETag>{escape(each.tag)}</ETag>"
                f"<LastModified>{each.modified.isoformat()}</LastModified></Contents>"
                for key, each in entries
            ) + "".join(
                f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
                for name in common
            )
            self.reply(200, f"<ListBucketResult>{found}</ListBucketResult>".encode())
        elif "uploads" in self.query:
            upload = uuid.uuid4().hex
            self.cloud.uploads[upload] = {}
            answer = f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId></InitiateMultipartUploadResult>"
            self.reply(200, answer.encode())
        elif self.command == "PUT":
            self.cloud.uploads[self.query["uploadId"]][self.query["partNumber"]] = self.body
            self.reply(200, headers={"ETag": f'"{hashlib.md5(self.body).hexdigest()}"'})
        else:
            parts = self.cloud.uploads.pop(self.query["uploadId"])
            if self.command == "DELETE":
                self.reply(204)
                return
            named = self.cloud.store(
                self.key, b"".join(parts[number] for number in sorted(parts, key=int))
            )
            answer = f"<CompleteMultipartUploadResult><ETag>{escape(named.tag)}</ETag></CompleteMultipartUploadResult>"
            self.reply(200, answer.encode(), named=named)


class _Azure(_Handler):
    missing = "ContainerNotFound"

    def refused(self) -> int:
        found = self.cloud.objects.get(self.key)
        if self.headers.get("If-None-Match") == "*" and found is not None:
            return 409
        expected = self.headers.get("If-Match")
        return (
            412 if expected is not None and (found is None or expected != self.tag_of(found)) else 0
        )

    def is_special(self) -> bool:
        return "comp" in self.query

    def special(self) -> None:
        blocks = self.cloud.uploads.setdefault(self.key, {})
        if self.query["comp"] == "list":
            entries, common = self.listing()
            found = "".join(
                f"<Blob><Name>{escape(key)}</Name><Properties><Content-Length>{len(each.content)}</Content-Length>"
                f"<Last-Modified>{format_datetime(each.modified, usegmt=True)}</Last-Modified><Etag>{escape(self.tag_of(each))}</Etag>"
                "<Content-Type>application/octet-stream</Content-Type></Properties></Blob>"
                for key, each in entries
            ) + "".join(f"<BlobPrefix><Name>{escape(name)}</Name></BlobPrefix>" for name in common)
            self.reply(
                200,
                f"<EnumerationResults><Blobs>{found}</Blobs><NextMarker/></EnumerationResults>".encode(),
            )
        elif self.query["comp"] == "block":
            blocks[self.query["blockid"]] = self.body
            self.reply(201)
        elif self.query["comp"] == "blocklist":
            names = re.findall(r"<Uncommitted>(.*?)</Uncommitted>", self.body.decode())
            named = self.cloud.store(self.key, b"".join(blocks[name] for name in names))
            del self.cloud.uploads[self.key]
            self.reply(201, named=named)
        else:
            self.batch()

    def batch(self) -> None:
        """Delete objects that are named in one request of many parts, as the client does it also for one."""
        answers = []
        for number, path in enumerate(
            re.findall(r"^DELETE (\S+)", self.body.decode(), re.MULTILINE)
        ):
            key = unquote(path).lstrip("/").partition("/")[2]
            gone = self.cloud.objects.pop(key, None)
            status = (
                "202 Accepted"
                if gone
                else "404 The blob does not exist.\r\nx-ms-error-code: BlobNotFound"
            )
            head = f"--batch\r\nContent-Type: application/http\r\nContent-ID: {number}"
            answers.append(f"{head}\r\n\r\nHTTP/1.1 {status}\r\n\r\n")
        content = "".join([*answers, "--batch--\r\n"]).encode()
        self.reply(202, content, {"Content-Type": "multipart/mixed; boundary=batch"})


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    cloud: Cloud


_KINDS: dict[str, tuple[type[_Handler], str]] = {
    "google": (_Google, f"gs://{BUCKET}/pre/fix"),
    "azure": (_Azure, f"abfss://{BUCKET}@account.dfs.core.windows.net/pre/fix"),
}


@contextmanager
def cloud_server(kind: str) -> Iterator[Cloud]:
    """Run a server with one bucket in a thread."""
    handler, url = _KINDS[kind]
    server = _Server(("127.0.0.1", 0), handler)
    server.cloud = Cloud(kind, f"http://127.0.0.1:{server.server_address[1]}", url)
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
    )
    thread.start()
    try:
        yield server.cloud
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
