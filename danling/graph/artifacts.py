"""Compiled code that a run keeps: in one file, which is verified when it is read and unpacked into a private folder."""

from __future__ import annotations

import errno
import fcntl
import grp
import hashlib
import hmac
import logging
import os
import platform
import pwd
import shutil
import socket
import stat
import sys
import tempfile
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from zipfile import ZIP_DEFLATED, BadZipFile, ZipFile

import torch

from danling.distributed import Domain
from danling.utils.files import NEW_FILE, open_file, plain_path, staged_path

if TYPE_CHECKING:
    from danling.runners.torch_runner import TorchRunner

logger = logging.getLogger("danling")

_FOLDER = "compiled"
_CACHE = "TORCHINDUCTOR_CACHE_DIR"
_PLACES = (_CACHE, "TRITON_CACHE_DIR")
_FORMAT = b"danling compiled code 1\n"
_SIGNATURE_BYTES = 32
_KEY_BYTES = 32
_LARGEST = 1 << 30
"""Bytes of the largest file of compiled code."""
_CHUNK = 1 << 20
_ATTEMPTS = 100

Identity = tuple[str, int, int]
"""Path, device and inode of a private folder."""


def artifacts_of(runner: TorchRunner, policy: str = "") -> Artifacts | None:
    """Return where a runner keeps compiled code: in `compile.precompile_artifact_dir`, else in its run, signed by this user.

    `None` where the user has given torch another place, or wants no code to be kept. Called on all ranks.
    """
    settings = runner.config.compile.plain()
    shared, _ = settings.pop("precompile_artifact_dir"), settings.pop("memory_policy")
    if shared == "" or (shared is None and settings["backend"] not in (None, "inductor")):
        return None
    # Ranks on several machines may have other variables, and open the directory together or not at all.
    if shared is None and any(runner.world.gather_objects(_has_own_cache())):
        return None
    root = runner.dir / _FOLDER if shared is None else Path(shared).absolute()
    name = _name(runner, settings, policy)
    return Artifacts(
        root / name, signed=shared is None, world=runner.world, leads=runner.is_local_main_process
    )


def _name(runner: TorchRunner, settings: Mapping[str, object], policy: str) -> str:
    """Return a digest of what compiled code depends on, but for what torch's own keys tell apart: code of the user, sizes of batches."""
    model = runner.unwrapped_model
    kinds = dict.fromkeys(map(type, [*model.modules(), runner.criterion, runner]))
    tensors = [*model.named_parameters(), *model.named_buffers()]
    of_model = _digest(
        [
            *(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds),
            *(f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in tensors),
        ]
    )
    # The stages of a pipeline are other models, and share a file.
    of_model = runner.world.broadcast_object(of_model)
    versions = f"{torch.__version__} {sys.version_info[:2]}"
    return _digest(
        [versions, _device(runner.device), of_model, policy, *map(repr, sorted(settings.items()))]
    )


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        return f"{torch.cuda.get_device_name(device)} {capability} {torch.version.cuda}"
    # Code for a CPU uses every instruction that the machine has: on another one it may be an illegal one.
    flags = ""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {flags}"


def _has_own_cache() -> bool:
    """Whether the user has named a directory for torch's compiler, which sets the variable itself as well."""
    place = os.environ.get(_CACHE)
    if place is None:
        return False
    # torch finds no default for a user without a name, as in containers; that is what the variable is set for there.
    with suppress(KeyError, OSError):
        return bool(
            place != import_module("torch._inductor.runtime.cache_dir_utils").default_cache_dir()
        )
    return True


def _user_key() -> bytes:
    """Return the secret with which this user signs compiled code, so that code that another user has put into a run is not loaded."""
    path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "danling" / "key"
    if not os.path.lexists(path):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        staged = staged_path(path)
        try:
            with os.fdopen(os.open(staged, NEW_FILE, 0o600), "wb") as file:
                file.write(os.urandom(_KEY_BYTES))
                file.flush()
                os.fsync(file.fileno())
            with suppress(FileExistsError):
                os.link(staged, path)
        finally:
            staged.unlink(missing_ok=True)
    with open_file(path, follow=False) as file:
        about = os.fstat(file.fileno())
        key = file.read(2 * _KEY_BYTES + 1)
    is_secret = about.st_uid == os.geteuid() and not about.st_mode & 0o077
    if not is_secret or not _KEY_BYTES <= len(key) <= 2 * _KEY_BYTES:
        raise OSError(errno.EPERM, f"{path} is no key that only this user can read; remove it")
    return key


