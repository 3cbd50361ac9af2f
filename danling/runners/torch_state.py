"""What a torch runner saves and restores, and in which order."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from danling.checkpoints.reading import FORMAT_VERSION
from danling.config import RunnerConfig
from danling.metrics import Meters
from danling.optim.named_state import named_state_dict
from danling.utils.names import canonical_name
from danling.utils.tensors import floating_dtype

from .torch_components import TorchComponents

logger = logging.getLogger("danling")


class TorchState(TorchComponents):
    """Checkpoints of a torch runner. Save, load and `state_dict` are called on all ranks."""

    def __init__(self, config: RunnerConfig | Mapping[str, Any] | None = None) -> None:
        super().__init__(config)
        self._scored_at: int | None = None
        """Updates that the weights had seen at the last evaluation: after a further one they are no longer those of its score."""
        self.losses = Meters()
        """Loss of the open epoch, or since the last evaluation in step mode; weighted over all ranks."""
        self.open_result: dict[str, dict[str, float]] = {}
        """Figures of the epoch that is not finished yet."""

    _bare: bool | None = None
    """Whether the batches to train on come without a target; `None` before it is known, and where `train_step` reads them otherwise."""

    def meter_totals(self) -> dict[str, tuple[float, float]]:
        """Return sums and weights of `meters` over all ranks. Call on all ranks."""
        return self.meters.totals(self.figures_domain)

    def settle(self) -> None:
        """Raise what an update left to be checked; the update provides it."""

    # Saving

    def state_dict(self) -> dict[str, Any]:
        """Return the full state: tensors, not copied, and plain values. Call on all ranks.

        The random streams and the states of loaders that differ from rank to rank are gathered, so every rank returns all of
        them.
        """
        self.equalize_buffers()
        payload = super().state_dict()
        totals = self.meters.totals(self.figures_domain)
        payload["state"]["meters"] = {name: list(pair) for name, pair in totals.items()}
        if self.criterion_has_state:
            payload["criterion"] = self.criterion_state_dict()
        if self.ema is not None:
            payload["ema"] = self.ema.state_dict()
        if self.scheduler is not None:
            payload["scheduler"] = self.scheduler.state_dict()
        return payload

    def component_states(self) -> dict[str, Any]:
        """Return the states of `model` and `optimizer`, by these names. Call on all ranks."""
        states = {"model": self.model_state_dict()}
        if self.optimizer is not None:
            states["optimizer"] = self.optimizer_state_dict()
        return states

    def run_state(self) -> dict[str, Any]:
        """Return counters, attempts, random streams, figures and scores. No communication: may be called on one rank."""
        self.state.train.weight_reference = self.window.agreed_reference
        state = super().run_state()
        state["open_result"] = dict(self.open_result)
        state["bare"] = self._bare
        state["meters"] = self.meters.state_dict()
        state["losses"] = self.losses.state_dict()
        state["scores"] = self.scoreboard.state_dict() if self.scoreboard is not None else {}
        state["scaler"] = self.precision.scaler.state_dict() if self.precision.scaler is not None else {}
        return state

    @property
    def criterion_has_state(self) -> bool:
        """Whether the criterion has parameters or persistent buffers, which are saved beside the model's."""
        return isinstance(self.criterion, nn.Module) and bool(self.criterion.state_dict())

    def criterion_state_dict(self) -> dict[str, Any]:
        """Return the parameters and persistent buffers of the criterion. May be called on any rank."""
        return dict(self.criterion.state_dict()) if isinstance(self.criterion, nn.Module) else {}

    def model_state_dict(self) -> dict[str, Any]:
        """Return the parameters and persistent buffers of the bare model, by canonical name. Called on all ranks."""
        return {canonical_name(name): value for name, value in self.unwrapped_model.state_dict().items()}

    def optimizer_state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state by parameter name. Called on all ranks."""
        return named_state_dict(self.optimizer, self.named_parameters())

    def save_checkpoint(self, *, history: bool = False, save_best: bool = True) -> None:
        """Save the full state as `latest`, and under the other names it deserves. Call on all ranks.

        Args:
            history: Also keep it under its history name.
            save_best: Also make it `best` when the score of this very state is the best one.
        """
        if not self.config.checkpoint.load_only:
            self.settle()
        scored = self._scored_at == self.state.train.global_step
        super().save_checkpoint(history=history, save_best=save_best and scored)

    def export_model(self) -> None:
        """Write the weights, and the averaged ones, as `model`, cast to `checkpoint.export_dtype`. Call on all ranks."""
        payload: dict[str, Any] = {"format_version": FORMAT_VERSION, "runner": self.config.public()}
        dtype = export_dtype(self.config.checkpoint.export_dtype)
        payload["model"] = cast_floating(self.model_state_dict(), dtype)
        if self.ema is not None:
            payload["ema"] = {"weights": cast_floating(self.ema.weights, dtype), "num_updates": self.ema.num_updates}
        train = self.state.train
        self.checkpoint_manager.export_model(payload, epoch=train.epoch, global_step=train.global_step)


def export_dtype(name: str | None) -> torch.dtype | None:
    """Return the dtype that `checkpoint.export_dtype` names, `None` to keep what there is."""
    if name is None:
        return None
    return floating_dtype(name, key="checkpoint.export_dtype")


def cast_floating(weights: Mapping[str, torch.Tensor], dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """Return the weights with the floating ones in `dtype`."""
    return {name: w.to(dtype) if dtype is not None and w.is_floating_point() else w for name, w in weights.items()}
