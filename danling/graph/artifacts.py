"""The folder in which a run keeps compiled code: checked before it is used, and listed after something was compiled."""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import logging
import os
import platform
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from danling.distributed import Domain
from danling.utils.files import open_file, plain_path, read_text, write_atomically
from danling.utils.plain import json_text, parse_json

if TYPE_CHECKING:
    from danling.runners.torch_runner import TorchRunner

logger = logging.getLogger("danling")

_FOLDER = "compiled"
_MANIFEST = "manifest.json"
_CACHE = "TORCHINDUCTOR_CACHE_DIR"
_PLACES = (_CACHE, "TRITON_CACHE_DIR")


def artifacts_of(runner: TorchRunner, policy: str = "") -> ArtifactDirectory | None:
    """Return where a runner keeps compiled code: `compile.precompile_artifact_dir`, else a folder of its run that only this user reads.

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
    name = _folder_name(runner, settings, policy)
    return ArtifactDirectory(root / name, signed=shared is None, world=runner.world, leads=runner.is_local_main_process)


def _folder_name(runner: TorchRunner, settings: Mapping[str, object], policy: str) -> str:
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
    # The stages of a pipeline are other models, and share a folder.
    of_model = runner.world.broadcast_object(of_model)
    versions = f"{torch.__version__} {sys.version_info[:2]}"
    return _digest([versions, _device(runner.device), of_model, policy, *map(repr, sorted(settings.items()))])


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
        return bool(place != import_module("torch._inductor.runtime.cache_dir_utils").default_cache_dir())
    return True


def _user_key() -> bytes:
    """Return the secret with which this user signs compiled code, so that code in another user's run is not loaded."""
    path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "danling" / "key"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        staged = path.with_name(f"key.{os.getpid()}")
        with os.fdopen(os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(os.urandom(32))
        with suppress(FileExistsError):
            os.link(staged, path)
        staged.unlink()
    return path.read_bytes()


class ArtifactDirectory:
    """A folder of compiled code, which is the cache of torch's compiler while it is used.

    Compiled code is loaded into the process and run. Its files are listed with their SHA-256 checksums; the list of a `signed` folder is
    signed with the key of this user. The next start compares everything: a folder with a file that is not as it was written is emptied,
    and what a killed run has left half-written is removed. Nothing that is wrong with the folder ends a run.

    Processes of one machine may share a folder, of one run and of several: torch locks what it writes. Each process has a lock on the
    folder, so that nothing is removed beneath another one.
    """

    def __init__(self, path: Path, *, signed: bool, world: Domain, leads: bool) -> None:
        self.path = path
        self.is_warm = False
        """Whether compiled code was found in it."""
        self._signed = signed
        self._world = world
        self._leads = leads
        self._key = b""
        self._usable = False
        self._was_opened = False
        self._lock: int | None = None
        self._before: dict[str, Any] = {}

    def open(self) -> None:
        """Check the files of earlier starts, and make the folder ready to compile into; only once. Called on all ranks."""
        if self._was_opened:
            return
        self._was_opened = True
        if self._leads:
            self._open()
        self._world.barrier()
        if not self._leads:
            self._open()

    def _open(self) -> None:
        try:
            if self._signed:
                self._key = _user_key()
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._usable = self._check(alone=self._leads and self._take_lock(fcntl.LOCK_EX | fcntl.LOCK_NB))
            self._take_lock(fcntl.LOCK_SH)
        except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home
            if self._leads:
                logger.warning(
                    "Expected a directory for compiled code that can be written to. Received: %s (%s). Everything is compiled, and nothing "
                    "is kept. Set compile.precompile_artifact_dir.",
                    self.path.parent,
                    getattr(error, "strerror", None) or error,
                )
            self.close()

    def _check(self, *, alone: bool) -> bool:
        """Return whether the folder may be used. A process that is alone with it removes what may not."""
        listed = self._read_manifest()
        wrong = next((name for name, digest in listed.items() if self._sum(name) != digest), None)
        if wrong is not None:
            if self._leads:
                logger.warning(
                    "The compiled code in %s is not as it was written (%s): everything is compiled anew.",
                    self.path,
                    wrong,
                )
            listed = {}
        if alone:
            kept = {*listed, _MANIFEST} if listed else set()
            for name in self._files() - kept:
                (self.path / name).unlink()
        self.is_warm = bool(listed)
        return alone or wrong is None

    def _take_lock(self, kind: int) -> bool:
        """Lock the folder, and return whether that was possible without waiting."""
        if self._lock is None:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            self._lock = os.open(self.path.with_name(f"{self.path.name}.lock"), flags, 0o600)
        try:
            fcntl.flock(self._lock, kind)
        except BlockingIOError:
            return False
        return True

    def _files(self) -> set[str]:
        return {str(path.relative_to(self.path)) for path in self.path.rglob("*") if path.is_file()}

    def _read_manifest(self) -> dict[str, str]:
        """Return the checksums by name. A manifest that cannot be read or has another signature lists itself, with a wrong sum."""
        try:
            found = parse_json(read_text(self.path / _MANIFEST))
            if hmac.compare_digest(str(found["signature"]), self._signature(found["files"])):
                return {str(name): str(digest) for name, digest in found["files"].items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            pass
        return {_MANIFEST: ""}

    def _signature(self, files: Mapping[str, str]) -> str:
        return hmac.new(self._key, json_text(files).encode(), hashlib.sha256).hexdigest()

    def _sum(self, name: str) -> str | None:
        # Neither a name in a foreign manifest nor a link may lead out of the folder.
        try:
            path = self.path / plain_path(name)
            if not path.resolve().is_relative_to(self.path.resolve()):
                return None
            with open_file(path) as file:
                return hashlib.sha256(file.read()).hexdigest()
        except (OSError, ValueError):
            return None

    def use(self) -> None:
        """Have torch's compiler keep its code in the folder, until another one is used or this one is closed."""
        global _used
        if _used is self or not self._usable:
            return
        if _used is not None:
            _used._leave()
        _used = self
        self._before = {name: os.environ.get(name) for name in _PLACES}
        inductor: Any = import_module("torch._inductor.config")  # sets the variable
        self._before["headers"] = inductor.cpp_cache_precompile_headers
        os.environ[_CACHE] = str(self.path)
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

    def seal(self) -> None:
        """List the files with their checksums, so that the next start may use them. Called on all ranks, while none compiles."""
        self._world.barrier()
        if self._leads and self._usable:
            self._list()
        self._world.barrier()

    def _list(self) -> None:
        with suppress(OSError):
            names = (name for name in self._files() if not name.endswith((".lock", ".tmp", _MANIFEST)))
            files = {name: digest for name in sorted(names) if (digest := self._sum(name)) is not None}
            write_atomically(self.path / _MANIFEST, json_text({"files": files, "signature": self._signature(files)}))

    def close(self) -> None:
        """Stop using the folder; the last process that closes it lists what was compiled. A second call does nothing."""
        if _used is self:
            self._leave()
        if self._usable and self._take_lock(fcntl.LOCK_EX | fcntl.LOCK_NB):
            self._list()
        self._usable = False
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


_used: ArtifactDirectory | None = None
