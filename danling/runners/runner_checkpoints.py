"""The checkpoint of every runner: its configuration, its counters, its random streams, the position in its data, and what a stack adds."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

from danling.checkpoints import CheckpointDamaged, CheckpointMismatch, CheckpointNotFound, CheckpointSettings
from danling.checkpoints.absent import NoCheckpoints
from danling.checkpoints.backends import backend_named
from danling.checkpoints.exclusion import ExcludedFromLoading
from danling.checkpoints.torch_files import FORMAT_VERSION
from danling.data import BatchSource, capture_random_state
from danling.data.rank_streams import have_drawn, resume_stream, streams_by_index
from danling.torchft import OwnPositions, ReplicaLoaderCheckpoints
from danling.training import loader_states
from danling.training.run_state import (
    RunState,
    StatePart,
    check_complete,
    check_given,
    check_payload,
    check_same_run,
    check_streams,
    in_order,
)
from danling.training.saving import RunSaver
from danling.workspace import format_number

from .runner_data import RunnerData

logger = logging.getLogger("danling")

_ATTEMPTS_TO_READ = 3


class RunnerCheckpoints(RunnerData):
    """Saves and restores a run. All of it is called on all ranks."""

    run_state: RunState
    saver: RunSaver

    keeps_streams: ClassVar[bool] = False
    """Whether a run that draws random numbers goes on with the same number of streams only, unless `parallel.allow_degree_change`."""

    def _open_run_state(self) -> None:
        self.run_state = RunState(self.component_parts(), self.progress_parts())
        self.saver = RunSaver(
            manager=lambda: self.checkpoint_manager, position=lambda: self.state.train, state=self.checkpoint_state
        )

    def init_checkpoint_manager(self) -> None:
        """Build the manager of `checkpoint.backend`: files, or torch's distributed checkpoint. Call on all ranks."""
        settings = CheckpointSettings.from_config(self.config.checkpoint)
        manager = self.manager_class()
        self.checkpoint_manager = manager(
            self.workspace.checkpoints,
            domain=self.world,
            run_id=self.id,
            settings=settings,
            step_mode=self.is_step_mode,
            compare=self.config_differences,
        )
        self.checkpoint_manager.before_save = self._run_place.confirm
        self._closers.callback(self.checkpoint_manager.close, settings.wait_timeout)

    def _open_checkpoints(self) -> None:
        self.init_checkpoint_manager()
        if self.checkpoint_manager is None:
            self.checkpoint_manager = NoCheckpoints()
        if self._position_owner is not None:
            self._keep_own_positions(self._position_owner)

    @property
    def _position_owner(self) -> str | None:
        """The replica group that saves its own place in the data besides, `None` where none does."""
        settings, ft = self.config.checkpoint, self.config.ft
        if not settings.enable_ft_dataloader_checkpoints:
            return None
        if settings.ft_replica_id is not None:
            return str(settings.ft_replica_id)
        return str(ft.replica_id) if ft.enabled else None

    def _keep_own_positions(self, replica: str) -> None:
        """Save the loader states of a replica group with every checkpoint, and go on from them."""
        settings = self.config.checkpoint
        checkpoints = ReplicaLoaderCheckpoints(
            self.workspace.checkpoints,
            replica=replica,
            prefix=settings.ft_dataloader_checkpoint_prefix,
            domain=self.world,
            run_id=self.id,
            settings=CheckpointSettings.from_config(settings),
        )
        self._closers.callback(checkpoints.close)
        positions = OwnPositions(
            checkpoints,
            sources=lambda: self.sources,
            trained=lambda: self._trained_sources(),
            position=lambda: self.state.train,
            share=lambda split, state: self.own_loader_state(split, state),
            leaves_out=lambda split: self.excluded_from_loading.leaves_out(f"dataloaders.{split}"),
            world=self.world,
            data_rank=lambda: self.data_domain.rank,
            device=self.device,
        )
        self.saver.before.append(positions.save)
        self.saver.loaded.append(positions.load)

    def _trained_sources(self) -> dict[str, BatchSource]:
        return {split: self.sources[split] for split in self.train_splits if split in self.sources}

    def config_differences(self, payload: Mapping[str, Any]) -> list[str]:
        """Return how the configuration of a checkpoint differs from this one in what changes the result, one line a key.

        No communication: may be called on one rank.

        Args:
            payload: The checkpoint, of which `runner` and `state` are read.
        """
        elastic = payload.get("state", {}).get("elastic", {})
        before = int(elastic.get("data_replicas", elastic.get("world_size", self.data_replicas)))
        return self.config.differences(payload.get("runner", {}), stored_replicas=before, replicas=self.data_replicas)

    def manager_class(self) -> Any:
        """Return the class of the checkpoint manager. Called on all ranks."""
        asked = self.config.checkpoint.backend
        return backend_named("file" if asked == "auto" else asked).manager()

    # Saving

    def component_parts(self) -> list[StatePart]:
        """Return the components of a checkpoint that this stack saves by itself, in the order in which they are restored."""
        return []

    def progress_parts(self) -> list[StatePart]:
        """Return what lies in the entry `state` of a checkpoint, in the order in which it is restored."""
        return [
            StatePart("train", lambda: asdict(self.state.train), lambda stored, _: self.state.load_train(stored)),
            StatePart(
                "elastic",
                lambda: asdict(self.state.elastic),
                lambda stored, _: self._load_attempts(stored),
                default=dict,
            ),
            # Restored last of all, since loading draws.
            StatePart("rng", lambda: dict(self.state.rng.ranks), lambda streams, _: None),
            StatePart("results", self._stored_results, lambda stored, _: self._load_results(stored), default=dict),
        ]

    def _load_attempts(self, stored: Mapping[str, Any]) -> None:
        self.state.load_elastic(stored)
        self._hold_at_most(self.state.elastic.micro_batch_size)

    def _stored_results(self) -> dict[str, Any]:
        return {str(index): result for index, result in self.results.items()}

    def _load_results(self, stored: Mapping[str, Any]) -> None:
        self.results = {int(index): result for index, result in stored.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the full state: tensors, not copied, and plain values. Call on all ranks.

        The random streams and the states of loaders that differ from rank to rank are gathered, so every rank returns all of
        them.
        """
        sources = self._trained_sources()
        streams = (self.stream_place[0], capture_random_state(self.device))
        loaders = (self.data_domain.rank, loader_states.own_states(sources))
        ranks = self.world.gather_objects((streams, loaders))
        self.state.rng.ranks = streams_by_index(streams for streams, _ in ranks)
        states = [states for _, states in ranks]
        return in_order(
            {
                "format_version": FORMAT_VERSION,
                "runner": self.config.public(),
                "state": {**self.state.state_dict(), **self.run_state.progress()},
                **self.run_state.completed(self.component_states()),
                "dataloaders": {s: loader_states.state_of(s, source, states) for s, source in sources.items()},
            }
        )

    def checkpoint_state(self) -> dict[str, Any]:
        """Return what the checkpoint manager is handed to save: the full state. Call on all ranks."""
        state = self.state_dict()
        check_payload(state, "`state_dict` to return the full state")
        return state

    def component_states(self) -> dict[str, Any]:
        """Return the states of components by name, such as `model`; a stack of your own overrides it. Call on all ranks."""
        return self.run_state.components()

    def save_checkpoint(self, *, history: bool = False, save_best: bool = True) -> None:
        """Save the full state as `latest`, and under the other names it deserves. Call on all ranks.

        Args:
            history: Also keep it under its history name.
            save_best: Also make it `best` when the score of this very state is the best one.
        """
        if not self.config.checkpoint.load_only:
            self.saver.save(history=history, best=save_best and self._is_state_of_best)

    @property
    def _is_state_of_best(self) -> bool:
        return self.is_best and next(reversed(self.own_scores), None) == self.index

    @property
    def index(self) -> int:
        """The number results go under: completed epochs, or committed updates in step mode."""
        return self.state.train.global_step if self.is_step_mode else self.state.train.epoch

    # Loading

    def restore(self) -> None:
        """Load what the configuration names: `resume`, else `auto_resume`, else `pretrained`. Call on all ranks.

        Raises:
            CheckpointNotFound: If `resume` or `pretrained` names none.
            CheckpointMismatch: If it is of another run, or another model.
        """
        config = self.config
        if not config.checkpoint.load_only:
            # Now, and not at the first save. Replica groups share the directory, and another one may be writing.
            if self.workspace_part is None:
                self.checkpoint_manager.tidy()
            self.checkpoint_manager.check_directory()
        for _ in range(_ATTEMPTS_TO_READ - 1 if config.ft.enabled and config.auto_resume else 0):
            with suppress(CheckpointDamaged, CheckpointNotFound):
                # Another replica group may have replaced what was found before it was read; then there is something newer.
                return self._load_configured()
        self._load_configured()

    def _load_configured(self) -> None:
        config = self.config
        if config.resume:
            self.load_checkpoint(config.resume)
            return
        if config.auto_resume:
            source = self.checkpoint_manager.find_latest()
            if source is not None:
                self.load_checkpoint(source)
                return
            self.checkpoint_manager.refuse_lost()
            logger.info(
                "auto_resume: no checkpoint of this run in %s yet; starting from scratch.", self.workspace.checkpoints
            )
        if config.pretrained:
            self.load_pretrained(config.pretrained)

    def read_checkpoint(self, checkpoint: str | Path) -> dict[str, Any]:
        """Return the verified payload of a checkpoint. Call on all ranks.

        Args:
            checkpoint: A name in the run's own checkpoint directory, or a path.

        Returns:
            Tensors on the CPU and plain values, by component: `model`, `optimizer`, `state`, ...

        Raises:
            CheckpointNotFound: If there is none.
            CheckpointDamaged: If a file is not what was written.
        """
        payload: dict[str, Any] = self.checkpoint_manager.load_checkpoint(checkpoint)
        return payload

    def load_checkpoint(self, checkpoint: str | Path | Mapping[str, Any]) -> None:
        """Restore the full state of a checkpoint; loader states that this replica group has saved for itself win. Call on all ranks.

        Args:
            checkpoint: A name in the run's own checkpoint directory (`"latest"`, `"best"`, `"ckpt-..."`), a path, or a payload, as
                `read_checkpoint` and `state_dict` return it.

        Raises:
            CheckpointNotFound: If there is none.
            CheckpointDamaged: If a file is not what was written.
            CheckpointMismatch: If a component is missing, or the stored configuration means another run.
        """
        given = isinstance(checkpoint, Mapping)
        payload = checkpoint if isinstance(checkpoint, Mapping) else self.read_checkpoint(checkpoint)
        if given:
            check_given(payload, self.excluded_from_loading)
        check_payload(payload, "`read_checkpoint` to return the payload of the checkpoint")
        self._check_config(payload)
        self.load_state_dict(payload)
        if not isinstance(checkpoint, Mapping):
            # A payload lies nowhere, so it is not saved either.
            self.checkpoint_manager.begin(checkpoint)
        where = f"step {self.state.train.global_step}, epoch {self.state.train.epoch}"
        logger.info("Resumed from %s at %s.", "a payload" if given else checkpoint, where)
        if not isinstance(checkpoint, Mapping):
            self._note_best(checkpoint)
            self.saver.note_loaded()

    _best_elsewhere: int | None = None
    """Index of a best score whose checkpoint lies in the directory that the run came from."""

    def _note_best(self, checkpoint: str | Path) -> None:
        own = self.workspace.checkpoints
        is_here = any((own / name).exists() for name in ("best", "best.pth"))
        self._best_elsewhere = None if is_here else self.best_index
        if self._best_elsewhere is not None and self.is_main_process:
            logger.info(
                "The best score so far, %s at %d, was kept beside %s; here a best is kept from the next better one on.",
                format_number(self.best_score or 0.0),
                self._best_elsewhere,
                checkpoint,
            )

    @property
    def excluded_from_loading(self) -> ExcludedFromLoading:
        """What `checkpoint.exclude_from_loading` leaves out of what is loaded."""
        return ExcludedFromLoading(self.config.checkpoint.exclude_from_loading)

    def _check_config(self, payload: Mapping[str, Any]) -> None:
        """Refuse a checkpoint from which this run could not go on as the one that was stored."""
        stored, excluded = payload.get("runner", {}), self.excluded_from_loading
        if self.seed_was_drawn and stored.get("seed") is not None:
            self.config.seed = self.seed = int(stored["seed"])
        differences = self.config_differences(payload)
        if not differences and not excluded.allows_setting("dataloader.drop_last"):
            loaders = {s: self.dataloaders[s] for s in self.train_splits if s in self.dataloaders}
            differences = loader_states.differences_of_passes(payload.get("dataloaders", {}), loaders)
        check_same_run(differences, excluded)
        if self.keeps_streams:
            kept, _ = excluded.apply({"state": payload.get("state", {})}, section="state")
            self._check_streams(kept.get("state", {}))

    def _check_streams(self, stored: Mapping[str, Any]) -> None:
        before, ranks = stored.get("elastic", {}).get("streams"), stored.get("rng", {})
        if before and before != self.stream_layout and have_drawn(ranks, seed=self.seed, device=self.device):
            check_streams(before, self.stream_layout, inexact=self.allows_inexact_resume)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a payload: components, loaders, counters, and the random streams last. Called on all ranks.

        Args:
            state: What `state_dict` returned, or the payload of a checkpoint.

        Raises:
            CheckpointMismatch: If a component that this runner has is missing and not excluded from loading.
        """
        payload, excluded = self.excluded_from_loading.apply(state)
        needed = self.run_state.names() or list(self.component_states())
        check_complete(payload, excluded, [*needed, "state", *(["dataloaders"] if self.sources else [])])
        self.load_components(payload, excluded)
        if "dataloaders" in payload:
            fresh = {split: None for split in self.sources if f"dataloaders.{split}" in excluded}
            self.load_dataloaders({**payload["dataloaders"], **fresh})
        if "state" in payload:
            self.state.load_state_dict(payload["state"])
            self.run_state.load_progress(payload["state"])
            self._load_random_state(payload["state"].get("rng", {}))

    def load_components(self, payload: Mapping[str, Any], excluded: set[str]) -> None:
        """Restore what `component_states` returned; a stack of your own overrides both. Called on all ranks.

        Args:
            payload: What is left of the payload of a checkpoint.
            excluded: The dotted paths that were left out of it.
        """
        self.run_state.load_components(payload, excluded)

    def load_dataloaders(self, states: Mapping[str, Any]) -> None:
        """Restore the position in the loaders of the splits to train on. Called on all ranks.

        Args:
            states: State by split; `None` for one that begins anew.

        Raises:
            CheckpointMismatch: If a split is missing, or a loader's own state was saved by another number of ranks.
        """
        for split in self.train_splits:
            if split not in states:
                raise CheckpointMismatch(
                    f"Expected the loader state of split {split!r}. Received: splits={sorted(states)}. Add "
                    f"'dataloaders' to checkpoint.exclude_from_loading to start it from its beginning."
                )
            own = self.own_loader_state(split, states[split]) if states[split] is not None else None
            if own is not None:
                self.source(split).load_state_dict(own)

    def own_loader_state(self, split: str, state: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return this rank's share of the state of a loader; `None` where the loader is to start from its beginning.

        Args:
            split: The split.
            state: What a checkpoint holds of its loader.
        """
        domain = self.data_domain
        return loader_states.share_of(
            state, split, rank=domain.rank, size=domain.size, inexact=self.allows_inexact_resume
        )

    @property
    def allows_inexact_resume(self) -> bool:
        """Whether a run may go on where it cannot do so exactly: `parallel.allow_degree_change` of a stack that keeps its streams."""
        return self.keeps_streams and bool(self.config.parallel.allow_degree_change)

    def _load_random_state(self, ranks: Mapping[str, Any]) -> None:
        index, number = self.stream_place[0], self.placement.rng_stream[1]
        # Each replica group saves its own ranks, and begins with new streams where another one has saved.
        changed = bool(ranks) and len(ranks) != number and self.is_main_process
        if changed and have_drawn(ranks, seed=self.seed, device=self.device):
            logger.info(
                "The checkpoint holds random streams of %d ranks and this run has %d: old ranks keep theirs, new ones are "
                "seeded from (seed, step, rank).",
                len(ranks),
                number,
            )
        resume_stream(ranks, index, seed=self.seed, step=self.state.train.global_step, device=self.device)
