"""Sources by split, without a runner."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from danling.data import BatchSource, open_source
from danling.data.run_data import Sources


def run_of(loaders: Any, build: Callable[[], None] = lambda: None, epoch: int = 0) -> Any:
    counters = SimpleNamespace(train=SimpleNamespace(epoch=epoch))
    return SimpleNamespace(dataloaders=loaders, datasets={}, build_dataloaders=build, state=counters)


def sources_of(
    loaders: dict[str, list[int]], build: Callable[[], None] = lambda: None, epoch: int = 0
) -> tuple[Sources, list[str]]:
    opened: list[str] = []

    def open(split: str, loader: Iterable[object]) -> BatchSource:
        opened.append(split)
        return open_source(loader, split=split)

    return Sources(run_of(loaders, build, epoch), open), opened


def values(source: BatchSource) -> list[object]:
    return [batch.data for batch in source.batches()]


def test_a_loader_is_opened_once_and_anew_where_another_one_takes_its_place() -> None:
    loaders = {"train": [1, 2], "val": [3]}
    sources, opened = sources_of(loaders)
    sources.open_all()
    assert opened == ["train", "val"] and sources.of("train") is sources["train"]
    before = sources["train"]
    before.set_epoch(4)
    loaders["train"] = [5, 6]
    after = sources.of("train")
    assert after is not before and after.epoch == 4 and values(after) == [5, 6]
    assert opened == ["train", "val", "train"]


def test_a_split_that_is_added_begins_at_the_epoch_of_the_run() -> None:
    loaders: dict[str, list[int]] = {}
    sources, _ = sources_of(loaders, epoch=3)
    sources.open_all()
    loaders["extra"] = [1]
    assert sources.of("extra").epoch == 3 and list(sources) == ["extra"]


def test_a_loader_that_is_missing_is_built_or_asked_for() -> None:
    loaders: dict[str, list[int]] = {}
    sources, _ = sources_of(loaders, build=lambda: loaders.update(train=[7]))
    assert values(sources.of("train")) == [7]
    nobody, _ = sources_of({})
    with pytest.raises(ValueError, match=r"Expected `build_dataloaders` to put a loader.*none for 'train'"):
        nobody.of("train")


def test_some_splits_are_given_in_the_order_that_is_asked_for() -> None:
    sources, _ = sources_of({"a": [1], "b": [2], "c": [3]})
    sources.open_all()
    assert list(sources.among(["c", "d", "a"])) == ["c", "a"]


def test_all_are_closed_also_where_one_fails() -> None:
    closed: list[str] = []

    def open(split: str, loader: Iterable[object]) -> BatchSource:
        source = open_source(loader, split=split)
        source.close = lambda: close(split)  # type: ignore[method-assign]
        return source

    def close(split: str) -> None:
        closed.append(split)
        if split == "b":
            raise RuntimeError("b does not close")

    loaders = {"a": [1], "b": [2], "c": [3]}
    sources = Sources(run_of(loaders), open)
    sources.open_all()
    loaders["a"] = [9]
    sources.of("a")
    with pytest.raises(RuntimeError, match="b does not close"):
        sources.close()
    assert sorted(closed) == ["a", "a", "b", "c"]
