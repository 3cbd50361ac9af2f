"""Batches of samples that are equally long, so that a producer pads nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch.utils.data import Sampler


class EqualLengthBatches(Sampler[list[int]]):
    """Batches of indices of samples of one length each, for `build_datasampler` of a producer.

    A batch is yielded when it is full, so that the order of the log stays near that of the dataset; the remaining samples of
    each length come at the end, the shortest first. The order is a function of the lengths alone; a producer that starts again has it too.

    Args:
        lengths: Length of each sample of the dataset, such as its number of tokens.
        batch_size: Samples of a batch at most.

    Raises:
        ValueError: If the batch size is not positive.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int) -> None:
        if batch_size < 1:
            raise ValueError(f"Expected batch_size to be a positive integer. Received: batch_size={batch_size!r}.")
        self.batches = list(_batches(lengths, batch_size))

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)


def _batches(lengths: Sequence[int], batch_size: int) -> Iterator[list[int]]:
    open_batches: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        batch = open_batches.setdefault(int(length), [])
        batch.append(index)
        if len(batch) == batch_size:
            yield open_batches.pop(int(length))
    yield from (open_batches[length] for length in sorted(open_batches))
