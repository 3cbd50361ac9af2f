"""How a device mesh prepares the user's model: its weights in parts on the ranks, the states of these parts, and evaluation on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from danling.checkpoints.errors import CheckpointMismatch
from danling.data import derive_seed, seed_streams
from danling.distributed import Domain
from danling.optim.state import added_names
from danling.training import peek_target, unpack_batch
from danling.training.evaluation import EvaluationForward
from danling.training.keys import preserved_streams
from danling.training.model_states import ModelStates
from danling.training.preparation import ModelPreparation, NamedParameters
from danling.utils.messages import listed
from danling.utils.plain import flatten
from danling.utils.tensors import canonical_name, is_sharded, local_part, shard_like, whole

from .axes import axes_with
from .fsdp import reshard
from .pipeline import Pipeline
from .reduction import copied_axes, divided_axes, equalize, loss_context
from .topology import Topology
from .units import UnitOrder

if TYPE_CHECKING:
    from danling.runners.parallel_runner import ParallelRunner


class MeshPreparation(ModelPreparation):
    """The model as the ranks of a mesh hold it."""

    def __init__(self, runner: ParallelRunner) -> None:
        super().__init__(runner.world)
        self.topology = runner.topology
        self.pipeline = runner.pipeline_domain
        self.in_pipeline = self.topology.degree("pipeline") > 1
        self.config = runner.config
        self.recomputes = True
        """Whether the activations of some block are computed again in the backward, where that is asked for."""
        self.order: UnitOrder | None = None
        """What compares the ranks of FSDP2; `None` without the axis `shard`."""

    def forward_communicates(self, model: nn.Module) -> str | None:
        """Return which axes make a forward or a backward communicate; `None` where nothing does."""
        degrees = self.topology.axes.degrees
        active = [axis for axis in axes_with(forward_communicates=True) if degrees[axis] > 1]
        listed = ", ".join(f"parallel.axes.{axis}={degrees[axis]}" for axis in active)
        return listed or super().forward_communicates(model)

    def communicated_module(self) -> str:
        return self.order.last if self.order is not None else ""

    def held_part(self, tensor: Tensor) -> tuple[str, tuple[int, ...]]:
        """Return the axes that divide a tensor, and this rank's coordinates on them and on those that divide the model."""
        divided = divided_axes(tensor)
        axes = (*axes_with(cuts_modules=True), *divided)
        return ",".join(divided) or "whole", tuple(self.topology.coordinate[axis] for axis in axes)

    def place(self) -> tuple[Mapping[str, int], Mapping[str, int]]:
        """Return the coordinate of this rank on each axis of the mesh, and the degrees."""
        return self.topology.coordinate, self.topology.axes.degrees

    def whole_parameters(self, named: NamedParameters) -> dict[str, bool] | None:
        """Return all parameter names of the whole model and whether they are trained; `None` without a pipeline."""
        if self.topology.degree(*axes_with(cuts_modules=True)) == 1:
            return None
        mine = {name: parameter.requires_grad for name, parameter in named}
        return {
            name: value
            for part in self.pipeline.gather_objects(mine)
            for name, value in part.items()
        }

    @contextmanager
    def whole_weights(self, model: nn.Module, *, modify: bool) -> Iterator[None]:
        """Replace divided parameters by whole, plain ones; on exit the own ones are put back."""
        reshard(model)
        full: dict[nn.Parameter, nn.Parameter] = {}
        owners = [
            (m, name, p)
            for m in model.modules()
            for name, p in m._parameters.items()
            if p is not None
        ]
        for module, name, own in owners:
            if own not in full:
                full[own] = (
                    nn.Parameter(whole(own.detach()), own.requires_grad) if is_sharded(own) else own
                )
            # Not by `setattr`, which modules of FSDP override.
            module._parameters[name] = full[own]
        try:
            with torch.no_grad():
                yield
        finally:
            for module, name, own in owners:
                module._parameters[name] = own
        if modify:
            with torch.no_grad():
                equalize(self.topology, full.values())
                for own, value in full.items():
                    own.copy_(shard_like(value, own))

    def broadcast_buffers(self, model: Any, more: Sequence[Tensor] = ()) -> None:
        equalize(self.topology, [*model.buffers(), *more])

    @property
    def evaluates_together(self) -> bool:
        return self.topology.degree(*axes_with(divides_parameters=True, needs_transform=False)) > 1

    @contextmanager
    def evaluating(self, model: Any) -> Iterator[None]:
        """Let go of gathered parameters, which would hide that averaged weights come in and go out."""
        reshard(model)
        try:
            with self.order.compared() if self.order is not None else nullcontext():
                yield
        except BaseException:
            # Its own error is raised, also where FSDP2 of this torch cannot leave the forward: what comes next says so.
            with suppress(RuntimeError):
                reshard(model)
            raise
        reshard(model)

    def idle_settings(self) -> list[str]:
        """Return a sentence for every setting of the mesh that has no effect in this run. May be called on one rank."""
        changed = list(flatten(self.config.changed()))
        if self.config.parallel.activation_checkpointing or self.config.compile.enable:
            # Activation checkpointing and compilation work on blocks too.
            changed = [key for key in changed if key != "fsdp.blocks"]
        found = [
            f"{key} has no effect: parallel.axes.{axis} is 1."
            for prefix, axis in (("fsdp.", "shard"), ("parallel.pipeline_", "pipeline"))
            for key in changed
            if key.startswith(prefix) and self.topology.degree(axis) == 1
        ]
        if not self.recomputes:
            found.append(
                "parallel.activation_checkpointing has no effect: the model has no ModuleList whose layers could be computed again. Name "
                "classes or modules in fsdp.blocks."
            )
        return found


