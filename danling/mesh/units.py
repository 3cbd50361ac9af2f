"""The units that FSDP2 gathers and reduces: every rank runs the same ones in the same order, and reduces the whole gradient of each.

FSDP2 matches the ranks by order alone: a rank that runs another module of the same size computes with its weights, and gradients are
added to those of another module. So units note what FSDP2 communicates, and the ranks compare it in the one collective of an update.

FSDP2 reduces the gradients that the parameters of a unit have. So ranks, and micro-batches that are added up, would have to use the same
parameters. Here a unit that was run reduces all its trained parameters, with zeros for a missing gradient; after the update's collective,
a parameter that no rank has used gets no gradient.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from danling.distributed import HostCopy
from danling.utils.devices import sent
from danling.utils.observers import Observer
from danling.utils.tensors import canonical_name

from .axes import axes_with
from .fsdp import sharded_modules

if TYPE_CHECKING:
    from .topology import Topology

_GATHER, _REDUCE = 0, 1
_VERBS = ("the weights", "the gradients")
_FIGURES = 4
"""Numbers of a rank that tell whether it has noted the same as others."""
_HALF = (1 << 16) - 1


class UnitOrderError(RuntimeError):
    """Ranks have run different modules of FSDP2, so that weights and gradients of different modules were mixed."""


class Unit:
    """Parameters that FSDP2 gathers and reduces together.

    Attributes:
        name: Name of the module.
        number: Place among the units of this rank.
        places: Places of its parameters.
        used: Places of the parameters that have got a gradient on this rank since the last update.
        unused: Places of those that are trained and have got none in some micro-batch.
    """

    def __init__(self, name: str, number: int, group: Any, order: UnitOrder) -> None:
        self.name = name
        self.number = number
        self.used: frozenset[int] = frozenset()
        self.unused: frozenset[int] = frozenset()
        self._order = order
        self._group = group
        self.places = frozenset(range(len(group.fsdp_params)))
        self._was_gathered = False
        self._reduce = group.post_backward
        # Replaced on the object, since FSDP2 makes its groups itself and no subclass can be passed.
        group.post_backward = self.reduce
        # One that a user has set stays.
        if type(group._all_gather_comm) is DefaultAllGather:
            group._all_gather_comm = _NotedAllGather(self)

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters as the optimizer has them."""
        return [each.sharded_param for each in self._group.fsdp_params]

    def note_gather(self) -> None:
        """Note that FSDP2 gathers the unit."""
        self._was_gathered = True
        self._order.note(self, _GATHER)

    def reduce(self, *unused: object) -> None:
        """Do what `post_backward` of FSDP2 does, with a gradient for each trained parameter if the unit was run."""
        group = self._group
        found = 0
        missing = {}
        for place, each in enumerate(group.fsdp_params):
            parameter = getattr(each, "_unsharded_param", None)  # made by the first gather
            if parameter is None:
                break
            if parameter.grad is not None or each.unsharded_accumulated_grad is not None:
                found += 1
            elif parameter.requires_grad:
                missing[place] = parameter
        if missing:
            self.unused |= missing.keys()
        if self._order.counts:
            self.used |= self.places - missing.keys()
        if group.reduce_grads:
            # This call adds the partial sums over the replicas: a collective no rank may miss.
            adds_over_replicas = group.all_reduce_grads and self.has_partial_sum
            is_due = found or self._was_gathered or adds_over_replicas
            if is_due:
                for parameter in missing.values():
                    parameter.grad = torch.zeros_like(parameter)
                self._take_one_dtype()
            if found or (is_due and missing):
                self._order.note(self, _REDUCE)
            self._was_gathered = False
        self._reduce(*unused)

    def _take_one_dtype(self) -> None:
        """Give all gradients the dtype of the reduction if some have it, which are of earlier micro-batches."""
        all_of_unit = self._group.fsdp_params
        if self._group._reduce_dtype is None or all(
            each.unsharded_accumulated_grad is None for each in all_of_unit
        ):
            return
        for each in all_of_unit:
            if hasattr(each, "_unsharded_param"):
                each.accumulate_unsharded_grad_if_needed()
                each.to_accumulated_grad_if_needed()

    @property
    def has_partial_sum(self) -> bool:
        """Whether gradients of earlier micro-batches are still to be added over the replicas."""
        return self._group._partial_reduce_output is not None

    def drop_open(self) -> None:
        """Drop the gradients of an update that is left half-way."""
        for each in self._group.fsdp_params:
            parameter = getattr(each, "_unsharded_param", None)
            if parameter is not None:
                parameter.grad = None
            # From torch 2.15 on, it is the gradient of the parameter.
            if each.unsharded_accumulated_grad is not None:
                each.unsharded_accumulated_grad = None
        self._group._partial_reduce_output = None
        self.used = self.unused = frozenset()
        self._was_gathered = False

    def finish(self) -> None:
        """Add over the replicas what the last backward has left. Called on all ranks."""
        self.reduce()
        self._group._training_state = TrainingState.IDLE
        self._group.finalize_backward()


