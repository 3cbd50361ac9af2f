"""Samples of a stream as training and evaluation see them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset

from .protocols import FeatureStore
from .refs import SampleRef


class Sample(dict[str, Tensor]):
    """The features of a sample by name.

    Attributes:
        ref: What the log says of the sample: its id, and its metadata, such as the version of the weights that made it.
    """

    def __init__(self, features: Mapping[str, Tensor], ref: SampleRef) -> None:
        super().__init__(features)
        self.ref = ref


class FeatureDataset(Dataset[Any]):
    """A fixed list of samples of a stream, for evaluation, or to train on in another order; goes into `self.datasets`.

    Args:
        store: Where the features lie. It frees none of them; a `StreamLoader` over the same log does, unless it has `retain="all"`.
        refs: The samples, such as `channel.read(0, channel.published())`.
        transform: Makes of a `Sample` what the loader is to collate; by default its features by name.
    """

    def __init__(
        self, store: FeatureStore, refs: Sequence[SampleRef], *, transform: Callable[[Sample], Any] | None = None
    ) -> None:
        self.store = store
        self.refs = list(refs)
        self.transform = transform

    def __len__(self) -> int:
        return len(self.refs)

    def __getitem__(self, index: int) -> Any:
        sample = Sample(self.store.get(self.refs[index]), self.refs[index])
        return dict(sample) if self.transform is None else self.transform(sample)
