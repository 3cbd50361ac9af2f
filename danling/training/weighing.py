"""The weight and the number of samples of each batch, and whether the batches to train on have a target."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from danling.data import PLACEHOLDER, Batch, BatchSource
from danling.data.collation import collate

from .batches import count_samples, criterion_setting, peek_target
from .keys import preserved_streams
from .targets import unweighed

logger = logging.getLogger("danling")


class BatchWeights:
    """Weighs batches, and remembers what the batches to train on look like.

    Args:
        learns: Whether to look for a target in the batches to train on; not if the user's own step takes them apart.
        warns: Whether this process warns once if the criterion ignores some targets but no target is found in a batch.
        criterion: Returns the criterion, or `None`.

    Attributes:
        targetless: Whether the batches to train on have no target; `None` before one was seen. A checkpoint stores it under the key `bare`.
    """

    def __init__(
        self, *, learns: bool = True, warns: bool = True, criterion: Callable[[], object] = lambda: None
    ) -> None:
        self.targetless: bool | None = None
        self._criterion = criterion
        self._learns = learns
        self._warns = warns

    def weigh(
        self,
        batch: Batch,
        data: object,
        weight: Callable[[Any, Any], float | Tensor],
        *,
        training: bool = False,
    ) -> tuple[float | Tensor, float]:
        """Return the weight and the number of samples of a batch; both are 0 for padding and for data that only other ranks read.

        Args:
            batch: The batch as its source gave it.
            data: Its data, on the device.
            weight: `(data, target) -> weight` of the mean-reduced loss.
            training: Whether the batch is trained on.
        """
        if batch.samples == 0 or data is PLACEHOLDER:
            return 0.0, 0.0
        samples = count_samples(data) if batch.samples is None else batch.samples
        target = peek_target(data)
        if training and self.targetless is None and self._learns:
            self.targetless = target is None
        if training and target is None and self._warns:
            self._warns = False
            if criterion_setting(self._criterion(), "ignore_index") is not None:
                logger.warning("%s", unweighed(data))
        return weight(data, target), samples

    def look_at_first(
        self,
        splits: Iterable[str],
        *,
        sources: Mapping[str, BatchSource],
        datasets: Mapping[str, object],
        settings: Callable[[str], Mapping[str, Any]],
        device: torch.device,
    ) -> None:
        """Look for a target in the first split to train on whose samples are those of its batches, if no batch was seen.

        Args:
            splits: Splits to train on.
            sources: Batches by split.
            datasets: Datasets by split.
            settings: Returns the options of the loader of a split.
            device: The device whose random streams are kept.
        """
        split = next((name for name in splits if name in datasets and name in sources), None)
        if split is None:
            return
        options = settings(split)
        # Files that workers are to open stay closed here, and a dataset may have other keys than positions.
        if sources[split].kind == "position" and not (options.get("num_workers") or options.get("collate_fn")):
            self.look_at(datasets[split], device)

    def look_at(self, dataset: Any, device: torch.device) -> None:
        """Look for a target in the first sample of a dataset to train on, if no batch was seen; the random streams stay as they are.

        Args:
            dataset: A map-style dataset, whose samples are those of the batches.
            device: The device whose random streams are kept too.
        """
        if self.targetless is None and self._learns:
            with preserved_streams(device), suppress(Exception):
                sample = dataset[0]
                # What is neither is made into a batch by its library, and only that tells.
                told = isinstance(sample, (Tensor, Mapping, list, tuple))
                self.targetless = peek_target(sample if told else collate([sample])) is None
