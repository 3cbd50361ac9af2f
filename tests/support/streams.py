"""A frozen target, what it produces, and a draft that learns it from a stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import danling as dl
from danling.stream import (
    FeatureProducer,
    FeatureStore,
    RefChannel,
    SampleRef,
    StreamLoader,
    TensorSpec,
)


class Points(Dataset[dict[str, Any]]):
    """Points by index."""

    def __init__(self, indices: Sequence[int]) -> None:
        self.indices = list(indices)
        generator = torch.Generator().manual_seed(5)
        self.points = torch.randn(256, 4, generator=generator)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, place: int) -> dict[str, Any]:
        index = self.indices[place]
        return {"id": index, "point": self.points[index]}


def frozen_target() -> nn.Linear:
    """Return the target, the same wherever it is made."""
    target, generator = nn.Linear(4, 3), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return target


class Target(FeatureProducer):
    """Produces what the target says of points."""

    def __init__(
        self, config: Mapping[str, Any], *, indices: Sequence[int], **options: Any
    ) -> None:
        super().__init__(config, **options)
        self.model = frozen_target()
        self.datasets = {"predict": Points(indices)}
        self.captured: list[int] = []

    def capture(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        self.captured += batch["id"].tolist()
        return {"input": batch["point"], "target": self.model(batch["point"])}


class Draft(dl.TorchRunner):
    """Learns them, and writes down losses and inputs."""

    not_saved = ("trace",)

    def __init__(
        self,
        config: Mapping[str, Any],
        store: FeatureStore,
        channel: RefChannel,
        *,
        batch_size: int = 2,
        dropout: float = 0.2,
        stop_at: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(config)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3))
        self.criterion = nn.MSELoss()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.dataloaders = {"train": StreamLoader(store, channel, batch_size, **options)}
        self.trace: list[tuple[int, float]] = []
        self.stop_at = stop_at

    def train_step(self, data: dict[str, Tensor]) -> tuple[Any, Tensor]:
        if self.state.train.global_step == self.stop_at:
            raise Stopped
        pred, loss = super().train_step(data)
        self.trace.append((self.state.train.global_step, loss.item()))
        return pred, loss

    def end(self) -> tuple[list[tuple[int, float]], dict[str, Tensor]]:
        return self.trace, {
            name: value.clone() for name, value in self.unwrapped_model.state_dict().items()
        }


class Stopped(Exception):
    """Ends a run where a test wants it."""


def settings(directory: Path, **changes: Any) -> dict[str, Any]:
    """Return the configuration of a run that goes on where it was."""
    base: dict[str, Any] = {
        "seed": 1,
        "steps": 5,
        "dir": str(directory),
        "auto_resume": True,
        "accum_steps": 2,
    }
    return {**base, "checkpoint": {"interval": 2, "async_enabled": False}, **changes}


def publish(
    store: FeatureStore,
    channel: RefChannel,
    indices: Sequence[int],
    *,
    end: bool = True,
    **meta: Any,
) -> None:
    """Put what `Target` would into a stream, without a runner."""
    target = frozen_target()
    points = Points(indices)
    for place, index in enumerate(indices):
        point = points[place]["point"]
        with torch.no_grad():
            features = {"input": point, "target": target(point)}
        store.put(f"object-{index}", features)
        ref = reference(f"object-{index}", features, str(index))
        channel.append([SampleRef(ref.id, ref.object_id, ref.tensors, meta)])
    if end:
        channel.end()


def reference(object_id: str, tensors: Mapping[str, Tensor], sample: str = "sample 7") -> SampleRef:
    """Return what a log says of a sample with these features."""
    return SampleRef(
        sample, object_id, {name: TensorSpec.of(tensor) for name, tensor in tensors.items()}
    )


def assert_same(one: Any, other: Any) -> None:
    """Check that two runs came bitwise to the same losses and weights."""
    assert one[0] == other[0]
    assert one[1].keys() == other[1].keys()
    for name in one[1]:
        assert torch.equal(one[1][name], other[1][name]), name
