"""The folder of compiled code: what it depends on, whether it is as it was written, and what was compiled since."""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import logging
import os
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from danling.distributed import Domain, LocalDomain
from danling.utils.files import open_file, plain_path, read_text, write_atomically
from danling.utils.plain import json_text, parse_json

if TYPE_CHECKING:
    from danling.runners.torch_runner import TorchRunner

logger = logging.getLogger("danling")


def fingerprint(
    model: nn.Module,
    *,
    loss: Iterable[type],
    settings: Mapping[str, object],
    policy: str,
    device: torch.device,
) -> dict[str, str]:
    """Return what the compiled code of a model and its loss depends on, part by part.

    Code of the user and sizes of batches are no part of it: torch's own keys tell the graphs of one folder apart.
    """
    sizes = [f"{name} {tuple(t.shape)} {t.dtype}" for name, t in _tensors(model)]
    return {
        "torch": f"{torch.__version__}, Python {sys.version_info.major}.{sys.version_info.minor}",
        "device": _device(device),
        "model": _digest([*_names(type(module) for module in model.modules()), *sizes]),
        "loss": _digest(_names(loss)),
        "compile": _digest(f"{name}={value!r}" for name, value in sorted(settings.items())),
        "policy": policy,
    }


def digest_of(parts: Mapping[str, str]) -> str:
    """Return 16 hexadecimal digits for a fingerprint."""
    return _digest(f"{name}: {value}" for name, value in sorted(parts.items()))


