"""A device that is not the CPU, on this machine: `use()` makes it the accelerator of a process.

    def _trains() -> ...:                       # a function of the test module, run in a process of its own
        device.use()
        with MyRunner(config) as runner: ...    # runner.device is `sim:0`

    @device.needed
    def test_trains() -> None:
        device.run_processes(_trains, world_size=1)

It computes with the CPU's kernels, and notes where a CUDA device would make the host wait; `watched` lists that. The extension in C++ is
built once for each version of it and of torch, into the user's cache directory, which takes half a minute.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest
import torch
from torch import distributed as dist

from support import processes

NAME = "sim"
SOURCE = Path(__file__).with_name("device.cpp")
COMPILER = os.environ.get("CXX", "g++")

needed = pytest.mark.skipif(
    shutil.which(COMPILER) is None, reason="the simulated device needs a C++ compiler"
)


def built() -> Path:
    """Return the extension; the first process that asks for it compiles it, others wait."""
    python, root = sysconfig.get_paths()["include"], Path(torch.__file__).parent
    flags = [
        *("-O1", "-g0", "-w", "-std=c++20", "-shared", "-fPIC", "-DUSE_DISTRIBUTED"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        *(
            f"-I{each}"
            for each in (root / "include", root / "include/torch/csrc/api/include", python)
        ),
    ]
    libraries = [f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10", "-ltorch_python", "-ltorch"]
    # Without the directories, so that each environment with the same torch finds it.
    options = [flag for flag in flags if not flag.startswith("-I")]
    made_of = [SOURCE.read_text(), torch.__version__, sys.version, COMPILER, *options]
    key = hashlib.sha256("\0".join(made_of).encode()).hexdigest()[:16]
    cache_dir = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "danling-tests"
    cache_dir.mkdir(parents=True, exist_ok=True)
    library = cache_dir / f"simulated_device-{key}.so"
    if library.exists():
        return library
    with (cache_dir / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            partial = library.with_suffix(".partial")
            subprocess.run(
                [COMPILER, *flags, str(SOURCE), "-o", str(partial), *libraries], check=True
            )
            partial.replace(library)
    return library


def run_processes(function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """Run a function that calls `use` in some processes, once the extension is built; see `processes.run_processes`."""
    built()
    return processes.run_processes(function, *args, **options)


def plugged_in(directory: Path) -> dict[str, str]:
    """Return variables of the environment with which every program on this machine has the device, as by an installed plug-in of torch."""
    built()
    entry_points = directory / "simulated_device-1.0.dist-info/entry_points.txt"
    entry_points.parent.mkdir(parents=True)
    entry_points.write_text(f"[torch.backends]\n{NAME} = support.device:use\n")
    (entry_points.parent / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: simulated-device\nVersion: 1.0\n"
    )
    paths = [str(directory), str(SOURCE.parents[2]), os.environ.get("PYTHONPATH", "")]
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "1",
    }


def use() -> Any:
    """Make the device the accelerator of this process, for the rest of its life; return the extension."""
    if not hasattr(torch, NAME):
        # The first backward of a process, which looks for devices: `start` starts the thread of this one by itself.
        torch.ones((), requires_grad=True).backward()  # type: ignore[no-untyped-call]
        extension = _loaded()
        extension.start()
        torch.utils.backend_registration.rename_privateuse1_backend(NAME)
        torch._register_device_module(NAME, _device_module(extension))  # type: ignore[no-untyped-call]
        _keep_parameters()
        torch.utils.backend_registration.generate_methods_for_privateuse1_backend()
        dist.Backend.register_backend("simulated", _collectives, devices=[NAME])
    return _loaded()


def _keep_parameters() -> None:
    """Have parameters be the same objects after a module was moved, as with CUDA: an optimizer may have them."""
    apply: Any = torch.nn.Module._apply

    def swapping(module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        before = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            moved: torch.nn.Module = apply(module, *args, **kwargs)
            return moved
        finally:
            torch.__future__.set_swap_module_params_on_conversion(before)

    torch.nn.Module._apply = swapping  # type: ignore[method-assign, assignment]


@cache
def _loaded() -> Any:
    spec = importlib.util.spec_from_file_location("simulated_device", built())
    assert spec is not None and spec.loader is not None
    extension = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(extension)
    return extension


def _collectives(store: Any, rank: int, size: int, timeout: Any) -> Any:
    return _loaded().collectives(dist.ProcessGroupGloo(store, rank, size, timeout))


def _device_module(extension: Any) -> ModuleType:
    """Return `torch.sim`: what torch and programs ask of the module of a device, such as `torch.cuda`."""
    made = ModuleType(f"torch.{NAME}")
    module: Any = made
    generator = extension.default_generator()
    module.is_available = module.is_initialized = lambda: True
    module.init = module._lazy_init = module.empty_cache = lambda: None
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.set_device = lambda device: None
    module._is_in_bad_fork = lambda: False
    module.default_generators = (generator,)
    module.manual_seed = module.manual_seed_all = lambda seed: generator.manual_seed(seed)
    module.get_rng_state = lambda device=NAME: generator.get_state()
    module.set_rng_state = lambda state, device=NAME: generator.set_state(state)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.synchronize = lambda device=None: torch.accelerator.synchronize(device)
    module.Stream, module.Event = torch.Stream, torch.Event
    module.stream = lambda stream: nullcontext() if stream is None else stream
    module.current_stream = lambda device=None: torch.accelerator.current_stream(device)
    module.memory_allocated = lambda device=None: extension.allocated()
    return made


@dataclass(frozen=True)
class Wait:
    """One wait of the host: what for, and the line of the program, and of the library, that caused it."""

    what: str
    detail: str
    line: str

    def __str__(self) -> str:
        return f"{self.line}: {self.what}" + (f" ({self.detail})" if self.detail else "")


@dataclass
class Watch:
    """Waits of the host, and how many there were at each mark."""

    waits: list[Wait] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    _at: int = 0

    def mark(self) -> None:
        """Note that an update, or whatever is counted, ends here."""
        self.marks.append(len(self.waits))
        self.look_from_here()

    def look_from_here(self) -> None:
        """Take an event of before this place, within an update, as one of an earlier one: another optimizer has stepped."""
        self._at = _loaded().operations()

    def between(self, first: int, last: int) -> list[Wait]:
        """Return the waits after one mark and up to another, which count from 1."""
        return self.waits[self.marks[first - 1] : self.marks[last - 1]]


@contextmanager
def watched() -> Iterator[Watch]:
    """List the waits of the host inside. One for an event of before the last mark is none: the device has work meanwhile."""
    extension, watch = _loaded(), Watch()

    def note(what: str, detail: str) -> None:
        if what == "synchronize an event" and extension.operations() - int(detail) < watch._at:
            return
        watch.waits.append(Wait(what, detail, _line()))

    extension.listen(note)
    try:
        yield watch
    finally:
        extension.listen(None)


_TORCH = str(Path(torch.__file__).parent)
_OWN = str(Path(__file__).parent)


def _line() -> str:
    """Return the innermost line that is neither torch's nor this file's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, _OWN)):
        frame = frame.f_back
    if frame is None:
        return f"a thread of torch ({threading.current_thread().name})"
    path = Path(frame.f_code.co_filename)
    return f"{'/'.join(path.parts[-3:])}:{frame.f_lineno}"


def returns_collectives_at_once() -> None:
    """Have collectives on the device return before they are done, as those of nccl: the next operation on the device waits."""
    _loaded().return_collectives_at_once(True)


def shares_noise() -> None:
    """Have the device draw from the stream of the CPU, so that runs with noise are those of the CPU."""
    _loaded().share_noise(True)