def initialize_weights(part: nn.Module, topology: Topology, *, seed: int, number: int = 0) -> None:
    """Call the model's `init_weights()`, else `reset_parameters()` of every module that directly owns parameters or buffers.

    Each coordinate, and each part of a rank by its `number`, draws from its own streams; copies are made equal afterwards.
    """
    # The seeds of a run depend on this order: modules first, then pieces of tensors.
    axes = [
        axis
        for cut in (True, False)
        for axis in axes_with(divides_parameters=True, cuts_modules=cut)
    ]
    own_seed = derive_seed(
        seed, "initialization", *(topology.coordinate[axis] for axis in axes), number
    )
    with preserved_streams(topology.device), torch.no_grad():
        seed_streams(own_seed, topology.device)
        whole = getattr(part, "init_weights", None)
        if callable(whole):
            whole()
            return
        owners = {name: m for name, m in part.named_modules() if m._parameters or m._buffers}
        silent = [
            name or type(m).__name__
            for name, m in owners.items()
            if not hasattr(m, "reset_parameters")
        ]
        if silent:
            raise ValueError(
                f"Expected a model that was built on the meta device to have `init_weights()`, or `reset_parameters()` on every module "
                f"with parameters. Received: none on {', '.join(silent[:5])}. Write it, or build the model on a real device."
            )
        for module in owners.values():
            module.reset_parameters()


def initialize_all(
    part: nn.Module, topology: Topology, initialize: Callable[[], object], *, loads: bool
) -> None:
    """Initialise a part that has just got its memory, and refuse tensors that stay unwritten. Call on all ranks.

    Memory is filled before, and what is found unchanged after the initialisation is filled otherwise and initialised once more: only what
    was not written is unchanged again. What ranks share counts on the rank that the others copy it from.

    Args:
        part: The model, or a part of it.
        topology: The mesh.
        initialize: Initialises the part, each time alike.
        loads: Whether weights are loaded afterwards; then only what is not loaded has to be written.
    """
    world = topology.optimizer
    saved = part.state_dict().keys() if loads else ()
    tensors = {
        canonical_name(name): local_part(tensor.detach())
        for name, tensor in (*part.named_parameters(), *part.named_buffers())
        if name not in saved
        and not any(topology.coordinate[axis] for axis in copied_axes(topology, tensor))
    }
    plain = {
        name: tensor
        for name, tensor in tensors.items()
        if type(tensor) is Tensor and tensor.layout is torch.strided
    }
    _fill(plain, 0)
    initialize()
    unchanged = {
        name: mask for name, tensor in plain.items() if (mask := _is_filled(tensor, 0)).any()
    }
    # All ranks or none: an initialisation may communicate.
    if not any(world.gather_objects(bool(unchanged))):
        return
    _fill({name: plain[name] for name in unchanged}, 1)
    initialize()
    unwritten = [
        name for name, mask in unchanged.items() if (mask & _is_filled(plain[name], 1)).any()
    ]
    names = list(dict.fromkeys(name for found in world.gather_objects(unwritten) for name in found))
    if names:
        raise ValueError(
            f"Expected a model from the meta device to write all of its tensors when it is initialised. Received: {listed(names)} with "
            "unwritten elements. Set them in `init_weights()`, or in `reset_parameters()` of their modules; buffers too."
        )


