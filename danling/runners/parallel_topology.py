"""Where a rank stands on a device mesh: the seven axes, the domains they make, the stages of a pipeline it holds."""

from __future__ import annotations

from danling.distributed import Domain, LaunchEnvironment
from danling.mesh import AXES, Axes, ParallelContext, Topology
from danling.mesh.pipeline import check_schedule, resolve_schedule, stages_of_rank

from .torch_runner import TorchRunner

DIVIDING_AXES = ("tensor", "expert", "expert_tensor")
_SINGLE_STAGE = ("1f1b", "gpipe")


class ParallelTopology(TorchRunner):
    """Gives a runner its place on the mesh."""

    stack = "parallel"

    def init_distributed(self) -> None:
        """Check the axes before anything is allocated, then join the process group and build the mesh. Called on all ranks."""
        self._plan_pipeline(Axes.resolve(self._degrees(), world_size=LaunchEnvironment.read().world_size))
        super().init_distributed()
        check_schedule(self._schedule_class, self.device)
        self.topology = self.build_topology()
        if not isinstance(self.topology, Topology):
            return  # which is refused
        self.init_model_parallel_groups()
        if not hasattr(self, "parallel_context"):
            raise ValueError(
                "Expected `init_model_parallel_groups` to make the groups that training needs. Received: none. Call "
                "super().init_model_parallel_groups() in it."
            )

    def _complete_distributed(self) -> None:
        super()._complete_distributed()
        if not isinstance(getattr(self, "topology", None), Topology):
            hook = "build_topology" if self._overrides("build_topology") else "init_distributed"
            raise ValueError(
                f"Expected `{hook}` to give this rank a place on the mesh. Received: none. Return, or call, that of super()."
            )

    def _degrees(self) -> dict[str, int]:
        degrees = {name: int(self.config.parallel.axes[name]) for name in AXES}
        if self.config.fsdp.enabled and all(degree == 1 for degree in degrees.values()):
            degrees["shard"] = -1
        return degrees

    def _plan_pipeline(self, axes: Axes) -> None:
        """Decide which stages this rank holds, from the configuration alone."""
        settings = self.config.parallel
        size = axes.degree("pipeline")
        self._schedule_class = resolve_schedule(settings.pipeline_schedule)
        listed = settings.module_fqns_per_model_part
        if size == 1:
            if listed:
                raise ValueError(
                    f"Expected parallel.axes.pipeline > 1 with parallel.module_fqns_per_model_part. Received: {axes.describe()}. Set the "
                    "axis, or leave the list out."
                )
            self.num_stages, self.stages = 1, [0]
            return
        reshard = self.config.fsdp.reshard_after_forward
        if reshard and axes.degree("shard") > 1:
            # Replicas with other numbers of micro-batches would wait for ever, and zero-bubble schedules give wrong gradients.
            raise ValueError(
                f"Expected fsdp.reshard_after_forward to be false or unset in a pipeline, where each micro-batch would gather all "
                f"parameters again. Received: fsdp.reshard_after_forward={reshard!r}, {axes.describe()}. Unset it."
            )
        each = 1 if settings.pipeline_schedule.lower().removeprefix("schedule") in _SINGLE_STAGE else 2
        self.num_stages = len(listed) if listed else each * size
        place = axes.index("pipeline", rank=LaunchEnvironment.read().rank)
        self.stages = stages_of_rank(self._schedule_class, rank=place, size=size, num_stages=self.num_stages)

    def build_topology(self) -> Topology:
        """Return the place of this rank on the seven axes; override it for a mesh of your own. Called on all ranks."""
        device_type = self.config.parallel.mesh_device_type
        return Topology(self._degrees(), device=self.device, mesh_device_type=device_type)

    def init_model_parallel_groups(self) -> None:
        """Make the process groups that training needs besides those of single axes. Called on all ranks."""
        self.parallel_context = ParallelContext(self.topology)
        self.pipeline_domain: Domain = self.topology.domain("pipeline")
        self._figures_domain = self.topology.domain("replicate", "shard", "context", "pipeline")
        self.topology.group("replicate", "shard", "context")

    def degree(self, *axes: str) -> int:
        """Return the degree of an axis, or the product over several. No communication: may be called on one rank."""
        return self.topology.axes.degree(*axes)

    @property
    def data_domain(self) -> Domain:
        """Ranks that read different data: `replicate` x `shard`."""
        return self.topology.data

    @property
    def optimizer_domain(self) -> Domain:
        """Ranks that decide an update together: all."""
        return self.topology.optimizer

    @property
    def figures_domain(self) -> Domain:
        """Ranks whose losses add up: those of other data, of other positions, and the stage that has the loss."""
        return self._figures_domain

    @property
    def holds_first_stage(self) -> bool:
        """Whether the model's input comes in on this rank."""
        return 0 in self.stages

    @property
    def holds_last_stage(self) -> bool:
        """Whether the model's output comes out on this rank."""
        return self.num_stages - 1 in self.stages

    @property
    def reads_data(self) -> bool:
        """Whether this rank reads batches: the input is needed on the first stage, the target on the last."""
        return self.holds_first_stage or self.holds_last_stage

    @property
    def reports(self) -> tuple[bool, bool]:
        """Whether the loss and the samples of this rank count."""
        place = self.topology.coordinate
        loss = self.holds_last_stage and not any(place[axis] for axis in DIVIDING_AXES)
        return loss, loss and place["context"] == 0

    @property
    def own_stream_place(self) -> tuple[int, int]:
        """Index and number of the random streams: ranks that compute the same activations draw the same numbers."""
        axes = ("replicate", "shard", "context", "pipeline")
        return self.topology.axes.index(*axes, rank=self.rank), self.topology.axes.degree(*axes)

    @property
    def stream_layout(self) -> dict[str, int]:
        """What has random streams of its own, and how many of it: data replicas, and the degrees above 1 that divide the model."""
        axes = [axis for axis in AXES if axis not in ("replicate", "shard") and self.degree(axis) > 1]
        return super().stream_layout | {axis: self.degree(axis) for axis in axes}