def _tensors(model: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"{torch.cuda.get_device_name(device)}, {major}.{minor}, CUDA {torch.version.cuda}"
    # Code for a CPU uses every instruction that the machine has: on another one it may be an illegal one.
    return f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, {_digest([_cpu_flags()])}"


def _cpu_flags() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _names(kinds: Iterable[type]) -> Iterator[str]:
    return (f"{kind.__module__}.{kind.__qualname__}" for kind in dict.fromkeys(kinds))


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


FOLDER = "compiled"
"""Directory of compiled code in a run directory."""
_MANIFEST = "manifest.json"
_FINGERPRINT = "fingerprint.json"
_CACHE = "TORCHINDUCTOR_CACHE_DIR"
_PLACES = (_CACHE, "TRITON_CACHE_DIR")


def artifacts_of(runner: TorchRunner, *, title: str = "modules", policy: str = "") -> ArtifactDirectory | None:
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
    kinds = [type(runner.criterion), type(runner)]
    parts = fingerprint(runner.unwrapped_model, loss=kinds, settings=settings, policy=policy, device=runner.device)
    return ArtifactDirectory(
        runner.dir / FOLDER if shared is None else Path(shared).absolute(),
        parts,
        title=title,
        signed=shared is None,
        world=runner.world,
        leads=runner.is_local_main_process,
    )


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
    """A subfolder of a directory of compiled code, which is the cache of torch's compiler while it is used.

    Compiled code is loaded into the process and run. What was compiled is listed with its SHA-256 checksums; the list of a `signed` folder
    is signed with the key of this user. At the next start everything is compared: a folder with a file that is not as it was written is
    emptied, and everything is compiled anew; what a killed run has left half-written is removed. Nothing that is wrong with the folder
    ends a run: it is warned about, once.

    Processes of one machine may share a folder, of one run and of several: torch locks what it writes. Each has a lock on it, so that
    nothing is removed beneath another.
    """

    def __init__(
        self,
        root: Path,
        parts: Mapping[str, str],
        *,
        title: str,
        signed: bool = False,
        world: Domain | None = None,
        leads: bool = True,
    ) -> None:
        self.root = root
        self.path = root
        self.is_warm = False
        """Whether compiled code was found in it."""
        self._parts = dict(parts)
        self._title = title
        self._signed = signed
        self._key = b""
        self.world = world or LocalDomain()
        self._leads = leads
        self._usable = False
        self._was_opened = False
        self._lock: int | None = None
        self._listed: dict[str, str] = {}
        self._before: dict[str, Any] = {}

    def open(self) -> None:
        """Check the files of earlier starts, and make the folder ready to compile into; only once. Call on all ranks."""
        if self._was_opened:
            return
        self._was_opened = True
        # The stages of a pipeline are other models.
        self._parts["model"] = self.world.broadcast_object(self._parts["model"])
        self.path = self.root / f"{self._title}-{digest_of(self._parts)}"
        if self._leads:
            self._open()
        self.world.barrier()
        if not self._leads:
            self._open()

    def _open(self) -> None:
        try:
            self._usable = self._prepare() if self._leads else self.path.is_dir()
            self._take_lock(fcntl.LOCK_SH)
        except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home
            if self._leads:
                logger.warning(
                    "Expected a directory for compiled code that can be written to. Received: %s (%s). Everything is compiled, and nothing "
                    "is kept. Set compile.precompile_artifact_dir.",
                    self.root,
                    getattr(error, "strerror", None) or error,
                )
            self.close()

    def _prepare(self) -> bool:
        """Return whether the folder may be compiled into."""
        if self._signed:
            self._key = _user_key()
        is_new = not self.path.is_dir()
        others = _fingerprints(self.root) if is_new else []
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        alone = self._take_lock(fcntl.LOCK_EX | fcntl.LOCK_NB)
        listed = self._read_manifest()
        wrong = None if listed is None else next((name for name in listed if self._sum(name) != listed[name]), None)
        if wrong is not None:
            logger.warning(
                "The compiled code in %s is not as it was written (%s): everything is compiled anew.", self.path, wrong
            )
            listed = {}
        if wrong is not None and not alone:
            return False
        self._listed = listed or {}
        self.is_warm = bool(self._listed)
        if alone:
            self._remove_unlisted()
        if is_new and others:
            logger.warning(
                "Expected compiled code for this run in %s. Received: only such with another %s. Everything is compiled anew.",
                self.root,
                min((_changed(self._parts, other) for other in others), key=len),
            )
        write_atomically(self.path / _FINGERPRINT, json_text(self._parts))
        return True

    def _take_lock(self, kind: int) -> bool:
        """Lock the folder, and return whether that was possible without waiting."""
        if self._lock is None:
            self._lock = os.open(
                self.path.with_name(f"{self.path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
            )
        try:
            fcntl.flock(self._lock, kind)
        except BlockingIOError:
            return False
        return True

    def _read_manifest(self) -> dict[str, str] | None:
        """Return the checksums by name; what cannot be read lists nothing that is there."""
        try:
            found = parse_json(read_text(self.path / _MANIFEST))
            if not hmac.compare_digest(str(found["signature"]), self._signature(found["files"])):
                return {_MANIFEST: ""}
            return {str(name): str(digest) for name, digest in found["files"].items()}
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
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

    def _remove_unlisted(self) -> None:
        kept = {*self._listed, _MANIFEST} if self._listed else set()
        for path in [*_files(self.path)]:
            if str(path.relative_to(self.path)) not in kept:
                path.unlink()

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

    def seal(self, *, everything: bool) -> None:
        """List the complete files of the folder with their checksums, so that the next start may use them."""
        if not self._usable or not self._leads:
            return
        with suppress(OSError):
            loaded = "" if everything else _loaded_libraries()
            names = [path.relative_to(self.path) for path in _files(self.path) if path.suffix not in (".lock", ".tmp")]
            complete = [
                str(name)
                for name in names
                if everything or name.suffix != ".so" or str(name) in self._listed or str(self.path / name) in loaded
            ]
            sums = {name: self._sum(name) for name in sorted(complete) if name != _MANIFEST}
            self._listed = {name: digest for name, digest in sums.items() if digest is not None}
            manifest = {"files": self._listed, "signature": self._signature(self._listed)}
            write_atomically(self.path / _MANIFEST, json_text(manifest))

    def close(self) -> None:
        """Let go of the folder. A second call does nothing."""
        if _used is self:
            self._leave()
        self._usable = False
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


_used: ArtifactDirectory | None = None


def _files(directory: Path) -> Iterator[Path]:
    return (path for path in directory.rglob("*") if path.is_file())


def _fingerprints(root: Path) -> list[dict[str, str]]:
    found = []
    for path in root.glob(f"*/{_FINGERPRINT}"):
        with suppress(OSError, ValueError, AttributeError):
            found.append({str(name): str(value) for name, value in parse_json(read_text(path)).items()})
    return found


def _changed(parts: Mapping[str, str], other: Mapping[str, str]) -> str:
    return ", ".join(name for name, value in parts.items() if other.get(name) != value)


def _loaded_libraries() -> str:
    try:
        return Path("/proc/self/maps").read_text(encoding="utf-8")
    except OSError:
        return ""
