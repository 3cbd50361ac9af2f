"""Construction on a DeepSpeed engine: its configuration, the engine around model and optimizer, whole weights out of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from danling.config import RunnerConfig
from danling.deepspeed import engine as engines
from danling.deepspeed.engine_config import EngineFacts, clip_norm, engine_config, uses_bf16_weights, zero_stage
from danling.deepspeed.keys import check_keys
from danling.optim.named_state import parameter_names
from danling.training import Precision
from danling.training.coverage import listed
from danling.utils.names import canonical_name

from .torch_runner import TorchRunner

_LOOKS_AT_SHAPES = ("Adafactor", "Muon")


class DeepSpeedModel(TorchRunner):
    """Puts a model into an engine."""

    stack = "deepspeed"

    engine: Any = None
    engine_stage: int = 0
    deepspeed: Any = None
    _max_norm: float | None = None

    def __init__(self, config: RunnerConfig | Mapping[str, Any] | None = None) -> None:
        super().__init__(config)
        self._group_names: list[list[str]] = []
        self._engine_trains: set[str] = set()
        if self.deepspeed is None:
            raise ValueError(
                "Expected `init_distributed` to load DeepSpeed and to join its process group. Received: neither. Call "
                "super().init_distributed() in it."
            )

    def init_distributed(self) -> None:
        """Join the process group, as every stack; alone, make one of this process, since an engine needs it. Called on all ranks."""
        self.deepspeed = self.import_deepspeed()
        given = dist.is_initialized()
        super().init_distributed()
        self._closers.enter_context(engines.local_rank_known(self.local_rank))
        if not dist.is_initialized():
            engines.join_single_process_group()
        if not given:
            self._closers.callback(engines.leave_process_group)

    def import_deepspeed(self) -> Any:
        """Return the package.

        Raises:
            ImportError: If it is not installed.

        Called on all ranks.
        """
        return engines.import_deepspeed(torch.device("cuda" if torch.cuda.is_available() else "cpu"))

    def forward_communicates(self) -> str | None:
        """Return that an engine reduces gradients within the backward. Called on all ranks."""
        return f"stack={self.stack!r}"

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """Return the model as it is: the engine takes it together with the optimizer, in `bind_optimizer`. Called on all ranks."""
        return model

    def unwrap(self, model: Any) -> Any:
        """Return the user's module out of the engine. Called on all ranks."""
        return model.module if self.engine is not None and model is self.engine else model

    def bind_optimizer(self) -> None:
        """Build the engine around model and optimizer. Call on all ranks.

        Raises:
            ValueError: If DeepSpeed does not know a key, or a setting contradicts another one, such as averaged weights beside weights
                in bfloat16.
        """
        settings = self.engine_settings()
        if self.optimizer is None and "optimizer" not in settings:
            return
        check_keys(self.given_settings, settings)
        self._check_criterion()
        self._check_dtype()
        self._check_optimizer(settings)
        if uses_bf16_weights(settings) and self.ema is not None:
            raise ValueError(
                "Expected weights in float32 to average. Received: deepspeed.bf16.enabled=True, ema.enabled=True. Set precision='bf16' "
                "instead of deepspeed.bf16, which autocasts and leaves the weights in float32."
            )
        if uses_bf16_weights(settings) and self.precision.dtype is None:
            # Weights in bfloat16 take inputs in bfloat16, which autocast sees to.
            self.precision = Precision("bf16", self.device)
        if self.optimizer is not None:
            self._group_names = parameter_names(self.optimizer, self.named_parameters())
        self.engine = engines.build_engine(self.deepspeed, self.model, self.optimizer, settings)
        self._closers.callback(self._release_engine)
        self.engine_stage = zero_stage(settings)
        self._engine_trains = self._trained_names()
        self.model = self.engine
        self._adopt_parts()

    def optimized_parameters(self) -> list[nn.Parameter]:
        """Return what the engine updates; ZeRO's optimizer has flat pieces of it. May be called on one rank."""
        if self.engine is None:
            return super().optimized_parameters()
        held = {name for names in self._group_names for name in names} or self._engine_trains
        named = {canonical_name(name): parameter for name, parameter in self.engine.module.named_parameters()}
        return [parameter for name, parameter in named.items() if name in held]

    def _check_criterion(self) -> None:
        """Refuse a criterion that is trained, of which an engine knows nothing, and give all ranks the same one."""
        trained = [p for p in self._criterion_tensors("parameters") if p.requires_grad]
        if trained:
            raise ValueError(
                f"Expected a criterion without parameters to train: a DeepSpeed engine reduces and updates those of the model only. "
                f"Received: {type(self.criterion).__name__} with {len(trained)}. Make them part of the model, or freeze them."
            )
        if self.data_domain.size > 1:
            for tensor in self._criterion_tensors("parameters"):
                self.world.broadcast(tensor.data)

    def _check_dtype(self) -> None:
        """Refuse tensors in float64, which an engine makes float32."""
        tensors = (*self.model.named_parameters(), *self.model.named_buffers())
        wide = [canonical_name(name) for name, tensor in tensors if tensor.dtype is torch.float64]
        if wide:
            raise ValueError(
                f"Expected a model in float32, in which a DeepSpeed engine keeps weights and buffers. Received: float64 in "
                f"{listed(wide)}. Call self.model.float() in __init__ where that is precise enough, or set stack='ddp', "
                "which trains in float64."
            )

    def _check_optimizer(self, settings: Mapping[str, Any]) -> None:
        """Refuse an optimizer whose update depends on the shape of a parameter, of which ZeRO makes flat pieces."""
        kind = type(self.optimizer).__name__
        if zero_stage(settings) and kind in _LOOKS_AT_SHAPES:
            raise ValueError(
                f"Expected an optimizer that treats every element of a parameter alike, since ZeRO divides flat parameters. Received: "
                f"{kind} with deepspeed.zero_optimization.stage={zero_stage(settings)}. Set the stage to 0, or choose another optimizer."
            )

    def _trained_names(self) -> set[str]:
        return {name for name, parameter in self.named_parameters() if parameter.requires_grad}

    def follow_freezing(self) -> None:
        """Refuse parameters that were frozen or unfrozen since the engine was built, where it divides the optimizer.

        Called on all ranks.

        Raises:
            ValueError: If there are some: the engine divides what required a gradient at construction, and nothing else.
        """
        if self.engine is None or not engines.is_divided(self.engine):
            return
        changed = sorted(self._engine_trains ^ self._trained_names())
        if changed:
            raise ValueError(
                f"Expected the parameters that required a gradient when the engine was built, which are what ZeRO {self.engine_stage} "
                f"divides. Received: {', '.join(changed[:5])} frozen or unfrozen since ({len(changed)} in all). Set "
                "deepspeed.zero_optimization.stage=0, or begin another run with them so in __init__, from these weights by `pretrained`."
            )

    def _adopt_parts(self) -> None:
        self.optimizer = self.engine.basic_optimizer
        engines.let_optimizer_tell_its_state(self.engine)
        if self.scheduler is None and self.engine.lr_scheduler is not None:
            self.scheduler = self.engine.lr_scheduler
        # The runner moves the schedule, with every committed update.
        self.engine.lr_scheduler = None
        self._max_norm = clip_norm(self.given_settings, self.config.max_grad_norm)

    def _release_engine(self) -> None:
        engine, self.engine = self.engine, None
        if engine is not None:
            engine.destroy()

    @property
    def given_settings(self) -> dict[str, Any]:
        """`config.deepspeed` as plain values."""
        settings: dict[str, Any] = self.config.plain()["deepspeed"] or {}
        return settings

    def engine_settings(self) -> dict[str, Any]:
        """Return the configuration of the engine; override it for settings that depend on the run.

        Raises:
            ValueError: If `config.deepspeed` contradicts another key.

        Called on all ranks.
        """
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

    def idle_settings(self) -> list[str]:
        """Return a sentence for every setting that has no effect in this run.

        No communication: may be called on one rank.
        """
        found = super().idle_settings()
        mode = self.config.checkpoint.async_mode
        if mode in ("async", "async_with_pinned_mem"):
            found.append(f"checkpoint.async_mode={mode!r} has no effect: an engine's save is finished when it returns.")
        return found

    def _source_of(self, attribute: str, section: str) -> str | None:
        """Where an optimizer or a scheduler comes from, for a message; `None` when there is none."""
        kind = (self.config.get(section, None) or {}).get("type", None)
        own = getattr(self, attribute)
        if kind and (own is not None or attribute == "scheduler"):
            return f"{section}.type={kind!r}"
        return None if own is None else f"self.{attribute}, a {type(own).__name__}"

    def whole_weights(self, *, modify: bool = False) -> AbstractContextManager[None]:
        """Return a context in which the weights are whole; see `TorchRunner.whole_weights`. Enter on all ranks.

        Args:
            modify: Give all ranks on exit what rank 0 has written to them.
        """
        return self._written_weights() if modify else engines.gathered(self.engine)

    @contextmanager
    def _written_weights(self) -> Iterator[None]:
        with engines.gathered(self.engine, modify=True):
            yield
        if self.distributed and not self.divides_weights:
            for parameter in self.unwrapped_model.parameters():
                self.world.broadcast(parameter.data)
        if self.engine is not None and engines.is_divided(self.engine):
            # ZeRO updates weights of its own in float32, which would come back with the next update.
            self.engine.optimizer.refresh_fp32_params()

    @property
    def divides_weights(self) -> bool:
        """Whether the weights are divided over the ranks."""
        return self.engine is not None and engines.divides_weights(self.engine)
