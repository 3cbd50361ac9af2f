"""What a run begins from: its sources are checked before a model is moved, and one of them is loaded at the end of construction."""

from __future__ import annotations

import logging
from contextlib import suppress
from functools import partial
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING

from danling.checkpoints.errors import CheckpointDamaged, CheckpointDiskError, CheckpointNotFound
from danling.checkpoints.reading import CHECKSUMS, content_of
from danling.config.agreement import content_differs

if TYPE_CHECKING:
    from danling.runners.base_runner import BaseRunner

logger = logging.getLogger("danling")

_ATTEMPTS_TO_READ = 3


def check_resume(runner: BaseRunner) -> None:
    """Refuse a `resume` that no rank finds, before a model is moved and a directory is made."""
    source, checkpoints = runner.config.resume, runner.workspace.checkpoints
    # A program with a hook of its own may give `resume` another meaning.
    hooks = (
        runner.restore,
        runner.load_checkpoint,
        runner.read_checkpoint,
        runner.init_checkpoint_manager,
    )
    own = any(not hook.__module__.startswith("danling.") for hook in hooks)
    if not source or "://" in source or runner.config.checkpoint.remote.url or own:
        return
    places = (Path(source), checkpoints / source)
    found = any(match for path in places for match in path.parent.glob(f"{escape(path.name)}*"))
    if not any(runner.world.gather_objects(found)):
        raise CheckpointNotFound(
            f"Expected resume to be a checkpoint: a path, a URL, or a name in {checkpoints}. Received: {source!r}. Give one that is "
            "there."
        )


def check_sources_alike(runner: BaseRunner) -> None:
    """Refuse sources that have another content on some ranks. Called on all ranks."""
    if runner.world.size == 1:
        return
    differing = {}
    for key, hooks in (
        ("resume", ("restore", "load_checkpoint", "read_checkpoint")),
        ("pretrained", ("restore",)),
    ):
        source = runner.config.get(key)
        own = any(not getattr(runner, hook).__module__.startswith("danling.") for hook in hooks)
        if not source or "://" in source or own:
            continue
        look = partial(content_of, source, runner.workspace.checkpoints)
        contents = runner.world.gather_objects(look())
        # Without checksums next to the file, all ranks compare samples of its bytes.
        if not all(CHECKSUMS in content for content in contents if content is not None):
            contents = runner.world.gather_objects(look(sampled=True))
        # A rank that finds none fails where it reads it.
        if len({content for content in contents if content is not None}) > 1:
            sources = runner.world.gather_objects(source)
            differing[key] = [f"{place} ({content})" for place, content in zip(sources, contents)]
    if differing:
        raise content_differs(differing)


def restore_run(runner: BaseRunner) -> None:
    """Load what the configuration names: `resume`, else `auto_resume`, else `pretrained`. Called on all ranks."""
    config, manager = runner.config, runner.checkpoint_manager
    if not config.checkpoint.load_only:
        # Check now rather than at the first save. Replica groups share the directory, where another group may be writing: no tidying.
        if not config.ft.enabled:
            manager.on_main(manager.checkpoints.tidy)
        manager.on_main(manager.checkpoints.refuse_foreign)
    others_write = config.ft.enabled and config.auto_resume
    attempts = _ATTEMPTS_TO_READ if others_write else 1
    for _ in range(attempts - 1):
        with suppress(CheckpointDamaged, CheckpointNotFound):
            # Another replica group may replace a checkpoint between finding and reading it; then there is a newer one.
            return _load_first(runner)
    _load_first(runner)


def _load_first(runner: BaseRunner) -> None:
    config, manager = runner.config, runner.checkpoint_manager
    source = config.resume
    if not source and config.auto_resume:
        source = manager.find_latest()
    while source:
        try:
            runner.load_checkpoint(source)
            return
        except (CheckpointDamaged, CheckpointDiskError) as error:
            # What the user has named is not replaced by something older.
            if config.resume:
                raise
            # Its checksums fit and it still cannot be read: skip it, and take the one before.
            manager.on_main(partial(manager.checkpoints.skip, source, error))
        source = manager.find_latest()
    if config.auto_resume:
        manager.on_main(manager.checkpoints.refuse_lost)
        directory = runner.workspace.checkpoints
        logger.info(
            "auto_resume: no checkpoint of this run in %s yet; starting from scratch.", directory
        )
    if config.pretrained:
        runner.load_pretrained(config.pretrained)
