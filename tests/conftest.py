"""Rules for every test: one thread, a directory of its own, a time limit (pyproject.toml), no process left behind."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import time
from collections.abc import Generator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

# Before torch is imported: it reads some of these once.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("TP_SOCKET_IFNAME", "lo")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("RUST_LOG", "error")
if os.environ.get("DANLING_TEST_GPU") != "1":
    # Bitwise comparisons and several ranks on one machine are meant for the CPU.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
if sys.prefix != sys.base_prefix:
    # A run with an activated environment finds as few programs (no torchrun) as `make test`, which activates none.
    paths = os.environ["PATH"].split(os.pathsep)
    os.environ["PATH"] = os.pathsep.join(
        path for path in paths if Path(path) != Path(sys.executable).parent
    )

import pytest
import torch
from support.object_servers import ObjectServer, local_bucket, moto_server
from support.parts import parts_of
from support.preloading import take_huge_pages
from support.process_tree import adopt_orphans, descendants, kill_all, reap, seconds_since_boot
from support.processes import fork_server, server_processes
from support.warm import interpreter

torch.set_num_threads(1)
# A shell that starts this in the background has it ignore SIGINT, and so would every program of a test.
signal.signal(signal.SIGINT, signal.default_int_handler)


IN_MEMORY = Path("/dev/shm")


def pytest_configure() -> None:
    """Have directories of tests in memory where there is room: every save waits for the disk, which are thousands in all."""
    adopt_orphans()  # not when this file is loaded: a fork has it loaded
    if os.access(IN_MEMORY, os.W_OK) and shutil.disk_usage(IN_MEMORY).free > 4 * 2**30:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(IN_MEMORY))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Have the workers be forks of one process with all test files loaded, which takes each 25 s of the processor otherwise."""
    if sys.platform == "linux" and all(spec.popen for spec in specs):
        fork_server(partial(_load_tests, config.args))
        for spec in specs:
            spec.python = interpreter()


def _load_tests(args: list[str]) -> None:
    """Load the test files as pytest does; a worker that finds one missing, since it fails, loads it and says so."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    pytest.main(["--collect-only", "-qq", "-p", "no:xdist", "-p", "no:cacheprovider", *args])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tenth",
        type=int,
        metavar="DIGIT",
        help="run a tenth of the tests that are marked slow, and no others",
    )
    parser.addoption("--third", type=int, metavar="0..2", help="run a third of the tests")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of one tenth, or of one third."""
    tenth, third = config.getoption("tenth"), config.getoption("third")
    if tenth is not None:
        found = [item for item in items if item.get_closest_marker("slow")]
        count, wanted = 10, tenth
    elif third is not None:
        found, count, wanted = [*items], 3, third
    else:
        return
    parts = parts_of((item.nodeid for item in found), count)
    taken = [item for item, part in zip(found, parts) if part == wanted]
    config.hook.pytest_deselected(items=[item for item in items if item not in taken])
    items[:] = taken


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Leave what is loaded while tests are collected out of garbage collection: every run collects some times, 0.3 s each otherwise.

    Around the hook, since pytest-xdist's controller, which collects nothing, is not told when a collection has finished.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    """Fork the server of forks while all test files are loaded and none has run; what a fork prints is captured as what a test does."""
    plugins = session.config.pluginmanager
    # The controller of pytest-xdist runs no test.
    if not plugins.has_plugin("dsession") and not session.config.option.collectonly:
        capture = plugins.get_plugin("capturemanager")
        capture.resume_global_capture()
        fork_server()
        # Loaders fork their workers from this process.
        take_huge_pages()
        capture.suspend_global_capture()
    return (yield)


@pytest.fixture(scope="session")
def moto() -> Iterator[ObjectServer]:
    """An S3 server on the loopback, which takes seconds to start: one for all tests, each of which makes buckets of its own."""
    with moto_server() as server:
        yield server


@pytest.fixture(scope="session")
def localbucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    """Another one, which keeps buckets as directories."""
    with local_bucket(tmp_path_factory.mktemp("buckets")) as server:
        yield server


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _logs_of_this_test() -> Iterator[None]:
    """A runner that a test leaves open, as many programs do, keeps its log open; the tests after it must not speak into it."""
    yield
    module = sys.modules.get("danling.reporting.logging")
    for log in list(module._open_logs) if module is not None else []:
        log.close()


@pytest.fixture(autouse=True)
def _no_process_left() -> Iterator[None]:
    begun = seconds_since_boot()
    yield
    end = time.monotonic() + 3.0
    while (
        left := descendants(os.getpid(), without=server_processes(), since=begun)
    ) and time.monotonic() < end:
        time.sleep(0.02)
    kill_all(left)
    reap()
    assert not left, f"Expected no process to outlive the test. Received: {left}."
