"""What is said of a training when it begins."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

_WIDTH = 98
"""A line of the log has a time before it, and a terminal 120 columns."""


class UpdateDivision(Protocol):
    """How the samples of an update are divided over ranks and micro-batches."""

    @property
    def samples(self) -> int:
        """Samples of an update over all ranks."""

    @property
    def is_even(self) -> bool:
        """Whether every rank and micro-batch has the same number of samples."""


def describe_parameters(sizes: Iterable[tuple[int, bool]]) -> str:
    """Return the number of parameters of a model, and of those that are trained where it is another one.

    Args:
        sizes: Elements of each parameter, and whether it is trained.

    Examples:
        >>> describe_parameters([(1000, True), (24, False)])
        '1,024 parameters, 1,000 trained'
    """
    listed = list(sizes)
    whole, trained = sum(size for size, _ in listed), sum(size for size, is_trained in listed if is_trained)
    return f"{whole:,} parameters" + (f", {trained:,} trained" if trained != whole else "")


def describe_batches(
    batch_size: int | None, accum_steps: int, division: UpdateDivision | None = None, *, distributed: bool = False
) -> str:
    """Return what an update is made of; nothing where no size is known.

    Args:
        batch_size: Samples of a micro-batch on each rank, at most.
        accum_steps: Micro-batches of an update on each rank.
        division: How an update of a fixed number of samples is divided, `None` where batches have a size of their own.
        distributed: Whether there are several ranks.

    Examples:
        >>> describe_batches(4, 2, distributed=True)
        'batch 4 x 2 micro-batches on each'
    """
    accumulated = f" x {accum_steps} micro-batches" if accum_steps > 1 else ""
    each = " on each" if distributed else ""
    if division is not None:
        most = "" if division.is_even else "at most "
        return f"{division.samples} samples an update, {most}{batch_size}{accumulated}{each}"
    return f"batch {batch_size}{accumulated}{each}" if batch_size else ""


def describe_training(
    *, step: int, epoch: int, budget: str, processes: str, stack: str, parameters: str, batches: str, directory: Path
) -> list[str]:
    """Return what is going to be trained, in lines of at most 100 columns; a path alone may be longer.

    Args:
        step: Updates committed before.
        epoch: Epochs completed before.
        budget: Where training ends, such as `epoch 3`.
        processes: Number and kind of the processes.
        stack: Stack and precision.
        parameters: What `describe_parameters` returned.
        batches: What `describe_batches` returned.
        directory: The run directory.
    """
    head = f"Training from step {step} (epoch {epoch}) to {budget} on {processes} ({stack})"
    sizes = ", ".join(part for part in (parameters, batches) if part)
    first = [f"{head}: {sizes}"] if len(head) + len(sizes) <= _WIDTH else [head, sizes]
    return [*first, f"Run directory: {directory}"]
