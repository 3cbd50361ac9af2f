"""Weights go to other programs and come back: plain files, safetensors in one piece and in shards, averaged weights too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.saves import make_manager
from torch import Tensor, nn

from danling.checkpoints import (
    CheckpointDamaged,
    CheckpointMismatch,
    CheckpointNotFound,
    export_weights,
    import_weights,
    read_model,
)
from danling.checkpoints.exchange import evaluated_weights


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.state_dict(keep_vars=True))


def _same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


@pytest.mark.parametrize("path", ["weights.pth", "weights.safetensors", "directory"])
@pytest.mark.parametrize("limit", [None, 20])
def test_round_trip_with_averaged_weights(tmp_path: Path, path: str, limit: int | None) -> None:
    model, averaged = _Tied(), _Tied()
    files = export_weights(
        tmp_path / path, _weights(model), ema=_weights(averaged), max_shard_bytes=limit
    )
    assert all(file.is_file() for file in files)
    assert _same(import_weights(tmp_path / path), model.state_dict())
    assert _same(import_weights(tmp_path / path, which="ema"), averaged.state_dict())
    loaded = import_weights(tmp_path / path)
    assert loaded["head.weight"].data_ptr() == loaded["embed.weight"].data_ptr()
    _Tied().load_state_dict(loaded)
    assert not [file for file in tmp_path.rglob("*") if file.name.startswith(".")]


@pytest.mark.parametrize("path", ["directory", "weights.safetensors"])
def test_nothing_of_an_earlier_export_stays_beside_a_new_one(tmp_path: Path, path: str) -> None:
    place = tmp_path / path
    old, new = {"a": torch.zeros(4), "b": torch.zeros(4)}, {"a": torch.ones(4), "b": torch.ones(4)}
    export_weights(place, old, ema=old, max_shard_bytes=16)
    bystanders = {
        tmp_path / "model.pth",
        tmp_path / "other.safetensors",
        place.with_name("config.json"),
    }
    for bystander in bystanders:
        bystander.write_text("mine")
    for limit in (None, 16, None):
        written = export_weights(place, new, max_shard_bytes=limit)
        assert set(written) == {file for file in tmp_path.rglob("*") if file.is_file()} - bystanders
        assert _same(import_weights(place), new)
    with pytest.raises(CheckpointNotFound, match=r"\(ema\)"):
        import_weights(place, which="ema")


@pytest.mark.parametrize("key", ["model", "state_dict"])
def test_weights_under_a_key_are_found(key: str, tmp_path: Path) -> None:
    model = nn.Linear(8, 8)
    torch.save({"epoch": 3, key: model.state_dict()}, tmp_path / "weights.pt")
    assert _same(import_weights(tmp_path / "weights.pt"), model.state_dict())
    torch.save({"epoch": 3, "weights": model.state_dict()}, tmp_path / "others.pt")
    with pytest.raises(
        CheckpointMismatch,
        match=r"a mapping with \['epoch', 'weights'\]. Save `model.state_dict\(\)`",
    ):
        import_weights(tmp_path / "others.pt")


def test_exported_file_is_read_by_other_programs(tmp_path: Path) -> None:
    model = nn.Linear(8, 8)
    export_weights(tmp_path / "plain.pth", _weights(model))
    assert _same(torch.load(tmp_path / "plain.pth", weights_only=True), model.state_dict())
    export_weights(tmp_path / "one.safetensors", _weights(model))
    assert _same(load_file(tmp_path / "one.safetensors"), model.state_dict())
    files = export_weights(tmp_path / "many", _weights(model), max_shard_bytes=100)
    shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    assert [file.name for file in files] == [*shards, "model.safetensors.index.json"]
    index = json.loads(files[-1].read_text())
    assert index["metadata"]["total_size"] == 8 * 8 * 4 + 8 * 4
    collected = {
        name: load_file(tmp_path / "many" / file)[name]
        for name, file in index["weight_map"].items()
    }
    assert _same(collected, model.state_dict())


def test_names_and_dtypes(tmp_path: Path) -> None:
    weights = {
        "module._orig_mod.a": torch.ones(2),
        "module.b": torch.ones(2, dtype=torch.int64),
        "module.c": torch.ones(6)[:2],
    }
    export_weights(tmp_path / "w.safetensors", weights, dtype=torch.bfloat16)
    loaded = import_weights(tmp_path / "w.safetensors")
    dtypes = {"a": torch.bfloat16, "b": torch.int64, "c": torch.bfloat16}
    assert {name: tensor.dtype for name, tensor in loaded.items()} == dtypes


def test_equal_weights_give_equal_files(tmp_path: Path) -> None:
    weights = {name: torch.randn(3) for name in "abc"}
    weights["tied"] = weights["a"]
    about = {name: f"ä {number}" for number, name in enumerate("zyxwvu")}
    files = []
    for number in range(8):
        file = tmp_path / f"{number}.safetensors"
        export_weights(
            file, weights, metadata=dict(reversed(about.items())) if number % 2 else about
        )
        files.append(file.read_bytes())
    assert len(set(files)) == 1
    with safe_open(tmp_path / "0.safetensors", framework="pt") as opened:
        assert opened.metadata() == {**about, "format": "pt", "tied": '{"tied": "a"}'}
    loaded = load_file(tmp_path / "0.safetensors")
    assert loaded.keys() == set("abc") and all(
        torch.equal(loaded[name], weights[name]) for name in loaded
    )


def test_wrong_source_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointNotFound,
        match="without model.safetensors.index.json, model.safetensors, model.pth",
    ):
        import_weights(tmp_path)
    torch.save([1], tmp_path / "list.pth")
    with pytest.raises(CheckpointMismatch, match="list"):
        import_weights(tmp_path / "list.pth")
    export_weights(tmp_path / "plain.pth", {"a": torch.ones(1)})
    with pytest.raises(CheckpointNotFound, match=r"\(ema\)"):
        import_weights(tmp_path / "plain.pth", which="ema")
    (tmp_path / "broken.safetensors").write_bytes(b"\0" * 20)
    with pytest.raises(CheckpointDamaged, match="broken.safetensors"):
        import_weights(tmp_path / "broken.safetensors")
    files = export_weights(
        tmp_path / "many", {"a": torch.ones(4), "b": torch.ones(4)}, max_shard_bytes=16
    )
    save_file({"a": torch.ones(4)}, files[1])
    with pytest.raises(CheckpointDamaged, match="without: b"):
        import_weights(tmp_path / "many")
    files[1].unlink()
    with pytest.raises(
        CheckpointNotFound, match="model-00002-of-00002.safetensors, which is missing"
    ):
        import_weights(tmp_path / "many")
    index = tmp_path / "many" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../plain.pth"}}))
    with pytest.raises(CheckpointDamaged, match="plain relative name"):
        import_weights(tmp_path / "many")


def test_weights_are_found_one_level_below_and_nothing_beside_them_is_left_out(
    tmp_path: Path,
) -> None:
    weight, file = torch.ones(1), tmp_path / "weights.pt"
    taken: list[dict[str, object]] = [
        {"a": weight},
        {"model": {"a": weight}},
        {"state_dict": {"a": weight}, "epoch": 3},
        {"state_dict": {"model": {"a": weight}}},
    ]
    for content in taken:
        torch.save(content, file)
        assert import_weights(file).keys() == {"a"}
    refused: list[dict[str, object]] = [
        {"model": {"model": {"a": weight}, "head": weight}},
        {"model": weight, "state_dict": {"a": weight}},
        {"model": "resnet", "state_dict": {"a": weight}},
        {"state_dict": {"a": 1}},
    ]
    for content in refused:
        torch.save(content, file)
        with pytest.raises(CheckpointMismatch, match="a state_dict of tensors"):
            import_weights(file)


def test_a_runner_finds_foreign_weights_and_its_own(tmp_path: Path) -> None:
    manager = make_manager("file", tmp_path / "own")
    manager.save_checkpoint(
        {"format_version": 1, "model": {"a": torch.zeros(1)}}, epoch=0, global_step=1
    )
    export_weights(tmp_path / "directory", {"a": torch.ones(1)})
    export_weights(tmp_path / "file.pt", {"a": torch.full((1,), 2.0)}, ema={"a": torch.zeros(1)})
    sources = [
        "latest",
        *(tmp_path / name for name in ("own", "own/latest.pth", "directory", "file.pt")),
    ]
    assert [float(read_model(manager, source, averages=False)["a"]) for source in sources] == [
        0,
        0,
        0,
        1,
        2,
    ]
    assert float(read_model(manager, tmp_path / "file.pt")["a"]) == 0


def test_averages_come_under_both_names_of_a_tied_weight_and_only_if_they_are_those_of_the_model() -> (
    None
):
    head, bias = torch.ones(2), torch.zeros(3)
    weights = {"embed": head, "head": head.clone(), "bias": bias}
    found = evaluated_weights(
        weights, {"weights": {"embed": torch.full((2,), 5.0), "bias": torch.ones(3)}}
    )
    assert (
        found is not None
        and found["head"] is found["embed"]
        and found["bias"].tolist() == [1.0] * 3
    )
    wrapped = evaluated_weights(weights, {"module.embed": head, "module.bias": bias + 2})
    assert wrapped is not None and wrapped["bias"].tolist() == [2.0] * 3
    for other in (
        None,
        5,
        {},
        {"decay": 0.9},
        {"embed": torch.ones(3)},
        {"other": torch.ones(2)},
        {"weights": {}},
    ):
        assert evaluated_weights(weights, other) is None
