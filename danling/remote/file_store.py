"""File checkpoints in an object store as a manager sees them: to verify one is to bring it here.

It is downloaded, compared with its SHA-256 and committed in the directory as a save would be, so that all that follows reads it from
there. What does not verify is passed over for an older one, like a file on the disk.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from danling.checkpoints import storage
from danling.checkpoints.errors import CheckpointError
from danling.checkpoints.file_store import SUFFIX, FileStore
from danling.checkpoints.policy import is_name
from danling.distributed.environment import is_first_on_machine

from .records import RemoteCheckpoints
from .store import is_url


class RemoteFiles(RemoteCheckpoints, FileStore):
    """The file checkpoints of a run in a store. A path is that of the file in the directory to which it is brought."""

    is_file = True

    def find(self, source: str | Path) -> Path | None:
        """Return where the checkpoint of a name or path of the directory is brought to, if there is one in the store."""
        path = Path(source)
        name = path.name.removesuffix(SUFFIX)
        own = path.parent in (Path("."), self.directory) and not is_url(str(source))
        return self.path(name) if own and is_name(name) and self._found.named(name) is not None else None

    def verify(self, path: Path, level: str) -> None:
        """Bring a checkpoint here, under all names that it has in the store."""
        found = self._described(path)
        file = next(iter(found.manifest.files))
        size, digest = found.manifest.files[file]
        same = [
            other.record
            for other in self._found.described(complete=True)
            if other.record.sequence == found.record.sequence and (size, digest) in other.manifest.files.values()
        ]
        storage.make_directory(self.directory)
        storage.require_space(self.directory, size)
        # `latest` becomes visible last, as in a save.
        records = sorted(same, key=lambda record: record.name == "latest") or [found.record]
        self.write(partial(self.run.download, found, file), records)

    def bring(self, path: Path) -> None:
        """Bring a checkpoint to this machine, where the directory is not that of the main process."""
        # An older one may lie there under the same name.
        if is_first_on_machine() and not self._lies_here(path):
            self.verify(path, "full")

    def _lies_here(self, path: Path) -> bool:
        try:
            here = super().examine(path, "size")[0]
        except (CheckpointError, OSError):
            return False
        return here.files == self._described(path).manifest.files and storage.size_of(path) is not None