class _NotedAllGather(DefaultAllGather):
    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._unit.note_gather()
        return super().__call__(*args, **kwargs)


class UnitOrder(Observer):
    """Compares what the units of the ranks have communicated, in the collective of an update and after an evaluation.

    On an accelerator the sums of an update are read one update later, so that the host never waits for the device.

    Attributes:
        units: The units of this rank's part of the model.
        last: The name of the unit that was gathered or reduced last. May be read by another thread.
        counts: Whether a gradient counts as one. That of padding does not, where it is dropped.
    """

    critical = True

    def __init__(self, model: nn.Module, topology: Topology) -> None:
        self.units: list[Unit] = []
        self.last = ""
        self.counts = True
        self._domain, self._device = topology.optimizer, topology.device
        names = {id(module): canonical_name(name) for name, module in model.named_modules()}
        for module in sharded_modules(model):
            name = names[id(module)] or type(cast(nn.Module, module)).__name__
            state: Any = module._get_fsdp_state()
            # Since torch 2.12; before, a module has one group, or none without parameters.
            has_several = hasattr(state, "_fsdp_param_groups")
            for group in state._fsdp_param_groups if has_several else [state._fsdp_param_group]:
                if group is not None:
                    self.units.append(Unit(name, len(self.units), group, self))
        # Stages, and ranks with other experts, do not share units.
        axes = axes_with(divides_experts=True, reads_data=False)
        self._set, self._sets = topology.rank(*axes), topology.degree(*axes)
        sizes = dict(
            self._domain.gather_objects((self._set, sum(len(unit.places) for unit in self.units)))
        )
        begin = sum(sizes[number] for number in range(self._set))
        self._mine = slice(begin, begin + sizes[self._set])
        self._all_used = torch.ones(sum(sizes.values()), dtype=torch.float64, device=self._device)
        self._users = self._all_used
        self._update = 0
        self._hash = 0
        self._noted: list[int] = []
        self._landed: tuple[list[int], HostCopy] | None = None

    def note(self, unit: Unit, verb: int) -> None:
        """Note that a unit is gathered or reduced."""
        code = 2 * unit.number + verb
        # Multiplied first, so that the order counts; one more, so that a code of 0 does.
        self._hash = (self._hash * 1_000_003 + code + 1) & 0xFFFFFFFF
        self._noted.append(code)
        self.last = unit.name

    # The collective of an update

    def values(self) -> Tensor:
        """Return numbers whose sums tell whether the ranks have noted the same, and which parameters some rank has used."""
        self._read_landed()
        used = self._all_used
        if any(unit.unused - unit.used for unit in self.units if unit.unused):
            mine = [float(n in unit.used) for unit in self.units for n in range(len(unit.places))]
            used = torch.zeros_like(self._all_used)
            used[self._mine] = sent(torch.tensor(mine, dtype=torch.float64), self._device)
        return torch.cat([sent(self._figures(), self._device), used])

    def take(self, sums: Tensor) -> None:
        """Take their sums. Called on all ranks.

        Raises:
            UnitOrderError: On all ranks, if some have noted something else.
        """
        end = _FIGURES * self._sets
        self._users = sums[end:]
        self._landed, self._noted, self._hash = (self._noted, HostCopy(sums[:end])), [], 0
        # On the CPU nothing has to be waited for: the error comes with the update it is about.
        if self._device.type == "cpu":
            self._read_landed()

    def places_of(self, parameters: Collection[nn.Parameter]) -> list[frozenset[int]]:
        """Return for each unit the places of those of its parameters that are among some."""
        return [
            frozenset(place for place, each in enumerate(unit.parameters()) if each in parameters)
            for unit in self.units
        ]

    def complete(self, places: Sequence[frozenset[int]]) -> None:
        """Add over the replicas what is left, and take gradients of zero from parameters that no rank has used.

        Called on all ranks, after the collective of the update.

        Args:
            places: Those of the parameters that are updated, by unit.
        """
        counts: list[float] | None = None
        begin = self._mine.start
        for unit, own in zip(self.units, places):
            if unit.has_partial_sum:
                unit.finish()
            for place in own & unit.unused - unit.used if unit.unused else ():
                parameter = unit.parameters()[place]
                if parameter.grad is not None:
                    # The host waits here: it asks only where a parameter may have no user.
                    counts = counts or self._users.tolist()
                    if not counts[begin + place]:
                        parameter.grad = None
            unit.used -= own
            unit.unused -= own
            begin += len(unit.places)

    def drop_open(self) -> None:
        """Drop the gradients of an update that is left half-way, which the units keep until its last micro-batch."""
        self._noted, self._hash = [], 0
        for unit in self.units:
            unit.drop_open()

    # Comparison

    @contextmanager
    def compared(self) -> Iterator[None]:
        """Return a context after which all ranks compare what they have noted, unless it raises."""
        yield
        self._read_landed()
        sums = self._domain.all_reduce(self._figures())
        self._landed, self._noted, self._hash = (self._noted, HostCopy(sums)), [], 0
        self._read_landed()

    def results_needed(self) -> None:
        """Compare what the last update has left to be compared."""
        self._read_landed()

    def _figures(self) -> Tensor:
        """Return whole numbers whose sums over the ranks are exact."""
        # Halves of 16 bits, whose squares are exact in float64 also as sums over many ranks.
        low = self._hash & _HALF
        high = self._hash >> 16
        figures = [0] * (_FIGURES * self._sets)
        begin = _FIGURES * self._set
        figures[begin : begin + _FIGURES] = low, low * low, high, high * high
        return torch.tensor(figures, dtype=torch.float64)

    def _read_landed(self) -> None:
        landed, self._landed = self._landed, None
        if landed is None:
            return
        noted, sums = landed
        figures = [int(value) for value in sums.read()]
        ranks = self._domain.size // self._sets
        # The sum of squares is the least where all numbers are equal.
        pairs = zip(figures[::2], figures[1::2])
        if any(total * total != ranks * squares for total, squares in pairs):
            raise self._error(noted)

    def _error(self, noted: list[int]) -> UnitOrderError:
        mine = [f"{_VERBS[code % 2]} of {self.units[code // 2].name}" for code in noted]
        found = self._domain.gather_objects((self._set, mine))
        names = [names for number, names in found if number == self._set]
        longest = max(map(len, names))
        lists = [[*each, *["nothing"] * (longest - len(each))] for each in names]
        place = next((n for n, each in enumerate(zip(*lists)) if len(set(each)) > 1), None)
        if place is None:
            return UnitOrderError(
                "Another stage of the pipeline has run different modules on its ranks; see the error there."
            )
        doing: dict[str, list[int]] = {}
        for rank, each in zip(
            (rank for rank, (number, _) in enumerate(found) if number == self._set), lists
        ):
            doing.setdefault(each[place], []).append(rank)
        shown = "; ".join(f"{what} on ranks {ranks}" for what, ranks in doing.items())
        return UnitOrderError(
            f"Expected all ranks to run the same modules in the same order, by which FSDP2 matches them. Received: as number {place + 1} "
            f"since the update before, {shown}. What they have computed since then is wrong; a checkpoint from before is right. If random "
            "numbers or data choose the modules, make the same choice on all ranks, or name the module around them in fsdp.blocks: each "
            "rank may use other parts of one block. Or train on 'ddp'."
        )
