"""Features in files, for processes that share a file system."""

from __future__ import annotations

import fcntl
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from itertools import islice
from pathlib import Path

from torch import Tensor

from danling.utils.files import write_all, write_error

from ..files import ROOM, exclusive, sync_directory
from ..refs import SampleRef
from .objects import check_against, check_budget, dense, missing, same_bytes, specs, taken
from .safetensors_objects import file_name, load, require_safetensors, serialize
from .usage import UsageCount

_AT_ONCE = 16
"""Files that are removed between two notes of the count: their names have to fit into one page."""


class DirectoryStore:
    """A store of one safetensors file an object, on a file system that all processes see alike.

    Objects lie in 256 folders below `objects`. An object is written and synced under another name below `writing`, and one rename
    publishes it. The files of writers that have died are removed when another begins to write. Any number of processes, threads and
    forked workers may use the directory at once.

    Args:
        path: The directory, which is made.
        max_bytes: Bytes of files that it holds at most, whichever process writes them; no limit where it is left out.
        read_only: Read features that were computed before; the directory may lie on a file system that cannot be written.

    Raises:
        ImportError: If safetensors is not installed: `pip install safetensors`.
        FileNotFoundError: If it is to be read only and is no store.
    """

    def __init__(self, path: str | os.PathLike[str], *, max_bytes: int | None = None, read_only: bool = False) -> None:
        require_safetensors()
        self.path = Path(path).absolute()
        self.max_bytes = max_bytes
        self.read_only = read_only
        self._objects = self.path / "objects"
        self._writing = self.path / "writing"
        self._count = UsageCount(self.path / "usage.json", self._objects)
        self._opened_by = 0
        if not read_only:
            self._objects.mkdir(parents=True, exist_ok=True)
            self._writing.mkdir(exist_ok=True)
        elif not self._objects.is_dir():
            raise FileNotFoundError(
                f"Expected a directory that a DirectoryStore has written. Received: {self.path}, which has no folder 'objects'. "
                "Compute the features first, or leave read_only out."
            )

    def put(self, object_id: str, tensors: Mapping[str, Tensor]) -> None:
        """Write an object durably; see `FeatureStore.put`.

        Raises:
            PermissionError: If the store is read only.
            TypeError: If safetensors cannot hold a dtype, complex128 for instance.
        """
        self._check_writable(f"put object {object_id!r}")
        plain = dense(object_id, tensors)
        file = self._file(object_id)
        if file.exists():
            self._check_same(file, object_id, plain)
            return
        data = serialize(object_id, plain)
        try:
            # Asked before anything is written, and once more when it is published.
            if self.max_bytes is not None:
                check_budget(object_id, len(data), self.usage(), self.max_bytes)
            with self._staged(data) as staged:
                published = self._publish(staged, file, object_id, len(data))
            if published:
                sync_directory(file.parent)
        except OSError as error:
            raise write_error(f"object {object_id!r} of {len(data)} bytes", self.path, error, room=ROOM) from error
        if not published:
            self._check_same(file, object_id, plain)

    def _publish(self, staged: Path, file: Path, object_id: str, size: int) -> bool:
        """Move a file to its place; return whether nobody else was quicker."""
        with self._exclusive():
            if file.exists():
                return False
            usage = self._count.read()
            check_budget(object_id, size, usage, self.max_bytes)
            if not file.parent.is_dir():
                file.parent.mkdir(exist_ok=True)
                sync_directory(self._objects)
            self._count.write(usage, {str(file.relative_to(self._objects)): size})
            os.rename(staged, file)
            self._count.write(usage + size)
        return True

    @contextmanager
    def _staged(self, data: bytes) -> Iterator[Path]:
        """Write a file that no reader looks at, locked so that nobody takes it for one of a writer that has died."""
        staged = self._writing / uuid.uuid4().hex
        with self._exclusive():
            handle = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            fcntl.flock(handle, fcntl.LOCK_EX)
        try:
            write_all(handle, data)
            os.fsync(handle)
            yield staged
        finally:
            try:
                staged.unlink(missing_ok=True)
            finally:
                fcntl.flock(handle, fcntl.LOCK_UN)
                os.close(handle)

    def get(self, ref: SampleRef) -> dict[str, Tensor]:
        """Return the features of a sample; see `FeatureStore.get`."""
        file = self._file(ref.object_id)
        try:
            found = load(file, ref.object_id)
        except FileNotFoundError:
            raise missing(ref, str(self.path)) from None
        except ValueError as error:
            raise ValueError(
                f"Expected the features of sample {ref.id!r} in {file}. Received: {error}. "
                "Bring the file back from a copy, or make the features anew in another stream: this log counts the sample as made."
            ) from error
        check_against(ref, specs(found), str(file))
        return {name: found[name] for name in ref.tensors}

    def discard(self, object_ids: Iterable[str]) -> None:
        """Remove files; see `FeatureStore.discard`.

        Raises:
            PermissionError: If the store is read only.
        """
        self._check_writable("discard objects")
        files = iter({self._file(object_id): None for object_id in object_ids})
        while chunk := list(islice(files, _AT_ONCE)):
            with self._exclusive():
                self._remove([file for file in chunk if file.exists()])

    def _remove(self, files: list[Path]) -> None:
        if not files:
            return
        sizes = {str(file.relative_to(self._objects)): file.stat().st_size for file in files}
        rest = self._count.read() - sum(sizes.values())
        self._count.write(rest, sizes)
        for file in files:
            os.unlink(file)
        self._count.write(rest)

    def usage(self) -> int:
        """Return the bytes of all files; those of a store that is read only are counted at each call."""
        if self.read_only:
            return self._count.recount()
        with self._exclusive():
            return self._count.read()

    def close(self) -> None:
        """Do nothing: no file stays open."""

    def _file(self, object_id: str) -> Path:
        folder = sha256(object_id.encode(errors="surrogatepass")).hexdigest()[:2]
        return self._objects / folder / file_name(object_id)

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        with exclusive(self.path / "lock"):
            if self._opened_by != os.getpid():
                self._remove_abandoned()
                # What a power cut has left of the count is not trusted.
                self._count.write(self._count.recount())
                self._opened_by = os.getpid()
            yield

    def _remove_abandoned(self) -> None:
        for name in os.listdir(self._writing):
            handle = os.open(self._writing / name, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(self._writing / name)
            except BlockingIOError:
                continue  # its writer lives
            finally:
                os.close(handle)

    def _check_same(self, file: Path, object_id: str, tensors: Mapping[str, Tensor]) -> None:
        try:
            found = load(file, object_id)
        except FileNotFoundError:
            return  # discarded by a trainer that needed it no more
        except ValueError as error:
            raise ValueError(
                f"Expected object {object_id!r} in {file}. Received: {error}. Discard the object, and put it again."
            ) from error
        if not same_bytes(found, tensors):
            raise taken(object_id, str(self.path))
        # Its writer may have been killed before it had made the name durable.
        sync_directory(file.parent)

    def _check_writable(self, what: str) -> None:
        if self.read_only:
            raise PermissionError(
                f"Expected to {what} in a store that can be written. Received: {self.path} with read_only=True. "
                "Leave read_only out, or read the features without discarding them."
            )
