"""Training on a DeepSpeed engine: ZeRO and offload under the loops, decisions and checkpoint names of the training core."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import HashStore

from danling.checkpoints import CheckpointManager
from danling.deepspeed import engine as engines
from danling.deepspeed.checkpoints import DeepSpeedCheckpointManager
from danling.deepspeed.engine_config import (
    check_keys,
    engine_config,
    uses_bf16_weights,
    without_auto,
    zero_stage,
)
from danling.deepspeed.preparation import (
    EngineModelStates,
    EnginePreparation,
    check_trainable,
    trained_names,
)
from danling.deepspeed.reduction import EngineReduction
from danling.optim.state import parameter_names
from danling.training import GradientReduction, Precision

from .torch_runner import TorchRunner


class DeepSpeedRunner(TorchRunner):
    """Trains on a DeepSpeed engine, with ZeRO 0 to 3 and offload as `config.deepspeed` says.

    The engine's configuration is derived from the runner's own keys and `config.deepspeed` is merged over it; a contradiction is an error
    that names both keys. The optimizer is the one set in `__init__`, that of `config.optim`, or that of `config.deepspeed.optimizer`;
    `self.optimizer` is the optimizer inside the engine, whose learning rates a scheduler moves. The scheduler may be DeepSpeed's too.

    Weighing, finiteness, clipping and skipping are those of `TorchRunner`: the engine averages gradients, divides them over the ranks and
    steps. `self.model` is the engine after construction, `self.unwrapped_model` the bare model.

    Under ZeRO 3 the weights are divided over the ranks: every forward is a collective, in evaluation too, where a rank that is out of
    batches takes part with a batch that does not count. Outside, `with runner.whole_weights():` makes them whole; enter it on all ranks.

    Raises:
        ImportError: If DeepSpeed is not installed: `pip install deepspeed`.
    """

    stack = "deepspeed"

    preparation: EnginePreparation

    deepspeed: Any = None
    engine: Any = None
    """The engine; `None` before it is built and after `close`."""

    def init_distributed(self) -> None:
        """Join the process group, as every stack; alone, make one of this process, since an engine needs it."""
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        self.deepspeed = engines.import_deepspeed(torch.device(kind))
        # A group that the program has made is left to it.
        given = dist.is_initialized()
        super().init_distributed()
        self._parts.closers.enter_context(engines.local_rank_known(self.local_rank))
        if not dist.is_initialized():
            # In memory, since no other process has to find it.
            dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        if not given:
            self._parts.closers.callback(engines.leave_process_group)

    def build_preparation(self) -> EnginePreparation:
        if self.deepspeed is None:
            raise ValueError(
                "Expected `init_distributed` to load DeepSpeed and to join its process group. Received: neither. Call "
                "super().init_distributed() in it."
            )
        return EnginePreparation(self)

    @property
    def engine_stage(self) -> int:
        """The ZeRO stage of the engine; 0 without one. At 3 the weights are divided over the ranks."""
        return engines.zero_stage(self.engine)

    def bind_optimizer(self) -> None:
        settings = self.engine_settings()
        if self.optimizer is None and "optimizer" not in settings:
            return
        check_keys(self.given_settings, settings)
        check_trainable(
            self.model, self.criterion, self.optimizer, zero_stage(settings), self.world_size
        )
        if self.data_domain.size > 1:
            self._broadcast_criterion()
        if uses_bf16_weights(settings):
            # Weights in bfloat16 take inputs in bfloat16, which autocast sees to.
            self.precision = Precision("bf16", self.device)
        if self.optimizer is not None:
            self.preparation.group_names = parameter_names(self.optimizer, self.named_parameters())
        self.preparation.trained = trained_names(self.model)
        self.model = self.engine = engines.build_engine(
            self.deepspeed, self.model, self.optimizer, settings
        )
        self._parts.closers.callback(self._release)
        self.optimizer = self.engine.basic_optimizer
        if self.scheduler is None and self.engine.lr_scheduler is not None:
            self.scheduler = self.engine.lr_scheduler
        # The runner moves the schedule, with every committed update.
        self.engine.lr_scheduler = None

    def _release(self) -> None:
        engine, self.engine = self.engine, None
        self.preparation.reached.stop()
        engine.destroy()

    @property
    def given_settings(self) -> dict[str, Any]:
        """`config.deepspeed` as plain values, without those that are `"auto"`."""
        settings: dict[str, Any] = without_auto(self.config.plain()["deepspeed"] or {})
        return settings

    def engine_settings(self) -> dict[str, Any]:
        """Return the configuration of the engine; override it for settings that depend on the run."""
        return engine_config(self)

    def manager_class(self) -> Callable[..., CheckpointManager]:
        """Return what builds the checkpoint manager: tags of the engine under the library's names."""
        return partial(DeepSpeedCheckpointManager, engine=self.engine)

    def build_model_states(self) -> EngineModelStates:
        return EngineModelStates(self)

    def checkpoint_state(self) -> dict[str, Any]:
        with self.run_state.saved_elsewhere("model", "optimizer"):
            state = super().checkpoint_state()
        states = self.model_states
        assert isinstance(states, EngineModelStates)
        return {**state, "engine": states.outline()}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        states = self.model_states
        assert isinstance(states, EngineModelStates)
        super().load_state_dict(states.opened(state, self.run_state.excluded_from(state)))

    # Update

    def build_reduction(self) -> GradientReduction:
        return EngineReduction(self)