def _filling_of(tensor: Tensor, number: int) -> Any:
    """Return one of two values that an initialisation is unlikely to write: of integers any two that differ."""
    if tensor.is_floating_point() or tensor.is_complex():
        return (torch.nan, 0.0)[number]
    return (True, False)[number] if tensor.dtype is torch.bool else (93, 41)[number]


@torch.no_grad()
def _fill(tensors: Mapping[str, Tensor], number: int) -> None:
    for tensor in tensors.values():
        tensor.fill_(_filling_of(tensor, number))


def _is_filled(tensor: Tensor, number: int) -> Tensor:
    value = (
        tensor.float() if tensor.is_floating_point() else tensor
    )  # eight bits have no comparisons
    filling = _filling_of(tensor, number)
    return value != value if filling != filling else value == filling


class MeshForward(EvaluationForward):
    """Evaluates and predicts single batches on a model that is divided over a mesh.

    In a pipeline, predictions and losses are on the ranks with the last stage.
    """

    runner: ParallelRunner

    def evaluate(self, data: object) -> tuple[Any, Tensor | None]:
        """Return the prediction of a batch, whole on every rank that has one, and its loss."""
        runner, pipeline = self.runner, self.runner.pipeline
        # With an answer, a step of the program runs on what the stages have computed already.
        if pipeline is None or runner.model.answer is not None:
            with loss_context(runner.topology):
                pred, loss = super().evaluate(data)
            return whole_tensors(pred), loss
        pred = self._through_stages(pipeline, data)
        if not runner.stage_plan.has_last:
            return pred, None
        with loss_context(runner.topology), runner.forward_context() or nullcontext():
            loss = runner.evaluated_loss(pred, peek_target(data))
        return whole_tensors(pred), loss

    def infer(self, data: object) -> Any:
        pipeline = self.runner.pipeline
        return whole_tensors(
            super().infer(data) if pipeline is None else self._through_stages(pipeline, data)
        )

    def _through_stages(self, pipeline: Pipeline, data: object) -> Any:
        pipeline.open(unpack_batch(data)[0] if self.runner.stage_plan.has_first else None)
        with self.runner.forward_context() or nullcontext():
            return pipeline.evaluate()

    def counted(self, predictions: list[Any]) -> list[Any]:
        """Return the predictions of a batch on the ranks with the last stage; the others have made none."""
        return (
            predictions if self.runner.pipeline is None or self.runner.stage_plan.has_last else []
        )

    def shared(self, predictions: list[Any]) -> list[Any]:
        """Return the predictions of a split on all stages, from the rank with the last one."""
        pipeline = self.runner.pipeline
        if pipeline is None:
            return predictions
        gathered: list[Any] = pipeline.domain.broadcast_object(
            predictions, source=pipeline.last_rank
        )
        return gathered


def whole_tensors(pred: object) -> Any:
    """Return a prediction whose tensors are whole on this rank."""
    return torch.utils._pytree.tree_map(
        lambda value: whole(value) if isinstance(value, Tensor) else value, pred
    )


def rebind_optimizer(
    optimizer: Any,
    names: Mapping[int, str],
    model: nn.Module,
    kept: Iterable[nn.Parameter],
    *,
    pipeline: Domain,
) -> None:
    """Point an optimizer that the user made at the parameters that have replaced its own, by name."""
    if optimizer.state:
        raise ValueError(
            "Expected an optimizer without a state at the end of __init__: the parallel stack replaces the parameters it was made for. "
            f"Received: a {type(optimizer).__name__} that has stepped. Let the runner restore it from a checkpoint."
        )
    now = {canonical_name(name): parameter for name, parameter in model.named_parameters()}
    known = {id(parameter) for parameter in kept}
    trained = 0
    for group in optimizer.param_groups:
        # A parameter of another stage has no successor here.
        # One that the model has not, such as of the criterion, stays.
        found = [now.get(names[id(p)]) if id(p) in names else p for p in group["params"]]
        group["params"] = [p for p in found if p is not None]
        trained += sum(id(p) in known for p in group["params"])
    if not sum(pipeline.gather_objects(trained)):
        raise ValueError(
            f"Expected an optimizer over parameters of the model. Received: a {type(optimizer).__name__} that would train "
            "nothing. Make it over self.model.parameters(), after the model is complete, or set `optim.type` and let the runner "
            "build it."
        )
    keep_kinds_apart(optimizer)


