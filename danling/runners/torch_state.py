"""What a torch runner saves and restores: a run, or the weights of another one."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from danling.checkpoints import exclude, read_model
from danling.checkpoints.torch_files import FORMAT_VERSION
from danling.config import RunnerConfig
from danling.metrics import Meters
from danling.optim.options import adopt_options, options_of
from danling.torchft import ReplicaMember
from danling.training import BatchWeights
from danling.training.component_parts import component_parts
from danling.training.model_states import ModelStates, weights_to_export
from danling.training.results import RunResults
from danling.training.run_state import StatePart

from .torch_components import TorchComponents

logger = logging.getLogger("danling")


class TorchState(TorchComponents):
    """Checkpoints of a torch runner. Save, load and `state_dict` are called on all ranks."""

    def __init__(self, config: RunnerConfig | Mapping[str, Any] | None = None) -> None:
        super().__init__(config)
        self.model_states: ModelStates = self.build_model_states()
        self.losses = Meters()
        """Loss of the open epoch, or since the last evaluation in step mode; weighted over all ranks."""

    fault_tolerance: ReplicaMember | None = None
    """This process's replica group among the others; `None` unless `ft.enabled`."""

    _batch_weights: BatchWeights
    _results: RunResults

    def build_model_states(self) -> ModelStates:
        """Return how the states of model, averages and optimizer are read and put back; a stack that divides them brings its own."""
        return ModelStates(
            model=lambda: self.unwrapped_model,
            named_parameters=lambda: self.named_parameters(),
            optimizer=lambda: self.optimizer,
            ema=lambda: self.ema,
        )

    def meter_totals(self) -> dict[str, tuple[float, float]]:
        """Return sums and weights of `meters` over all ranks, and over the replica groups that take part. Call on all ranks."""
        totals = self.meters.totals(self.placement.metrics)
        return totals if self.fault_tolerance is None else self.fault_tolerance.sum_totals(totals)

    # Saving

    def component_parts(self) -> list[StatePart]:
        """Return model, criterion, averages, optimizer and scheduler, in the order in which they are restored."""
        return component_parts(self)

    def progress_parts(self) -> list[StatePart]:
        """Return what lies in the entry `state` of a checkpoint, in the order in which it is restored."""
        return [
            *super().progress_parts(),
            StatePart(
                "train",
                lambda: {**asdict(self.state.train), "weight_reference": self.window.agreed_reference},
                lambda stored, _: self._load_counters(stored),
            ),
            StatePart(
                "open_result",
                lambda: dict(self._results.open),
                lambda stored, _: self._results.reopen(stored),
                default=dict,
            ),
            StatePart(
                "bare",
                lambda: self._batch_weights.targetless,
                lambda known, _: setattr(self._batch_weights, "targetless", known),
                default=lambda: None,
            ),
            StatePart(
                "meters",
                lambda: self.meters.state_dict(),
                # Sums over all ranks were saved: one of those that add up takes them over.
                lambda sums, _: self.meters.load_state_dict(sums if self.placement.metrics.rank == 0 else {}),
                default=dict,
            ),
            StatePart.stateful("losses", lambda: self.losses, resets=True),
            StatePart.stateful("scores", lambda: self.standing.board),
            StatePart.stateful("scaler", lambda: self.precision.scaler),
        ]

    def _load_counters(self, stored: Mapping[str, Any]) -> None:
        self.state.load_train(stored)
        self.window.agreed_reference = self.state.train.weight_reference

    def state_dict(self) -> dict[str, Any]:
        """Return the full state: tensors, not copied, and plain values. Call on all ranks.

        The random streams and the states of loaders that differ from rank to rank are gathered, so every rank returns all of
        them.
        """
        self.broadcast_buffers()
        payload = super().state_dict()
        totals = self.meters.totals(self.placement.metrics)
        payload["state"]["meters"] = {name: list(pair) for name, pair in totals.items()}
        return payload

    def model_state_dict(self) -> dict[str, Any]:
        """Return the parameters and persistent buffers of the bare model, by canonical name. Called on all ranks."""
        return self.model_states.model_state()

    def optimizer_state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state by parameter name. Called on all ranks."""
        return self.model_states.optimizer_state()

    @property
    def _is_state_of_best(self) -> bool:
        return self._results.scored_at == self.state.train.global_step and super()._is_state_of_best

    def export_model(self) -> None:
        """Write the weights, and the averaged ones, as `model`, cast to `checkpoint.export_dtype`. Call on all ranks."""
        dtype, config = self.config.checkpoint.export_dtype, self.config.public()
        self.saver.export(
            lambda: weights_to_export(config, self.model_state_dict(), self.ema, dtype=dtype, version=FORMAT_VERSION)
        )

    # Loading

    def read_checkpoint(self, checkpoint: str | Path) -> dict[str, Any]:
        """Return the verified payload of a checkpoint, of which this rank reads what it holds. Call on all ranks.

        Args:
            checkpoint: A name in the run's own checkpoint directory, or a path.

        Returns:
            Tensors and plain values by component: `model`, `optimizer`, `state`, ...

        Raises:
            CheckpointNotFound: If there is none.
            CheckpointDamaged: If a file is not what was written.
        """
        template = self.model_states.template()
        if template is None:
            return super().read_checkpoint(checkpoint)
        template["model"] = self.model_state_dict()
        payload: dict[str, Any] = self.checkpoint_manager.load_checkpoint(checkpoint, template=template)
        return payload

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a payload: components, loaders, counters, and the random streams last. Called on all ranks.

        Args:
            state: What `state_dict` returned, or the payload of a checkpoint.

        Raises:
            CheckpointMismatch: If a component that this runner has is missing and not excluded from loading.
        """
        super().load_state_dict(self.model_states.opened(state, self.run_state.excluded))

    def load_components(self, payload: Mapping[str, Any], excluded: set[str]) -> None:
        """Restore model, criterion, averages, optimizer and scheduler, in this order. Called on all ranks.

        Args:
            payload: What is left of the payload of a checkpoint.
            excluded: The dotted paths that were left out of it.
        """
        options = options_of(self.optimizer) if self.optimizer is not None else []
        super().load_components(payload, excluded)
        if self.optimizer is not None and "optimizer" in payload:
            allows = self.run_state.excluded.allows_setting
            adopt_options(
                self.optimizer,
                self.scheduler,
                options,
                lambda name: allows(f"optim.{name}") or allows("optim.param_groups"),
            )

    def load_model(self, state: Mapping[str, Any], *, partial: bool = False) -> None:
        """Load model weights by canonical name into the bare model. Called on all ranks.

        Args:
            state: Tensors by name.
            partial: Allow names that were excluded from loading to be missing.

        Raises:
            CheckpointMismatch: If names or shapes are not those of the model.
        """
        self.model_states.load_model(state, partial=partial)

    def load_ema(self, state: Mapping[str, Any], *, partial: bool = False) -> None:
        """Restore the averaged weights. Called on all ranks.

        Args:
            state: What the averages' `state_dict` returned: `weights` by canonical name, and `num_updates`.
            partial: Begin the average of weights that are missing at the model's, instead of refusing.

        Raises:
            CheckpointMismatch: If names are not those of the model.
        """
        self.model_states.load_ema(state, partial=partial)

    def load_optimizer(self, state: Mapping[str, Any]) -> None:
        """Restore the optimizer's state by parameter name. Called on all ranks.

        Args:
            state: `state` by parameter name, and `param_groups` with parameter names.
        """
        self.model_states.load_optimizer(state)

    def load_scheduler(self, state: Mapping[str, Any]) -> None:
        """Restore the scheduler. Called on all ranks.

        Args:
            state: What the schedule's `state_dict` returned.
        """
        self.scheduler.load_state_dict(dict(state))

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
        # Only weights are read for finetuning, so other exclusions would match nothing there.
        payload, excluded = exclude({"model": weights}, self.run_state.excluded.parts_of("model"))
        self.load_model(payload["model"], partial=bool(excluded))
        if self.ema is not None:
            self.ema.reset()
        logger.info("Loaded the weights of %s.", checkpoint)