def _is_own_group(group: int) -> bool:
    """Whether this user is the only one in a group."""
    try:
        found = grp.getgrgid(group)
        user = pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return False
    return found.gr_name == user and set(found.gr_mem) <= {user}


def _is_own(about: os.stat_result, administrators: Collection[int] = (0,)) -> bool:
    """Whether a file or directory is this user's, or an administrator's, and no other user can write to it."""
    others = about.st_mode & stat.S_IWOTH
    group = about.st_mode & stat.S_IWGRP and not _is_own_group(about.st_gid)
    return about.st_uid in (os.geteuid(), *administrators) and not others and not group


def _administrators() -> list[int]:
    """Return the users whose directories `/` and `/tmp` are."""
    try:
        mapped = Path("/proc/self/uid_map").read_text(encoding="utf-8")
        unknown = int(Path("/proc/sys/kernel/overflowuid").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return [0]
    has_root = any(line.split()[0] == "0" for line in mapped.splitlines())
    # In a container that has no other user than this one, as those of Apptainer, what is root's belongs to this number.
    return [0] if has_root else [0, unknown]


def _check_parents(directory: Path) -> None:
    """Refuse a directory in which another user could exchange a folder: one that others can write to, unless it is sticky as /tmp is."""
    administrators = _administrators()
    for parent in (directory, *directory.parents):
        about = os.stat(parent)
        is_sticky = about.st_mode & stat.S_ISVTX and about.st_uid in (os.geteuid(), *administrators)
        if not is_sticky and not _is_own(about, administrators):
            raise OSError(
                errno.EPERM,
                f"other users can write to {parent}; set TMPDIR to a directory of your own",
            )


class _Refused(Exception):
    """Why a file of compiled code is not used."""


class Artifacts:
    """The compiled code of a run, or of several: in one file, and unpacked in a private folder while it is used.

    Compiled code is loaded into the process and run. Torch's compiler works in the private folder, which a process of this user has made
    and no other user can enter; the processes of one machine share it. The file is opened once and copied, and the copy is unpacked only if
    the signature at its end fits: it is made with the key of this user, for code of this name. In a directory that runs share there is no
    signature but a checksum, and the file must be this user's own. All that was compiled is packed again after the first update, and when
    the last process closes. Nothing that is wrong with the file ends a run: everything is compiled then.
    """

    def __init__(self, path: Path, *, signed: bool, world: Domain, leads: bool) -> None:
        self.path = path
        self.is_warm = False
        """Whether compiled code was found."""
        self.folder: Path | None = None
        """The private folder."""
        self._signed = signed
        self._world = world
        self._leads = leads
        self._key = b""
        self._lock: int | None = None
        self._directory: int | None = None
        """Descriptor of the directory of the file; `None` where nothing is kept."""
        self._seen: tuple[int, ...] | None = None
        """What tells whether the file was written again since it was read or written here."""
        self._packed: dict[str, int] = {}
        """Sizes of the files in it, by name."""
        self._was_opened = False
        self._before: dict[str, Any] = {}

    # The private folder

    def open(self) -> None:
        """Unpack the code of earlier starts into a folder, in which this one compiles; only once. Called on all ranks."""
        if self._was_opened:
            return
        self._was_opened = True
        if self._leads:
            self._begin()
        folders = self._world.gather_objects((socket.gethostname(), _identity(self.folder)))
        if not self._leads:
            self._join(
                identity
                for host, identity in folders
                if host == socket.gethostname() and identity is not None
            )

    def _begin(self) -> None:
        try:
            self._make_folder()
        except OSError as error:
            self._warn(f"{_reason(error)}. Torch uses its own folder, and nothing is kept.")
            return
        try:
            self._open_directory()
            self._unpack()
        except FileNotFoundError:
            pass
        except _Refused as error:
            logger.warning(
                "The compiled code in %s is not used: %s. Everything is compiled.", self.path, error
            )
        except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home
            self._keep_nothing(error)
        self.is_warm = bool(self._packed)

    def _keep_nothing(self, error: Exception) -> None:
        self._warn(
            f"{_reason(error)}. Everything is compiled, and nothing is kept. Set compile.precompile_artifact_dir."
        )
        self._close_directory()

    def _warn(self, received: str) -> None:
        logger.warning(
            "Expected a directory for compiled code that can be written to: %s. Received: %s",
            self.path.parent,
            received,
        )

    def _make_folder(self) -> None:
        temporary = Path(tempfile.gettempdir()).resolve()
        _check_parents(temporary)
        # Machines may share the directory, and do not see the locks of each other there.
        prefix = f"danling-compiled-{os.geteuid()}-{_digest([socket.gethostname()])[:8]}-"
        for left in temporary.glob(f"{prefix}*"):
            _remove_left(left)
        for _ in range(_ATTEMPTS):
            path = Path(tempfile.mkdtemp(prefix=prefix, dir=temporary))
            # Until it is locked, another start may take it for one that a killed process has left.
            if self._enter(path, _identity(path)):
                return
            with suppress(OSError):
                path.rmdir()
        raise OSError(errno.EAGAIN, "its folders vanish")

    def _enter(self, path: Path, identity: Identity | None) -> bool:
        """Lock a folder against its removal; return whether it is the one that is meant."""
        lock = _locked(path, fcntl.LOCK_SH)
        if lock is not None and identity is not None and _identity(path) == identity:
            self.folder, self._lock = path, lock
            return True
        if lock is not None:
            os.close(lock)
        return False

    def _join(self, folders: Iterable[Identity]) -> None:
        """Share the folder of the first process of this machine."""
        # A container of the same name may have another directory at that path.
        is_shared = any(self._enter(Path(identity[0]), identity) for identity in folders)
        # Its leader has logged why.
        with suppress(OSError, RuntimeError):
            if not is_shared:
                self._make_folder()
            self._open_directory()

    # The file

    def _open_directory(self) -> None:
        """Open the directory of the file. In a run it is made there, and is no link: what that leads to may be another person's choice."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        if not self._signed:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._directory = os.open(self.path.parent, flags)
            return
        self._key = _user_key()
        folder = self.path.parent
        folder.parent.mkdir(parents=True, exist_ok=True)
        run = os.open(folder.parent, flags)
        try:
            with suppress(FileExistsError):
                os.mkdir(folder.name, 0o700, dir_fd=run)
            self._directory = os.open(folder.name, flags | os.O_NOFOLLOW, dir_fd=run)
        finally:
            os.close(run)

    def _close_directory(self) -> None:
        if self._directory is not None:
            os.close(self._directory)
            self._directory = None

    def _copy(self, source: BinaryIO, target: BinaryIO, count: int) -> bytes:
        """Copy bytes, and return their signature as code of this name; without a key, a checksum."""
        signature = hmac.new(self._key, _FORMAT + self.path.name.encode(), hashlib.sha256)
        while count > 0 and (chunk := source.read(min(count, _CHUNK))):
            signature.update(chunk)
            target.write(chunk)
            count -= len(chunk)
        return signature.digest()

    def _unpack(self) -> None:
        """Add the files that the folder lacks."""
        try:
            file = open_file(self.path.name, follow=False, directory=self._directory)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise _Refused(_reason(error)) from None
        with file, tempfile.TemporaryFile(dir=self.folder) as copy:
            about = os.fstat(file.fileno())
            if not self._signed and not _is_own(about):
                raise OSError(
                    errno.EPERM, f"{self.path} is another user's, or others can write to it"
                )
            if about.st_size > _LARGEST:
                raise _Refused(f"it has more than {_LARGEST:,} bytes")
            signature = self._copy(file, copy, about.st_size - _SIGNATURE_BYTES)
            if not hmac.compare_digest(file.read(_SIGNATURE_BYTES + 1), signature):
                raise _Refused("it is not as this user's runs have written it")
            try:
                self._add_files(copy)
            except (BadZipFile, ValueError) as error:
                raise _Refused(str(error)) from error
        self._seen = _version(about)

    def _add_files(self, copy: BinaryIO) -> None:
        assert self.folder is not None
        with ZipFile(copy) as archive:
            for entry in archive.infolist():
                path = self.folder / plain_path(entry.filename)
                self._packed[entry.filename] = entry.file_size
                if not os.path.lexists(path):
                    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                    with (
                        archive.open(entry) as packed,
                        os.fdopen(os.open(path, NEW_FILE, 0o600), "wb") as file,
                    ):
                        shutil.copyfileobj(packed, file)

    def seal(self) -> None:
        """Pack what was compiled, so that the next start finds it. Called on all ranks, while none compiles."""
        self._world.barrier()
        if self._leads:
            self._pack()
        self._world.barrier()

    def _pack(self) -> None:
        if self._directory is None or self.folder is None:
            return
        try:
            if self._version_there() != self._seen:
                # Another run, or another machine of this one, has written it meanwhile.
                with suppress(_Refused, FileNotFoundError):
                    self._unpack()
            sizes = {name: (self.folder / name).stat().st_size for name in _files(self.folder)}
            if sizes and (sizes != self._packed or self._version_there() != self._seen):
                self._write(sizes)
        except OSError as error:
            self._keep_nothing(error)

    def _version_there(self) -> tuple[int, ...] | None:
        with suppress(FileNotFoundError):
            return _version(os.stat(self.path.name, dir_fd=self._directory, follow_symlinks=False))
        return None

    def _write(self, sizes: Mapping[str, int]) -> None:
        assert self.folder is not None
        staged = staged_path(Path(self.path.name)).name
        with tempfile.TemporaryFile(dir=self.folder) as packed:
            with ZipFile(
                packed, "w", ZIP_DEFLATED, compresslevel=1, strict_timestamps=False
            ) as archive:
                for name in sorted(sizes):
                    archive.write(self.folder / name, name)
            size = packed.tell()
            if size > _LARGEST - _SIGNATURE_BYTES:
                raise OSError(errno.EFBIG, f"more than {_LARGEST:,} bytes of code")
            packed.seek(0)
            try:
                with os.fdopen(
                    os.open(staged, NEW_FILE, 0o600, dir_fd=self._directory), "wb"
                ) as file:
                    file.write(self._copy(packed, file, size))
                    file.flush()
                    os.fsync(file.fileno())
                    written = os.fstat(file.fileno())
                # A reader opens the whole old file, or the whole new one.
                os.replace(
                    staged, self.path.name, src_dir_fd=self._directory, dst_dir_fd=self._directory
                )
            except BaseException:
                with suppress(OSError):
                    os.unlink(staged, dir_fd=self._directory)
                raise
        self._seen = _version(written)
        self._packed = dict(sizes)

    # Its use

    def use(self) -> None:
        """Have torch's compiler work in the folder, until another one is used or this one is closed."""
        global _used
        if _used is self or self.folder is None:
            return
        if _used is not None:
            _used._leave()
        _used = self
        self._before = {name: os.environ.get(name) for name in _PLACES}
        inductor: Any = import_module("torch._inductor.config")  # sets the variable
        self._before["headers"] = inductor.cpp_cache_precompile_headers
        os.environ[_CACHE] = str(self.folder)
        # A precompiled header is outside of the folder, and the compiler is asked at each start whether it still fits.
        inductor.cpp_cache_precompile_headers = False

    def _leave(self) -> None:
        global _used
        _used = None
        inductor: Any = import_module("torch._inductor.config")
        inductor.cpp_cache_precompile_headers = self._before.pop("headers")
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    def close(self) -> None:
        """Stop using the folder; the last process that closes it packs what was compiled, and removes it. A second call does nothing."""
        if _used is self:
            self._leave()
        folder, self.folder, lock, self._lock = self.folder, None, self._lock, None
        if folder is not None and lock is not None:
            with suppress(BlockingIOError):
                # Only the last process gets it: the others still share the lock.
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self.folder = folder
                self._pack()
                self.folder = None
                shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)
        self._close_directory()


def _identity(folder: Path | None) -> Identity | None:
    if folder is None:
        return None
    with suppress(OSError):
        about = os.lstat(folder)
        return str(folder), about.st_dev, about.st_ino
    return None


def _version(about: os.stat_result) -> tuple[int, ...]:
    return about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns


def _locked(folder: Path, kind: int) -> int | None:
    """Return the descriptor of a folder of this user, locked without waiting; `None` for another one, and where others have it."""
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    with suppress(OSError):
        if os.fstat(lock).st_uid == os.geteuid():
            fcntl.flock(lock, kind | fcntl.LOCK_NB)
            return lock
    os.close(lock)
    return None


def _remove_left(folder: Path) -> None:
    """Remove the folder of a process that was killed, which nothing locks."""
    lock = _locked(folder, fcntl.LOCK_EX)
    if lock is not None:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _files(folder: Path) -> list[str]:
    """Return the names of the regular files of a folder that are whole, sorted."""
    found = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return sorted(
        str(path.relative_to(folder)) for path in found if path.suffix not in (".lock", ".tmp")
    )


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


_used: Artifacts | None = None
