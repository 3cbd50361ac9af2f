"""What a torch runner restores, and in which order: a run, or the weights of another one."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from danling.checkpoints import CheckpointMismatch, exclude, read_model
from danling.optim.named_state import load_named_state_dict
from danling.optim.options import adopt_options, options_of
from danling.utils.names import canonical_name

from .runner_checkpoints import listed_entries
from .torch_state import TorchState

logger = logging.getLogger("danling")


class TorchLoading(TorchState):
    """What a torch runner reads from checkpoints. All of it is called on all ranks."""

    def load_components(self, payload: Mapping[str, Any], excluded: set[str]) -> None:
        """Restore model, criterion, averages, optimizer and scheduler, in this order. Called on all ranks.

        Args:
            payload: What is left of the payload of a checkpoint.
            excluded: The dotted paths that were left out of it.
        """
        if "model" in payload:
            self.load_model(payload["model"], partial="model" in {name.partition(".")[0] for name in excluded})
        if self.criterion_has_state and "criterion" in payload:
            self.load_criterion(payload["criterion"])
        if self.ema is not None and "ema" in payload:
            averages = {"weights": {}, "num_updates": self.ema.num_updates, **payload["ema"]}
            self.load_ema(averages, partial=any(name.startswith("ema.weights") for name in excluded))
        options = options_of(self.optimizer) if self.optimizer is not None else []
        if self.optimizer is not None and "optimizer" in payload:
            optimizer = payload["optimizer"]
            # Without its state, it begins anew with the options that were stored.
            if "optimizer.state" in excluded:
                optimizer = {"state": {}, **optimizer}
            if "optimizer.param_groups" in excluded:
                optimizer = {**optimizer, "param_groups": self.optimizer_state_dict()["param_groups"]}
            self.load_optimizer(optimizer)
        if self.scheduler is not None and "scheduler" in payload:
            kept = self.scheduler.state_dict() if any(name.startswith("scheduler.") for name in excluded) else {}
            self.load_scheduler({**kept, **payload["scheduler"]})
        if self.optimizer is not None and "optimizer" in payload:
            adopt_options(self.optimizer, self.scheduler, options, self._is_option_changed_on_purpose)

    def _is_option_changed_on_purpose(self, name: str) -> bool:
        return any(self._is_changed_on_purpose(f"optim.{key}") for key in (name, "param_groups"))

    def needed_components(self) -> list[str]:
        """Return the names of the components that a full checkpoint of this runner has. Called on all ranks."""
        needed = {
            "model": True,
            "criterion": self.criterion_has_state,
            "ema": self.ema is not None,
            "optimizer": self.optimizer is not None,
            "scheduler": self.scheduler is not None,
        }
        return [name for name, wanted in needed.items() if wanted]

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

    def load_run_state(self, state: Mapping[str, Any]) -> None:
        """Restore counters, figures and scores. Called on all ranks.

        Args:
            state: What `run_state` returned.
        """
        super().load_run_state(state)
        self.window.agreed_reference = self.state.train.weight_reference
        self.open_result = dict(state.get("open_result", {}))
        self._bare = state.get("bare")
        # Sums over all ranks were saved: one of those that add up takes them over.
        self.meters.load_state_dict(state.get("meters", {}) if self.figures_domain.rank == 0 else {})
        self.losses.load_state_dict(state.get("losses", {}))
        if self.scoreboard is not None and state.get("scores"):
            self.scoreboard.load_state_dict(state["scores"])
        if self.precision.scaler is not None and state.get("scaler"):
            self.precision.scaler.load_state_dict(dict(state["scaler"]))

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
        payload, excluded = exclude({"model": weights}, model_entries(self.config.checkpoint.exclude_from_loading))
        self.load_model(payload["model"], partial=bool(excluded))
        if self.ema is not None:
            self.ema.reset()
        logger.info("Loaded the weights of %s.", checkpoint)


def model_entries(entries: Any) -> list[str]:
    """Return the entries of `exclude_from_loading` that are weights."""
    # Only weights are read for finetuning, so other exclusions would match nothing there.
    return [entry for entry in listed_entries(entries) if entry.startswith("model.")]
