"""What a run on a DeepSpeed engine saves and restores: the engine's files under the library's names, and weights by name."""

from __future__ import annotations

from functools import partial
from typing import Any

from danling.checkpoints import DeepSpeedCheckpointManager
from danling.deepspeed.engine_config import uses_bf16_weights
from danling.deepspeed.model_states import EngineFiles, EngineModelStates

from .deepspeed_model import DeepSpeedModel


class DeepSpeedState(DeepSpeedModel):
    """Checkpoints of a run on an engine. Save, load and `state_dict` are called on all ranks."""

    model_states: EngineModelStates

    def manager_class(self) -> Any:
        """Return what builds the checkpoint manager: tags of the engine under the library's names. Called on all ranks."""
        return partial(DeepSpeedCheckpointManager, engine=EngineFiles(self.engine, self.preparation.stage))

    def build_model_states(self) -> EngineModelStates:
        """Return how the states of a model in an engine are read and put back."""
        return EngineModelStates(
            engine=lambda: self.engine,
            stage=lambda: self.preparation.stage,
            world_size=self.world_size,
            group_names=lambda: self.preparation.group_names,
            whole_weights=lambda: self.whole_weights(),
            keeps_master_weights=lambda: uses_bf16_weights(self.given_settings),
            trust=lambda: bool(self.config.checkpoint.trust),
            excluded=lambda: self.excluded_from_loading,
            on_all=lambda action: self.checkpoint_manager.on_all(action),
            model=lambda: self.unwrapped_model,
            named_parameters=lambda: self.named_parameters(),
            optimizer=lambda: self.optimizer,
            ema=lambda: self.ema,
        )

    def checkpoint_state(self) -> dict[str, Any]:
        """Return what is saved beside the engine's files. Call on all ranks."""
        with self.run_state.saved_elsewhere("model", "optimizer"):
            state = super().checkpoint_state()
        return {**state, "engine": self.model_states.outline()}
