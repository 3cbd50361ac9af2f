"""How an engine prepares the user's model: what it refuses, whole weights by name out of its shares, and tags that it reads itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from danling.checkpoints.errors import CheckpointMismatch
from danling.checkpoints.reading import ExcludedFromLoading
from danling.optim import JointOptimizer
from danling.optim.state import own_dtypes
from danling.training.ema import EMA
from danling.training.model_states import ModelStates
from danling.training.preparation import ModelPreparation, NamedParameters
from danling.utils.messages import listed
from danling.utils.tensors import canonical_name

from . import engine as engines
from .checkpoints import EngineTag, HashingFiles, consolidated_optimizer, consolidated_weights
from .engine_config import uses_bf16_weights

if TYPE_CHECKING:
    from danling.runners.deepspeed_runner import DeepSpeedRunner


_ADDED = (
    "Expected an optimizer whose state is that of its parameters, to put the shares of ZeRO {stage} together. Received: {names} in its "
    "state_dict() in addition. Resume with the same stage and number of processes, or keep them in `state[parameter]`."
)


class ReachedParameters:
    """Which parameters got a gradient in the open window: an engine takes gradients away from them as they come."""

    def __init__(self) -> None:
        self._watches: dict[int, RemovableHandle] = {}
        self._ids: set[int] = set()
        self._has_stopped = False

    def watch(self, parameters: Iterable[nn.Parameter]) -> None:
        """Watch parameters that are not watched yet."""
        if self._has_stopped:
            return
        for parameter in parameters:
            if id(parameter) not in self._watches:
                watch = parameter.register_post_accumulate_grad_hook(self._note)  # type: ignore[no-untyped-call]
                self._watches[id(parameter)] = watch

    def begin(self) -> None:
        """Begin a window, in which no parameter has got a gradient yet."""
        self._ids.clear()

    def _note(self, parameter: Tensor) -> None:
        self._ids.add(id(parameter))

    @property
    def is_all(self) -> bool:
        """Whether all that are watched got a gradient."""
        return len(self._ids) == len(self._watches)

    @property
    def is_none(self) -> bool:
        """Whether none of them did."""
        return not self._ids

    def missing(self, named: NamedParameters) -> list[str]:
        """Return the names of those that are watched and trained and got none."""
        return [
            name
            for name, p in named
            if p.requires_grad and id(p) in self._watches and id(p) not in self._ids
        ]

    def stop(self) -> None:
        """Watch no parameter any more."""
        self._has_stopped = True
        for watch in self._watches.values():
            watch.remove()
        self._watches.clear()
        self._ids.clear()


class EnginePreparation(ModelPreparation):
    """The model in a DeepSpeed engine, which reduces gradients within the backward and may divide weights and optimizer.

    Until the engine is built, the model is as it is.
    """

    def __init__(self, runner: DeepSpeedRunner) -> None:
        super().__init__(runner.world, communication=f"stack={runner.stack!r}")
        self.runner = runner
        self.group_names: list[list[str]] = []
        """Names of the parameters in each group of the optimizer; none where DeepSpeed has built it."""
        self.trained: set[str] = set()
        """Names of the parameters that required a gradient when the engine was built."""
        self.reached = ReachedParameters()

    def wrap(
        self, model: nn.Module, options: Mapping[str, object], *, reduces_later: bool = False
    ) -> nn.Module:
        """Return the model as it is: the engine takes it together with the optimizer."""
        return model

    def held(self, parameter: Tensor) -> Tensor:
        # From stage 3 on a parameter is empty, and this rank's share of it an attribute. Shares are equally long: where the elements do
        # not divide, the last ones end in memory that has not been written.
        share = getattr(parameter, "ds_tensor", None)
        if share is None:
            return super().held(parameter)
        group = parameter.ds_process_group  # type: ignore[attr-defined]
        own = parameter.ds_numel - dist.get_rank(group) * share.numel()  # type: ignore[attr-defined]
        return super().held(share.flatten()[: max(own, 0)])

    def unwrap(self, model: object) -> Any:
        return model.module if model is not None and model is self.runner.engine else model  # type: ignore[attr-defined]

    def trainables_changed(self, model: nn.Module) -> bool:
        """Refuse parameters that were frozen or unfrozen since the engine was built, where it divides the optimizer."""
        stage = self.runner.engine_stage
        changed = sorted(self.trained ^ trained_names(model)) if stage else []
        if changed:
            raise ValueError(
                f"Expected the parameters that required a gradient when the engine was built, which are what ZeRO {stage} "
                f"divides. Received: {', '.join(changed[:5])} frozen or unfrozen since ({len(changed)} in all). Set "
                "deepspeed.zero_optimization.stage=0, or begin another run with them so in __init__, from these weights by `pretrained`."
            )
        return False

    def optimized_parameters(self, optimizer: Optimizer) -> list[nn.Parameter]:
        """Return the parameters that the engine updates, of which ZeRO's optimizer holds flat pieces. May be called on one rank."""
        if self.runner.engine is None:
            return super().optimized_parameters(optimizer)
        updated = {name for names in self.group_names for name in names} or self.trained
        return [parameter for name, parameter in self.runner.named_parameters() if name in updated]

    @contextmanager
    def whole_weights(self, model: nn.Module, *, modify: bool) -> Iterator[None]:
        with engines.gathered(self.runner.engine, modify=modify):
            yield
        if not modify:
            return
        # Under ZeRO 3, what the first rank has changed is broadcast where the weights are divided again.
        if self.runner.engine_stage < 3:
            for parameter in model.parameters():
                self.world.broadcast(parameter.data)
        if self.runner.engine_stage:
            # ZeRO updates its own float32 copy of the weights, which would otherwise overwrite these at the next update.
            self.runner.engine.optimizer.refresh_fp32_params()

    def broadcast_buffers(self, model: object, more: Sequence[Tensor] = ()) -> None:
        # Asked first: this is called in each window.
        if self.runner.data_domain.size > 1:
            for buffer in (*self.unwrap(model).buffers(), *more):
                self.world.broadcast(buffer)

    @property
    def evaluates_together(self) -> bool:
        return self.runner.engine_stage == 3 and self.world.size > 1

    @contextmanager
    def averaged(self, ema: EMA) -> Iterator[None]:
        applied = ema.applied()
        with engines.gathered(self.runner.engine, modify=True):
            applied.__enter__()
        try:
            yield
        finally:
            with engines.gathered(self.runner.engine, modify=True):
                applied.__exit__(None, None, None)

    def update_averages(self, ema: EMA, model: nn.Module) -> None:
        with self.whole_weights(model, modify=False):
            ema.update()

    def idle_settings(self) -> list[str]:
        """Return a sentence for every setting of the stack that has no effect in this run. May be called on one rank."""
        mode = self.runner.config.checkpoint.async_mode
        if mode not in ("async", "async_with_pinned_mem"):
            return []
        return [
            f"checkpoint.async_mode={mode!r} has no effect: an engine's save is finished when it returns."
        ]


