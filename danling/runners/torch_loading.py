"""What a torch runner restores, and in which order: a run, or the weights of another one."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from danling.data import capture_random_state, derive_seed, preserved_random_state, restore_random_state, seed_streams
from danling.optim.named_state import load_named_state_dict
from danling.optim.options import adopt_options, options_of
from danling.utils.names import canonical_name
from danling.workspace import format_number

from .checkpoints import CheckpointMismatch, exclude, read_model
from .config_updates import is_update_key
from .torch_state import TorchState

logger = logging.getLogger("danling")


class TorchLoading(TorchState):
    """What a torch runner reads from checkpoints. All of it is called on all ranks."""

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

    def load_checkpoint(self, checkpoint: str | Path) -> None:
        """Restore the full state of a checkpoint. Call on all ranks.

        Args:
            checkpoint: A name in the run's own checkpoint directory (`"latest"`, `"best"`, `"ckpt-..."`), or a path.

        Raises:
            CheckpointNotFound: If there is none.
            CheckpointDamaged: If a file is not what was written.
            CheckpointMismatch: If a component is missing, or the stored configuration means another run.
        """
        payload = self.read_checkpoint(checkpoint)
        self._check_config(payload)
        self.load_state_dict(payload)
        self.checkpoint_manager.begin(checkpoint)
        self._saved_at = (self.state.train.global_step, self.state.train.epoch)
        where = f"step {self.state.train.global_step}, epoch {self.state.train.epoch}"
        logger.info("Resumed from %s at %s.", checkpoint, where)
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

    def _check_config(self, payload: Mapping[str, Any]) -> None:
        stored = payload.get("runner", {})
        if self.seed_was_drawn and stored.get("seed") is not None:
            self.config.seed = self.seed = int(stored["seed"])
        found = self.config_differences(payload)
        differences = [line for line in found if not self._is_changed_on_purpose(line.partition(":")[0])]
        if differences:
            listing = "\n  ".join(differences)
            raise CheckpointMismatch(
                f"Expected the configuration that the checkpoint was made with. Received other values for:\n  {listing}\n"
                "Restore them, add 'runner.' and the key to checkpoint.exclude_from_loading where you mean to change it, or start a "
                "new run from the weights with `pretrained`."
            )

    def _is_changed_on_purpose(self, key: str) -> bool:
        """Whether the configuration names a key as one that may differ from that of the checkpoint."""
        excluded = _listed(self.config.checkpoint.exclude_from_loading)
        # The samples of an update follow from several keys: to name one of them is enough.
        if is_update_key(key) and any(is_update_key(entry.removeprefix("runner.")) for entry in excluded):
            return True
        return any(f"runner.{key}.".startswith(f"{entry}.") for entry in excluded)

    def _is_option_changed_on_purpose(self, name: str) -> bool:
        return any(self._is_changed_on_purpose(f"optim.{key}") for key in (name, "param_groups"))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a payload: model, EMA, optimizer, scheduler, loaders, counters, and the random streams last. Called on all ranks.

        Args:
            state: What `state_dict` returned, or the payload of a checkpoint.

        Raises:
            CheckpointMismatch: If a component that this runner has is missing and not excluded from loading.
        """
        entries = [entry for entry in _listed(self.config.checkpoint.exclude_from_loading) if not _is_setting(entry)]
        payload, excluded = exclude(state, entries)
        self._check_complete(payload, excluded)
        if "model" in payload:
            self.load_model(payload["model"], partial="model" in {name.partition(".")[0] for name in excluded})
        if self.criterion_has_state and "criterion" in payload:
            self.load_criterion(payload["criterion"])
        if self.ema is not None and "ema" in payload:
            self.load_ema(payload["ema"], partial=any(name.startswith("ema.weights.") for name in excluded))
        options = options_of(self.optimizer) if self.optimizer is not None else []
        if self.optimizer is not None and "optimizer" in payload:
            optimizer = payload["optimizer"]
            # Without its state, it begins anew with the options that were stored.
            self.load_optimizer(optimizer if "optimizer.state" not in excluded else {"state": {}, **optimizer})
        if self.scheduler is not None and "scheduler" in payload:
            self.load_scheduler(payload["scheduler"])
        if self.optimizer is not None and "optimizer" in payload:
            adopt_options(self.optimizer, self.scheduler, options, self._is_option_changed_on_purpose)
        if "dataloaders" in payload:
            fresh = {split: None for split in self.sources if f"dataloaders.{split}" in excluded}
            self.load_dataloaders({**payload["dataloaders"], **fresh})
        if "state" in payload:
            self._load_run_state(payload["state"])
            self._load_random_state(payload["state"].get("rng", {}))

    def _check_complete(self, payload: Mapping[str, Any], excluded: set[str]) -> None:
        needed = {
            "model": True,
            "state": True,
            "dataloaders": bool(self.sources),
            "criterion": self.criterion_has_state,
        }
        needed.update(
            ema=self.ema is not None, optimizer=self.optimizer is not None, scheduler=self.scheduler is not None
        )
        missing = [name for name, wanted in needed.items() if wanted and name not in payload and name not in excluded]
        if missing:
            raise CheckpointMismatch(
                f"Expected a full checkpoint. Received one without: {', '.join(missing)}. Name them in "
                "checkpoint.exclude_from_loading to start them afresh, or load the weights only with `pretrained`."
            )

    def load_model(self, state: Mapping[str, Any], *, partial: bool = False) -> None:
        """Load model weights by canonical name into the bare model. Called on all ranks.

        Args:
            state: Tensors by name.
            partial: Allow names that were excluded from loading to be missing.

        Raises:
            CheckpointMismatch: If names or shapes are not those of the model.
        """
        model = self.unwrapped_model
        names = {canonical_name(name): name for name in model.state_dict()}
        missing = sorted(names.keys() - state.keys())
        unexpected = sorted(state.keys() - names.keys())
        if unexpected or (missing and not partial):
            raise CheckpointMismatch(
                f"Expected the weights of this model. Received: missing={missing[:5]}, unexpected={unexpected[:5]} "
                f"({len(missing)} and {len(unexpected)} in all). Load into the model they were saved from."
            )
        try:
            model.load_state_dict({names[name]: value for name, value in state.items()}, strict=not partial)
        except RuntimeError as error:
            raise CheckpointMismatch(f"Expected weights of this model's shapes. Received: {error}") from error

    def load_criterion(self, state: Mapping[str, Any]) -> None:
        """Restore the parameters and buffers of the criterion. Called on all ranks.

        Args:
            state: Its tensors by name.

        Raises:
            CheckpointMismatch: If names or shapes are not those of the criterion.
        """
        assert isinstance(self.criterion, nn.Module)
        try:
            self.criterion.load_state_dict(dict(state))
        except RuntimeError as error:
            raise CheckpointMismatch(f"Expected the state of this criterion. Received: {error}") from error

    def load_ema(self, state: Mapping[str, Any], *, partial: bool = False) -> None:
        """Restore the averaged weights. Called on all ranks.

        Args:
            state: What the averages' `state_dict` returned: `weights` by canonical name, and `num_updates`.
            partial: Begin the average of weights that are missing at the model's, instead of refusing.

        Raises:
            CheckpointMismatch: If names are not those of the model.
        """
        weights = state.get("weights")
        if partial and weights is not None:
            present = {canonical_name(name): value for name, value in self.unwrapped_model.state_dict().items()}
            begun = {name: value for name, value in present.items() if name in self.ema.weights}
            state = {**state, "weights": {**begun, **weights}}
        try:
            self.ema.load_state_dict(state)
        except KeyError as error:
            raise CheckpointMismatch(str(error.args[0])) from error

    def load_optimizer(self, state: Mapping[str, Any]) -> None:
        """Restore the optimizer's state by parameter name. Called on all ranks.

        Args:
            state: `state` by parameter name, and `param_groups` with parameter names.
        """
        load_named_state_dict(self.optimizer, state, self.named_parameters())

    def load_scheduler(self, state: Mapping[str, Any]) -> None:
        """Restore the scheduler. Called on all ranks.

        Args:
            state: What the schedule's `state_dict` returned.
        """
        self.scheduler.load_state_dict(dict(state))

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

    def _load_run_state(self, state: Mapping[str, Any]) -> None:
        self.state.load_state_dict(state)
        self.hold_at_most(self.state.elastic.micro_batch_size)
        self.window.agreed_reference = self.state.train.weight_reference
        self.results = {int(index): result for index, result in state.get("results", {}).items()}
        self.open_result = dict(state.get("open_result", {}))
        self._bare = state.get("bare")
        # Sums over all ranks were saved: one of those that add up takes them over.
        self.meters.load_state_dict(state.get("meters", {}) if self.figures_domain.rank == 0 else {})
        self.losses.load_state_dict(state.get("losses", {}))
        if self.scoreboard is not None and state.get("scores"):
            self.scoreboard.load_state_dict(state["scores"])
        if self.precision.scaler is not None and state.get("scaler"):
            self.precision.scaler.load_state_dict(dict(state["scaler"]))

    def _load_random_state(self, ranks: Mapping[str, Any]) -> None:
        if not ranks:
            return
        index, number = self.stream_place[0], self.own_stream_place[1]
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

    def load_pretrained(self, checkpoint: str | Path) -> None:
        """Load only the model; everything else starts afresh. Call on all ranks.

        Args:
            checkpoint: A checkpoint of this library, or a file with a plain `state_dict`.

        Raises:
            CheckpointNotFound: If there is none.
            CheckpointDamaged: If a file is not what was written.
            CheckpointMismatch: If names or shapes are not those of the model; `checkpoint.exclude_from_loading` leaves some out.
        """
        weights = read_model(self.checkpoint_manager, checkpoint)
        payload, excluded = exclude({"model": weights}, _model_entries(self.config.checkpoint.exclude_from_loading))
        self.load_model(payload["model"], partial=bool(excluded))
        if self.ema is not None:
            self.ema.reset()
        logger.info("Loaded the weights of %s.", checkpoint)


def _is_equal(first: Any, second: Any) -> bool:
    """Whether two nested states of random streams are equal."""
    if isinstance(first, Mapping):
        return first.keys() == second.keys() and all(_is_equal(value, second[key]) for key, value in first.items())
    return torch.equal(first, second) if isinstance(first, torch.Tensor) else bool(first == second)


def _listed(entries: Any) -> list[str]:
    return [entries] if isinstance(entries, str) else list(entries or [])


def _is_setting(entry: str) -> bool:
    """Whether an entry means the configuration, of which nothing is loaded: it is compared."""
    return entry.partition(".")[0] == "runner"


def _model_entries(entries: Any) -> list[str]:
    # Only weights are read for finetuning, so other exclusions would match nothing there.
    return [entry for entry in _listed(entries) if entry.startswith("model.")]
