"""Features in files, for processes that share a file system."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from hashlib import sha256
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from urllib.parse import quote

from torch import Tensor

from danling.utils.files import (
    NEW_FILE,
    open_file,
    read_bytes,
    refuse_link,
    sync_directory,
    write_all,
    write_error,
)
from danling.utils.locks import FileLock, exclusive
from danling.utils.plain import parse_json

from .refs import ROOM, TensorSpec
from .store import CheckedStore, check_budget, check_sum, checksum, dense, owned

_AT_ONCE = 16
"""Files that are written and published together."""

_SYNCING_THREADS = 8
"""A file system writes its journal once for all files that are synced at the same time."""

_KEY = "danling"
_RESERVED = "__metadata__"
_LONGEST_NAME = 160
_USAGE_BYTES = 4096


class DirectoryStore(CheckedStore):
    """A store of one safetensors file an object, on a file system that all processes see alike.

    A file is written and synced under another name in `writing`, and one rename into `objects` publishes it. `put_many` syncs its files at
    the same time, and the directory once. The files of writers that have died are removed when another begins to write. Any number of
    processes, threads and forked workers may use the directory at once.

    Args:
        path: The directory, which is made.
        max_bytes: Bytes of files that it holds at most, whichever process writes them; no limit where it is left out.
        read_only: Read features that were computed before; the directory may be on a file system that cannot be written.

    Raises:
        ImportError: If safetensors is not installed: `pip install safetensors`.
        FileNotFoundError: If it is to be read only and is no store.
        ValueError: If `objects` or `writing` in it is a link.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, max_bytes: int | None = None, read_only: bool = False
    ) -> None:
        if find_spec("safetensors") is None:
            raise ImportError(
                "Expected the package 'safetensors' to be installed for a DirectoryStore. Received: no such package. "
                "Run `pip install safetensors`."
            )
        self.path = Path(path).absolute()
        self.max_bytes = max_bytes
        self.read_only = read_only
        self._objects = self.path / "objects"
        self._writing = self.path / "writing"
        self._usage_file = self.path / "usage.json"
        self._opened_by = 0
        if not read_only:
            for directory in (self._objects, self._writing):
                refuse_link(directory)
                directory.mkdir(parents=True, exist_ok=True)
        elif not self._objects.is_dir():
            raise FileNotFoundError(
                f"Expected a directory that a DirectoryStore has written. Received: {self.path}, which has no folder 'objects'. "
                "Compute the features first, or leave read_only out."
            )

    def put(self, object_id: str, tensors: Mapping[str, Tensor]) -> None:
        self.put_many({object_id: tensors})

    def put_many(self, objects: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Write objects durably; see `FeatureStore.put_many`.

        Raises:
            PermissionError: If the store is read only.
            TypeError: If safetensors cannot hold a dtype, complex128 for instance.
        """
        self._check_writable(f"put {', '.join(map(repr, objects))}")
        plain = {object_id: dense(object_id, tensors) for object_id, tensors in objects.items()}
        # Not written again: the bytes are compared at the end.
        present = [object_id for object_id in plain if self._file(object_id).exists()]
        waiting = iter([object_id for object_id in plain if object_id not in present])
        while chunk := list(islice(waiting, _AT_ONCE)):
            present += self._write(
                {object_id: _serialize(object_id, plain[object_id]) for object_id in chunk}
            )
        for object_id in present:
            self._check_same(object_id, plain[object_id])
        if present:
            # Their writer may have been killed before it had made the names durable.
            sync_directory(self._objects)

    def _write(self, objects: Mapping[str, bytes]) -> list[str]:
        """Write files, all durable at the end; return the objects that another writer has published meanwhile."""
        first, size = next(iter(objects)), sum(map(len, objects.values()))
        writer = FileLock(self._writing / f"{uuid.uuid4().hex}.lock")
        staged = {
            name: writer.file.with_suffix(f".{number}") for number, name in enumerate(objects)
        }
        try:
            with self._exclusive():
                # Checked before anything is written, and for each when it is published.
                check_budget(first, len(objects[first]), self._count(), self.max_bytes)
                writer.acquire()
            # Without the lock: a sync takes long, and other writers may sync at the same time.
            with ThreadPoolExecutor(_SYNCING_THREADS) as threads:
                list(threads.map(_write_synced, staged.values(), objects.values()))
            try:
                return self._publish(staged, objects)
            finally:
                # Also where the budget has refused one: those before it are published.
                sync_directory(self._objects)
        except OSError as error:
            more = f" and {len(objects) - 1} more" if len(objects) > 1 else ""
            what = f"object {first!r}{more} of {size} bytes"
            raise write_error(what, self.path, error, room=ROOM) from error
        finally:
            for file in staged.values():
                file.unlink(missing_ok=True)
            writer.release()

    def _publish(self, staged: Mapping[str, Path], objects: Mapping[str, bytes]) -> list[str]:
        """Move files to their places; return those that are taken."""
        present = []
        with self._changing() as usage:
            for name, file in staged.items():
                if self._file(name).exists():
                    present.append(name)
                    continue
                check_budget(name, len(objects[name]), sum(usage), self.max_bytes)
                os.rename(file, self._file(name))
                usage.append(len(objects[name]))
        return present

    def _place(self, object_id: str) -> str:
        return str(self._file(object_id))

    def _load(self, object_id: str, expected: Mapping[str, TensorSpec]) -> dict[str, Tensor]:
        """Read through a memory map into new memory, and verify; see `CheckedStore._load`."""
        import safetensors

        file = self._file(object_id)
        try:
            open_file(file).close()  # safetensors would wait for the writer of a named pipe
            with safetensors.safe_open(file, framework="pt") as opened:
                about = parse_json((opened.metadata() or {})[_KEY])
                tensors = owned({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118
            name, written = about["object"], about["checksum"]
        except FileNotFoundError:
            raise KeyError(object_id) from None
        except (safetensors.SafetensorError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"a damaged object: {type(error).__name__}: {error}") from error
        if name != object_id:
            raise ValueError(f"object {name!r}")
        check_sum(object_id, tensors, written)
        return tensors

    def discard(self, object_ids: Iterable[str]) -> None:
        """Remove files; see `FeatureStore.discard`.

        Raises:
            PermissionError: If the store is read only.
        """
        self._check_writable("discard objects")
        with self._changing() as usage:
            for file in map(self._file, object_ids):
                with suppress(FileNotFoundError):
                    size = file.stat().st_size
                    file.unlink()
                    usage.append(-size)

    def usage(self) -> int:
        if self.read_only:
            return self._recount()
        with self._exclusive():
            return self._count()

    def close(self) -> None:
        """Do nothing: no file stays open."""

    def _file(self, object_id: str) -> Path:
        """Return the file of an object: any string has a name, another one for each."""
        name = quote(object_id, safe="", errors="surrogatepass")
        # A point would hide the file, and `~` begins the name of an object whose name is too long.
        if name[:1] in (".", "~"):
            name = f"%{ord(name[0]):02X}{name[1:]}"
        if len(name) > _LONGEST_NAME:
            name = "~" + sha256(object_id.encode(errors="surrogatepass")).hexdigest()
        return self._objects / f"{name}.safetensors"

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        with exclusive(self.path / "lock"):
            # Once in each process: a forked worker has the attribute of its parent.
            if self._opened_by != os.getpid():
                self._remove_left()
                self._note(self._recount())  # what a power cut has left of the count is not trusted
                self._opened_by = os.getpid()
            yield

    def _remove_left(self) -> None:
        """Remove the files of writers that have died. The directory is opened once: a link that takes its place leads nowhere."""
        refuse_link(self._writing)
        handle = os.open(self._writing, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            for name in os.listdir(handle):
                if not FileLock((self._writing / name).with_suffix(".lock")).is_taken():
                    with suppress(FileNotFoundError, IsADirectoryError):
                        os.unlink(name, dir_fd=handle)
        finally:
            os.close(handle)

    @contextmanager
    def _changing(self) -> Iterator[list[int]]:
        """Lock the store and yield its bytes, to which the size of each change is appended.

        The count is emptied meanwhile, so that it is made anew after a kill.
        """
        with self._exclusive():
            usage = [self._count()]
            self._note(None)
            try:
                yield usage
            finally:
                self._note(sum(usage))

    def _count(self) -> int:
        try:
            text = read_bytes(self._usage_file, limit=_USAGE_BYTES, follow=False)
            return int(parse_json(text)["bytes"])
        except (OSError, ValueError, KeyError, TypeError, OverflowError):
            self._note(total := self._recount())
            return total

    def _note(self, total: int | None) -> None:
        # Neither atomic nor durable: without a file, or one cut short by a kill or a full disk, `_count` counts again.
        with suppress(OSError):
            self._usage_file.unlink(missing_ok=True)
            if total is not None:
                with os.fdopen(os.open(self._usage_file, NEW_FILE, 0o666), "w") as file:
                    json.dump({"bytes": total}, file)

    def _recount(self) -> int:
        total = 0
        with os.scandir(self._objects) as files:
            for file in files:
                with suppress(
                    FileNotFoundError
                ):  # a reader without the lock may meet one that goes
                    total += file.stat().st_size
        return total

    def _check_writable(self, what: str) -> None:
        if self.read_only:
            raise PermissionError(
                f"Expected to {what} in a store that can be written. Received: {self.path} with read_only=True. "
                "Leave read_only out, or read the features without discarding them."
            )


def _write_synced(file: Path, data: bytes) -> None:
    handle = os.open(file, NEW_FILE, 0o666)
    try:
        write_all(handle, data)
        os.fsync(handle)
    finally:
        os.close(handle)


def _serialize(object_id: str, tensors: Mapping[str, Tensor]) -> bytes:
    """Return the file of an object; safetensors refuses some dtypes, and tensors that share memory."""
    import safetensors.torch

    storages = [tensor.untyped_storage().data_ptr() for tensor in tensors.values()]
    plain = dict(tensors) if len(set(storages)) == len(storages) else owned(tensors)
    about = json.dumps({"object": object_id, "checksum": checksum(object_id, plain)})
    try:
        if _RESERVED in tensors:
            raise KeyError(_RESERVED)
        data: bytes = safetensors.torch.save(plain, metadata={_KEY: about})
        return data
    # Which of these safetensors raises differs between its versions.
    except (KeyError, ValueError, safetensors.SafetensorError) as error:
        received = ", ".join(f"{name!r} of {tensor.dtype}" for name, tensor in tensors.items())
        raise TypeError(
            f"Expected names and dtypes that safetensors can store in object {object_id!r}. Received: {received} ({error!r}). Return them "
            "from capture otherwise, such as the real and imaginary parts of complex128 by view_as_real."
        ) from error
