"""Records the first updates of a run on each rank, and makes them comparable between layouts.

The run is one that `danling check-layout` has started. The recorder makes no collective: a mistake of a plan must show in what
is recorded, not in how it is recorded.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from danling.utils.observers import Observer
from danling.utils.tensors import canonical_name, dtype_of, is_sharded, local_part

from .hashing import Hasher

if TYPE_CHECKING:
    from danling.distributed import StepTotals
    from danling.runners.torch_runner import TorchRunner
    from danling.training import UpdateOutcome

WEIGHTS = "weights.pt"
"""File with the weights that the run on one process began with."""


# The files


@dataclass(frozen=True)
class Part:
    """What a rank has of a tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    tensor: Tensor | None

    def of(self, whole: Tensor) -> Tensor:
        """Return the same part of a whole tensor of shape `self.shape`."""
        assert self.tensor is not None
        return whole[tuple(slice(start, start + length) for start, length in zip(self.offset, self.tensor.shape))]


@dataclass(frozen=True)
class UpdateRecord:
    """One update, as a rank saw it."""

    loss: float
    weight: float
    samples: float
    digest: int
    norm: float
    gradients: Mapping[str, Part]
    weights: Mapping[str, Part]
    buffers: Mapping[str, Tensor]
    outputs: Mapping[str, tuple[float, float]]


@dataclass(frozen=True)
class RankRecord:
    """A rank of a run whose first updates were recorded.

    Attributes:
        rank: Global rank.
        coordinate: Its coordinate on each axis.
        degrees: Number of ranks along each axis.
        trained: Names of the parameters that the optimizer updates.
        before: Digests of the whole weights before the model was divided, by name.
        moved: Names of the weights that were other ones once the model was divided.
        initial: Names of weights that were not those of one process before they were replaced by these.
        draws: Whether forward or backward drew random numbers.
        batch_norms: Modules that normalize by the statistics of a batch, since they have no running ones.
        eps: Relative precision of the coarsest dtype of parameters and of outputs of modules.
        coarse: Whether outputs are coarser than the parameters.
        updates: Number of recorded updates.
    """

    rank: int
    coordinate: Mapping[str, int]
    degrees: Mapping[str, int]
    trained: Sequence[str]
    before: Mapping[str, int]
    moved: Sequence[str]
    initial: Sequence[str]
    draws: bool
    batch_norms: int
    eps: float
    coarse: bool
    updates: int
    directory: Path = field(default_factory=Path)

    def update(self, number: int) -> UpdateRecord:
        """Read an update, counted from 1; its tensors are mapped into memory."""
        found = torch.load(_update_file(self.directory, self.rank, number), weights_only=True, mmap=True)
        parts = {
            kind: {
                name: Part(tuple(offset), tuple(shape), value) for name, (offset, shape, value) in found[kind].items()
            }
            for kind in ("gradients", "weights")
        }
        return UpdateRecord(**{**found, **parts})


def has_recorded(directory: Path, rank: int) -> bool:
    """Whether a rank has written all that it records."""
    return _rank_file(directory, rank).exists()


def count_updates(directory: Path, rank: int) -> int:
    """Return how many updates a rank has written."""
    return len(list(directory.glob(f"rank-{rank}.update-*.pt")))


def read_ranks(directory: Path, ranks: int) -> list[RankRecord]:
    """Return what all ranks have written, by rank."""
    found = (torch.load(_rank_file(directory, rank), weights_only=True) for rank in range(ranks))
    return [RankRecord(**values, directory=directory) for values in found]


def _update_file(directory: Path, rank: int, number: int) -> Path:
    return directory / f"rank-{rank}.update-{number}.pt"


def _rank_file(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank}.pt"


