"""What a run on a DeepSpeed engine saves and restores: the engine's files under the library's names, and weights by name."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch import Tensor, nn

from danling.checkpoints import CheckpointMismatch, DeepSpeedCheckpointManager
from danling.checkpoints.deepspeed_files import EngineTag, HashingFiles, consolidated_optimizer, consolidated_weights
from danling.deepspeed import engine as engines
from danling.deepspeed.engine_config import uses_bf16_weights
from danling.utils.names import canonical_name

from .deepspeed_model import DeepSpeedModel


class _EngineFiles:
    """What a checkpoint manager asks of an engine."""

    def __init__(self, engine: Any, stage: int) -> None:
        self.engine = engine
        self.stage = stage
        trained = (
            sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters()) if engine is not None else 0
        )
        self.state_bytes = 16 * trained
        """Weights, float32 copies and two moments."""

    def save(self, directory: str, tag: str, client_state: Mapping[str, Any]) -> None:
        """Write the files of a tag. Call on all ranks."""
        self.engine.save_checkpoint(directory, tag=tag, client_state=dict(client_state), save_latest=False)

    def writing_to(self, files: HashingFiles) -> AbstractContextManager[None]:
        """Let `files` write what the engine saves."""
        return engines.single_writer(self.engine, files)


class DeepSpeedState(DeepSpeedModel):
    """Checkpoints of a run on an engine. Save, load and `state_dict` are called on all ranks."""

    def manager_class(self) -> Any:
        """Return what builds the checkpoint manager: tags of the engine under the library's names. Called on all ranks."""
        return partial(DeepSpeedCheckpointManager, engine=_EngineFiles(self.engine, self.engine_stage))

    def checkpoint_state(self) -> dict[str, Any]:
        """Return what is saved beside the engine's files. Call on all ranks."""
        self._without_components = True
        try:
            state = super().checkpoint_state()
        finally:
            self._without_components = False
        state["engine"] = {"stage": self.engine_stage, "world_size": self.world_size, **self._optimizer_outline()}
        return state

    _without_components = False

    def component_states(self) -> dict[str, Any]:
        """Return the states of `model` and `optimizer`; neither where the engine saves them itself. Call on all ranks."""
        return {} if self._without_components else super().component_states()

    def model_state_dict(self) -> dict[str, Any]:
        """Return whole weights and persistent buffers by canonical name, weights in float32. Call on all ranks."""
        with self.whole_weights():
            state = super().model_state_dict()
            if self.divides_weights:
                state = {name: value.detach().clone() for name, value in state.items()}
        if self.engine is not None and uses_bf16_weights(self.given_settings):
            state.update(self._master_weights())
        return state

    def _master_weights(self) -> dict[str, Tensor]:
        found = {}
        for name, parameter in self.unwrapped_model.named_parameters(remove_duplicate=False):
            weight = engines.full_parameter(parameter) if parameter.requires_grad else None
            if weight is not None:
                found[canonical_name(name)] = weight.detach().clone()
        return found

    def optimizer_state_dict(self) -> dict[str, Any]:
        """Return the optimizer's whole state by parameter name, as the other stacks do. Call on all ranks."""
        if not engines.is_divided(self.engine):
            return super().optimizer_state_dict()
        named = self._trained()
        state = {name: engines.full_state(self.engine, parameter) for name, parameter in named.items()}
        return {"state": {name: entry for name, entry in state.items() if entry}, "param_groups": self._named_groups()}

    def _optimizer_outline(self) -> dict[str, Any]:
        """What the engine's files do not say by name: groups of parameters, and states that are no tensors."""
        if self.optimizer is None:
            return {}
        scalars = engines.scalar_states(self.engine) if engines.is_divided(self.engine) else {}
        return {"param_groups": self._named_groups(), "scalars": scalars}

    def _named_groups(self) -> list[dict[str, Any]]:
        names = self._group_names or [list(self._trained())]
        groups = [
            {key: value for key, value in group.items() if key != "params"} for group in self.optimizer.param_groups
        ]
        return [{**group, "params": own} for group, own in zip(groups, names)]

    def _trained(self) -> dict[str, nn.Parameter]:
        return {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}

    # Loading

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the full state, of which `checkpoint.exclude_from_loading` may leave out parts of the engine's files too.

        Called on all ranks.

        Args:
            state: The payload of a checkpoint, in which `model` and `optimizer` may be a tag of an engine.

        Raises:
            CheckpointError: If part of the shares of several ranks, or of ZeRO 1 to 3, is left out, and they are not trusted.
        """
        inner = {entry.partition(".")[0] for entry in self._entries() if "." in entry}
        opened: dict[str, Any] = {
            name: self._opened(name, state[name]) for name in ("model", "optimizer") if name in inner & state.keys()
        }
        super().load_state_dict({**state, **opened})

    def _opened(self, name: str, state: Any) -> Any:
        """Return by name what a tag holds of a component, so that parts of it can be left out."""
        if not isinstance(state, EngineTag):
            return state
        if name == "model":
            return self.checkpoint_manager.on_all(lambda: consolidated_weights(state.path, trust=self._trusted))
        if "optimizer.state" in self._entries():
            # Nothing of what the engine has written is needed.
            return {"state": {}, "param_groups": [dict(group) for group in state.outline["param_groups"]]}
        return self._whole_optimizer(state)

    def _whole_optimizer(self, tag: EngineTag) -> Any:
        return self.checkpoint_manager.on_all(
            lambda: consolidated_optimizer(tag.path, tag.outline, trust=self._trusted)
        )

    def load_model(self, state: Any, *, partial: bool = False) -> None:
        """Load weights by canonical name, or the model of an engine's own checkpoint. Call on all ranks.

        Raises:
            CheckpointMismatch: If names or shapes are not those of the model, or the engine's checkpoint is of another layout.
        """
        if isinstance(state, EngineTag) and self._fits(state):
            self._load_tag(state)
            return
        if isinstance(state, EngineTag):
            state = self.checkpoint_manager.on_all(lambda: consolidated_weights(state.path, trust=self._trusted))
        with engines.gathered(self.engine, modify=True):
            super().load_model(state, partial=partial)
        if self.engine is not None and engines.is_divided(self.engine):
            self.engine.optimizer.refresh_fp32_params()

    def load_optimizer(self, state: Any) -> None:
        """Restore the optimizer's state by parameter name; what the engine read came with its model. Called on all ranks.

        Args:
            state: `state` by parameter name and `param_groups`, or a tag of an engine.

        Raises:
            CheckpointMismatch: If the parameter groups are others.
        """
        if isinstance(state, EngineTag) and state is self._tag_read:
            return
        if isinstance(state, EngineTag):
            state = self._whole_optimizer(state)
        if not engines.is_divided(self.engine):
            super().load_optimizer(state)
            return
        names = [set(group["params"]) for group in state["param_groups"]]
        if sorted(map(sorted, names)) != sorted(map(sorted, self._group_names)):
            raise CheckpointMismatch(
                f"Expected the parameter groups of the checkpoint. Received: {len(self._group_names)} groups here, {len(names)} stored, "
                "divided otherwise. Restore optim.param_groups, or add 'optimizer' to checkpoint.exclude_from_loading."
            )
        for group, own in zip(self.optimizer.param_groups, self._group_names):
            stored = state["param_groups"][names.index(set(own))]
            group.update({key: value for key, value in stored.items() if key != "params"})
        engines.load_full_states(
            self.engine, [(p, state["state"].get(name, {})) for name, p in self._trained().items()]
        )

    @property
    def _trusted(self) -> bool:
        return bool(self.config.checkpoint.trust)

    def _fits(self, tag: EngineTag) -> bool:
        """Whether the engine reads the tag itself; one of another stage or number of ranks is put together and divided anew."""
        return tag.stage == self.engine_stage and (tag.world_size == self.world_size or tag.stage == 0)

    _tag_read: EngineTag | None = None

    def _load_tag(self, tag: EngineTag) -> None:
        whole = not any(entry.partition(".")[0] == "optimizer" for entry in self._entries())
        files = HashingFiles(trust=self._trusted)
        with engines.single_writer(self.engine, files):
            self.engine.load_checkpoint(str(tag.path.parent), tag=tag.path.name, load_optimizer_states=whole)
        self._tag_read = tag
