"""The states of a model in a DeepSpeed engine: whole weights by name out of its shares, and tags that the engine reads itself."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from danling.checkpoints.deepspeed import EngineTag, HashingFiles, consolidated_optimizer, consolidated_weights
from danling.checkpoints.errors import CheckpointMismatch
from danling.checkpoints.exclusion import ExcludedFromLoading
from danling.deepspeed import engine as engines
from danling.training.model_states import ModelStates
from danling.utils.tensors import canonical_name

from .engine_config import uses_bf16_weights

if TYPE_CHECKING:
    from danling.runners.deepspeed_runner import DeepSpeedRunner


class EngineModelStates(ModelStates):
    """Reads and writes the states of a model in an engine."""

    keeps_modes = False

    runner: DeepSpeedRunner

    def __init__(self, runner: DeepSpeedRunner) -> None:
        super().__init__(runner)
        self._tag_read: EngineTag | None = None

    @property
    def _trust(self) -> bool:
        return bool(self.runner.config.checkpoint.trust)

    # Saving

    def model_state(self) -> dict[str, Any]:
        """Return whole weights and persistent buffers by canonical name, weights in float32. Call on all ranks."""
        engine = self.runner.engine
        with self.runner.whole_weights():
            state = super().model_state()
            if engine is not None and engines.divides_weights(engine):
                state = {name: value.detach().clone() for name, value in state.items()}
        if engine is not None and uses_bf16_weights(self.runner.given_settings):
            state.update(self._master_weights())
        return state

    def _master_weights(self) -> dict[str, Tensor]:
        found = {}
        for name, parameter in self.runner.unwrapped_model.named_parameters(remove_duplicate=False):
            weight = engines.full_parameter(parameter) if parameter.requires_grad else None
            if weight is not None:
                found[canonical_name(name)] = weight.detach().clone()
        return found

    def optimizer_state(self) -> dict[str, Any]:
        """Return the optimizer's whole state by parameter name, as the other stacks do. Call on all ranks."""
        engine = self.runner.engine
        if not engines.is_divided(engine):
            return super().optimizer_state()
        state = {name: engines.full_state(engine, parameter) for name, parameter in self._trained().items()}
        return {"state": {name: entry for name, entry in state.items() if entry}, "param_groups": self._named_groups()}

    def outline(self) -> dict[str, Any]:
        """Return what the engine's files do not say by name: its stage and ranks, groups of parameters, and states that are no tensors."""
        engine = self.runner.engine
        place = {"stage": self.runner.preparation.stage, "world_size": self.runner.world_size}
        if self.runner.optimizer is None:
            return place
        scalars = engines.scalar_states(engine) if engines.is_divided(engine) else {}
        return {**place, "param_groups": self._named_groups(), "scalars": scalars}

    def _named_groups(self) -> list[dict[str, Any]]:
        names = self.runner.preparation.group_names or [list(self._trained())]
        return [
            {**{key: value for key, value in group.items() if key != "params"}, "params": own}
            for group, own in zip(self.runner.optimizer.param_groups, names)
        ]

    def _trained(self) -> dict[str, nn.Parameter]:
        return {name: parameter for name, parameter in self.runner.named_parameters() if parameter.requires_grad}

    # Loading

    def opened(self, payload: Mapping[str, Any], excluded: ExcludedFromLoading) -> Mapping[str, object]:
        """Return a payload in which components that are left out in part are by name, rather than a tag of the engine."""
        found = dict(payload)
        for name in ("model", "optimizer"):
            if excluded.parts_of(name) and isinstance(payload.get(name), EngineTag):
                found[name] = self._opened(name, payload[name], excluded)
        return found

    def _opened(self, name: str, tag: EngineTag, excluded: ExcludedFromLoading) -> object:
        if name == "model":
            return self._whole_model(tag)
        if "optimizer.state" in excluded.entries:
            # Nothing of what the engine has written is needed.
            return {"state": {}, "param_groups": [dict(group) for group in tag.outline["param_groups"]]}
        return self._whole_optimizer(tag)

    def _whole_model(self, tag: EngineTag) -> object:
        return self.runner.checkpoint_manager.on_all(lambda: consolidated_weights(tag.path, trust=self._trust))

    def _whole_optimizer(self, tag: EngineTag) -> object:
        return self.runner.checkpoint_manager.on_all(
            lambda: consolidated_optimizer(tag.path, tag.outline, trust=self._trust)
        )

    def load_model(self, state: Any, *, partial: bool = False) -> None:
        """Load weights by canonical name, or the model of an engine's own checkpoint. Call on all ranks."""
        engine = self.runner.engine
        if isinstance(state, EngineTag):
            # The engine reads its own tag; one of another stage or number of ranks is put together and divided anew.
            same_ranks = state.world_size == self.runner.world_size or state.stage == 0
            if state.stage == self.runner.preparation.stage and same_ranks:
                whole = not self.runner.run_state.excluded.mentions("optimizer")
                with engines.single_writer(engine, HashingFiles(trust=self._trust)):
                    engine.load_checkpoint(str(state.path.parent), tag=state.path.name, load_optimizer_states=whole)
                self._tag_read = state
                return
            state = self._whole_model(state)
        with engines.gathered(engine, modify=True):
            super().load_model(state, partial=partial)
        if engine is not None and engines.is_divided(engine):
            engine.optimizer.refresh_fp32_params()

    def load_optimizer(self, state: Any) -> None:
        """Restore the optimizer's state by parameter name; what the engine read came with its model. Call on all ranks."""
        if isinstance(state, EngineTag) and state is self._tag_read:
            return
        if isinstance(state, EngineTag):
            state = self._whole_optimizer(state)
        if engines.is_divided(self.runner.engine):
            self._load_divided(state)
        else:
            super().load_optimizer(state)

    def _load_divided(self, state: Mapping[str, Any]) -> None:
        engine, here = self.runner.engine, self.runner.preparation.group_names
        names = [set(group["params"]) for group in state["param_groups"]]
        if sorted(map(sorted, names)) != sorted(map(sorted, here)):
            raise CheckpointMismatch(
                f"Expected the parameter groups of the checkpoint. Received: {len(here)} groups here, {len(names)} stored, "
                "divided otherwise. Restore optim.param_groups, or add 'optimizer' to checkpoint.exclude_from_loading."
            )
        for group, own in zip(self.runner.optimizer.param_groups, here):
            stored = state["param_groups"][names.index(set(own))]
            group.update({key: value for key, value in stored.items() if key != "params"})
        engines.load_full_states(engine, [(p, state["state"].get(name, {})) for name, p in self._trained().items()])


class EngineFiles:
    """What a checkpoint manager asks of an engine."""

    def __init__(self, engine: Any, stage: int) -> None:
        self.engine = engine
        self.stage = stage
        parameters = engine.module.parameters() if engine is not None else ()
        self.state_bytes = 16 * sum(getattr(p, "ds_numel", p.numel()) for p in parameters)
        """Weights, float32 copies and two moments."""

    def save(self, directory: str, tag: str, client_state: Mapping[str, object]) -> None:
        """Write the files of a tag. Call on all ranks."""
        self.engine.save_checkpoint(directory, tag=tag, client_state=dict(client_state), save_latest=False)

    def writing_to(self, files: HashingFiles) -> AbstractContextManager[None]:
        """Let `files` write what the engine saves."""
        return engines.single_writer(self.engine, files)
