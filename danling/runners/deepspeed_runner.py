"""Training on a DeepSpeed engine: ZeRO and offload under the loops, decisions and checkpoint names of the training core."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import distributed as dist

from danling.checkpoints import CheckpointManager
from danling.deepspeed import engine as engines
from danling.deepspeed.checkpoints import DeepSpeedCheckpointManager
from danling.deepspeed.engine_config import (
    EngineFacts,
    check_keys,
    clip_norm,
    engine_config,
    uses_bf16_weights,
    zero_stage,
)
from danling.deepspeed.preparation import (
    EngineModelStates,
    EnginePreparation,
    check_criterion,
    check_dtype,
    check_optimizer,
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
    _max_norm: float | None = None

    def init_distributed(self) -> None:
        """Join the process group, as every stack; alone, make one of this process, since an engine needs it."""
        self.deepspeed = self.import_deepspeed()
        given = dist.is_initialized()
        super().init_distributed()
        self._closers.enter_context(engines.local_rank_known(self.local_rank))
        if not dist.is_initialized():
            engines.join_single_process_group()
        if not given:
            self._closers.callback(engines.leave_process_group)

    def import_deepspeed(self) -> Any:
        """Return the package."""
        return engines.import_deepspeed(torch.device("cuda" if torch.cuda.is_available() else "cpu"))

    def build_preparation(self) -> EnginePreparation:
        if self.deepspeed is None:
            raise ValueError(
                "Expected `init_distributed` to load DeepSpeed and to join its process group. Received: neither. Call "
                "super().init_distributed() in it."
            )
        mode = self.config.checkpoint.async_mode
        return EnginePreparation(self.world, self.data_domain, stack=self.stack, async_mode=mode)

    @property
    def engine(self) -> Any:
        """The engine; `None` before it is built and after `close`."""
        return self.preparation.engine if "preparation" in vars(self) else None

    def bind_optimizer(self) -> None:
        settings = self.engine_settings()
        if self.optimizer is None and "optimizer" not in settings:
            return
        check_keys(self.given_settings, settings)
        check_criterion(self.criterion)
        if self.data_domain.size > 1:
            for tensor in self._criterion_tensors("parameters"):
                self.world.broadcast(tensor.data)
        check_dtype(self.model)
        check_optimizer(self.optimizer, settings)
        if uses_bf16_weights(settings) and self.ema is not None:
            raise ValueError(
                "Expected weights in float32 to average. Received: deepspeed.bf16.enabled=True, ema.enabled=True. Set precision='bf16' "
                "instead of deepspeed.bf16, which autocasts and leaves the weights in float32."
            )
        if uses_bf16_weights(settings) and self.precision.dtype is None:
            # Weights in bfloat16 take inputs in bfloat16, which autocast sees to.
            self.precision = Precision("bf16", self.device)
        if self.optimizer is not None:
            self.preparation.group_names = parameter_names(self.optimizer, self.named_parameters())
        trained = trained_names(self.model)
        engine = engines.build_engine(self.deepspeed, self.model, self.optimizer, settings)
        self.preparation.adopt(engine, stage=zero_stage(settings), trained=trained)
        self._closers.callback(self.preparation.release)
        self.model = engine
        self.optimizer = self.engine.basic_optimizer
        if self.scheduler is None and self.engine.lr_scheduler is not None:
            self.scheduler = self.engine.lr_scheduler
        # The runner moves the schedule, with every committed update.
        self.engine.lr_scheduler = None
        self._max_norm = clip_norm(self.given_settings, self.config.max_grad_norm)

    @property
    def given_settings(self) -> dict[str, Any]:
        """`config.deepspeed` as plain values."""
        settings: dict[str, Any] = self.config.plain()["deepspeed"] or {}
        return settings

    def engine_settings(self) -> dict[str, Any]:
        """Return the configuration of the engine; override it for settings that depend on the run."""
        facts = EngineFacts(
            micro_batch=self.batch_size,
            accum_steps=self.accum_steps,
            world_size=self.data_domain.size,
            precision=self.config.precision,
            max_grad_norm=self.config.max_grad_norm,
            optimizer=self._source_of("optimizer", "optim"),
            scheduler=self._source_of("scheduler", "scheduler"),
            on_cpu=self.device.type == "cpu",
        )
        return engine_config(self.given_settings, facts)

    def _source_of(self, attribute: str, section: str) -> str | None:
        """Where an optimizer or a scheduler comes from, for a message; `None` when there is none."""
        kind = (self.config.get(section, None) or {}).get("type", None)
        own = getattr(self, attribute)
        if kind and (own is not None or attribute == "scheduler"):
            return f"{section}.type={kind!r}"
        return None if own is None else f"self.{attribute}, a {type(own).__name__}"

    @property
    def divides_weights(self) -> bool:
        """Whether the weights are divided over the ranks."""
        return self.preparation.divides_weights

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

    # Update

    def build_reduction(self) -> GradientReduction:
        return EngineReduction(self)
