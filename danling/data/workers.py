"""Worker processes of loaders: signals, and an orderly end."""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.process
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import DataLoader, get_worker_info

OF_WORKERS = frozenset(
    {"persistent_workers", "prefetch_factor", "timeout", "multiprocessing_context"}
)
"""Settings of worker processes, which are errors without workers."""
_IGNORED = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}


class WorkersView:
    """What the workers of the library's loaders read instead of the user's dataset.

    Attributes:
        dataset: The user's.
    """

    dataset: Any


class WorkerInit:
    """Makes a worker ignore signals to the whole process group, then calls the user's `worker_init_fn`.

    torchrun and schedulers signal the group; the trainer then finishes its update and saves, for which it needs its
    workers.
    """

    def __init__(self, user: Callable[[int], object] | None = None) -> None:
        self.user = user

    def __call__(self, worker_id: int) -> None:
        """Prepare the worker process `worker_id`."""
        for number in _IGNORED:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED)  # see `signals_blocked`
        info = get_worker_info()
        if info is not None and isinstance(info.dataset, WorkersView):
            # What functions of the user's divide is their dataset, not the keyed view of it. torch has the attribute read-only.
            object.__setattr__(info, "dataset", info.dataset.dataset)
        if self.user is not None:
            self.user(worker_id)
        _end_with_parent()


def _end_with_parent() -> None:
    """End this worker when the process that started it is gone.

    A worker of torch ends when its parent changes, but it looks who that is only from here on: one that was left behind before would
    wait for ever. So would one whose parent is the fork server, which lives as long as its workers do.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    method = (
        getattr(multiprocessing.current_process(), "_start_method", None)
        or multiprocessing.get_start_method()
    )
    if method == "forkserver":
        threading.Thread(target=_exit_after, args=(parent,), daemon=True).start()
    elif os.getppid() != parent.pid:
        os._exit(1)


def _exit_after(process: multiprocessing.process.BaseProcess) -> None:
    process.join()
    os._exit(1)


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Keep what a `WorkerInit` makes workers ignore from those that start inside, until they come to it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def kept_from_group_signals(loader: object) -> Iterator[None]:
    """Make workers that a user's torch loader starts inside ignore signals to the whole process group.

    Else a SIGTERM to the group ends them before the update and the save that it asks for. Workers that he starts himself are left as
    they are: nothing would end those with the process.
    """
    if (
        not isinstance(loader, DataLoader)
        or not loader.num_workers
        or isinstance(loader.worker_init_fn, WorkerInit)
    ):
        yield
        return
    users = loader.worker_init_fn
    loader.worker_init_fn = WorkerInit(users)
    try:
        with signals_blocked():
            yield
    finally:
        loader.worker_init_fn = users


def shut_down_workers(loader: Any) -> None:
    """End the worker processes of a loader or an iterator; one that does not end within torch's time limit is killed."""
    iterator = (
        loader if hasattr(loader, "_shutdown_workers") else getattr(loader, "_iterator", None)
    )
    if iterator is None:
        return
    if iterator is not loader:
        # A loader with persistent workers would go on with those that have ended.
        loader._iterator = None
    if hasattr(iterator, "_shutdown_workers"):
        iterator._shutdown_workers()
    for worker in getattr(iterator, "_workers", ()):
        if worker.is_alive():
            worker.kill()


_loaders: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def end_with_process(loader: object) -> None:
    """Shut the workers of a loader, or of an iterator that its loader does not keep, down when this process ends.

    `multiprocessing` terminates them by SIGTERM and waits: for workers that ignore it, it would wait for ever.
    """
    if not _loaders:
        # Exit handlers run in reverse order: registered late, this one precedes those of multiprocessing and torch.
        atexit.unregister(_shut_down_all)
        atexit.register(_shut_down_all)
    _loaders[loader] = os.getpid()


def _shut_down_all() -> None:
    for loader, owner in list(_loaders.items()):
        if owner == os.getpid():  # a forked process has copies of loaders that are not its own
            shut_down_workers(loader)
