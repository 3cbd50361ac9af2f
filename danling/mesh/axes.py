"""The parallel axes as plain integers: degrees, coordinates and the ranks that go together. Nothing is allocated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod

from danling.utils.messages import did_you_mean


@dataclass(frozen=True, kw_only=True)
class AxisTraits:
    """What the ranks along one parallel axis share, and what each of them has for itself.

    Attributes:
        mesh_place: Place in the order of the mesh, slowest first: what talks most, tensor parallelism, is on neighbouring ranks.
        reads_data: The ranks read different samples.
        sees_positions: The ranks see different positions of the same samples.
        cuts_modules: The ranks hold different modules of the model, so that they have no parameter in common.
        divides_dense: The ranks hold different parts of the parameters outside experts, be it whole modules or pieces of tensors.
        divides_experts: The same of the parameters of experts.
        needs_transform: The model itself has to be transformed for the axis, by its `parallelize`.
        forward_communicates: A forward or a backward is a collective of the ranks.
        sums_gradient: The gradient is the sum over the ranks, which saw other samples or positions.
        counts_loss: The losses of the ranks add up; along other axes the ranks compute the same loss, and the first one counts.
        own_noise: The ranks see the same samples and need different random numbers in a forward: the coordinate joins the key of a
            micro-batch. Along other axes the samples, or the stage, tell the numbers apart, or the ranks must draw the same.
    """

    mesh_place: int
    reads_data: bool = False
    sees_positions: bool = False
    cuts_modules: bool = False
    divides_dense: bool = False
    divides_experts: bool = False
    needs_transform: bool = False
    forward_communicates: bool = True
    sums_gradient: bool = False
    counts_loss: bool = False
    own_noise: bool = False

    @property
    def divides_parameters(self) -> bool:
        """Whether the ranks hold different parts of some parameters."""
        return self.divides_dense or self.divides_experts


TRAITS: Mapping[str, AxisTraits] = {
    "replicate": AxisTraits(
        mesh_place=1,
        reads_data=True,
        forward_communicates=False,
        sums_gradient=True,
        counts_loss=True,
    ),
    "shard": AxisTraits(
        mesh_place=2,
        reads_data=True,
        divides_dense=True,
        divides_experts=True,
        sums_gradient=True,
        counts_loss=True,
    ),
    "context": AxisTraits(
        mesh_place=3,
        sees_positions=True,
        needs_transform=True,
        sums_gradient=True,
        counts_loss=True,
        own_noise=True,
    ),
    "pipeline": AxisTraits(
        mesh_place=0, cuts_modules=True, divides_dense=True, divides_experts=True, counts_loss=True
    ),
    "tensor": AxisTraits(mesh_place=6, divides_dense=True, needs_transform=True),
    "expert": AxisTraits(mesh_place=4, divides_experts=True, needs_transform=True),
    "expert_tensor": AxisTraits(mesh_place=5, divides_experts=True, needs_transform=True),
}
"""The parallel axes, in the order of the configuration. Whatever depends on an axis looks it up here."""

AXES = tuple(TRAITS)
"""Names of the axes, in the order of the configuration."""

MESH_ORDER = tuple(sorted(AXES, key=lambda name: TRAITS[name].mesh_place))
"""Names of the axes as ranks run over the mesh, slowest first."""


def axes_with(**traits: bool) -> tuple[str, ...]:
    """Return the axes that have these traits, in the order of the configuration.

    Args:
        **traits: Attributes of `AxisTraits`, and the value that each must have.

    Examples:
        >>> axes_with(reads_data=True)
        ('replicate', 'shard')
    """
    return tuple(
        name
        for name, row in TRAITS.items()
        if all(getattr(row, trait) is value for trait, value in traits.items())
    )


@dataclass(frozen=True)
class Axes:
    """The degrees of all axes; their product is the world size.

    The expert axes are separate axes, not folded into the others: a rank has one coordinate on each axis. Ranks
    that differ only on `expert` hold different experts, those that differ only on `expert_tensor` hold parts of the same
    experts, and all of them see the same batch and hold the same copy of everything outside the experts.

    Attributes:
        degrees: Degree by axis, for all of `AXES`.

    Examples:
        >>> axes = Axes.resolve({"shard": -1, "tensor": 2}, world_size=8)
        >>> axes.degree("shard"), axes.coordinate(5)["shard"], axes.ranks("tensor", rank=5)
        (4, 2, [4, 5])
    """

    degrees: Mapping[str, int]

    @classmethod
    def resolve(cls, degrees: Mapping[str, int], *, world_size: int) -> Axes:
        """Check the configured degrees and fill the one that is -1.

        Args:
            degrees: Degree by axis; an axis that is left out has degree 1, at most one is -1.
            world_size: Number of processes.

        Raises:
            ValueError: If an axis is unknown, a degree is neither -1 nor at least 1, or the product is not the world size. All axes
                are listed.
        """
        for name in degrees:
            _check_name(name)
        wanted = {name: degrees.get(name, 1) for name in AXES}
        received = "Received: " + ", ".join(f"{name}={value!r}" for name, value in wanted.items())
        open_axes = [name for name, value in wanted.items() if value == -1]
        if any(value < -1 or value == 0 for value in wanted.values()) or len(open_axes) > 1:
            raise ValueError(
                f"Expected degrees that are integers >= 1, at most one of them -1. {received}."
            )
        for name in open_axes:
            # The open axis is a -1 in this product.
            fixed = -prod(wanted.values())
            if world_size % fixed:
                raise ValueError(
                    f"Expected the world size {world_size} to be a multiple of {fixed}, the product of the fixed axes, so that {name} "
                    f"can be filled. {received}. Change a degree, or start another number of processes."
                )
            wanted[name] = world_size // fixed
        product = prod(wanted.values())
        if product != world_size:
            raise ValueError(
                f"Expected the product of the parallel axes to be the world size {world_size}. {received}, product {product}. Change a "
                "degree, set one of them to -1 to fill it, or start another number of processes."
            )
        return cls(wanted)

    @property
    def world_size(self) -> int:
        """Number of ranks: the product of all degrees."""
        return prod(self.degrees.values())

    @property
    def active(self) -> tuple[str, ...]:
        """Axes above 1, slowest first; only these cost a communicator."""
        return tuple(name for name in MESH_ORDER if self.degrees[name] > 1)

    @cached_property
    def strides(self) -> dict[str, int]:
        """Distance in rank between neighbours along each axis."""
        strides: dict[str, int] = {}
        stride = 1
        for name in reversed(MESH_ORDER):
            strides[name] = stride
            stride *= self.degrees[name]
        return strides

    def degree(self, *axes: str) -> int:
        """Return the degree of an axis, or the product over several."""
        return prod(self.degrees[_check_name(axis)] for axis in axes)

    def coordinate(self, rank: int) -> dict[str, int]:
        """Return the coordinate of a global rank on each axis."""
        return {name: rank // self.strides[name] % self.degrees[name] for name in AXES}

    def index(self, *axes: str, rank: int) -> int:
        """Return the place of a global rank among those that differ from it on these axes only, counted in rank order."""
        return self.ranks(*axes, rank=rank).index(rank)

    def ranks(self, *axes: str, rank: int) -> list[int]:
        """Return the global ranks that differ from `rank` on these axes only, itself included, in ascending order."""
        named = {_check_name(axis) for axis in axes}
        names = [name for name in MESH_ORDER if name in named]
        coordinate = self.coordinate(rank)
        base = rank - sum(coordinate[name] * self.strides[name] for name in names)
        places = product(
            *(
                range(0, self.degrees[name] * self.strides[name], self.strides[name])
                for name in names
            )
        )
        return [base + sum(offsets) for offsets in places]

    def share(self, size: int, *axes: str, what: str) -> int:
        """Return the share of one rank when a size is divided over axes; a size that does not divide is refused.

        Args:
            size: Number of attention heads, positions of a sequence, experts, ...
            axes: The axes that it is divided over.
            what: Its name in the error.

        Examples:
            >>> Axes.resolve({"tensor": 4}, world_size=4).share(32, "tensor", what="the number of attention heads")
            8
        """
        degree = self.degree(*axes)
        if size < 1 or size % degree:
            raise ValueError(
                f"Expected {what} to be a multiple of {' x '.join(axes)} = {degree}. Received: {what}={size!r}, {self.describe()}. "
                "Change it, or the degree."
            )
        return size // degree

    def describe(self) -> str:
        """Return the degrees of all axes in one line."""
        return ", ".join(f"{name}={self.degrees[name]}" for name in AXES)


def _check_name(name: str) -> str:
    if name not in AXES:
        raise ValueError(
            f"Expected an axis out of {list(AXES)}. Received: {name!r}.{did_you_mean(name, AXES)}"
        )
    return name
