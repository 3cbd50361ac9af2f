"""Records the gradients of the first updates of a run on each rank, for a comparison of layouts.

The run is one that `danling check-layout` has started. Nothing is communicated that the update does not communicate anyway, so that a
mistake of a plan shows in what is recorded and not in how it is recorded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from danling.utils.names import canonical_name
from danling.utils.tensors import dtype_of, local_part

from .comparable import ComparableCalls, cast_floating, cast_loose_tensors, hold_batch_norms, switch_dropout_off
from .gradient_record import WEIGHTS, Part, RankRecord, part_of, recorded, write_rank, write_update
from .hashing import Hasher

logger = logging.getLogger("danling")


class RecordedRun(Protocol):
    """What is asked of a run. It is looked up anew each time, since a model is wrapped and divided after the recorder was made."""

    @property
    def optimizer(self) -> Any: ...
    @property
    def unwrapped_model(self) -> nn.Module: ...

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        """Return names and parameters of model and criterion on this rank."""

    def model_state_dict(self) -> Mapping[str, Any]:
        """Return the weights and persistent buffers."""

    def load_model(self, state: Mapping[str, object], *, partial: bool = False) -> None:
        """Load weights of a whole model."""


class RecordedUpdate(Protocol):
    """What became of an update."""

    weight: float | Tensor
    samples: float | Tensor

    @property
    def loss(self) -> float | Tensor:
        """The mean loss, 0-dim."""


@dataclass(frozen=True)
class GradientSettings:
    """What is recorded, and where: the settings under `audit.gradients`.

    Attributes:
        directory: Where each rank writes.
        updates: How many updates.
        weights: File with the weights to begin from; `None` writes those that the run has.
        dtype: What model and batches are cast to; `None` leaves them as they are.
        compute_eps: Relative precision of what a forward is computed in, where it is coarser than the parameters.
    """

    directory: Path
    updates: int
    weights: Path | None = None
    dtype: torch.dtype | None = None
    compute_eps: float = 0.0

    @classmethod
    def of(cls, section: Mapping[str, Any], precision: object) -> GradientSettings | None:
        """Return them from the section of a configuration; `None` where nothing is recorded.

        Args:
            section: `audit.gradients`.
            precision: The setting `precision`.
        """
        if section["dir"] is None:
            return None
        weights, dtype = section["weights"], section["dtype"]
        coarse = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(str(precision).lower())
        return cls(
            Path(section["dir"]),
            int(section["updates"]),
            weights=None if weights is None else Path(weights),
            dtype=None if dtype is None else dtype_of(dtype),
            compute_eps=0.0 if coarse is None else torch.finfo(coarse).eps,
        )


class GradientCapture:
    """Records the first updates of a run, and ends the program after them.

    Args:
        settings: What is recorded, and where.
        run: The run.
        criterion: Returns the criterion, which may have parameters.
        rank: Global rank.
        coordinate: Of this rank on each axis.
        degrees: Number of ranks along each axis.
        counts_samples: Whether the samples of this rank count.

    Attributes:
        calls: Is to be entered before the first forward, until the end of the run.
    """

    def __init__(
        self,
        settings: GradientSettings,
        run: RecordedRun,
        *,
        criterion: Callable[[], object],
        rank: int,
        coordinate: Mapping[str, int],
        degrees: Mapping[str, int],
        counts_samples: bool,
    ) -> None:
        self.settings = settings
        self.calls = ComparableCalls(settings.dtype)
        self._run = run
        self._criterion = criterion
        self._rank = rank
        self._coordinate = dict(coordinate)
        self._degrees = dict(degrees)
        self._counts_samples = counts_samples
        self._hasher = Hasher(torch.device("cpu"))
        self._digest = 0
        self._begun = False
        self._initial: list[str] = []
        self._dropped = 0
        self._held: list[nn.Module] = []
        self._draws = False
        self._streams: list[Tensor] = []
        self._update: dict[str, Any] = {}
        self._made = 0

    # Before the first update

    def prepare(self, model: nn.Module, criterion: object) -> None:
        """Cast the model and switch its dropout off, before anything is divided or wrapped. No communication.

        Args:
            model: The user's model.
            criterion: The criterion, cast as well where it is a module.
        """
        modules = [module for module in (model, criterion) if isinstance(module, nn.Module)]
        self._dropped = sum(switch_dropout_off(module) for module in modules)
        dtype = self.settings.dtype
        if dtype is not None:
            for module in modules:
                module._apply(lambda value: value.to(dtype) if value.is_floating_point() else value)  # type: ignore[no-untyped-call]
                cast_loose_tensors(module, dtype)

    def begin(self) -> None:
        """Write the weights that the run has, or take those that were written. Called on all ranks."""
        if self._begun:
            return
        self._begun = True
        self._held = hold_batch_norms(self._run.unwrapped_model)
        if self.settings.weights is None:
            state = {
                name: _host(value) for name, value in self._run.model_state_dict().items() if isinstance(value, Tensor)
            }
            torch.save({"model": state, "criterion": self._criterion_state()}, self.settings.directory / WEIGHTS)
            return
        found = torch.load(self.settings.weights, weights_only=True)
        self._initial = self._differing(found["model"])
        self._run.load_model(found["model"], partial=True)
        criterion = self._criterion()
        if isinstance(criterion, nn.Module):
            criterion.load_state_dict(found["criterion"])

    def _criterion_state(self) -> dict[str, Tensor]:
        criterion = self._criterion()
        if not isinstance(criterion, nn.Module):
            return {}
        return {name: _host(value) for name, value in criterion.state_dict().items() if isinstance(value, Tensor)}

    def _differing(self, weights: Mapping[str, Tensor]) -> list[str]:
        """Return the names of the weights of this rank that are others than those of one process."""
        found = []
        for name, parameter in self._run.named_parameters():
            whole = weights.get(name)
            if whole is None or whole.shape != parameter.shape:
                continue
            offset, shape = part_of(parameter)
            mine = _host(local_part(parameter.detach()))
            if not torch.equal(mine, Part(offset, shape, mine).of(whole).to(mine.dtype)):
                found.append(name)
        return found

    # Within an update

    def took(self, data: object, moved: object, *, counts: bool) -> Any:
        """Return the data of a micro-batch as it is trained on, and note its samples. Called before the forward, on all ranks.

        Args:
            data: As its loader gave it.
            moved: As it was moved to the device.
            counts: Whether it is a batch and not a placeholder.
        """
        self.begin()
        if counts and self._counts_samples:
            self._digest += int(self._hasher.digest_samples(data))
        for module in self._held:
            module.training = False
        self.calls.looks = True
        self._streams = _streams()
        return moved if self.settings.dtype is None else cast_floating(moved, self.settings.dtype)

    def ran(self) -> None:
        """Note whether the micro-batch has drawn random numbers. No communication."""
        self.calls.looks = False
        now = _streams()
        self._draws |= any(not torch.equal(before, after) for before, after in zip(self._streams, now))

    def measured(self, norm: Tensor) -> None:
        """Record the gradient, complete and divided, before it is clipped. Called on all ranks.

        Args:
            norm: Its 2-norm, 0-dim.
        """
        gradients = {
            name: recorded(parameter, parameter.grad)
            for name, parameter in self._run.named_parameters()
            if parameter.requires_grad
        }
        self._update = {
            "gradients": gradients,
            "norm": float(norm),
            "digest": self._digest,
            "weights": {},
            "buffers": {},
        }
        self._digest = 0

    def updated(self, outcome: RecordedUpdate, *, committed: bool) -> None:
        """Record the weights after an update, and end the program after the last one, or after one that was not made.

        Args:
            outcome: What became of it.
            committed: Whether it was made.

        Raises:
            SystemExit: After the last one, with exit code 0.
        """
        figures = {"loss": outcome.loss, "weight": outcome.weight, "samples": outcome.samples}
        self._update.update({name: float(value) for name, value in figures.items()})
        if committed:
            self._update["weights"] = {name: recorded(p, p) for name, p in self._run.named_parameters()}
            buffers = self._run.unwrapped_model.named_buffers()
            self._update["buffers"] = {canonical_name(name): _host(local_part(buffer)) for name, buffer in buffers}
        self._made += 1
        write_update(self.settings.directory, self._rank, self._made, self._update)
        if self._made == self.settings.updates or not committed:
            write_rank(self._record())
            raise SystemExit(0)

    def failed(self, loss: float | Tensor, weight: float | Tensor, samples: float | Tensor) -> None:
        """Record an update whose gradient is not finite, which is going to be refused.

        Args:
            loss: Sum of loss times weight over all ranks.
            weight: Of all ranks.
            samples: Of all ranks.
        """
        figures = {"loss": float(loss) / (float(weight) or 1.0), "weight": float(weight), "samples": float(samples)}
        self._made += 1
        write_update(self.settings.directory, self._rank, self._made, {**self._update, **figures})
        write_rank(self._record())
        raise SystemExit(0)

    def _record(self) -> RankRecord:
        named = list(self._run.named_parameters())
        names = {id(parameter): name for name, parameter in reversed(named)}
        owned = {id(p) for group in self._run.optimizer.param_groups for p in group["params"]}
        several = self._run.unwrapped_model.named_parameters(remove_duplicate=False)
        tied = {canonical_name(name): names.get(id(p), "") for name, p in several}
        model = self._run.unwrapped_model
        norms = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.running_mean is None]
        # Those of all ranks together are no cause of a difference.
        alone = [module for module in norms if not isinstance(module, nn.SyncBatchNorm)]
        eps = [torch.finfo(p.dtype).eps for _, p in named if p.is_floating_point()]
        return RankRecord(
            rank=self._rank,
            coordinate=self._coordinate,
            degrees=self._degrees,
            trained=[name for name, parameter in named if id(parameter) in owned and parameter.requires_grad],
            tied={name: listed for name, listed in tied.items() if listed and name != listed},
            initial=self._initial,
            dropped=self._dropped,
            drops_in_calls=self.calls.dropped,
            draws=self._draws,
            held_norms=len(self._held),
            batch_norms=len(alone),
            eps=max([self.settings.compute_eps, self.calls.eps, *eps]),
            coarse=self.calls.eps > max(eps, default=0.0),
            updates=self._made,
            directory=self.settings.directory,
        )


def _host(value: Tensor) -> Tensor:
    return value.detach().to("cpu", copy=True)


def _streams() -> list[Tensor]:
    streams = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        streams.append(torch.cuda.get_rng_state())
    return streams
