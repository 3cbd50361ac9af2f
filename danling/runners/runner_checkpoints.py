"""The checkpoint of every runner: its configuration, its counters, its random streams, the position in its data, and what a stack adds."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from danling.checkpoints import CheckpointMismatch, CheckpointSettings, FileCheckpointManager, exclude
from danling.checkpoints.absent import NoCheckpoints
from danling.checkpoints.reading import FORMAT_VERSION
from danling.config.updates import is_update_key
from danling.data import (
    DataLoader,
    capture_random_state,
    derive_seed,
    preserved_random_state,
    restore_random_state,
    seed_streams,
)
from danling.reporting import format_number

from .runner_data import RunnerData

logger = logging.getLogger("danling")


class RunnerCheckpoints(RunnerData):
    """Saves and restores a run. All of it is called on all ranks."""

    _saved_at: tuple[int, int] | None = None
    """Updates and epochs that the last save, or the checkpoint resumed from, stands at."""

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
        if self.config.checkpoint.backend == "dcp":
            from danling.checkpoints import TorchDistributedCheckpointManager

            return TorchDistributedCheckpointManager
        return FileCheckpointManager

    # Saving

    def state_dict(self) -> dict[str, Any]:
        """Return the full state: tensors, not copied, and plain values. Call on all ranks.

        The random streams and the states of loaders that differ from rank to rank are gathered, so every rank returns all of
        them.
        """
        splits = [split for split in self.train_splits if split in self.sources]
        mine = {
            "stream": self.stream_place[0],
            "rng": capture_random_state(self.device),
            "replica": self.data_domain.rank,
            "loaders": {
                s: self.sources[s].state_dict()
                for s in splits
                if self.sources[s].is_rank_local and self.sources[s].reads
            },
        }
        ranks = self.world.gather_objects(mine)
        # From the last to the first: of ranks that draw the same numbers, and of those that read the same data, the first one's.
        self.state.rng.ranks = {str(entry["stream"]): entry["rng"] for entry in reversed(ranks)}
        payload: dict[str, Any] = {
            "format_version": FORMAT_VERSION,
            "runner": self.config.public(),
            "state": self.run_state(),
            **self.component_states(),
            "dataloaders": {split: self._loader_state(split, ranks) for split in splits},
        }
        return payload

    def checkpoint_state(self) -> dict[str, Any]:
        """Return what the checkpoint manager is handed to save: the full state. Call on all ranks."""
        state = self.state_dict()
        self._check_payload(state, "`state_dict` to return the full state")
        return state

    def component_states(self) -> dict[str, Any]:
        """Return the states of components by name, such as `model`; a stack of your own overrides it. Call on all ranks."""
        return {}

    def run_state(self) -> dict[str, Any]:
        """Return counters, attempts, random streams and figures. No communication: may be called on one rank."""
        state = self.state.state_dict()
        state["results"] = {str(index): result for index, result in self.results.items()}
        return state

    def _loader_state(self, split: str, ranks: list[dict[str, Any]]) -> dict[str, Any]:
        if not self.sources[split].is_rank_local:
            return self.sources[split].state_dict()
        states = {
            str(entry["replica"]): entry["loaders"][split] for entry in reversed(ranks) if split in entry["loaders"]
        }
        return {"ranks": states}

    def save_checkpoint(self, *, history: bool = False, save_best: bool = True) -> None:
        """Save the full state as `latest`, and under the other names it deserves. Call on all ranks.

        Args:
            history: Also keep it under its history name.
            save_best: Also make it `best` when the score of this very state is the best one.
        """
        if self.config.checkpoint.load_only:
            return
        train = self.state.train
        best = bool(save_best and self.is_best) and next(reversed(self.own_scores), None) == self.index
        self.checkpoint_manager.save_checkpoint(
            self.checkpoint_state(), epoch=train.epoch, global_step=train.global_step, history=history, best=best
        )
        self._saved_at = (train.global_step, train.epoch)

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
        """Restore the full state of a checkpoint. Call on all ranks.

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
            self._check_given(payload)
        self._check_payload(payload, "`read_checkpoint` to return the payload of the checkpoint")
        self._check_config(payload)
        self.load_state_dict(payload)
        if not isinstance(checkpoint, Mapping):
            # A payload lies nowhere, so it is not saved either.
            self.checkpoint_manager.begin(checkpoint)
            self._saved_at = (self.state.train.global_step, self.state.train.epoch)
        where = f"step {self.state.train.global_step}, epoch {self.state.train.epoch}"
        logger.info("Resumed from %s at %s.", "a payload" if given else checkpoint, where)
        if not isinstance(checkpoint, Mapping):
            self._note_best(checkpoint)

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

    def _check_payload(self, payload: Any, what: str) -> None:
        if not isinstance(payload, Mapping):
            raise ValueError(f"Expected {what}, a mapping. Received: {payload!r}. Return that of super().")

    def _check_given(self, payload: Mapping[str, Any]) -> None:
        if "state" not in payload and "state" not in self._entries():
            raise CheckpointMismatch(
                f"Expected the payload of a checkpoint, with the entries 'runner' and 'state'. Received: {sorted(map(str, payload))[:8]}. "
                "Load weights alone with `load_model`, or with `load_pretrained` from a file."
            )

    def _entries(self) -> list[str]:
        """Return what `checkpoint.exclude_from_loading` leaves out of what is loaded."""
        return [entry for entry in listed_entries(self.config.checkpoint.exclude_from_loading) if not is_setting(entry)]

    def _check_config(self, payload: Mapping[str, Any]) -> None:
        stored = payload.get("runner", {})
        if self.seed_was_drawn and stored.get("seed") is not None:
            self.config.seed = self.seed = int(stored["seed"])
        found = self.config_differences(payload) or self._differences_of_passes(payload.get("dataloaders", {}))
        differences = [line for line in found if not self._is_changed_on_purpose(line.partition(":")[0])]
        if differences:
            listing = "\n  ".join(differences)
            raise CheckpointMismatch(
                f"Expected the configuration that the checkpoint was made with. Received other values for:\n  {listing}\n"
                "Restore them, add 'runner.' and the key to checkpoint.exclude_from_loading where you mean to change it, or start a "
                "new run from the weights with `pretrained`."
            )

    def _differences_of_passes(self, stored: Mapping[str, Any]) -> list[str]:
        """Return where another division leaves out other samples at the end of a pass, though updates have one size."""
        lines = []
        for split in self.train_splits:
            state, loader = stored.get(split) or {}, self.dataloaders.get(split)
            before = state.get("end")
            if before is None or not isinstance(loader, DataLoader) or state.get("length") != loader.positions.length:
                continue
            if before != loader.positions.end and not self._is_changed_on_purpose("dataloader.drop_last"):
                lines.append(
                    f"dataloader.batch_size: stored passes of {before} out of {loader.positions.length} samples over split {split!r}, "
                    f"now of {loader.positions.end} (drop_last leaves out what does not fill batch_size x ranks: keep that product too)"
                )
        return lines

    def _is_changed_on_purpose(self, key: str) -> bool:
        """Whether the configuration names a key as one that may differ from that of the checkpoint."""
        excluded = listed_entries(self.config.checkpoint.exclude_from_loading)
        # The samples of an update follow from several keys: to name one of them is enough.
        if is_update_key(key) and any(is_update_key(entry.removeprefix("runner.")) for entry in excluded):
            return True
        return any(f"runner.{key}.".startswith(f"{entry}.") for entry in excluded)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a payload: components, loaders, counters, and the random streams last. Called on all ranks.

        Args:
            state: What `state_dict` returned, or the payload of a checkpoint.

        Raises:
            CheckpointMismatch: If a component that this runner has is missing and not excluded from loading.
        """
        payload, excluded = exclude(state, self._entries())
        self._check_complete(payload, excluded)
        self.load_components(payload, excluded)
        if "dataloaders" in payload:
            fresh = {split: None for split in self.sources if f"dataloaders.{split}" in excluded}
            self.load_dataloaders({**payload["dataloaders"], **fresh})
        if "state" in payload:
            self.load_run_state(payload["state"])
            self._load_random_state(payload["state"].get("rng", {}))

    def load_components(self, payload: Mapping[str, Any], excluded: set[str]) -> None:
        """Restore what `component_states` returned; a stack of your own overrides both. Called on all ranks.

        Args:
            payload: What is left of the payload of a checkpoint.
            excluded: The dotted paths that were left out of it.
        """

    def needed_components(self) -> list[str]:
        """Return the names of the components that a full checkpoint of this runner has. Called on all ranks."""
        return list(self.component_states())

    def _check_complete(self, payload: Mapping[str, Any], excluded: set[str]) -> None:
        needed = [*self.needed_components(), "state", *(["dataloaders"] if self.sources else [])]
        missing = [name for name in needed if name not in payload and name not in excluded]
        if missing:
            raise CheckpointMismatch(
                f"Expected a full checkpoint. Received one without: {', '.join(missing)}. Name them in "
                "checkpoint.exclude_from_loading to start them afresh, or load the weights only with `pretrained`."
            )

    def load_run_state(self, state: Mapping[str, Any]) -> None:
        """Restore counters and figures. Called on all ranks.

        Args:
            state: What `run_state` returned.
        """
        self.state.load_state_dict(state)
        self.hold_at_most(self.state.elastic.micro_batch_size)
        self.results = {int(index): result for index, result in state.get("results", {}).items()}

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
            own = self._own_loader_state(split, states[split]) if states[split] is not None else None
            if own is not None:
                self.source(split).load_state_dict(own)

    def _own_loader_state(self, split: str, state: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return this rank's share of the state of a loader; `None` where the loader is to start from its beginning."""
        if "ranks" not in state:
            return state
        ranks = state["ranks"]
        if len(ranks) != self.data_domain.size:
            received = f"the loader of split {split!r} keeps a state of its own on each of {len(ranks)} data replicas"
            if self.allows_inexact_resume:
                logger.warning("%s, and there are %d now: it starts anew.", received, self.data_domain.size)
                return None
            raise CheckpointMismatch(
                f"Expected {len(ranks)} data replicas: {received}, which cannot be divided anew. Received: {self.data_domain.size}. Let "
                "the library build the loader from a dataset, or exclude 'dataloaders' from loading."
            )
        own: Mapping[str, Any] = ranks[str(self.data_domain.rank)]
        return own

    @property
    def allows_inexact_resume(self) -> bool:
        """Whether a run may go on where it cannot do so exactly; the parallel stack asks `parallel.allow_degree_change`."""
        return False

    def _load_random_state(self, ranks: Mapping[str, Any]) -> None:
        if not ranks:
            return
        index, number = self.stream_place[0], self.placement.rng_stream[1]
        # Each replica group saves its own ranks, and begins with new streams where another one has saved.
        if len(ranks) != number and self.is_main_process and self._has_drawn(ranks):
            logger.info(
                "The checkpoint holds random streams of %d ranks and this run has %d: old ranks keep theirs, new ones are "
                "seeded from (seed, step, rank).",
                len(ranks),
                number,
            )
        own = ranks.get(str(index))
        if own is None and self._has_drawn(ranks):
            seed_streams(derive_seed(self.seed, "resumed", self.state.train.global_step, index))
        elif own is None:
            seed_streams(derive_seed(self.seed, "forward", index))
        else:
            restore_random_state(own, self.device)

    def _has_drawn(self, ranks: Mapping[str, Any]) -> bool:
        """Whether the forward of a run has drawn random numbers, seen in its streams; one that has none goes on exactly with others."""
        for index, state in ranks.items():
            with preserved_random_state(self.device, seed=derive_seed(self.seed, "forward", int(index))):
                if not _is_equal(state, capture_random_state(self.device)):
                    return True
        return False


def _is_equal(first: Any, second: Any) -> bool:
    """Whether two nested states of random streams are equal."""
    if isinstance(first, Mapping):
        return first.keys() == second.keys() and all(_is_equal(value, second[key]) for key, value in first.items())
    return torch.equal(first, second) if isinstance(first, torch.Tensor) else bool(first == second)


def listed_entries(entries: Any) -> list[str]:
    return [entries] if isinstance(entries, str) else list(entries or [])


def is_setting(entry: str) -> bool:
    """Whether an entry means the configuration, of which nothing is loaded: it is compared."""
    return entry.partition(".")[0] == "runner"
