"""What replica groups do together: one update, the healing of one that has come back, and one set of checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from danling.checkpoints import (
    CheckpointDamaged,
    CheckpointNotFound,
)
from danling.config import RunnerConfig
from danling.data import (
    derive_seed,
    preserved_random_state,
    seed_streams,
)
from danling.torchft import ReplicaGroups
from danling.torchft.healing import laid_out_like, packed, sharded_optimizer_state
from danling.torchft.update import ReplicatedUpdate
from danling.training import loader_states
from danling.training.gradients import normalization_statistics
from danling.training.model_states import load_criterion
from danling.training.rollback import remember_forwards
from danling.training.run_state import StatePart

from .torch_groups import TorchGroups

logger = logging.getLogger("danling")

_ATTEMPTS_TO_READ = 3


class TorchReplicas(TorchGroups):
    """Updates, healing and checkpoints of a replica group among others."""

    def __init__(self, config: RunnerConfig | Mapping[str, Any] | None = None) -> None:
        super().__init__(config)
        self.replicated: ReplicatedUpdate | None = None
        self.saver.before.append(self._save_own_loaders)
        self.saver.writes = self.writes_checkpoints
        # As a save does, so that all groups go on alike.
        self.saver.instead.append(lambda: self.equalize_buffers())

    # Joining

    def init_fault_tolerance(self) -> None:
        """Join the replica groups when `config.ft.enabled`. Call on all ranks of the group.

        Raises:
            ValueError: If no lighthouse is named.
            ImportError: If torchft is not installed.
            QuorumError: If the lighthouse cannot be reached.
        """
        if not self.config.ft.enabled:
            return
        self.fault_tolerance = ReplicaGroups(
            self.replica_settings(),
            group=self.world,
            state_dict=self.healing_state,
            load_state_dict=self.heal,
            asked_to_stop=self._session.asked_to_stop,
        )
        self._closers.callback(self.fault_tolerance.leave)
        self.replicated = ReplicatedUpdate(
            self.fault_tolerance,
            remember=self._remember_update,
            statistics=lambda: normalization_statistics(self.unwrapped_model),
            begin_alike=self._begin_alike,
            catch_up=self._catch_up,
        )

    # One update

    def open_update(self) -> bool:
        """Agree with the other groups on the next update, once, before its forward. Call on all ranks of the group.

        Returns:
            Whether the state of this runner was replaced by that of another group: batches read before do not count.

        Raises:
            QuorumError: If there is no agreement.
        """
        return self.replicated is not None and self.replicated.open()

    def _begin_alike(self, healed: bool) -> bool:
        # At step 0 each rank takes its weights from a group of its own choice, and ranks of one group from different ones.
        if not any(self.world.gather_objects(healed)):
            return False
        if isinstance(self.model, DistributedDataParallel):
            averaged = self.ema.weights.values() if self.ema is not None else ()
            with torch.no_grad():
                for tensor in (*self.model.module.parameters(), *self.model.module.buffers(), *averaged):
                    self.world.broadcast(tensor)
        return True

    def _catch_up(self) -> bool:
        """Go on from a checkpoint that the others have written since this process began, when it joins and finds nobody."""
        assert self.fault_tolerance is not None
        if not self.config.auto_resume or self.fault_tolerance.num_participants > 1:
            return False
        source = self.checkpoint_manager.find_latest()
        if source is None or self.checkpoint_manager.step_of(source) <= self.state.train.global_step:
            return False
        self.load_checkpoint(source)
        return True

    def _buffers(self) -> dict[str, Tensor]:
        """Return what a forward may change: the buffers of model and criterion."""
        return {
            **dict(self.unwrapped_model.named_buffers()),
            **{f"criterion.{i}": buffer for i, buffer in enumerate(self._criterion_tensors("buffers"))},
        }

    def _remember_forwards(self) -> Callable[[], None]:
        return remember_forwards(self.device, counter=self.state.train, meters=self.meters, buffers=self._buffers)

    def _remember_update(self) -> Callable[[], None]:
        put_back = self._remember_forwards()

        def take_back() -> None:
            self.optimizer.zero_grad()
            self.window.reset()
            put_back()

        return take_back

    def meter_totals(self) -> dict[str, tuple[float, float]]:
        """Return sums and weights of `meters` over all ranks of the groups that take part. Call on all ranks of the group."""
        totals = super().meter_totals()
        if self.fault_tolerance is not None and self.fault_tolerance.num_participants:
            # One answer for the group: its ranks may meet different errors.
            totals = self.world.broadcast_object(self.fault_tolerance.sum_totals(totals))
        return totals

    # Healing

    def healing_state(self) -> dict[str, Any]:
        """Return what another group heals from: the state of this rank, shards as plain tensors, without communication.

        Called on each rank by itself.
        """
        progress = {**self.state.state_dict(), **self.run_state.progress()}
        payload: dict[str, Any] = {
            **self.run_state.components(),
            "state": {name: part for name, part in progress.items() if name != "rng"},
            "dataloaders": {split: self.sources[split].state_dict() for split in self.train_splits},
        }
        return packed(payload, self.unwrapped_model.buffers())

    def heal(self, state: Mapping[str, Any]) -> None:
        """Take the state of the same rank of another group.

        Called on every rank of the group that heals.

        Args:
            state: What `healing_state` returned there.
        """
        elastic, reference = replace(self.state.elastic), self.window.agreed_reference
        self.load_model(laid_out_like(state["model"], self.model_state_dict()))
        if "criterion" in state:
            load_criterion(self.criterion, state["criterion"])
        if self.ema is not None:
            self.load_ema({**state["ema"], "weights": laid_out_like(state["ema"]["weights"], self.ema.weights)})
        if self.optimizer is not None:
            self.load_optimizer(sharded_optimizer_state(state["optimizer"], dict(self.named_parameters())))
        if self.scheduler is not None:
            self.load_scheduler(state["scheduler"])
        for split, position in state["dataloaders"].items():
            if self.replica_loaders is None or not self.sources[split].is_rank_local:
                self.sources[split].load_state_dict(position)
        self.state.load_state_dict(state["state"])
        self.run_state.load_progress(state["state"])
        # What the other group has counted is added by the other group.
        self.meters.reset()
        # Those are of the group: ranks of one group may heal from different ones.
        self.state.elastic, self.window.agreed_reference = elastic, reference
        seed = derive_seed(self.seed, "healed", self.state.train.global_step, self.stream_place[0])
        seed_streams(seed)
        if self.is_main_process:
            logger.info("Healed from another replica group at step %d.", self.state.train.global_step)

    def progress_parts(self) -> list[StatePart]:
        """Return what lies in the entry `state` of a checkpoint; here also where the replica groups stand."""
        return [
            *super().progress_parts(),
            StatePart(
                "replicas",
                lambda: self._groups.state_dict(),
                lambda state, _: self._groups.load_state_dict(state),
                exists=lambda: self.fault_tolerance is not None,
                default=self._fresh_groups,
            ),
        ]

    @property
    def _groups(self) -> ReplicaGroups:
        assert self.fault_tolerance is not None
        return self.fault_tolerance

    def _fresh_groups(self) -> dict[str, int]:
        # A run that begins to train in groups at a checkpoint counts from there: at 0 they would all start from one group.
        step = self.state.train.global_step + self.state.train.skipped_updates
        return {"step": step, "batches_committed": step}

    # Checkpoints

    def restore(self) -> None:
        """Load what the configuration names; with `auto_resume`, from a directory that another group may be writing.

        Called on all ranks.
        """
        attempts = _ATTEMPTS_TO_READ if self.fault_tolerance is not None and self.config.auto_resume else 1
        for _ in range(attempts - 1):
            with suppress(CheckpointDamaged, CheckpointNotFound):
                # What was found may have been replaced before it was read; then there is something newer.
                return super().restore()
        super().restore()

    def load_checkpoint(self, checkpoint: str | Path | Mapping[str, Any]) -> None:
        """Restore the full state of a checkpoint; loader states that this group has saved for itself win. Call on all ranks.

        A position that belongs to another step than the weights is taken only for loaders that keep a state of their own on each
        rank: groups whose common position differed would end their passes at different updates.

        Args:
            checkpoint: A name in the run's own checkpoint directory (`"latest"`, `"best"`, `"ckpt-..."`), a path, or a payload.

        Raises:
            CheckpointNotFound: If there is none.
            CheckpointDamaged: If a file is not what was written.
            CheckpointMismatch: If a component is missing, or the stored configuration means another run.
        """
        super().load_checkpoint(checkpoint)
        excluded = self.excluded_from_loading
        if self.replica_loaders is None or isinstance(checkpoint, Mapping):
            return
        found = self.replica_loaders.load(self.state.train.global_step)
        if found is None:
            return
        states, step = found
        with preserved_random_state(self.device):
            for split, source in self.sources.items():
                if excluded.leaves_out(f"dataloaders.{split}"):
                    continue
                if split in states and (source.is_rank_local or step == self.state.train.global_step):
                    own = self.own_loader_state(split, states[split])
                    if own is not None:
                        source.load_state_dict(own)

    def _save_own_loaders(self) -> None:
        """Save this group's loader states, which belong to the state that is saved next. Called on all ranks of the group."""
        if self.replica_loaders is not None:
            train = self.state.train
            self.replica_loaders.save(self._loader_states(), epoch=train.epoch, global_step=train.global_step)

    def writes_checkpoints(self) -> bool:
        """Whether full checkpoints are this group's to write: one of those that take part does, until it dies. Call on all ranks."""
        writer, manager = self._writer, self.checkpoint_manager
        if writer is None:
            return True
        held, mine = manager.on_main(lambda: (writer.held, writer.acquire()))
        if mine and not held:
            # Saves of the group that wrote before come first: the state of this one follows from them.
            source = manager.find_latest()
            if source is not None:
                manager.begin(source)
        return bool(mine)

    def _loader_states(self) -> dict[str, Any]:
        sources = {split: self.sources[split] for split in self.train_splits if split in self.sources}
        ranks = self.world.gather_objects((self.data_domain.rank, loader_states.own_states(sources, read_only=False)))
        return {split: loader_states.state_of(split, source, ranks) for split, source in sources.items()}
