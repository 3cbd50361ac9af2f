"""Features in files, for processes that share a file system."""

from __future__ import annotations

import fcntl
import json
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from urllib.parse import quote

import torch
from torch import Tensor

from danling.utils.files import open_file, read_text, sync_directory, write_all, write_error
from danling.utils.locks import exclusive
from danling.utils.plain import parse_json

from ..protocols import ROOM, FeatureStore, SampleRef
from .objects import check_against, check_budget, check_sum, checksum, dense, missing, owned, same_bytes, specs, taken

_AT_ONCE = 16
"""Files that are published or removed between two notes of the count: their names have to fit into one page."""

_SYNCING_THREADS = 8
"""A file system writes its journal once for all files that are synced at the same time."""

_KEY = "danling"
_RESERVED = "__metadata__"
_LONGEST_NAME = 160


class DirectoryStore(FeatureStore):
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
    """

    def __init__(self, path: str | os.PathLike[str], *, max_bytes: int | None = None, read_only: bool = False) -> None:
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
        """Write an object durably; see `put_many`."""
        self.put_many({object_id: tensors})

    def put_many(self, objects: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Write objects durably; see `FeatureStore.put_many`.

        Raises:
            PermissionError: If the store is read only.
            TypeError: If safetensors cannot hold a dtype, complex128 for instance.
        """
        self._check_writable(f"put {', '.join(map(repr, objects))}")
        plain = {object_id: dense(object_id, tensors) for object_id, tensors in objects.items()}
        present = [object_id for object_id in plain if self._file(object_id).exists()]
        waiting = iter([object_id for object_id in plain if object_id not in present])
        while chunk := list(islice(waiting, _AT_ONCE)):
            present += self._write({object_id: _serialize(object_id, plain[object_id]) for object_id in chunk})
        for object_id in present:
            self._check_same(object_id, plain[object_id])
        if present:
            # Their writer may have been killed before it had made the names durable.
            sync_directory(self._objects)

    def _write(self, objects: Mapping[str, bytes]) -> list[str]:
        """Write files, all durable at the end; return those whose place somebody else has taken meanwhile."""
        first, size = next(iter(objects)), sum(map(len, objects.values()))
        try:
            # Asked before anything is written, and for each when it is published.
            if self.max_bytes is not None:
                check_budget(first, len(objects[first]), self.usage(), self.max_bytes)
            with ExitStack() as staging:
                staged = {name: staging.enter_context(self._staged()) for name in objects}
                for name, (_, handle) in staged.items():
                    write_all(handle, objects[name])
                _sync([handle for _, handle in staged.values()])
                try:
                    return self._publish({name: (file, len(objects[name])) for name, (file, _) in staged.items()})
                finally:
                    sync_directory(self._objects)
        except OSError as error:
            what = f"object {first!r}" if len(objects) == 1 else f"object {first!r} and {len(objects) - 1} more"
            raise write_error(f"{what} of {size} bytes", self.path, error, room=ROOM) from error

    def _publish(self, staged: Mapping[str, tuple[Path, int]]) -> list[str]:
        """Move files to their places; return those that are taken."""
        with self._exclusive():
            free = {name: size for name, (_, size) in staged.items() if not self._file(name).exists()}
            before = self._count.read()
            fitting = list(self._fitting(free, before))
            usage = before + sum(free[name] for name in fitting)
            self._count.write(before, {self._file(name).name: free[name] for name in fitting})
            for name in fitting:
                os.rename(staged[name][0], self._file(name))
            self._count.write(usage)
            if len(fitting) < len(free):
                name = list(free)[len(fitting)]
                check_budget(name, free[name], usage, self.max_bytes)
        return [name for name in staged if name not in free]

    def _fitting(self, sizes: Mapping[str, int], usage: int) -> Iterator[str]:
        for name, size in sizes.items():
            usage += size
            if self.max_bytes is not None and usage > self.max_bytes:
                return
            yield name

    @contextmanager
    def _staged(self) -> Iterator[tuple[Path, int]]:
        """Open a file that no reader looks at, locked so that nobody takes it for one of a writer that has died."""
        staged = self._writing / uuid.uuid4().hex
        with self._exclusive():
            handle = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            fcntl.flock(handle, fcntl.LOCK_EX)
        try:
            yield staged, handle
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
            found = _load(file, ref.object_id)
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
        sizes = {file.name: file.stat().st_size for file in files}
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
        """Return the file of an object: any string has a name, another one for each."""
        name = quote(object_id, safe="", errors="surrogatepass")
        if name[:1] in (".", "~"):
            name = f"%{ord(name[0]):02X}{name[1:]}"
        if len(name) > _LONGEST_NAME:
            name = "~" + sha256(object_id.encode(errors="surrogatepass")).hexdigest()
        return self._objects / f"{name}.safetensors"

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

    def _check_same(self, object_id: str, tensors: Mapping[str, Tensor]) -> None:
        file = self._file(object_id)
        try:
            found = _load(file, object_id)
        except FileNotFoundError:
            return  # discarded by a trainer that needed it no more
        except ValueError as error:
            raise ValueError(
                f"Expected object {object_id!r} in {file}. Received: {error}. Discard the object, and put it again."
            ) from error
        if not same_bytes(found, tensors):
            raise taken(object_id, str(self.path))

    def _check_writable(self, what: str) -> None:
        if self.read_only:
            raise PermissionError(
                f"Expected to {what} in a store that can be written. Received: {self.path} with read_only=True. "
                "Leave read_only out, or read the features without discarding them."
            )