def _part_of(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return where this rank's part of a tensor begins, and the shape of the whole."""
    if not is_sharded(tensor):
        return (0,) * tensor.dim(), tuple(tensor.shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sharded: Any = tensor
    _, offset = compute_local_shape_and_global_offset(tensor.shape, sharded.device_mesh, sharded.placements)
    return tuple(offset), tuple(tensor.shape)


def _recorded(tensor: Tensor, value: Tensor | None) -> tuple[tuple[int, ...], tuple[int, ...], Tensor | None]:
    offset, shape = _part_of(tensor if value is None else value)
    return offset, shape, None if value is None else _host(local_part(value))


def _host(value: Tensor) -> Tensor:
    return value.detach().to("cpu", copy=True)


# What makes updates comparable


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Return a batch with its floating tensors in another dtype: those in mappings, lists, tuples, and objects with `apply`."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, Mapping):
        items = {key: cast_floating(item, dtype) for key, item in value.items()}
        return items if type(value) is dict else type(value)(items)  # type: ignore[call-arg]
    if isinstance(value, (list, tuple)):
        cast = [cast_floating(item, dtype) for item in value]
        return type(value)(*cast) if hasattr(value, "_fields") else type(value)(cast)
    if callable(getattr(value, "apply", None)) and not isinstance(value, type):
        return value.apply(lambda item: cast_floating(item, dtype))
    return value


def divided_batch(
    settings: Mapping[str, Any],
    *,
    accum_steps: int,
    samples: int | None,
    replicas: int,
    alone: bool,
    divides_itself: bool,
) -> Mapping[str, Any]:
    """Return the loader settings of a split by which updates have the same samples on every layout, in unequal shares.

    With equal shares a wrong divisor does not show.
    """
    batch = settings.get("batch_size")
    if replicas == 1 and samples is None:
        return settings
    if divides_itself:
        if batch is None:
            return settings
        share = max((batch if samples is None else max(samples // accum_steps, 1)) // replicas, 1)
        return {**settings, "batch_size": share * replicas if alone else share}
    if samples is None:
        samples = settings.get("global_batch_size") or int(batch or 1) * accum_steps
        samples = max(samples, replicas + 1)
        samples -= samples % replicas == 0
    kept = {name: value for name, value in settings.items() if name not in ("batch_size", "micro_batch_size")}
    return {**kept, "global_batch_size": samples}


# The recorder


class LayoutRecorder(Observer):
    """Records the first updates of a run, and ends the program after them."""

    critical = True

    def __init__(self, runner: TorchRunner) -> None:
        section = runner.config.audit.gradients
        self._directory, self._updates, self._weights = Path(str(section.dir)), int(section.updates), section.weights
        self._dtype = None if section.dtype is None else dtype_of(section.dtype)
        coarse = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(str(runner.config.precision).lower())
        self._compute_eps = 0.0 if coarse is None else torch.finfo(coarse).eps
        self._runner = runner
        self._hasher = Hasher(torch.device("cpu"))
        self._whole: dict[str, Tensor] = {}
        self._before: dict[str, int] = {}
        self._moved: list[str] = []
        self._initial: list[str] = []
        self._begun = False
        self._counts = False
        self._digest = 0
        self._outputs: dict[str, list[float]] = {}
        self._eps = 0.0
        self._draws = False
        self._streams: list[Tensor] = []
        self._update: dict[str, Any] = {}
        self._made = 0

    # Before the first update

    def prepare(self, model: nn.Module, criterion: object) -> None:
        """Cast model and criterion, and keep the whole weights, before anything is divided or wrapped."""
        dtype = self._dtype
        for module in (model, criterion):
            if dtype is not None and isinstance(module, nn.Module):
                module._apply(lambda value: value.to(dtype) if value.is_floating_point() else value)  # type: ignore[no-untyped-call]
        if isinstance(model, nn.Module):
            named = ((canonical_name(name), p) for name, p in model.named_parameters())
            self._whole = {name: _host(p) for name, p in named if not p.is_meta}
            self._before = {name: int(self._hasher.digest(whole)) for name, whole in self._whole.items()}

    def divided(self) -> None:
        """Note which weights are other ones now that the model is divided, and forget the whole ones."""
        self._moved, self._whole = self._differing(self._whole), {}

    def training_started(self) -> None:
        """Write the weights of the run, or take those that were written. Called on all ranks."""
        if self._begun:
            return
        self._begun = True
        for name, module in self._runner.unwrapped_model.named_modules():
            module.register_forward_hook(self._watch(canonical_name(name)))
        criterion = self._runner.criterion
        if self._weights is None:
            states = [self._runner.model_state_dict()]
            states.append(criterion.state_dict() if isinstance(criterion, nn.Module) else {})
            kept = [{k: _host(v) for k, v in state.items() if isinstance(v, Tensor)} for state in states]
            torch.save({"model": kept[0], "criterion": kept[1]}, self._directory / WEIGHTS)
            return
        found = torch.load(self._weights, weights_only=True)
        self._initial = self._differing(found["model"])
        self._runner.load_model(found["model"], partial=True)
        if isinstance(criterion, nn.Module):
            criterion.load_state_dict(found["criterion"])

    def _differing(self, weights: Mapping[str, Tensor]) -> list[str]:
        """Return the names of the weights of this rank that are not the same part of the given whole ones."""
        found = []
        for name, parameter in self._runner.named_parameters():
            whole = weights.get(name)
            if whole is None or whole.shape != parameter.shape or parameter.is_meta:
                continue
            mine = _host(local_part(parameter))
            if not torch.equal(mine, Part(*_part_of(parameter), mine).of(whole).to(mine.dtype)):
                found.append(name)
        return found

    # Within an update

    def took(self, data: object, moved: object, *, counts: bool) -> Any:
        """Return the data of a micro-batch as it is trained on, and note its samples. Called before the forward, on all ranks."""
        self.training_started()
        self._counts = counts
        if counts and self._runner.placement.counts_samples:
            self._digest += int(self._hasher.digest_samples(data))
        for module in self._runner.unwrapped_model.modules():
            # No dropout, and running statistics; cuDNN has the backward of a recurrent layer in training only.
            module.training = isinstance(module, nn.RNNBase)
            if isinstance(module, nn.RNNBase):
                module.dropout = 0.0
        self._streams = _streams()
        return moved if self._dtype is None else cast_floating(moved, self._dtype)

    def ran(self) -> None:
        """Note whether the micro-batch has drawn random numbers."""
        now = _streams()
        self._draws |= any(not torch.equal(before, after) for before, after in zip(self._streams, now))

    def _watch(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            # Checkpointing calls modules again within a backward.
            if torch._C._current_graph_task_id() != -1 or not torch.is_grad_enabled():
                return
            for tensor in _tensors(output):
                if tensor.is_floating_point():
                    self._eps = max(self._eps, torch.finfo(tensor.dtype).eps)
                    if self._counts:
                        local = local_part(tensor).detach().double()
                        sums = self._outputs.setdefault(name, [0.0, 0.0])
                        sums[0] += float(local.sum())
                        sums[1] += float(local.square().sum())

        return hook

    def gradients_ready(self, totals: StepTotals, norm: Tensor) -> None:
        """Record the gradient; end the program if it is not finite, since the update may be refused with an error.

        Raises:
            SystemExit: If it is not finite.
        """
        named = [(name, p) for name, p in self._runner.named_parameters() if p.requires_grad]
        self._update = {
            "gradients": {name: _recorded(parameter, parameter.grad) for name, parameter in named},
            "norm": float(norm),
            "digest": self._digest,
            "weights": {},
            "buffers": {},
            "outputs": {name: tuple(sums) for name, sums in self._outputs.items()},
        }
        self._digest, self._outputs = 0, {}
        if not bool(norm.isfinite()):
            loss = float(totals.loss) / (float(totals.weight) or 1.0)
            self._write_update({"loss": loss, "weight": float(totals.weight), "samples": float(totals.samples)})
            self._write_rank()
            raise SystemExit(0)

    def update_ended(self, outcome: UpdateOutcome) -> None:
        """Record the weights after an update, and end the program after the last one, or after one that was not made."""
        figures = {"loss": outcome.loss, "weight": outcome.weight, "samples": outcome.samples}
        if outcome.committed:
            self._update["weights"] = {name: _recorded(p, p) for name, p in self._runner.named_parameters()}
            buffers = self._runner.unwrapped_model.named_buffers()
            self._update["buffers"] = {canonical_name(name): _host(local_part(buffer)) for name, buffer in buffers}
        self._write_update({name: float(value) for name, value in figures.items()})
        if self._made == self._updates or not outcome.committed:
            self._write_rank()
            raise SystemExit(0)

    def _write_update(self, figures: Mapping[str, float]) -> None:
        self._made += 1
        place = _update_file(self._directory, self._runner.rank, self._made)
        torch.save({**self._update, **figures}, place)

    def _write_rank(self) -> None:
        """Write the record of this rank, which says that all of its updates are there."""
        record = self._record()
        values = {key: value for key, value in asdict(record).items() if key != "directory"}
        target = _rank_file(record.directory, record.rank)
        torch.save(values, target.with_suffix(".new"))
        os.replace(target.with_suffix(".new"), target)

    def _record(self) -> RankRecord:
        runner, model = self._runner, self._runner.unwrapped_model
        named = list(runner.named_parameters())
        owned = {id(p) for group in runner.optimizer.param_groups for p in group["params"]}
        # SyncBatchNorm is left out: the statistics of all ranks together do not depend on the layout.
        norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is None]
        finest = max((torch.finfo(p.dtype).eps for _, p in named if p.is_floating_point()), default=0.0)
        coordinate, degrees = runner.preparation.place()
        return RankRecord(
            rank=runner.rank,
            coordinate=dict(coordinate),
            degrees=dict(degrees),
            trained=[name for name, parameter in named if id(parameter) in owned and parameter.requires_grad],
            before=self._before,
            moved=self._moved,
            initial=self._initial,
            draws=self._draws,
            batch_norms=sum(not isinstance(norm, nn.SyncBatchNorm) for norm in norms),
            eps=max(self._compute_eps, self._eps, finest),
            coarse=self._eps > finest,
            updates=self._made,
            directory=self._directory,
        )


def _tensors(output: Any) -> Iterable[Tensor]:
    """Yield the tensors that a module returned: itself, or those in a tuple, a list or a mapping."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, (list, tuple, Mapping)):
        for item in output.values() if isinstance(output, Mapping) else output:
            yield from _tensors(item)


def _streams() -> list[Tensor]:
    streams = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        streams.append(torch.cuda.get_rng_state())
    return streams