def keep_kinds_apart(optimizer: Any) -> None:
    """Update parameters one by one where those of a group are on different meshes, since one call cannot take them together."""
    for group in optimizer.param_groups:
        kinds = {p.device_mesh if is_sharded(p) else None for p in group["params"]}
        if len(kinds) > 1:
            for option in ("foreach", "fused"):
                if option in group:
                    group[option] = False


class ShardedModelStates(ModelStates):
    """Reads and writes this rank's parts of a model."""

    keeps_modes = False

    runner: ParallelRunner

    def paths(self) -> list[str]:
        # An entry of checkpoint.exclude_from_loading may name a layer of another stage.
        return sorted(
            {
                path
                for paths in self.runner.pipeline_domain.gather_objects(super().paths())
                for path in paths
            }
        )

    def load_model(self, state: Mapping[str, object], *, partial: bool = False) -> None:
        super().load_model(self._share_of(state, self.model_state()), partial=partial)

    def load_ema(self, state: Mapping[str, Any], *, partial: bool = False) -> None:
        weights = self._share_of(state["weights"], self.averages().weights)
        super().load_ema({**state, "weights": weights}, partial=partial)

    def optimizer_state(self) -> dict[str, Any]:
        state = super().optimizer_state()
        groups = self._whole_groups(state["param_groups"])
        named = [{**group, "params": names} for group, names in zip(state["param_groups"], groups)]
        added = added_names(self.runner.optimizer) if self.runner.pipeline_domain.size > 1 else []
        if added:
            raise ValueError(
                "Expected an optimizer whose state is that of its parameters, since the stages of a pipeline have different ones. "
                f"Received: {', '.join(added[:5])} in its state_dict() in addition. Keep them in `state[parameter]`, or train without "
                "parallel.axes.pipeline."
            )
        return {**state, "param_groups": named}

    def load_optimizer(self, state: Mapping[str, Any]) -> None:
        here = dict(self.runner.named_parameters())
        mine = super().optimizer_state()["param_groups"]
        stored = [group_of(state["param_groups"], names) for names in self._whole_groups(mine)]
        groups = [{**match, "params": group["params"]} for match, group in zip(stored, mine)]
        values = {
            name: {key: laid_out(value, here[name]) for key, value in entry.items()}
            for name, entry in state["state"].items()
            if name in here
        }
        super().load_optimizer({**state, "state": values, "param_groups": groups})
        # A stage whose parameters are on one mesh may have written how its group is stepped.
        keep_kinds_apart(self.runner.optimizer)

    def template(self) -> dict[str, Any]:
        """Return a state that says how tensors are laid out on this rank: one reads its own shards of a checkpoint."""
        template: dict[str, Any] = {"model": self.model_state()}
        averages = self.runner.ema
        if averages is not None:
            template["ema"] = {"weights": dict(averages.weights)}
        if self.runner.optimizer is not None:
            # Moments are divided as their parameters are.
            template["optimizer"] = {"state": dict(self.runner.named_parameters())}
        return template

    def _share_of(
        self, state: Mapping[str, object], here: Mapping[str, object]
    ) -> dict[str, object]:
        """Return the entries of a whole model that this rank holds, laid out as they are here; names that no rank holds stay."""
        elsewhere = (
            set().union(*self.runner.pipeline_domain.gather_objects(set(here))) - here.keys()
        )
        return {
            name: laid_out(value, here.get(name))
            for name, value in state.items()
            if name not in elsewhere
        }

    def _whole_groups(self, groups: Sequence[Mapping[str, Any]]) -> list[list[str]]:
        """Return the names of the parameters of each group on all ranks of the pipeline together."""
        mine = [list(group["params"]) for group in groups]
        parts = self.runner.pipeline_domain.gather_objects(mine)
        return [
            sorted({name for part in parts for name in part[index]}) for index in range(len(mine))
        ]


def group_of(stored: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Mapping[str, object]:
    """Return the stored group of an optimizer that holds the parameters of these names and no others."""
    for group in stored:
        if set(group["params"]) == set(names):
            return group
    raise CheckpointMismatch(
        f"Expected optimizer state of this model's parameters, grouped as here. Received: {len(stored)} groups, none of which has "
        f"{list(names[:5])} and nothing else. Restore optim.param_groups and the model, or add 'optimizer' to "
        "checkpoint.exclude_from_loading to start with a new state."
    )


def laid_out(value: object, like: object) -> Any:
    """Return a whole tensor in the layout that another one of its shape has here; anything else as it is."""
    if isinstance(value, Tensor) and isinstance(like, Tensor) and value.shape == like.shape:
        return shard_like(value, like)
    return value