class UsageCount:
    """The bytes of the files in a directory, in a small file: known without looking at all of them, and right after a kill.

    A change is announced before it is made, with the files that it is about. Whoever reads the count after a kill between the two
    finds out from the disk whether it was made. All methods need the lock of the store.
    """

    def __init__(self, file: Path, directory: Path) -> None:
        self._file = file
        self._directory = directory

    def read(self) -> int:
        """Return the bytes; they are counted anew where the small file cannot be read."""
        try:
            found = parse_json(read_text(self._file))
            settled, pending = int(found["bytes"]), dict(found["pending"])
        except (OSError, ValueError, KeyError, TypeError, OverflowError):
            return self.recount()
        return settled + sum(int(size) for name, size in pending.items() if (self._directory / name).exists())

    def write(self, settled: int, pending: Mapping[str, int] | None = None) -> None:
        """Keep a count."""
        text = json.dumps({"bytes": settled, "pending": dict(pending or {})}).encode()
        handle = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            # Neither atomic nor durable: what is cut short is no JSON, and is counted anew, as at the first use in each process.
            os.pwrite(handle, text, 0)
            os.ftruncate(handle, len(text))
        finally:
            os.close(handle)

    def recount(self) -> int:
        """Return the bytes of all files, found on the disk."""
        total = 0
        with os.scandir(self._directory) as files:
            for file in files:
                try:
                    total += file.stat().st_size
                except FileNotFoundError:  # a reader without the lock may meet one that goes
                    continue
        return total


def _sync(handles: Sequence[int]) -> None:
    """Make files durable, at the same time."""
    if len(handles) == 1:
        return os.fsync(handles[0])
    with ThreadPoolExecutor(_SYNCING_THREADS) as threads:
        list(threads.map(os.fsync, handles))


def _serialize(object_id: str, tensors: Mapping[str, Tensor]) -> bytes:
    """Return the file of an object; safetensors refuses some dtypes, and tensors that share memory."""
    import safetensors.torch

    if _RESERVED in tensors:
        raise TypeError(
            f"Expected names that safetensors does not use itself in object {object_id!r}. Received: {_RESERVED!r}. Call it otherwise."
        )
    for name, tensor in tensors.items():
        if not _can_hold(tensor.dtype):
            raise TypeError(
                f"Expected dtypes that safetensors can hold in object {object_id!r}. Received: {name!r} of {tensor.dtype}. "
                "Return it from capture in another, such as the real and imaginary parts of complex128 by view_as_real."
            )
    storages = [tensor.untyped_storage().data_ptr() for tensor in tensors.values()]
    plain = dict(tensors) if len(set(storages)) == len(storages) else owned(tensors)
    about = json.dumps({"object": object_id, "checksum": checksum(object_id, plain)})
    data: bytes = safetensors.torch.save(plain, metadata={_KEY: about})
    return data


@cache
def _can_hold(dtype: torch.dtype) -> bool:
    import safetensors.torch

    try:
        safetensors.torch.save({"x": torch.empty(0, dtype=dtype)})
    except Exception:  # its own error differs between versions: KeyError, ValueError, SafetensorError
        return False
    return True


def _load(file: Path, object_id: str) -> dict[str, Tensor]:
    """Return the tensors of an object, read through a memory map into memory of their own, and verified."""
    import safetensors

    open_file(file).close()  # safetensors would wait for the writer of a named pipe
    try:
        with safetensors.safe_open(file, framework="pt") as opened:
            about = parse_json((opened.metadata() or {})[_KEY])
            tensors = owned({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118
        name, written = about["object"], about["checksum"]
    except FileNotFoundError:
        raise
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"a damaged object: {type(error).__name__}: {error}") from error
    if name != object_id:
        raise ValueError(f"object {name!r}")
    check_sum(object_id, tensors, written)
    return tensors
