"""What the pages say of published faults of installed libraries, seen without `danling prove`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader

accelerate = pytest.importorskip("accelerate")

EPOCH, SKIPPED = 2, 3


@pytest.fixture(autouse=True)
def without_shared_state() -> Iterator[None]:
    """Leave nothing of Accelerate, whose state all of its objects in a process share."""
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def test_accelerate_resumes_a_later_epoch_in_the_order_of_epoch_zero() -> None:
    """If this fails, Accelerate has mended it: then docs/guides/prove.md names the version."""
    configuration = accelerate.DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = accelerate.Accelerator(cpu=True, dataloader_config=configuration)

    def loader() -> DataLoader[torch.Tensor]:
        accelerate.utils.set_seed(0)
        prepared: DataLoader[torch.Tensor] = accelerator.prepare(
            DataLoader(torch.arange(32.0), 4, shuffle=True)
        )
        return prepared

    whole = loader()
    orders = [torch.cat(list(whole)).tolist() for _ in range(EPOCH + 1)]
    assert orders[0] != orders[EPOCH]
    # What a resumed script has: a new loader, of which `skip_first_batches` makes another one.
    rest = torch.cat(list(accelerator.skip_first_batches(loader(), SKIPPED))).tolist()
    assert rest == orders[0][4 * SKIPPED :]
    told = accelerator.skip_first_batches(loader(), SKIPPED)
    told.set_epoch(EPOCH)
    assert torch.cat(list(told)).tolist() == orders[EPOCH][4 * SKIPPED :]
