"""Where a run writes, as its configuration says it: what the claim of a run directory needs to know of it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from danling.checkpoints import CheckpointMismatch
from danling.checkpoints.ownership import newest_record, stored_settings
from danling.config import RunnerConfig, identity
from danling.config.identity import update_sizes
from danling.utils.files import read_text
from danling.utils.nesting import parse_yaml
from danling.utils.notebook import in_notebook

from .claim import WAIT_SECONDS, Wish, newest_first
from .series import number_of

# What a checkpoint records of places: where its run wrote, on the machine that it ran on.
PLACES = frozenset(
    {
        *("dir", "checkpoint_dir", "log_file", "workspace_root", "init_method", "resume", "auto_resume", "pretrained"),
        *("wandb.dir", "mlflow.uri", "profiling.trace_dir", "heartbeat.dir_name", "compile.precompile_artifact_dir"),
        "checkpoint.remote.url",
    }
)
# Names of single directories, which lie where the run itself does: they are kept unless they lead out of it.
DIRECTORY_NAMES = frozenset({"lineage", "checkpoint.dir_name", "checkpoint.ft_dataloader_checkpoint_prefix"})
_ENGINE_PLACES = re.compile(r"deepspeed\.(.*\.)?[a-z_]*_(path|dir|file)")
# DeepSpeed joins these to a directory, of which nothing is left where they are paths themselves.
_ENGINE_NAMES = re.compile(r"deepspeed\.(.*\.)?job_name")
_PLAIN_NAME = re.compile(r"[^/\\\0]+")

_DIGITS = 16
_NUMBER = re.compile(r"-[1-9]\d{0,5}$")
_PATIENT_SHARE = 0.5


def wish_of(config: RunnerConfig, *, id: str, code_id: str | None, part: str | None, replicas: int) -> Wish:
    """Return where a run with this configuration may write."""
    family = _absolute(config.workspace_root) / (f"{config.lineage}-{code_id}" if code_id else config.lineage)
    named, checkpoint_dir = config.get("dir", None), config.get("checkpoint_dir", None)
    name = config.checkpoint.dir_name

    def own_id(run: Path) -> str | None:
        return recognised(config, run, checkpoints=run / name, id=id, code_id=code_id, replicas=replicas)

    def older() -> Path | None:
        found = older_run(config, family, id=id, code_id=code_id, checkpoint_dir_name=name, replicas=replicas)
        if found is None:
            refuse_other_updates(config, family, code_id=code_id, checkpoint_dir_name=name, replicas=replicas)
        return found

    return Wish(
        family=family,
        id=id,
        named=_absolute(named) if named else None,
        checkpoint_dir=_absolute(checkpoint_dir) if checkpoint_dir else None,
        checkpoint_dir_name=name,
        part=part,
        auto_resume=config.auto_resume,
        resume=config.resume,
        only_looks=config.checkpoint.load_only,
        wait_seconds=_patience(config),
        own_id=own_id,
        differences=lambda run: _differences(config, run / name, replicas) or [],
        older=older,
        again=part is None and in_notebook(),
    )


def _differences(config: RunnerConfig, checkpoints: Path, replicas: int) -> list[str] | None:
    """Return how the run that saved in a directory differs in what changes the result; `None` where nothing can be read of it."""
    stored = stored_settings(checkpoints)
    if stored is None:
        return None
    return config.differences(stored[0], stored_replicas=stored[1], replicas=replicas)


def _patience(config: RunnerConfig) -> float:
    # The other ranks wait as well, and must not give up first.
    limit = config.comm.init_timeout_seconds
    return WAIT_SECONDS if limit is None else min(WAIT_SECONDS, limit * _PATIENT_SHARE)


def recognised(
    config: RunnerConfig, run: Path, *, checkpoints: Path, id: str, code_id: str | None, replicas: int
) -> str | None:
    """Return the id under which a run goes on in a run directory; `None` where the directory holds another run.

    It is the run's own, or one that stands for the same configuration and code: an older version made ids in another way, and a seed
    that was drawn is part of the configuration of a checkpoint, but not of its id.
    """
    record = newest_record(checkpoints)
    if record is None:
        return id if number_of(run.name, id) is not None else None
    if record.run == id:
        return id
    if _code_of(record.run) != (code_id or ""):
        return None
    return record.run if _differences(config, checkpoints, replicas) == [] else None


def older_run(
    config: RunnerConfig, family: Path, *, id: str, code_id: str | None, checkpoint_dir_name: str, replicas: int
) -> Path | None:
    """Return the newest run directory that an older version made for this configuration, under an id that this version does not make."""
    for run in newest_first(family):
        stem = _NUMBER.sub("", run.name)
        if number_of(run.name, id) is not None or _code_of(stem) != (code_id or ""):
            continue
        stored = _canonical_of(run)
        # Most are of other configurations: their checkpoints are not opened.
        if stored is None or stem[-_DIGITS:] in _ids_now(stored):
            continue
        if _differences(config, run / checkpoint_dir_name, replicas) == []:
            return run
    return None


def refuse_other_updates(
    config: RunnerConfig, family: Path, *, code_id: str | None, checkpoint_dir_name: str, replicas: int
) -> None:
    """Refuse to begin anew where the very same settings have made a run on another number of ranks.

    Its updates have another size, so that it is another run; but who comes back with fewer processes wants to go on.
    """
    settings = config.plain()
    own = update_sizes(settings, 1).get("dataloader")
    for run in newest_first(family) if own is not None else ():
        stem = _NUMBER.sub("", run.name)
        made = (
            update_sizes(_canonical_of(run) or {}, 1).get("dataloader") if _code_of(stem) == (code_id or "") else None
        )
        if own is None or made is None or made.samples % own.samples:
            continue
        then = identity.canonical(settings, replicas=made.samples // own.samples)
        if stem[-_DIGITS:] != identity.digest(then):
            continue
        differences = _differences(config, run / checkpoint_dir_name, replicas)
        if differences:
            raise CheckpointMismatch(
                f"Expected auto_resume to go on with updates of the size that they had. Received: {'; '.join(differences)}; of the run in "
                f"{run}, with the same settings. Start as many processes as then, or keep the product by another batch_size or "
                "accum_steps; dataloader.global_batch_size keeps it at any number. For a new run, start once without auto_resume."
            )


def _ids_now(stored: Mapping[str, object]) -> set[str]:
    """Return what this version calls a configuration, with the seed that it holds and with one that was drawn."""
    whole = RunnerConfig.completed(stored)
    forms = (whole, {**whole, "seed": None})
    return {identity.digest(identity.canonical(settings)) for settings in forms}


def _canonical_of(run: Path) -> dict[str, object] | None:
    try:
        stored = parse_yaml(read_text(run / "metadata" / "config.canonical.yaml"))
    except (OSError, ValueError, yaml.YAMLError):
        return None
    return stored if isinstance(stored, dict) else None


def _code_of(id: str) -> str:
    return id[:-_DIGITS].removesuffix("-")


def _absolute(path: str | os.PathLike[str]) -> Path:
    return Path(os.path.abspath(os.path.expanduser(path)))


def without_places(stored: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Return the configuration of a checkpoint without the places in it: they are recorded, and never obeyed.

    Whoever made the checkpoint could otherwise choose the files that the reader writes to, and a copied one would write into the run
    directory of the machine that it came from. The user's own sections are left as they are.
    """
    kept: dict[str, Any] = {}
    for name, value in stored.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            kept[name] = without_places(value, f"{key}.")
        elif not _is_place(key, value):
            kept[name] = value
    return kept


def _is_place(key: str, value: object) -> bool:
    if key in PLACES or _ENGINE_PLACES.fullmatch(key):
        return True
    if key not in DIRECTORY_NAMES and not _ENGINE_NAMES.fullmatch(key):
        return False
    return not isinstance(value, str) or not _PLAIN_NAME.fullmatch(value) or value in (".", "..")
