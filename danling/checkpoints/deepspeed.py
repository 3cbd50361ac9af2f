"""Checkpoints of a DeepSpeed engine, written by all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch

from . import storage
from .collective import CollectiveCheckpointManager
from .deepspeed_files import (
    CLIENT_STATE,
    EngineAhead,
    EngineTag,
    HashingFiles,
    consolidated_weights,
    read_runner_file,
)
from .errors import CheckpointError, CheckpointMismatch, CheckpointNotFound
from .exchange import export_weights
from .manifest import Manifest
from .policy import Record
from .snapshot import count_bytes, to_host
from .target_store import RUNNER_FILE, SUMS, TargetStore, is_engine_target


class Engine(Protocol):
    """What a manager asks of a DeepSpeed engine; all of it is called on all ranks."""

    stage: int
    state_bytes: int

    def save(self, directory: str, tag: str, client_state: Mapping[str, Any]) -> None:
        """Write the files of a tag."""

    def writing_to(self, files: HashingFiles) -> AbstractContextManager[None]:
        """Let `files` write what the engine saves."""


class DeepSpeedCheckpointManager(CollectiveCheckpointManager):
    """Tags of a DeepSpeed engine as targets that are written once, and pointer files with the names; see `TargetStore`.

    Beside the engine's files lies `runner.pth` with everything but model and optimizer; the same goes to the engine as its client
    state, so that `engine.load_checkpoint("checkpoints/targets", tag)` of a program without this library finds it too. Where the state was
    saved before an evaluation and once more with its metrics, the client state may be the one from before: the engine's files are linked.
    This library reads `runner.pth` alone, which has the figures.

    The engine writes from its live tensors, so a save is finished when it returns, whatever `checkpoint.async_mode` says.

    Args:
        engine: The engine that saves.
    """

    store_class: ClassVar[type[TargetStore]] = TargetStore
    store: TargetStore
    _ahead: EngineAhead | None = None

    def __init__(self, *args: Any, engine: Engine, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._engine = engine

    # Saving

    def _save(
        self, payload: Mapping[str, object], names: list[str], *, epoch: int, global_step: int, ahead: bool = False
    ) -> None:
        if self.settings.load_only:
            return
        if self.mirror is not None:
            self._surface()
        before, self._ahead = self._ahead, None
        exported = "model" in payload
        needed = count_bytes(payload) + (0 if exported else self._engine.state_bytes)
        record = self.on_main(lambda: self._open_target(needed, epoch, global_step))
        plain = self.on_all(lambda: to_host(payload))
        client = {name: value for name, value in plain.items() if name != "ema"}
        files = HashingFiles(ahead=before if before is not None and before.step == global_step else None)
        if not exported:
            self._save_engine(files, record, client)
        try:
            self._finish(files, record, plain, names)
        except Exception:
            if self.domain.rank == 0:
                self.store.give_up(record.name)
            raise
        if ahead:
            self._ahead = EngineAhead(self.store.path(record.name), global_step, client, files.written)

    def _open_target(self, needed: int, epoch: int, global_step: int) -> Record:
        record = self._open_attempt(["latest"], needed=needed, epoch=epoch, global_step=global_step)[0]
        record = replace(record, name=self.store.new_target(record.sequence))
        storage.make_directory(self.store.path(record.name))
        return record

    def _save_engine(self, files: HashingFiles, record: Record, client: Mapping[str, object]) -> None:
        with self._engine.writing_to(files):
            self._engine.save(str(self.store.path(record.name).parent), record.name, {CLIENT_STATE: client})

    def _finish(self, files: HashingFiles, record: Record, plain: Mapping[str, object], names: Sequence[str]) -> None:
        """Agree that all files are there; then, on rank 0, describe them, let the names lead there and prune."""
        self._ranks.agree(files.error)
        written: dict[str, tuple[int, str]] = {}
        for of_rank in self.domain.gather_objects(files.written):
            written.update(of_rank)
        mirror, domain = self.mirror, self.domain
        put_off = mirror is not None and domain.size > 1 and any(domain.gather_objects(mirror.is_behind))
        self.on_main(lambda: self._publish(record, plain, written, names, own=files.written, put_off=put_off))
        if domain.rank != 0:
            self._mirrored(record, names, target=record.name, own=files.written, put_off=put_off)
        self._follow(record.sequence, domain.gather_objects)

    def _publish(
        self,
        record: Record,
        plain: Mapping[str, object],
        written: Mapping[str, tuple[int, str]],
        names: Sequence[str],
        *,
        own: Iterable[str],
        put_off: bool,
    ) -> None:
        target = self.store.path(record.name)
        described = storage.write_file(target / RUNNER_FILE, lambda writer: torch.save(dict(plain), writer))  # type: ignore[arg-type]
        storage.sync_directory(target)
        storage.sync_directory(target.parent)
        storage.write_text(target / SUMS, Manifest(record, {**written, RUNNER_FILE: described}).text())
        self.store.publish(record.name, names)
        self._mirrored(record, names, target=record.name, own=[*own, RUNNER_FILE], put_off=put_off)
        self._saved(plain, names)

    # Loading

    def load_checkpoint(
        self,
        source: str | Path,
        *,
        template: Mapping[str, Any] | None = None,
        sections: Any = None,
    ) -> dict[str, object]:
        """Return the verified payload of a checkpoint; see `CheckpointManager.load_checkpoint`.

        In a checkpoint of an engine `model` and `optimizer` are an `EngineTag`, which the engine reads, unless sections are named.
        """
        path = self._fetched(source)
        if sections is not None or not self.on_main(lambda: is_engine_target(path)):
            return self._read(path, template=template, sections=sections)
        payload = self.on_all(lambda: read_runner_file(path))
        if "model" in payload:
            raise CheckpointMismatch(
                f"Expected a full checkpoint. Received: {source}, an export of weights. Load it with `pretrained`."
            )
        engine = payload["engine"]
        tag = EngineTag(path, int(engine["stage"]), int(engine["world_size"]), engine)
        return {**payload, "model": tag, "optimizer": tag}


def export_deepspeed_checkpoint(
    source: str | Path, path: str | Path, *, trust: bool = False, **options: Any
) -> list[Path]:
    """Put the weights of a checkpoint of the DeepSpeed manager together and write them for other programs. Call on one process.

    Args:
        source: A checkpoint directory, one of its pointer files, or a target.
        path: As in `export_weights`: a file for `torch.load`, a `.safetensors` file, or a directory.
        trust: Let DeepSpeed put the shares of several ranks, or of ZeRO 1 to 3, together: it unpickles them, which runs what is in them.
        options: As in `export_weights`.

    Returns:
        The files written.

    Raises:
        CheckpointNotFound: If there is no such checkpoint.
        CheckpointDamaged: If it is not what was written.
        CheckpointError: If it takes trust, or DeepSpeed is not installed.
    """
    store = TargetStore(Path("checkpoints"), run_id="")
    found = store.locate(Path(source))
    if found is None:
        raise CheckpointNotFound(
            f"Expected a checkpoint of the DeepSpeed manager. Received: {str(source)!r}, where there is none."
        )
    store.verify(found, "full")
    target = store.target(found)
    if not is_engine_target(target):
        raise CheckpointError(
            f"Expected a checkpoint of the DeepSpeed manager. Received: {target}, without {RUNNER_FILE}."
        )
    payload = read_runner_file(target)
    weights = payload["model"] if "model" in payload else consolidated_weights(target, trust=trust)
    averaged = payload.get("ema", {}).get("weights")
    return export_weights(path, weights, ema=averaged, **options)
