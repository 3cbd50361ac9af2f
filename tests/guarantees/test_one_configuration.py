"""One run has one configuration and one source on all ranks: what differs is refused at construction, in the same words on each."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_outcomes, run_processes
from support.toys import Chain, Line, settings

import danling as dl


def rank() -> int:
    return int(os.environ["RANK"])


def of_rank(values: dict[str, list[Any]]) -> dict[str, Any]:
    return {key: listed[rank()] for key, listed in values.items() if listed[rank()] is not ...}


def train(root: str, values: dict[str, list[Any]], given: dict[str, Any]) -> list[float]:
    with Chain({**settings(root, steps=2), **given, **of_rank(values)}) as runner:
        runner.train()
        return [float(parameter.sum()) for parameter in runner.unwrapped_model.parameters()]


def refusals(world_size: int, *args: Any, function: Any = train) -> set[str]:
    """Return what the ranks were refused with; each rank must be."""
    outcomes = run_outcomes(function, *args, world_size=world_size)
    assert all(isinstance(outcome.error, ValueError) for outcome in outcomes), [
        o.traceback for o in outcomes
    ]
    return {str(outcome.error) for outcome in outcomes}


@pytest.mark.parametrize(
    ("values", "given", "line"),
    [
        ({"optim.lr": [0.1, 0.2, 0.1]}, {}, "optim.lr: 0.1 (ranks 0, 2), 0.2 (rank 1)"),
        ({"steps": [2, 3]}, {}, "steps: 2 (rank 0), 3 (rank 1)"),
        ({"epochs": [1, 2]}, {"steps": None}, "epochs: 1 (rank 0), 2 (rank 1)"),
        ({"accum_steps": [1, 2]}, {}, "accum_steps: 1 (rank 0), 2 (rank 1)"),
        ({"max_grad_norm": [None, 1.0]}, {}, "max_grad_norm: None (rank 0), 1.0 (rank 1)"),
        ({"patience": [3, 4]}, {}, "patience: 3.0 (rank 0), 4.0 (rank 1)"),
        ({"seed": [1, None]}, {}, "seed: 1 (rank 0), None (rank 1)"),
        (
            {"parallel.axes.shard": [2, 1]},
            {"stack": "parallel"},
            "parallel.axes.shard: 2 (rank 0), 1 (rank 1)",
        ),
        ({"mixture": [{"width": 1}, ...]}, {}, "mixture.width: 1 (rank 0), absent (rank 1)"),
        (
            {"model": [{"drop_path": 0.1}, {"drop_path": 0.2}]},
            {},
            "model.drop_path: 0.1 (rank 0), 0.2 (rank 1)",
        ),
        ({"lora": [{"rank": 4}, {"rank": 8}]}, {}, "lora.rank: 4 (rank 0), 8 (rank 1)"),
        (
            {"sources": [[{"path": "/a", "share": 1}], [{"path": "/b", "share": 2}]]},
            {},
            "sources.0.share: 1 (rank 0), 2 (rank 1)",
        ),
        ({"local_keys": [None, ["shards"]]}, {}, "local_keys: None (rank 0), ['shards'] (rank 1)"),
        (
            {"resume": [None, "elsewhere.pth"]},
            {},
            "resume: None (rank 0), 'elsewhere.pth' (rank 1)",
        ),
        (
            {"pretrained": ["weights.pth", None]},
            {},
            "pretrained: 'weights.pth' (rank 0), None (rank 1)",
        ),
    ],
)
def test_different_setting_is_named_by_rank(
    values: dict[str, list[Any]], given: dict[str, Any], line: str, tmp_path: Path
) -> None:
    (message,) = refusals(len(next(iter(values.values()))), str(tmp_path), values, given)
    assert line in message.splitlines()[1], message
    assert not list(tmp_path.rglob("*.pth"))


class SetsLate(Chain):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.config.optim.weight_decay = 0.1 * rank()


def construct_late(root: str) -> None:
    SetsLate(settings(root, steps=2)).close()


def test_setting_by_rank_in_init_is_refused(tmp_path: Path) -> None:
    (message,) = refusals(2, str(tmp_path), function=construct_late)
    assert "optim.weight_decay: 0.0 (rank 0), 0.1 (rank 1)" in message


def test_a_secret_is_not_compared_and_not_shown(tmp_path: Path) -> None:
    values = {"tracker": [{"api_key": "abcdefgh"}, {"api_key": "ijklmnop"}], "optim.lr": [0.1, 0.2]}
    (message,) = refusals(2, str(tmp_path), values, {})
    assert "optim.lr" in message and "abcdefgh" not in message and "api_key" not in message


def test_settings_of_a_machine_are_not_compared(tmp_path: Path) -> None:
    values = {
        "dir": [str(tmp_path / "run"), str(tmp_path / "run" / "other")],
        "dataloader.num_workers": [0, 1],
        "log_seconds": [1.0, 2.0],
        "tensorboard": [True, False],
        "profiling.enabled": [True, False],
        "device": ["cuda:0", "cuda:1"],
        "rank": [0, 1],
        "sources": [[{"path": "/a", "share": 1}], [{"path": "/b", "share": 1}]],
        "environment": [{"LOCAL_RANK": 0}, {"LOCAL_RANK": 1}],
        "experiment": ["at-120000", "at-120001"],
        "name": ["tuesday-120000", "tuesday-120001"],
        "corpus": [{"cache_dir": "/a", "shards": 3}, {"cache_dir": "/b", "shards": 4}],
    }
    first, second = run_processes(train, str(tmp_path), values, {"local_keys": ["corpus.shards"]})
    assert first == second


# Sources


def continue_from(sources: list[str], root: str, given: dict[str, Any]) -> tuple[int, list[float]]:
    with Line({**settings(root, steps=6), **given, "resume": sources[rank()]}) as runner:
        begun = runner.state.train.global_step
        runner.train()
        return begun, [float(each.sum()) for each in whole(runner)]


def whole(runner: dl.TorchRunner) -> list[torch.Tensor]:
    with runner.whole_weights():
        return [parameter.detach().clone() for parameter in runner.unwrapped_model.parameters()]


def make_checkpoints(root: str, given: dict[str, Any]) -> None:
    with Line({**settings(root, steps=4), **given, "checkpoint": {"interval": 2}}) as runner:
        runner.train()


def copy_of(path: Path, to: Path) -> str:
    """Copy a checkpoint as a user does: a file with its sums, or the whole directory."""
    if path.suffix == ".pth":
        to.mkdir()
        for each in (path, path.with_name(f"{path.name}.sha256")):
            shutil.copy(each, to / each.name)
        return str(to / path.name)
    shutil.copytree(path.parent, to)
    return str(to / path.name)


@pytest.mark.parametrize(("stack", "suffix"), [("ddp", ".pth"), ("parallel", "")])
def test_copies_of_a_checkpoint_are_one_source_and_other_content_is_refused(
    stack: str, suffix: str, tmp_path: Path
) -> None:
    given: dict[str, Any] = {"stack": stack}
    if stack == "parallel":
        given |= {"parallel": {"axes": {"shard": 2}}, "fsdp": {"enabled": True}}
    run_processes(make_checkpoints, str(tmp_path / "run"), given)
    checkpoint = tmp_path / "run" / "checkpoints" / f"ckpt-s000000000002{suffix}"
    copied = copy_of(checkpoint, tmp_path / "copies")
    expected = run_processes(continue_from, [str(checkpoint)] * 2, str(tmp_path / "one"), given)
    assert expected[0][0] == 2
    assert (
        run_processes(continue_from, [str(checkpoint), copied], str(tmp_path / "two"), given)
        == expected
    )
    later = checkpoint.with_name(f"ckpt-s000000000004{suffix}")
    (message,) = refusals(
        2, [copied, str(later)], str(tmp_path / "three"), given, function=continue_from
    )
    assert "step 2" in message and "step 4" in message and f"resume of rank 1: {later}" in message


def test_a_copy_without_its_checksums_is_compared_by_its_blocks(tmp_path: Path) -> None:
    run_processes(make_checkpoints, str(tmp_path / "run"), {})
    directory = tmp_path / "run" / "checkpoints"
    alone = []
    for step in (2, 4):
        (tmp_path / f"alone{step}").mkdir()
        alone.append(
            str(
                shutil.copy(
                    directory / f"ckpt-s{step:012d}.pth", tmp_path / f"alone{step}" / "mine.pth"
                )
            )
        )
    whole_one = str(directory / "ckpt-s000000000002.pth")
    results = run_processes(continue_from, [whole_one, alone[0]], str(tmp_path / "one"), {})
    assert results[0][0] == 2 and results[0] == results[1]
    refusals(2, [whole_one, alone[1]], str(tmp_path / "two"), {}, function=continue_from)


def begin_from(weights: list[str], root: str) -> list[float]:
    with Line({**settings(root, steps=1), "pretrained": weights[rank()]}) as runner:
        runner.train()
        return [float(parameter.sum()) for parameter in runner.unwrapped_model.parameters()]


def test_weights_of_another_program_are_compared_by_content(tmp_path: Path) -> None:
    files = [str(tmp_path / name) for name in ("a.pt", "copy.pt", "other.pt")]
    for file, value in ((files[0], 1.0), (files[2], 2.0)):
        torch.save({"weight": torch.full((1, 3), value), "bias": torch.zeros(1)}, file)
    shutil.copy(files[0], files[1])
    first, second = run_processes(begin_from, files[:2], str(tmp_path / "one"))
    assert first == second
    refusals(2, files[1:], str(tmp_path / "two"), function=begin_from)
