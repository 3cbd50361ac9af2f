"""Training on a device mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from danling.checkpoints import CheckpointManager, FileCheckpointManager
from danling.checkpoints.reading import manager_named
from danling.data import PLACEHOLDER, Packed
from danling.distributed import Domain, Placement
from danling.mesh import AXES, Topology, axes_with
from danling.mesh.fsdp import find_blocks, shard
from danling.mesh.model_parts import (
    ModelParts,
    check_meta,
    choose_parts,
    is_meta,
    materialize,
    recompute_blocks,
    recomputes,
    take_part,
)
from danling.mesh.pipeline import Pipeline, StagePlan
from danling.mesh.preparation import (
    MeshForward,
    MeshPreparation,
    ShardedModelStates,
    initialize_all,
    initialize_weights,
    keep_kinds_apart,
    rebind_optimizer,
)
from danling.mesh.reduction import (
    CanonicalMeshReduction,
    CanonicalReduceScatter,
    MeshReduction,
    check_built_alike,
    equalize,
    equalize_built,
    exchange_shards,
    mesh_axes,
)
from danling.mesh.units import UnitOrder
from danling.optim import JointOptimizer
from danling.training import (
    GradientReduction,
    PassAgreement,
    count_samples,
    peek_target,
    unpack_batch,
)
from danling.training.batch_weights import shifts_labels
from danling.training.batches import (
    align_labels,
    aligned_labels,
    call_model,
    takes_aligned_labels,
)
from danling.training.model_states import ModelStates
from danling.utils.hooks import is_overridden
from danling.utils.tensors import floating_dtype

from .direct_calls import prepared
from .torch_runner import TorchRunner


class ParallelRunner(TorchRunner):
    """Trains on a mesh of processes: FSDP2, HSDP, tensor, context, pipeline and expert parallelism, in any combination.

    `parallel.axes` has the degrees; their product is the number of processes. A script for `TorchRunner` runs unchanged as
    long as the model can be cut along the axes that are asked for: `replicate` and `shard` need nothing, `pipeline` a model that is a
    chain of modules, `context`, `tensor`, `expert` and `expert_tensor` a method `parallelize(topology)`.

    Construct and train on all ranks.

    Examples:
        >>> runner = MyRunner({"stack": "parallel", "parallel.axes.shard": 4, "steps": 100})  # doctest: +SKIP
    """

    stack = "parallel"
    _initialized = 0

    topology: Topology
    parallel_context: Topology
    """What `parallelize` gets: the topology."""
    pipeline_domain: Domain
    preparation: MeshPreparation
    pipeline: Pipeline | None = None
    _exchanges: Sequence[CanonicalReduceScatter] = ()
    _handed_on: list[Tensor] | None = None
    """Scaled losses of the open pipeline micro-batch; `None` where a backward runs at once."""

    # Place

    def build_placement(self) -> Placement:
        self.topology = self.parallel_context = self.build_topology()
        if not isinstance(self.topology, Topology):
            raise _returned_nothing(
                "build_topology", "the place of this rank on the mesh", self.topology
            )
        settings = self.config.parallel
        self.stage_plan = StagePlan.of(
            self.topology.axes,
            rank=self.rank,
            schedule=settings.pipeline_schedule,
            listed=len(settings.module_fqns_per_model_part or ()),
        )
        if self.topology.axes.active:
            # Closing drops the model before its groups, and after the parts that close first: saves in the background read it.
            self._parts.closers.callback(self._forget)
        self.init_model_parallel_groups()
        self.pipeline_domain = self.topology.domain("pipeline")
        has_first, has_last = self.stage_plan.has_first, self.stage_plan.has_last
        return self.topology.placement(reads_data=has_first or has_last, has_loss=has_last)

    def build_topology(self) -> Topology:
        """Return the place of this rank on the parallel axes; override it for your own mesh."""
        degrees = {name: int(self.config.parallel.axes[name]) for name in AXES}
        # `fsdp.enabled` without a degree means all ranks.
        if self.config.fsdp.enabled and all(degree == 1 for degree in degrees.values()):
            degrees["shard"] = -1
        return Topology(
            degrees, device=self.device, mesh_device_type=self.config.parallel.mesh_device_type
        )

    def init_model_parallel_groups(self) -> None:
        """Override it to make more process groups, right after the mesh is built; the default makes none."""

    def build_preparation(self) -> MeshPreparation:
        if "topology" not in vars(self):
            raise ValueError(
                "Expected `build_placement` to build the mesh. Received: none. Call super().build_placement() in it."
            )
        return MeshPreparation(self)

    # Model

    def materialize_model(self) -> None:
        """Cut, transform, checkpoint, compile, shard and initialise the model, in this order."""
        is_cut = self.topology.degree("pipeline") > 1
        # The optimizer of the program holds these parameters, which cutting and sharding replace.
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        check_meta(self.model)
        self._check_offload()
        self._check_labels()
        self._check_micro_batches()
        cuts_whole = is_cut and not is_overridden(self, "build_pipeline_model_parts")
        # Before the first collective over the weights, which would mix or wait for tensors of other shapes.
        check_built_alike(self.topology, self.model, before_cut=cuts_whole)
        if cuts_whole:
            equalize_built(self.topology, self.model, before_cut=True)
        parts = self.build_pipeline_model_parts() if is_cut else [self.model]
        number = len(self.stage_plan.indices)
        if (
            not isinstance(parts, Sequence)
            or [isinstance(part, nn.Module) for part in parts] != [True] * number
        ):
            raise _returned_nothing(
                "build_pipeline_model_parts", f"a list of {number} model parts", parts
            )
        for part in parts:
            # Tensors without memory get it on the device later, in `_place`, once they are cut to
            # their shards.
            if not is_meta(part):
                part.to(self.device)
            if any(self.topology.degree(axis) > 1 for axis in axes_with(needs_transform=True)):
                self.parallelize_model(part)
        self._check_divided(parts)
        for part in parts:
            self._place(part)
        asked = self.config.parallel.activation_checkpointing and not is_overridden(
            self, "apply_activation_checkpointing"
        )
        # All stages need one answer, and a stage may have no block that is computed again.
        wraps = any(self.pipeline_domain.gather_objects(recomputes(parts)))
        self.preparation.recomputes = wraps or not asked
        self.model = ModelParts(parts) if is_cut else parts[0]
        if isinstance(self.criterion, nn.Module):
            if is_cut and any(True for _ in self.criterion.parameters()):
                raise ValueError(
                    "Expected a criterion without parameters in a pipeline: only the last stage computes the loss. Received: "
                    f"{type(self.criterion).__name__}. Make its parameters part of the model's last module."
                )
            self.criterion.to(self.device)
        whole = {id(p): p for _, p in self.named_parameters()}
        equalize(self.topology, [*whole.values(), *self.model.buffers()])
        if self.optimizer is not None:
            rebind_optimizer(
                self.optimizer, names, self.model, whole.values(), pipeline=self.pipeline_domain
            )
        if self.topology.degree("shard") > 1:
            self.preparation.order = UnitOrder(self.model, self.topology)
            self.preparation.extra_reductions.append(self.preparation.order)
            self._parts.session.observers.append(self.preparation.order)
        if self._parts.canonical is not None:
            self._exchanges = exchange_shards(self.model, self._parts.canonical)
        # Only now: the average begins as a copy of shards whose values all ranks agree on.
        self._build_ema()
        if is_cut:
            self.pipeline = self.bind_pipeline_modules(parts)
            if not isinstance(self.pipeline, Pipeline):
                raise _returned_nothing(
                    "bind_pipeline_modules", "the pipeline that runs the parts", self.pipeline
                )

    def _check_micro_batches(self) -> None:
        """Refuse a setting that no full batch can be cut by; the last batch of an epoch is cut as it comes."""
        settings = self.config.parallel
        if self.topology.degree("pipeline") == 1 or self.batch_size is None:
            return
        for split in self.train_splits:
            division = self._parts.data.division(split)
            if division is not None and not division.is_even:
                raise ValueError(
                    f"Expected dataloader.global_batch_size to divide into equal micro-batches in a pipeline, whose batches have one size. "
                    f"Received: dataloader.global_batch_size={division.samples} over {division.world_size} data replicas x "
                    f"{division.micro_batches} micro-batches for split {split!r}. Choose a multiple of "
                    f"{division.world_size * division.micro_batches}, or change accum_steps or dataloader.micro_batch_size."
                )
        name = (
            "pipeline_microbatch_size"
            if settings.pipeline_n_microbatches is None
            else "pipeline_n_microbatches"
        )
        if self.batch_size % settings[name]:
            raise ValueError(
                f"Expected the batch size to be a multiple of parallel.{name}. Received: batch_size={self.batch_size}, "
                f"parallel.{name}={settings[name]}. Change either."
            )

    def _check_offload(self) -> None:
        """Refuse to initialise shards in host memory under a mesh of accelerators."""
        is_loaded = bool(self.config.resume or self.config.pretrained)
        if not is_meta(self.model) or is_loaded or is_overridden(self, "initialize_part"):
            return
        is_offloaded = self.topology.degree("shard") > 1 and self.build_offload_policy() is not None
        # A random operation of DTensor on such a shard puts the stream of the CPU back afterwards, so that all draw the same numbers.
        if is_offloaded and self.device.type != "cpu":
            raise ValueError(
                "Expected a model that has weights, since fsdp.offload_policy keeps the shards in host memory, where torch initialises all "
                "parameters with the same random numbers. Received: a model on the meta device. Build it on a real device, load weights "
                "with pretrained, or override `initialize_part` and draw on `to_local()` of each parameter."
            )

    def _place(self, part: nn.Module) -> None:
        self.apply_activation_checkpointing(part)
        if self.config.compile.enable:
            # Block by block: one graph serves all, and FSDP's hooks stay outside.
            self.compile_modules(self._blocks(part) or [part])
        if self.topology.degree("shard") > 1:
            equalize_built(self.topology, part)
            # A mesh with both axes makes FSDP2 add over the replicas as well: HSDP.
            mesh, blocks = self.topology.mesh("replicate", "shard"), self._blocks(part)
            assert mesh is not None
            for root in self._sharded_roots(part):
                inner = set(root.modules()) - {root}
                shard(
                    root,
                    mesh,
                    [block for block in blocks if block in inner],
                    **(self.fsdp_kwargs() or {}),
                )
        if is_meta(part):
            materialize(part, self.device)
            number = self._initialized

            def initialize() -> None:
                # The second call, see `initialize_all`, must draw the same numbers.
                self._initialized = number
                self.initialize_part(part)

            loads = bool(self.config.resume or self.config.pretrained)
            initialize_all(part, self.topology, initialize, loads=loads)

    def _sharded_roots(self, part: nn.Module) -> list[nn.Module]:
        """Return the modules that FSDP2 gathers separately: the whole model, or, for optimizers by name, each network of it."""
        of_phases = isinstance(self.optimizer, JointOptimizer) and self.optimizer.named
        if not of_phases or any(True for _ in part.parameters(recurse=False)):
            return [part]
        return [child for child in part.children() if any(True for _ in child.parameters())]

    def _blocks(self, part: nn.Module) -> list[nn.Module]:
        """Return the modules of a part that are sharded, compiled and recomputed one by one."""
        wanted = self.config.fsdp.blocks
        if wanted is not None and self.topology.degree("pipeline") > 1:
            # Other stages have other blocks.
            present = {name for name, _ in part.named_modules()} | {
                type(module).__name__ for module in part.modules()
            }
            wanted = [name for name in wanted if name in present]
        return list(find_blocks(part, wanted).values())

    def parallelize_model(self, model: nn.Module) -> None:
        """Apply tensor, context and expert parallelism to a model, or to one of its pipeline parts, in place.

        The default calls `model.parallelize(topology)`. A divided parameter must become a DTensor over the mesh of its axis
        (`topology.mesh("tensor")`); a plain parameter is taken as the same on all ranks of these axes, where every rank must
        compute its whole gradient.
        """
        transform = getattr(model, "parallelize", None)
        if not callable(transform):
            active = ", ".join(
                f"{axis}={self.topology.degree(axis)}"
                for axis in axes_with(needs_transform=True)
                if self.topology.degree(axis) > 1
            )
            raise ValueError(
                f"Expected a model that knows how to be divided over {active}. Received: {type(model).__name__} without a method "
                "`parallelize(topology)`. Write one, or override `parallelize_model`."
            )
        transform(self.parallel_context)

    def _check_divided(self, parts: Sequence[nn.Module]) -> None:
        """Refuse an axis over which nothing was divided: its ranks would all do the same work."""
        wanted = [
            axis
            for axis in axes_with(divides_parameters=True, needs_transform=True)
            if self.topology.degree(axis) > 1
        ]
        if not wanted:
            return
        mine = {
            axis
            for part in parts
            for parameter in part.parameters()
            for axis in mesh_axes(parameter)
        }
        # A stage may have nothing to divide where another one has.
        found = set().union(*self.pipeline_domain.gather_objects(mine))
        whole = [axis for axis in wanted if axis not in found]
        if whole:
            hook = (
                "parallelize_model" if is_overridden(self, "parallelize_model") else "parallelize"
            )
            raise ValueError(
                f"Expected `{hook}` to divide parameters over {', '.join(whole)}. Received: a model none of whose parameters is a "
                f"DTensor over the mesh of {whole[0]!r}; {self.topology.axes.describe()}. Divide some, or set the degree to 1."
            )

    def apply_activation_checkpointing(self, part: nn.Module) -> None:
        """Wrap the blocks of a model part when `parallel.activation_checkpointing`, so that their activations are computed again.

        The blocks are those of FSDP: the layers of every `ModuleList`, or what `fsdp.blocks` names.
        """
        if self.config.parallel.activation_checkpointing:
            recompute_blocks(part, self._blocks(part), compiled=self.config.compile.enable)

    # FSDP

    def fsdp_kwargs(self) -> dict[str, Any]:
        """Return the arguments of `fully_shard`; override it to add some.

        In a pipeline the gathered parameters stay until the backward.
        """
        kwargs: dict[str, Any] = {
            "mp_policy": self.build_mixed_precision_policy() or MixedPrecisionPolicy()
        }
        offload = self.build_offload_policy()
        if offload is not None:
            kwargs["offload_policy"] = offload
        reshard = self.config.fsdp.reshard_after_forward
        if self.topology.degree("pipeline") > 1:
            if reshard:
                # Replicas with other numbers of micro-batches would wait for ever, and zero-bubble schedules give wrong gradients.
                raise ValueError(
                    "Expected fsdp.reshard_after_forward to be false or unset in a pipeline, where each micro-batch would gather all "
                    f"parameters again. Received: fsdp.reshard_after_forward={reshard!r}, {self.topology.axes.describe()}. Unset it."
                )
            reshard = False
        if reshard is not None:
            kwargs["reshard_after_forward"] = reshard
        return kwargs

    def build_mixed_precision_policy(self) -> MixedPrecisionPolicy:
        """Return the policy of `fsdp.mp_policy`: a policy, or a mapping of its fields with dtypes by name."""
        given = self.config.fsdp.mp_policy or {}
        if isinstance(given, MixedPrecisionPolicy):
            return given
        known = [field.name for field in fields(MixedPrecisionPolicy)]
        if not isinstance(given, Mapping) or any(name not in known for name in given):
            raise ValueError(
                f"Expected fsdp.mp_policy to be a mapping with keys out of {known}. Received: {given!r}."
            )
        policy: dict[str, Any] = {
            name: floating_dtype(value, key=f"fsdp.mp_policy.{name}")
            if isinstance(value, str)
            else value
            for name, value in given.items()
        }
        return MixedPrecisionPolicy(**policy)

    def build_offload_policy(self) -> OffloadPolicy | None:
        """Return the policy of `fsdp.offload_policy`: a policy, or `"cpu"`, which keeps shards in host memory."""
        given = self.config.fsdp.offload_policy or None
        if given is None or isinstance(given, OffloadPolicy):
            return given
        if given is not True and str(given).lower() != "cpu":
            raise ValueError(
                f"Expected fsdp.offload_policy to be 'cpu' or none. Received: fsdp.offload_policy={given!r}."
            )
        # Only a machine with an accelerator has pinned memory.
        return CPUOffloadPolicy(pin_memory=self.device.type != "cpu")

    def initialize_part(self, part: nn.Module) -> None:
        """Give weights to a model, or a part, that was built on the meta device.

        The default calls the model's `init_weights()`, else `reset_parameters()` of every module that has parameters or buffers of
        its own. Each coordinate draws from its own streams; copies are made equal afterwards.
        """
        initialize_weights(part, self.topology, seed=self.seed, number=self._initialized)
        self._initialized += 1

    # Pipeline

    def build_pipeline_model_parts(self) -> list[nn.Module]:
        """Return the model parts of this rank, one a stage; override it for your own builder.

        Their parameters must be named as in the whole model, since checkpoints are written under these names.
        """
        listed = self.config.parallel.module_fqns_per_model_part
        self._part_names = choose_parts(self.model, self.stage_plan.number, listed)
        return [self.build_pipeline_model_part(stage) for stage in self.stage_plan.indices]

    def build_pipeline_model_part(self, stage: int) -> nn.Module:
        """Return the model of one stage: the modules of other stages become `nn.Identity`.

        So the model's `forward` must be a chain of its modules, each of which takes what the one before it returned.
        """
        return take_part(self.model, self._part_names[stage], keep=len(self.stage_plan.indices) > 1)

    def build_pipeline_schedule(self) -> Any:
        """Return the schedule class of `parallel.pipeline_schedule`."""
        return self.stage_plan.schedule

    def bind_pipeline_modules(self, parts: Sequence[nn.Module]) -> Pipeline:
        """Return the pipeline that runs model parts as stages."""
        schedule = self.build_pipeline_schedule()
        if schedule is None:
            raise _returned_nothing(
                "build_pipeline_schedule", "a schedule class of torch.distributed.pipelining", None
            )
        return Pipeline(self, self._parts.keys, parts, schedule)

    # Optimizer

    def build_optimizer(self) -> Optimizer:
        """Return the optimizer of `config.optim` over the parameters of this rank, each once."""
        optimizer = super().build_optimizer()
        keep_kinds_apart(optimizer)
        return optimizer

    def manager_class(self) -> Callable[..., CheckpointManager]:
        """Return the class of the checkpoint manager: DCP by default; files only where every rank holds the whole model."""
        asked = self.config.checkpoint.backend
        manager = manager_named("dcp" if asked == "auto" else asked)
        if not issubclass(manager, FileCheckpointManager):
            return manager
        if self.topology.axes.world_size != self.topology.degree(
            *axes_with(divides_parameters=False)
        ):
            raise ValueError(
                f"Expected checkpoint.backend='dcp' where parameters are divided. Received: checkpoint.backend={asked!r}, "
                f"{self.topology.axes.describe()}. Unset it; the export of the weights, checkpoint.last_save_model_only, can be converted "
                "by `python -m torch.distributed.checkpoint.format_utils dcp_to_torch`."
            )
        return manager

    def build_model_states(self) -> ModelStates:
        return ShardedModelStates(self)

    # Data

    def to_device(self, data: Any) -> Any:
        """Return this rank's share of a batch, on its device; a placeholder stays one."""
        if data is PLACEHOLDER:
            return data
        data = super().to_device(data)
        if self.topology.degree("context") == 1:
            return data
        if isinstance(data, Mapping) and self._model_shifts_labels(data):
            data = align_labels(data)
        return self.split_context(data)

    def _model_shifts_labels(self, data: Mapping[str, Any]) -> bool:
        """Return whether the model compares each position with the label of the next one, which may be on the next rank."""
        if self.criterion is not None or self._parts.loss.own_loss:
            return False
        shifts = self.shifts_labels
        if shifts is None:
            shifts = shifts_labels(self.unwrapped_model)
        labels = peek_target(data)
        is_open = isinstance(labels, Tensor) and labels.ndim == 2 and not labels.is_floating_point()
        if shifts is None and is_open and aligned_labels(data) is None:
            raise ValueError(
                "Expected to know whether the loss that the model returns compares each position with the label of the next one, which "
                f"may be on the next rank of parallel.axes.context. Received: a {type(self.unwrapped_model).__name__}, which does not say. "
                "Set `shifts_labels` to True or False on the runner or the model."
            )
        return bool(shifts)

    def _check_labels(self) -> None:
        """Refuse a loss that shifts labels after sequences are cut: it would lose the label at each edge."""
        if self.topology.degree("context") == 1:
            return
        own_loss = self.criterion is not None or self._parts.loss.own_loss
        shifts = self.shifts_labels
        if shifts is None and not own_loss:
            shifts = shifts_labels(self.model)
        if shifts and (own_loss or not takes_aligned_labels(self.model)):
            whose = (
                "a criterion or compute_loss"
                if own_loss
                else f"a {type(self.model).__name__} without that parameter"
            )
            raise ValueError(
                "Expected a loss that takes shifted labels with parallel.axes.context: shifting a slice of a sequence would lose the label "
                f"at its edge. Received: shifts_labels=True with {whose}. Give the model's `forward` a parameter `shift_labels`, which it "
                "compares with each position as they are, or shift the targets in the dataset and set shifts_labels=False."
            )
        packed = [
            name
            for name, each in self.datasets.items()
            if isinstance(each, Packed) and "labels" in each.fields
        ]
        if packed and own_loss and self.shifts_labels is None:
            raise ValueError(
                "Expected targets that are shifted already with parallel.axes.context: shifting a slice of a sequence would lose the label "
                f"at its edge. Received: labels of dl.data.Packed, which are not shifted, for split {packed[0]!r} with a criterion or "
                "compute_loss. Shift them in the dataset, and set shifts_labels=False on the runner."
            )

    def split_context(self, data: Any) -> Any:
        """Return this rank's stretch of every sequence; override it where dimension 1 is not the sequence."""

        def stretch(value: Any) -> Any:
            if not isinstance(value, Tensor) or value.ndim < 2:
                return value
            length = self.topology.axes.share(value.shape[1], "context", what="the sequence length")
            return value.narrow(1, length * self.topology.coordinate["context"], length)

        # Trees know no other mapping than a plain one, such as the batch of a tokenizer.
        plain = dict(data) if isinstance(data, Mapping) else data
        return tree_map(stretch, plain)

    def build_agreement(self) -> PassAgreement:
        return PassAgreement(
            self.placement.optimizer,
            self.data_domain,
            blind=self.pipeline is not None and self.pipeline.has_blind_ranks,
            collective_forward=self.topology.degree(*axes_with(forward_communicates=True)) > 1,
        )

    # One update

    def build_reduction(self) -> GradientReduction:
        canonical = self._parts.canonical
        return (
            MeshReduction(self)
            if canonical is None
            else CanonicalMeshReduction(self, canonical, self._exchanges)
        )

    def train_step(self, data: Any) -> tuple[Any, Tensor]:
        """Run one micro-batch forward and backward. See `TorchRunner.train_step`.

        In a pipeline the runner calls this method, or your override, on the last stage: once for each micro-batch of the schedule, and
        `self.model` then returns what the stages have computed. On the first stage it runs as far as the call of `self.model`, to find the
        input; on other stages it does not run. Called alone, on all ranks, it returns the output of the whole batch and its loss on the
        ranks with the last stage, `(None, 0)` elsewhere.
        """
        if self.pipeline is None:
            return super().train_step(data)
        if not self._parts.session.in_step:
            # Called by a program, and not by a loop of the library.
            returned: tuple[Any, Tensor] = prepared(
                self, "train_step", partial(ParallelRunner.train_step, self), data
            )
            return returned
        # The contexts of forward and backward are around the schedule.
        inputs, target = unpack_batch(data)
        pred = call_model(self.model, inputs)
        loss = self.compute_loss(pred, target)
        self.backward(loss)
        return pred, loss

    def _run_train_step(self, step: Callable[[Any], Any], data: Any) -> Any:
        pipeline = self.pipeline
        if pipeline is None:
            return step(data)
        with self._stages_run("train_step"):
            return self._train_in_pipeline(pipeline, step, data)

    def _stages_run(self, name: str) -> AbstractContextManager[None]:
        """Return the context in which the schedule runs a step of the user's, on the first stage and on the last one only."""
        calls = self._parts.calls
        if calls is None:
            return nullcontext()
        return calls.refusing(
            f"to be called by all ranks. Received: a call in {name}, which a pipeline runs on its first stage and its last one. Call it "
            "between two updates, such as in on_pass_start or in a loop around train_steps."
        )

    def _train_in_pipeline(self, pipeline: Pipeline, step: Callable[[Any], Any], data: Any) -> Any:
        window, weight = self.window, self.window.current
        pipeline.open(self._inputs(step, data))
        window.expect_no_loss()  # the loss comes with the last stage
        shares = self._shares(data) if self.stage_plan.has_last else []
        before = window.loss

        def loss_of(output: Any, place: int) -> Tensor:
            if place >= len(shares):
                # Padding: a loss without a gradient.
                leaves = [
                    leaf
                    for leaf in tree_leaves(output)
                    if isinstance(leaf, Tensor) and leaf.requires_grad
                ]
                return sum(
                    (leaf.sum() * 0.0 for leaf in leaves), torch.zeros((), device=self.device)
                )
            chunk, weight_of_chunk = shares[place]
            window.set_current(weight_of_chunk)
            window.cut(output)
            self._handed_on = []
            pipeline.seed_step(place, opened=True)
            self.model.output_is(step, chunk, output)
            if len(self._handed_on) != 1:
                raise ValueError(
                    "Expected `train_step` to call `self.backward(loss)` once in a pipeline. Received: "
                    f"{len(self._handed_on)} calls. Add up the losses before, and replace `loss.backward()`."
                )
            return self._handed_on[0]

        try:
            with self.train_context() or nullcontext(), self.forward_context() or nullcontext():
                pred = pipeline.train(loss_of)
        finally:
            self._handed_on = None
            # `loss_of` has put the weights of the micro-batches of the schedule in its place.
            window.set_current(weight)
        if self.carry is not None:
            raise ValueError(
                "self.carry cannot be used in a pipeline, whose schedule runs parts of a batch. Train on another axis than `pipeline`."
            )
        averaged_over = 1.0 if window.sum_reduced else weight or 1.0
        return pred, torch.as_tensor(
            (window.loss - before) / averaged_over, dtype=torch.float32, device=self.device
        )

    def _run_evaluate_step(self, step: Callable[[Any], Any], data: Any) -> Any:
        if self.pipeline is None or not is_overridden(self, "evaluate_step"):
            return step(data)
        with self._stages_run("evaluate_step"):
            self.pipeline.open(self._inputs(step, data, whole=True))
            with self.forward_context() or nullcontext():
                output = self.pipeline.evaluate()
            if not self.stage_plan.has_last:
                return None, None
            self.pipeline.seed_step(0, opened=True)
            return self.model.output_is(step, data, output)

    def _inputs(self, step: Callable[[Any], Any], data: Any, *, whole: bool = False) -> Any:
        """Return what a step calls the model with on the first stage, found for each pipeline micro-batch, or the error that it raises."""
        if not self.stage_plan.has_first:
            return None
        pipeline, samples, found = self.pipeline, count_samples(data), []
        assert pipeline is not None
        try:
            chunks = [data] if whole else pipeline.chunks(data, pipeline.cut_of(samples))
            for place, chunk in enumerate(chunks):
                pipeline.seed_step(place, opened=False)
                found.append(self.model.inputs_of(step, chunk))
            if not all(
                isinstance(value, Tensor) and value.ndim for inputs in found for value in inputs
            ):
                return found[0]  # which is refused
            inputs = tuple(torch.cat(values) for values in zip(*found, strict=True))
            if any(len(value) != samples for value in inputs):
                shapes = ", ".join(str(tuple(value.shape)) for value in inputs)
                raise ValueError(
                    f"Expected self.model to be called with {samples} samples in dimension 0, as the batch has. Received: shapes {shapes}. "
                    "Reshape in the model's `forward`."
                )
            return inputs
        except Exception as error:
            # `Pipeline.open` raises it on all ranks. Raised here, it would leave the others waiting.
            return error

    def _shares(self, data: Any) -> list[tuple[Any, Any]]:
        """Return data and weight of each pipeline micro-batch; together they weigh what the batch does."""
        assert self.pipeline is not None
        total = self.window.current
        chunks = self.pipeline.chunks(data, self.pipeline.cut)
        weights = [self.batch_weight(chunk, peek_target(chunk)) for chunk in chunks]
        added = sum(weights)
        if not isinstance(total, Tensor) and not isinstance(added, Tensor) and added != total:
            # A weight that is no sum over samples, or padding, which weighs nothing.
            weights = [weight * total / added if added else 0.0 for weight in weights]
        return list(zip(chunks, weights, strict=True))

    # Evaluation and inference

    def build_forward(self) -> MeshForward:
        return MeshForward(self)

    # Ending

    def _forget(self) -> None:
        # Modules that outlive their process groups can abort the process on exit.
        self.model = self.ema = self.optimizer = self.scheduler = None
        self.pipeline = None
        self.__dict__.pop("reduction", None)


def _returned_nothing(hook: str, what: str, received: Any) -> ValueError:
    return ValueError(
        f"Expected `{hook}` to return {what}. Received: {received!r}. Return that of super().{hook}(...)."
    )
