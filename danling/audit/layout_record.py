"""Records the first updates of a run on each rank, and makes them comparable between layouts.

The run is one that `danling check-layout` has started. The recorder makes no collective: a mistake of a plan must show in what
is recorded, not in how it is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from danling.prove.differences import Part
from danling.utils.observers import Observer
from danling.utils.tensors import canonical_name, default_dtype, dtype_of, local_part
from danling.utils.trees import tensors

from .hashing import Hasher

if TYPE_CHECKING:
    from contextlib import ExitStack

    from danling.data.run_data import DividedSettings
    from danling.distributed import StepTotals
    from danling.runners.base_runner import BaseRunner
    from danling.runners.torch_runner import TorchRunner
    from danling.training import UpdateOutcome

WEIGHTS = "weights.pt"
"""File with the weights that the run on one process began with."""


@dataclass(frozen=True)
class Record:
    """An update, as a rank saw it.

    Attributes:
        coordinate: Coordinate of the rank on each axis.
        before: Digests of the whole weights before the model was divided, by name.
        moved: Names of the weights that were other ones once the model was divided.
        draws: Whether a forward or a backward drew random numbers.
        eps: Relative precision of the coarsest dtype of parameters and of outputs of modules.
        loss: Loss of the update.
        weight: Weight of its batches.
        samples: Its samples.
        digest: Their digest, of those that this rank counts.
        norm: Norm of the gradient.
        gradients: The gradient of each trained parameter, before clipping; zeros where there is none.
        weights: All parameters after the update; empty if it was not made.
        outputs: For each module, in the order of the calls, the sum of its outputs and that of their squares.
    """

    coordinate: Mapping[str, int]
    before: Mapping[str, int]
    moved: list[str]
    draws: bool
    eps: float
    loss: float
    weight: float
    samples: float
    digest: int
    norm: float
    gradients: Mapping[str, Part]
    weights: Mapping[str, Part]
    outputs: Mapping[str, list[float]]

    @classmethod
    def read(cls, directory: Path, rank: int, number: int) -> Record:
        """Read an update of a rank, counted from 1; its tensors are mapped into memory."""
        found = torch.load(record_file(directory, rank, number), weights_only=True, mmap=True)
        for kind in ("gradients", "weights"):
            found[kind] = {name: Part(*part) for name, part in found[kind].items()}
        return cls(**found)


def record_file(directory: Path, rank: int, number: int) -> Path:
    """Return the file of an update, counted from 1."""
    return directory / f"rank-{rank}.update-{number}.pt"


def end_file(directory: Path, rank: int) -> Path:
    """Return the file that says that a rank has written all its records."""
    return directory / f"rank-{rank}.end"


def divide_for_check(runner: BaseRunner, closers: ExitStack) -> DividedSettings:
    """Prepare this process for a check of layouts, before a model is built.

    Returns a function that changes the loader settings of a split, so that updates have the same samples on every layout, in unequal
    shares: with equal shares a wrong divisor does not show.
    """
    config, section = runner.config, runner.config.audit.gradients
    if section.dtype is not None:
        # What the forward creates has to be of this dtype as well.
        closers.enter_context(default_dtype(dtype_of(section.dtype)))
    if config.seed is None:
        config.seed = 0
    replicas = int(section.replicas)
    accum_steps = int(config.accum_steps)

    def divided(settings: Mapping[str, Any], divides_itself: bool) -> Mapping[str, object]:
        batch: int | None = settings.get("batch_size")
        samples = section.samples
        if replicas == 1 and samples is None:
            return settings
        if divides_itself:
            if batch is None:
                return settings
            share = max(
                (batch if samples is None else max(samples // accum_steps, 1)) // replicas, 1
            )
            # The run on one process has no weights to begin with.
            return {
                **settings,
                "batch_size": share * replicas if section.weights is None else share,
            }
        if samples is None:
            samples = max(
                settings.get("global_batch_size") or int(batch or 1) * accum_steps, replicas + 1
            )
            # One less, where the ranks would have equally many.
            samples -= samples % replicas == 0
        kept = {
            name: value
            for name, value in settings.items()
            if name not in ("batch_size", "micro_batch_size")
        }
        return {**kept, "global_batch_size": samples}

    return divided


class LayoutRecorder(Observer):
    """Records the first updates of a run, and ends the program after them."""

    critical = True

    def __init__(self, runner: TorchRunner) -> None:
        section = runner.config.audit.gradients
        self._directory = Path(str(section.dir))
        self._updates = int(section.updates)
        self._weights = section.weights
        self._dtype = None if section.dtype is None else dtype_of(section.dtype)
        self._reversed = bool(section.reversed)
        self._runner = runner
        self._hasher = Hasher(torch.device("cpu"))
        self._whole: dict[str, Tensor] = {}
        self._before: dict[str, int] = {}
        self._moved: list[str] = []
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
        for module in (model, criterion):
            if self._dtype is not None and isinstance(module, nn.Module):
                module._apply(self._cast)  # type: ignore[no-untyped-call]
        named = ((canonical_name(name), p) for name, p in model.named_parameters())
        self._whole = {name: _host(p) for name, p in named if not p.is_meta}
        self._before = {
            name: int(self._hasher.digest(whole)) for name, whole in self._whole.items()
        }

    def note_division(self) -> None:
        """Note which weights are other ones now that the model is divided, and forget the whole ones."""
        for name, parameter in self._runner.named_parameters():
            whole = self._whole.get(name)
            if whole is not None and whole.shape == parameter.shape and not parameter.is_meta:
                part = Part(*self._part(parameter))
                if not torch.equal(part.tensor, part.of(whole).to(part.tensor.dtype)):
                    self._moved.append(name)
        self._whole = {}

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
            kept = [
                {k: _host(v) for k, v in state.items() if isinstance(v, Tensor)} for state in states
            ]
            torch.save({"model": kept[0], "criterion": kept[1]}, self._directory / WEIGHTS)
            return
        found = torch.load(self._weights, weights_only=True)
        self._runner.load_model(found["model"], partial=True)
        if isinstance(criterion, nn.Module):
            criterion.load_state_dict(found["criterion"])

    # Within an update

    def prepare_batch(self, data: object) -> Any:
        """Put the model into the mode of the comparison, and return the data of a micro-batch as it is trained on. Called on all ranks."""
        for module in self._runner.unwrapped_model.modules():
            # No dropout, and running statistics; cuDNN has the backward of a recurrent layer in training only.
            module.training = isinstance(module, nn.RNNBase)
            if isinstance(module, nn.RNNBase):
                module.dropout = 0.0
        self._streams = _streams()
        if self._dtype is not None:
            data = tree_map(self._cast, data)
        if self._reversed:
            data = tree_map(lambda value: _mapped(_reversed, value), data)
        return data

    def micro_batch_started(self, data: object, *, read: object, samples: float) -> None:
        """Note the samples of a micro-batch."""
        self._counts = True
        if self._runner.placement.counts_samples:
            self._digest += int(self._hasher.digest_samples(read))

    def micro_batch_ended(self) -> None:
        """Note whether the micro-batch has drawn random numbers."""
        self._counts = False
        self._draws |= any(
            not torch.equal(before, after) for before, after in zip(self._streams, _streams())
        )

    def _watch(self, name: str) -> Callable[[nn.Module, object, object], None]:
        def hook(module: nn.Module, inputs: object, output: object) -> None:
            # Checkpointing calls modules again within a backward.
            if torch._C._current_graph_task_id() != -1 or not torch.is_grad_enabled():
                return
            for _, tensor in tensors(output):
                if tensor.is_floating_point():
                    self._eps = max(self._eps, torch.finfo(tensor.dtype).eps)
                    # A scalar, such as an auxiliary loss, is no sum over samples.
                    if self._counts and tensor.dim():
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
        trained = [(name, p) for name, p in self._runner.named_parameters() if p.requires_grad]
        self._update = {
            "gradients": {
                n: self._part(torch.zeros_like(p) if p.grad is None else p.grad) for n, p in trained
            },
            "norm": float(norm),
            "digest": self._digest,
            "outputs": self._outputs,
        }
        self._digest, self._outputs = 0, {}
        if not norm.isfinite():
            weight = float(totals.weight)
            self._write(float(totals.loss) / (weight or 1.0), weight, float(totals.samples), {})

    def update_ended(self, outcome: UpdateOutcome) -> None:
        """Record the weights after an update, and end the program after the last one, or after one that was not made."""
        named = self._runner.named_parameters() if outcome.committed else ()
        weights = {name: self._part(parameter) for name, parameter in named}
        self._write(float(outcome.loss), float(outcome.weight), float(outcome.samples), weights)

    def _write(
        self, loss: float, weight: float, samples: float, weights: Mapping[str, object]
    ) -> None:
        runner, self._made = self._runner, self._made + 1
        eps = [
            torch.finfo(p.dtype).eps for _, p in runner.named_parameters() if p.is_floating_point()
        ]
        values = {
            **self._update,
            "coordinate": dict(runner.preparation.place()[0]),
            "before": self._before,
            "moved": self._moved,
            "draws": self._draws,
            "eps": max([self._eps, *eps]),
            "loss": loss,
            "weight": weight,
            "samples": samples,
            "weights": weights,
        }
        torch.save(values, record_file(self._directory, runner.rank, self._made))
        # An update without weights was not made: those after it would not be comparable.
        if self._made == self._updates or not weights:
            end_file(self._directory, runner.rank).touch()
            raise SystemExit(0)

    def _part(self, tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], Tensor]:
        return self._hasher.offset(tensor), tuple(tensor.shape), _host(local_part(tensor))

    def _cast(self, value: Any) -> Any:
        """Return a tensor in the dtype of the check, if it is floating; an object with `apply`, such as a batch of graphs, with its own."""
        return _mapped(
            lambda tensor: tensor.to(self._dtype) if tensor.is_floating_point() else tensor, value
        )


def _mapped(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return a value with its tensors changed, also in classes that `tree_map` does not know, such as those of Hugging Face."""
    if isinstance(value, Tensor):
        return change(value)

    def inner(item: Any) -> Any:
        return _mapped(change, item)

    if isinstance(value, Mapping):
        return type(value)({key: tree_map(inner, item) for key, item in value.items()})  # type: ignore[call-arg]
    if isinstance(value, (list, tuple)):
        return (
            tree_map(inner, value)
            if type(value) in (list, tuple)
            else type(value)(tree_map(inner, list(value)))
        )
    return value.apply(inner) if callable(getattr(value, "apply", None)) else value


def _reversed(tensor: Tensor) -> Tensor:
    return tensor.flip(0) if tensor.dim() else tensor


def _host(value: Tensor) -> Tensor:
    return value.detach().to("cpu", copy=True)


def _streams() -> list[Tensor]:
    streams = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        streams.append(torch.cuda.get_rng_state())
    return streams
