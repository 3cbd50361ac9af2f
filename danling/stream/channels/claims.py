"""Which run a log belongs to, and which process trains on it."""

from __future__ import annotations

import json
import os
from pathlib import Path

from danling.utils.files import read_text, write_atomically
from danling.utils.locks import FileLock
from danling.utils.plain import parse_json

from .rules import check_owner


class Claim:
    """The claim of one trainer on a log: a lock that ends with its process, and the run in a file that stays."""

    def __init__(self, owner: Path, lock: Path, name: str) -> None:
        self._owner = owner
        self._lock = FileLock(lock)
        self._pid = os.getpid()
        self._name = name

    def take(self, run: str, *, complete: bool) -> bool:
        """Take the log, and return whether it belongs to this run and this process; see `RefChannel.claim`."""
        if self._pid != os.getpid():
            # A forked child has inherited the object and not the lock.
            self._lock, self._pid = FileLock(self._lock.file), os.getpid()
        if complete and self.owner() not in ("", run):
            return False
        try:
            taken = self._lock.acquire()
        except OSError:
            if complete:  # on a file system that cannot be written, where nothing is freed either
                return False
            raise
        if not taken:
            if complete:
                return False
            raise RuntimeError(
                f"Expected the live stream {self._name} to be read by one trainer at a time. Received: one more, beside "
                f"{self._lock.holder}. Wait until that one has ended, or begin another stream."
            )
        owner = self.owner()
        if owner not in ("", run):
            self.release()
            if complete:
                return False
        check_owner(self._name, owner, run)
        if not owner:
            write_atomically(self._owner, json.dumps({"run": run}) + "\n")
        return True

    def owner(self) -> str:
        """Return the run that the log belongs to, empty when it belongs to none."""
        try:
            return str(parse_json(read_text(self._owner))["run"])
        except FileNotFoundError:
            return ""
        except (ValueError, KeyError, TypeError):
            raise ValueError(
                f"Expected the run that the stream {self._name} belongs to. Received: {self._owner}, which names none. Bring it back from "
                "a copy, or remove it."
            ) from None

    def release(self) -> None:
        """Give the log back; it still belongs to the run."""
        self._lock.release()
