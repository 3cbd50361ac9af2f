"""The device mesh of a run: process groups along the parallel axes, and the domains that reduce together."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import _random

from danling.distributed import (
    Domain,
    LocalDomain,
    Placement,
    collective_timeout,
    set_collective_timeout,
)

from .axes import AXES, Axes, axes_with


def _begin_random_tracker(mesh: DeviceMesh) -> None:
    """Make the tracker of random numbers that DTensor has once a process, from the seeds that this process has.

    torch makes it in the first random operation on a mesh, from within a forward, and broadcasts the state of rank 0: stages without such
    an operation would leave the others waiting, and a resumed run would draw other numbers. The library seeds all ranks by place.
    """
    is_on_host = mesh.device_type == "cpu"
    if not is_on_host and _random._rng_tracker is None and _random.is_rng_supported_mesh(mesh):
        _random._rng_tracker = _random.OffsetBasedRNGTracker(mesh, run_state_sync=False)


class Topology:
    """The place of this process on the parallel axes, and its meshes and groups: what a model's `parallelize` gets.

    Axes of degree 1 are not part of the mesh and cost no communicator; a domain that covers every rank uses the default group.
    What does not fit is refused before the first group is made.

    Attributes:
        axes: The degrees.
        coordinate: Coordinate of this process on each axis.
        device: Device of this process.
        data: Domain of `replicate` x `shard`: its ranks read different samples, and metrics are reduced over it.
        optimizer: Domain of all axes, where an update is decided.

    Raises:
        ValueError: If the degrees do not fit the world.

    Call on all ranks, after the process group is initialised.

    Example:
        def parallelize(self, topology: Topology) -> None:
            if topology.degree("tensor") > 1:
                parallelize_module(self.block, topology.mesh("tensor"), plan)
    """

    def __init__(
        self,
        degrees: Mapping[str, int],
        *,
        device: torch.device | None = None,
        mesh_device_type: str | None = None,
    ) -> None:
        world = Domain()
        self.axes = Axes.resolve(degrees, world_size=world.size)
        self._rank = world.rank
        self.coordinate = self.axes.coordinate(self._rank)
        self.device = device or torch.device("cpu")
        active = self.axes.active
        shape = tuple(self.axes.degrees[name] for name in active)
        self._mesh: DeviceMesh | None = None
        if active:
            kind = mesh_device_type or self.device.type
            self._mesh = init_device_mesh(kind, shape, mesh_dim_names=active)
            _begin_random_tracker(self._mesh)
        self._flat: dict[tuple[str, ...], dist.ProcessGroup] = {}
        self._limit(self._axis_groups())
        self.data = self.domain(*axes_with(reads_data=True))
        self.optimizer = self.domain(*AXES)

    def degree(self, *axes: str) -> int:
        """Return the degree of an axis, or the product over several."""
        return self.axes.degree(*axes)

    def rank(self, *axes: str) -> int:
        """Return the coordinate of this process on an axis, or its place among the ranks of several."""
        return self.axes.index(*axes, rank=self._rank)

    def ranks(self, *axes: str) -> list[int]:
        """Return the global ranks that differ from this one on these axes only, itself included."""
        return self.axes.ranks(*axes, rank=self._rank)

    def active(self, *axes: str) -> tuple[str, ...]:
        """Return those of the axes that are above 1, slowest first."""
        self.axes.degree(*axes)
        return tuple(name for name in self.axes.active if name in axes)

    def mesh(self, *axes: str) -> DeviceMesh | None:
        """Return the mesh of this rank along axes, its dimensions slowest first; `None` when all of them are 1.

        Axes of degree 1 have no dimension in it: with `shard=1`, `mesh("replicate", "shard")` has the dimension `replicate` only.
        """
        names = self.active(*axes)
        if not names or self._mesh is None:
            return None
        return self._mesh if names == self.axes.active else self._mesh[names]

    def group(self, *axes: str) -> dist.ProcessGroup | None:
        """Return one group over axes, flattened; `None` when all of them are 1.

        The first call for a set of several axes makes the group, so call it on all ranks.
        """
        # Axes of degree 1 make no difference: their group is that of the others.
        names, mesh = self.active(*axes), self.mesh(*axes)
        if mesh is None:
            return None
        if names == self.axes.active:
            # Another communicator over all ranks would only take memory.
            return dist.group.WORLD
        if len(names) == 1:
            return mesh.get_group()
        if names not in self._flat:
            self._flat[names] = mesh._flatten("_".join(names)).get_group()
            self._limit([self._flat[names]])
        return self._flat[names]

    def _limit(self, groups: list[dist.ProcessGroup]) -> None:
        """Give groups the time limit of the default one: torch makes those of a mesh with 30 minutes, whatever that has."""
        # Unknown where a backend hides it; then that of torch stays.
        limit = collective_timeout(self.device)
        if limit is not None:
            set_collective_timeout(limit, groups)

    def _groups(self) -> list[dist.ProcessGroup | None]:
        """Return the default group, and the groups of the mesh that have been made so far."""
        return [None, *self._axis_groups(), *self._flat.values()]

    def _axis_groups(self) -> list[dist.ProcessGroup]:
        return (
            [] if self._mesh is None else [self._mesh.get_group(name) for name in self.axes.active]
        )

    def domain(self, *axes: str) -> Domain:
        """Return the domain of this rank over axes, without communication when all of them are 1. Call on all ranks."""
        group = self.group(*axes)
        return LocalDomain() if group is None else Domain(group, device=self.device)

    def placement(self, *, reads_data: bool = True, has_loss: bool = True) -> Placement:
        """Return what training needs to know of this rank's place. Call on all ranks: it makes the groups of metrics and gradients.

        Args:
            reads_data: Whether this rank reads batches, which a middle stage of a pipeline does not.
            has_loss: Whether the loss is computed on this rank, as by the last stage of a pipeline.
        """
        metrics = self.domain(*axes_with(counts_loss=True))
        # Made here, where all ranks are: a reduction asks for it only where it has something to sum.
        self.group(*axes_with(sums_gradient=True))
        counts_loss = has_loss and not any(
            self.coordinate[axis] for axis in axes_with(counts_loss=False)
        )
        # DTensor draws the noise of shards on an accelerator from equal seeds, and leaves that of shards on the CPU to each rank.
        divided = (
            axes_with(divides_dense=True, divides_experts=True) if self.device.type == "cpu" else ()
        )
        return Placement(
            data=self.data,
            optimizer=self.optimizer,
            metrics=metrics,
            groups=self._groups,
            reads_data=reads_data,
            counts_loss=counts_loss,
            counts_samples=counts_loss
            and not any(self.coordinate[axis] for axis in axes_with(sees_positions=True)),
            forward_place=tuple(
                self.coordinate[axis] for axis in self.active(*axes_with(own_noise=True))
            ),
            update_place=tuple(self.coordinate[axis] for axis in self.active(*divided)),
        )