def trained_names(model: nn.Module) -> set[str]:
    """Return the names of the parameters that require a gradient."""
    return {
        canonical_name(name)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def check_trainable(
    model: nn.Module, criterion: object, optimizer: object, stage: int, ranks: int = 1
) -> None:
    """Refuse what an engine would not train, or would train otherwise."""
    parameters = criterion.parameters() if isinstance(criterion, nn.Module) else ()
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if trained:
        raise ValueError(
            f"Expected a criterion without parameters to train: a DeepSpeed engine reduces and updates those of the model only. "
            f"Received: {type(criterion).__name__} with {len(trained)}. Make them part of the model, or freeze them."
        )
    not_real = [
        canonical_name(name)
        for name, each in model.named_parameters()
        if each.requires_grad and each.is_complex()
    ]
    if not_real:
        raise ValueError(
            f"Expected real parameters to train: a DeepSpeed engine reduces no complex gradient. Received: complex ones in "
            f"{listed(not_real)}. Keep torch.view_as_real(weight) as the parameter, or set stack='ddp'."
        )
    without_size = [
        canonical_name(name) for name, each in model.named_parameters() if each.ndim == 0
    ]
    if without_size and ranks > 1:
        raise ValueError(
            f"Expected parameters with a dimension: a DeepSpeed engine of several ranks sends them as bytes, which those without one have "
            f"no view of. Received: {listed(without_size)}. Give them the shape (1,), or set stack='ddp'."
        )
    tensors = (*model.named_parameters(), *model.named_buffers())
    wide = [canonical_name(name) for name, tensor in tensors if tensor.dtype is torch.float64]
    if wide:
        raise ValueError(
            f"Expected a model in float32, in which a DeepSpeed engine keeps weights and buffers. Received: float64 in "
            f"{listed(wide)}. Call self.model.float() in __init__ where that is precise enough, or set stack='ddp', "
            "which trains in float64."
        )
    # They read the rows and columns of a matrix, of which a flat piece has none.
    members = optimizer.optimizers if isinstance(optimizer, JointOptimizer) else (optimizer,)
    kinds = [type(each).__name__ for each in members]
    kind = next((name for name in kinds if name in ("Adafactor", "Muon", "ShardedMuon")), None)
    if stage and kind is not None:
        raise ValueError(
            f"Expected an optimizer that treats every element of a parameter alike, since ZeRO divides flat parameters. Received: "
            f"{kind} with deepspeed.zero_optimization.stage={stage}. Set the stage to 0, or choose another optimizer."
        )


class EngineModelStates(ModelStates):
    """Reads and writes the states of a model in an engine."""

    keeps_modes = False

    runner: DeepSpeedRunner

    def __init__(self, runner: DeepSpeedRunner) -> None:
        super().__init__(runner)
        self._tag_read: EngineTag | None = None

    # Saving

    def model_state(self) -> dict[str, Any]:
        with self.runner.whole_weights():
            state = super().model_state()
            if self.runner.engine_stage == 3:
                # Values of `get_extra_state` need not be tensors.
                tensors = {
                    name: value for name, value in state.items() if isinstance(value, Tensor)
                }
                state.update({name: value.detach().clone() for name, value in tensors.items()})
        if self.runner.engine is not None and uses_bf16_weights(self.runner.given_settings):
            # The weights that are trained; those of the model are rounded to bfloat16.
            full_parameter = import_module("deepspeed.utils").safe_get_full_fp32_param
            for name, parameter in self.runner.unwrapped_model.named_parameters(
                remove_duplicate=False
            ):
                weight = full_parameter(parameter) if parameter.requires_grad else None
                if weight is not None:
                    state[canonical_name(name)] = weight.detach().clone()
        return state

    def optimizer_state(self) -> dict[str, Any]:
        if not self.runner.engine_stage:
            return super().optimizer_state()
        engine = self.runner.engine
        added = engines.added_names(engine)
        if added:
            raise ValueError(
                _ADDED.format(stage=self.runner.engine_stage, names=", ".join(added[:5]))
            )
        state = {
            name: engines.full_state(engine, parameter)
            for name, parameter in self._trained().items()
        }
        return {
            "state": {name: entry for name, entry in state.items() if entry},
            "param_groups": self._named_groups(),
        }

    def outline(self) -> dict[str, Any]:
        """Return what the engine's files do not say by name: its stage and ranks, groups of parameters, and states that are no tensors."""
        place = {"stage": self.runner.engine_stage, "world_size": self.runner.world_size}
        if self.runner.optimizer is None:
            return place
        by_name = {"param_groups": self._named_groups()}
        if not self.runner.engine_stage:
            return {**place, **by_name, "scalars": {}}
        engine = self.runner.engine
        return {
            **place,
            **by_name,
            "scalars": engines.scalar_states(engine),
            "added": engines.added_names(engine),
        }

    def _named_groups(self) -> list[dict[str, Any]]:
        names = self.runner.preparation.group_names or [list(self._trained())]
        return [
            {**{key: value for key, value in group.items() if key != "params"}, "params": own}
            for group, own in zip(self.runner.optimizer.param_groups, names)
        ]

    def _trained(self) -> dict[str, nn.Parameter]:
        return {
            name: parameter
            for name, parameter in self.runner.named_parameters()
            if parameter.requires_grad
        }

    # Loading

    def opened(
        self, payload: Mapping[str, Any], excluded: ExcludedFromLoading
    ) -> Mapping[str, object]:
        """Return a payload in which components that are left out in part are by name, rather than a tag of the engine."""
        found = dict(payload)
        if excluded.parts_of("model") and isinstance(found.get("model"), EngineTag):
            found["model"] = self._whole(consolidated_weights, found["model"].path)
        if excluded.parts_of("optimizer") and isinstance(found.get("optimizer"), EngineTag):
            tag = found["optimizer"]
            if "optimizer.state" in excluded.entries:
                # Nothing of what the engine has written is needed.
                groups = [dict(group) for group in tag.outline["param_groups"]]
                found["optimizer"] = {"state": {}, "param_groups": groups}
            else:
                found["optimizer"] = self._whole(consolidated_optimizer, tag.path, tag.outline)
        return found

    def _whole(self, consolidated: Callable[..., object], *arguments: object) -> Any:
        """Return what the shares of all ranks are put together to."""
        trust = bool(self.runner.config.checkpoint.trust)
        return self.runner.checkpoint_manager.on_all(lambda: consolidated(*arguments, trust=trust))

    def load_model(self, state: Any, *, partial: bool = False) -> None:
        engine = self.runner.engine
        if isinstance(state, EngineTag):
            # The engine reads its own tag; one of another stage or number of ranks is put together and divided anew.
            same_ranks = (
                state.outline["world_size"] == self.runner.world_size or state.outline["stage"] == 0
            )
            if state.outline["stage"] == self.runner.engine_stage and same_ranks:
                whole = not self.runner.run_state.excluded.mentions("optimizer")
                files = HashingFiles(trust=bool(self.runner.config.checkpoint.trust))
                inner = self.runner.optimizer
                keeps_dtypes = (
                    nullcontext() if inner is None else own_dtypes(engine.basic_optimizer)
                )
                with engines.single_writer(engine, files), keeps_dtypes:
                    engine.load_checkpoint(
                        str(state.path.parent), tag=state.path.name, load_optimizer_states=whole
                    )
                self._tag_read = state
                return
            state = self._whole(consolidated_weights, state.path)
        with engines.gathered(engine, modify=True):
            super().load_model(state, partial=partial)
        if self.runner.engine_stage:
            engine.optimizer.refresh_fp32_params()

    def load_optimizer(self, state: Any) -> None:
        if isinstance(state, EngineTag) and state is self._tag_read:
            return
        if isinstance(state, EngineTag):
            added = state.outline.get("added")
            if added:
                raise CheckpointMismatch(
                    _ADDED.format(stage=state.outline["stage"], names=", ".join(added[:5]))
                )
            state = self._whole(consolidated_optimizer, state.path, state.outline)
        if not self.runner.engine_stage:
            super().load_optimizer(state)
            return
        # By name, since the order of groups and parameters may be another one.
        here = [group["params"] for group in self._named_groups()]
        names = [set(group["params"]) for group in state["param_groups"]]
        if sorted(map(sorted, names)) != sorted(map(sorted, here)):
            raise CheckpointMismatch(
                f"Expected the parameter groups of the checkpoint. Received: {len(here)} groups here, {len(names)} stored, "
                "divided otherwise. Restore optim.param_groups, or add 'optimizer' to checkpoint.exclude_from_loading."
            )
        for group, own in zip(self.runner.optimizer.param_groups, here):
            stored = state["param_groups"][names.index(set(own))]
            group.update({key: value for key, value in stored.items() if key != "params"})
        engines.load_full_states(
            self.runner.engine,
            [(p, state["state"].get(name, {})) for name, p in self._trained().items()],
        )
