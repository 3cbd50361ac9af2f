"""What systems like this one get wrong, and faults of either side, in runs over real stores and logs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.streams import Draft, Target, assert_same, publish, settings

from danling.stream import DirectoryStore, SQLiteChannel

SAMPLES = 19


def stream(root: Path, *, end: bool = True) -> tuple[DirectoryStore, SQLiteChannel]:
    store, channel = DirectoryStore(root / "store"), SQLiteChannel(root / "log.sqlite")
    publish(store, channel, range(SAMPLES), end=end)
    return store, channel


def run(directory: Path, store: Any, channel: Any, **options: Any) -> Any:
    """Train to the end of a stream, and return losses and weights."""
    with Draft(
        settings(directory, steps=100, **options.pop("config", {})), store, channel, **options
    ) as runner:
        runner.train()
        return runner.end()


# Freed when it is read, acknowledged before it is on the disk


@pytest.mark.parametrize("saves", [{"async_enabled": False}, {"async_enabled": True}])
def test_freed_samples_are_behind_the_checkpoint_on_the_disk(
    tmp_path: Path, saves: dict[str, Any]
) -> None:
    _, channel = stream(tmp_path)
    seen: list[tuple[int, int]] = []

    def on_disk() -> int:
        payload = torch.load(tmp_path / "draft" / "checkpoints" / "latest.pth", weights_only=True)
        position = payload["dataloaders"]["train"]
        return SAMPLES if position["epoch"] else int(position["consumed"])

    class Witness(DirectoryStore):
        def discard(self, object_ids: Iterable[str]) -> None:
            names = list(object_ids)
            seen.extend((int(name.removeprefix("object-")), on_disk()) for name in names)
            super().discard(names)

    store = Witness(tmp_path / "store")
    run(tmp_path / "draft", store, channel, config={"checkpoint": {"interval": 2, **saves}})
    assert [freed for freed, _ in seen] == list(range(SAMPLES))
    assert all(freed < position for freed, position in seen)
    assert store.usage() == 0


# A damaged object


@pytest.mark.parametrize("length", [0, 100, -8])
def test_a_truncated_object_ends_the_run_by_its_sample_and_it_goes_on_when_the_file_is_back(
    tmp_path: Path, length: int
) -> None:
    store, channel = stream(tmp_path / "one")
    (file,) = (tmp_path / "one").rglob("*object-13.safetensors")
    whole = file.read_bytes()
    file.write_bytes(whole[:length])
    with pytest.raises(
        ValueError, match=rf"features of sample '13' in {re.escape(str(file))}. Received: a damaged"
    ):
        run(tmp_path / "one" / "draft", store, channel)
    assert channel.committed() == 8  # behind the last checkpoint, and nothing else
    file.write_bytes(whole)
    end = run(tmp_path / "one" / "draft", store, channel)
    assert_same(([], end[1]), ([], run(tmp_path / "two", *stream(tmp_path / "two"))[1]))
    assert store.usage() == 0


# What `capture` may not return


def test_a_wrong_capture_is_named_by_its_sample_and_the_producer_goes_on_after_the_mend(
    tmp_path: Path,
) -> None:
    class Spoilt(Target):
        def capture(self, batch: dict[str, Any]) -> Any:
            features = super().capture(batch)
            rows = [
                {name: tensor[i] for name, tensor in features.items()}
                for i in range(len(batch["id"]))
            ]
            rows = [{**row, "id": index} for row, index in zip(rows, batch["id"], strict=True)]
            for row in rows:
                if row.pop("id") == 9:
                    row["target"] = row["target"][:2]
            return rows

    store, channel = DirectoryStore(tmp_path / "store"), SQLiteChannel(tmp_path / "log.sqlite")
    config = {
        "dir": str(tmp_path / "producer"),
        "auto_resume": True,
        "dataloader": {"batch_size": 4},
    }
    options: dict[str, Any] = {"indices": range(12), "store": store, "channel": channel}
    with (
        pytest.raises(
            ValueError,
            match=r"float32\[3\] as feature 'target' of sample '9'.*Received: float32\[2\]",
        ),
        Spoilt(config, **options) as spoilt,
    ):
        spoilt.produce()
    assert channel.published() == 8
    assert len(list((tmp_path / "store" / "objects").rglob("*.safetensors"))) == 8
    end = channel.ended()
    assert end is not None and end.kind == "failed" and "sample '9'" in end.reason
    with Target(config, **options) as target:
        assert target.produce() == 4
    assert [ref.id for ref in channel.read(0, 99)] == [str(index) for index in range(12)]
    channel.close()
