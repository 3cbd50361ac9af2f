"""A position that was loaded in the middle of a pass is given up by going back to its beginning."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from support.datasets import stateful_loader
from torch.utils.data import RandomSampler

from danling.data import Batch, BatchSource, open_source


def cursor() -> BatchSource:
    numbers = list(range(12))
    sampler = RandomSampler(numbers, generator=torch.Generator().manual_seed(3))
    return open_source(stateful_loader(numbers, 2, sampler=sampler), split="train")


def rest(of: BatchSource) -> list[list[int]]:
    return [batch.data.tolist() for batch in of.batches()]


@pytest.mark.parametrize("read", [1, 3, 6])
def test_a_loaded_position_is_given_up_by_a_rewind(read: int) -> None:
    saved = cursor()
    begun = [batch.data.tolist() for batch in islice(saved.batches(), read)]
    saved.commit([Batch(None, None, None)] * read)
    state = saved.state_dict()
    whole = begun + rest(saved)
    loaded = cursor()
    loaded.load_state_dict(state)
    loaded.set_epoch(loaded.epoch)
    assert rest(loaded) == whole
    again = cursor()
    again.load_state_dict(state)
    assert rest(again) == whole[read:]
