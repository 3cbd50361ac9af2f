"""Training on a DeepSpeed engine: ZeRO and offload under the loops, decisions and checkpoint names of the training core."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from danling.data import Batch
from danling.distributed import Verdict
from danling.distributed import deepspeed_engine as engines
from danling.distributed.deepspeed_config import EngineFacts, clip_norm, engine_config, uses_bf16_weights, zero_stage
from danling.optim.named_state import parameter_names
from danling.training import NonFiniteError, Precision, UpdateOutcome, scale_gradients
from danling.utils.names import canonical_name

from .checkpoints import CheckpointMismatch, DeepSpeedCheckpointManager
from .checkpoints.deepspeed_files import EngineTag, HashingFiles, consolidated_optimizer, consolidated_weights
from .torch_runner import TorchRunner


class _Holders:
    """What a gradient scaler asks of an optimizer, around the shares of a gradient."""

    def __init__(self, holders: list[Tensor]) -> None:
        self.param_groups = [{"params": holders}]


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
        ImportError: If DeepSpeed is not installed: `pip install 'danling[deepspeed]'`.
    """

    stack = "deepspeed"

    # Construction

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
        self.engine: Any = None
        self.engine_stage = 0
        self._shares: list[Tensor] = []
        self._max_norm: float | None = None
        self._group_names: list[list[str]] = []
        self._engine_trains: set[str] = set()

    def import_deepspeed(self) -> Any:
        """Return the package.

        Raises:
            ImportError: If it is not installed.

        Called on all ranks.
        """
        return engines.import_deepspeed(torch.device("cuda" if torch.cuda.is_available() else "cpu"))

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """Return the model as it is: the engine takes it together with the optimizer, in `bind_optimizer`. Called on all ranks."""
        return model

    def unwrap(self, model: Any) -> Any:
        """Return the user's module out of the engine. Called on all ranks."""
        return model.module if self.engine is not None and model is self.engine else model

    def bind_optimizer(self) -> None:
        """Build the engine around model and optimizer. Call on all ranks.

        Raises:
            ValueError: If a setting contradicts another one, such as averaged weights beside weights in bfloat16.
        """
        settings = self.engine_settings()
        if self.optimizer is None and "optimizer" not in settings:
            return
        self._check_criterion()
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

    # Update

    def _micro_step(self, batch: Batch) -> None:
        if self.engine is not None and self.window.count == 0:
            self.equalize_buffers()
        super()._micro_step(batch)

    def backward(self, loss: Tensor) -> None:
        """Back-propagate the loss of the open micro-batch with its weight through the engine. Called on all ranks."""
        self.engine.set_gradient_accumulation_boundary(self.reduces_gradients)
        scaled = self.window.scale(loss)
        if self.precision.scaler is not None:
            scaled = self.precision.scaler.scale(scaled)
        # The weight stands for the engine's own division by the number of micro-batches.
        self.engine.backward(scaled, scale_wrt_gas=False)

    @property
    def gradient_mean_over(self) -> int:
        """Number of ranks over which the engine takes the mean of the gradients."""
        return self.data_domain.size

    def unscale_gradients(self, verdict: Verdict) -> list[Tensor]:
        """Divide the gradient by the global weight of the window, and by the scale of float16.

        Returns:
            This rank's share of it.

        Called on all ranks.
        """
        if not engines.is_divided(self.engine):
            return super().unscale_gradients(verdict)
        gradients = engines.gradient_shares(self.engine)
        if self.precision.scaler is not None:
            self._unscale_shares(gradients)
        scale_gradients(gradients, self.window.gradient_factor(verdict.weight, self.gradient_mean_over))
        return gradients

    def _unscale_shares(self, gradients: list[Tensor]) -> None:
        # The scaler looks for infinities where it unscales: here in one share, so all ranks are shown what any of them has.
        if not math.isfinite(float(self.gradient_norm(gradients))):
            for gradient in gradients:
                gradient.fill_(torch.inf)
        holders = [torch.empty_like(gradient) for gradient in gradients] or [torch.zeros(1, device=self.device)]
        for holder, gradient in zip(holders, gradients or holders):
            holder.grad = gradient
        assert self.precision.scaler is not None
        self.precision.scaler.unscale_(_Holders(holders))  # type: ignore[arg-type]

    def gradient_norm(self, gradients: list[Tensor]) -> Tensor:
        """Return the 2-norm of the whole gradient, 0-dim; the same on all ranks."""
        if not engines.is_divided(self.engine):
            return super().gradient_norm(gradients)
        self._shares = gradients
        local = nn.utils.get_total_norm(gradients).to(self.device) if gradients else torch.zeros((), device=self.device)
        squared = self.data_domain.all_reduce(local.double().square())
        return squared.sqrt().to(torch.float32)

    def clip_gradients(self, grad_norm: Tensor) -> None:
        """Clip by `max_grad_norm`, then by `max_grad_value`. Called on all ranks."""
        shares = (
            self._shares if engines.is_divided(self.engine) else [p.grad for p in self.parameters if p.grad is not None]
        )
        if self._max_norm is not None:
            scale_gradients(shares, torch.clamp(self._max_norm / (grad_norm + 1e-6), max=1.0))
        if self.config.max_grad_value is not None and shares:
            torch._foreach_clamp_min_(shares, -self.config.max_grad_value)
            torch._foreach_clamp_max_(shares, self.config.max_grad_value)

    def optimizer_step(self) -> None:
        """Apply a committed update to the weights of all ranks. Called on all ranks.

        Raises:
            NonFiniteError: If the engine refuses the update.
        """
        self.engine.step()
        if not self.engine.was_step_applied():
            raise NonFiniteError(
                f"Expected DeepSpeed to apply update {self.state.train.global_step + 1}. Received: it found the gradient not finite in "
                "float32. Lower the learning rate, or set max_grad_norm."
            )

    def zero_gradients(self) -> None:
        """Drop the gradient of the window, whether it was applied or not. Called on all ranks."""
        self._shares = []
        engines.discard_gradients(self.engine)

    def nonfinite_gradients(self) -> list[str]:
        """Return the names of the first parameters whose gradient is not finite. Call on all ranks."""
        if not engines.is_divided(self.engine):
            return super().nonfinite_gradients()
        found = []
        for name, parameter in self.named_parameters():
            gradient = engines.full_gradient(parameter) if parameter.requires_grad else None
            if gradient is not None and not bool(torch.isfinite(gradient).all()):
                found.append(name)
        return found[:5]

    def _conclude(self, outcome: UpdateOutcome) -> None:
        if self.ema is None:
            super()._conclude(outcome)
            return
        with self.whole_weights():
            super()._conclude(outcome)

    # Evaluation

    def whole_weights(self, *, modify: bool = False) -> AbstractContextManager[Any]:
        """Return a context in which every rank has whole weights, which ZeRO 3 divides. Enter on all ranks.

        Args:
            modify: Keep what rank 0 writes to them inside.
        """
        return engines.gathered(self.engine, modify=modify)

    @property
    def divides_weights(self) -> bool:
        """Whether the weights are divided over the ranks."""
        return self.engine is not None and engines.divides_weights(self.engine)

    def equalize_buffers(self) -> None:
        if self.data_domain.size > 1:
            for buffer in (*self.unwrapped_model.buffers(), *self._criterion_tensors("buffers")):
                self.world.broadcast(buffer)

    def _pass_over(self, split: str) -> Iterator[Batch]:
        if not (self.divides_weights and self.distributed):
            yield from super()._pass_over(split)
            return
        yield from self._in_step(super()._pass_over(split))

    def _in_step(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield as many batches on every rank: one that is out of its own goes on with one that does not count."""
        filler: Any = None
        first = True
        while True:
            batch = next(batches, None)
            have = self.data_domain.gather_objects(batch is not None)
            if not any(have):
                return
            filler = batch.data if batch is not None else filler
            if first and not all(have):
                shared = self.data_domain.broadcast_object(filler, source=have.index(True))
                filler = shared if batch is None else filler
            first = False
            yield batch if batch is not None else Batch(filler, 0, None)

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Put the averaged weights into the model, and the trained ones back on exit. Enter on all ranks."""
        applied = self.ema.applied()
        with self.whole_weights(modify=True):
            applied.__enter__()
        try:
            yield
        finally:
            with self.whole_weights(modify=True):
                applied.__exit__(None, None, None)

    # Saving

    def manager_class(self) -> Any:
        """Return what builds the checkpoint manager: tags of the engine under the library's names. Called on all ranks."""
        return partial(DeepSpeedCheckpointManager, engine=_EngineFiles(self.engine, self.engine_stage))

    def checkpoint_state(self) -> dict[str, Any]:
        """Return what is saved beside the engine's files. Call on all ranks."""
        self._without_components = True
        try:
            state = self.state_dict()
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

    def load_model(self, state: Any, *, partial: bool = False) -> None:
        """Load weights by canonical name, or the model of an engine's own checkpoint. Call on all ranks.

        Raises:
            CheckpointMismatch: If names or shapes are not those of the model, or the engine's checkpoint is of another layout.
        """
        if isinstance(state, EngineTag) and self._fits(state):
            self._load_tag(state)
            return
        if isinstance(state, EngineTag):
            state = self.checkpoint_manager.on_all(lambda: consolidated_weights(state.path))
        with self.whole_weights(modify=True):
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
            state = self.checkpoint_manager.on_all(lambda: consolidated_optimizer(state.path, state.outline))
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

    def _fits(self, tag: EngineTag) -> bool:
        """Whether the engine reads the tag itself; one of another stage or number of ranks is put together and divided anew."""
        return tag.stage == self.engine_stage and (tag.world_size == self.world_size or tag.stage == 0)

    _tag_read: EngineTag | None = None

    def _load_tag(self, tag: EngineTag) -> None:
        excluded = self.config.checkpoint.exclude_from_loading or []
        listed = [excluded] if isinstance(excluded, str) else list(excluded)
        files = HashingFiles()
        with engines.single_writer(self.engine, files):
            self.engine.load_checkpoint(
                str(tag.path.parent), tag=tag.path.name, load_optimizer_states="optimizer" not in listed
            )
        self._tag_read = tag
