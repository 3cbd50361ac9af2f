"""Machines without a common disk train one run: each uploads and keeps its own part, and the store has the whole of it."""

from __future__ import annotations

import ctypes
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from support.object_servers import ObjectServer
from support.processes import run_processes
from support.stacks import AnyStackRunner, needs_deepspeed
from support.toys import differences

_NEW_MOUNTS, _NEW_USERS = 0x00020000, 0x10000000
_BIND, _PRIVATE_BELOW = 0x1000, 0x4000 | 0x40000


def move_to_machine(place: Path, disk: Path) -> None:
    """Let this process see a disk at a place, which other processes see as it was, and be the first one of its machine."""
    libc = ctypes.CDLL(None, use_errno=True)
    owner = os.getuid(), os.getgid()
    if libc.unshare(_NEW_MOUNTS):
        _checked(libc.unshare(_NEW_MOUNTS | _NEW_USERS))
        Path("/proc/self/setgroups").write_text("deny")
        for kind, own in zip(("uid", "gid"), owner):
            Path(f"/proc/self/{kind}_map").write_text(f"{own} {own} 1")
    _checked(libc.mount(None, b"/", None, _PRIVATE_BELOW, None))
    _checked(libc.mount(os.fsencode(disk), os.fsencode(place), None, _BIND, None))
    os.environ["LOCAL_RANK"] = "0"
    os.environ["LOCAL_WORLD_SIZE"] = "1"


def _checked(code: int) -> None:
    if code:
        number = ctypes.get_errno()
        raise PermissionError(number, os.strerror(number))


STACKS: dict[str, dict[str, Any]] = {
    "ddp": {"stack": "ddp"},
    "parallel": {"stack": "parallel", "parallel": {"axes": {"shard": 2}}},
    "deepspeed": {"stack": "deepspeed", "deepspeed": {"zero_optimization": {"stage": 2}}},
}
KEPT = 2


def can_have_mounts(place: str) -> None:
    """Try it."""
    move_to_machine(Path(place), Path(place))


def train(
    place: str, disks: list[str] | None, url: str | None, stack: dict[str, Any], stop_at: int | None
) -> Any:
    """Train on machines of one process each.

    Args:
        place: Where each machine sees its disk.
        disks: Of each machine; `None` is one disk for all.
        url: Of the store.
        stack: Its settings.
        stop_at: Global step after which it stops.

    Returns:
        Where it began, weights and last updates at the end, targets on the disk of this machine, and warnings.
    """
    if disks is not None:
        import os

        move_to_machine(Path(place), Path(disks[int(os.environ["RANK"])]))
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("danling").addHandler(handler)
    config = {
        "steps": 8,
        "dataloader": {"batch_size": 2, "drop_last": False},
        "optim": {"type": "adamw", "lr": 1e-2},
        "seed": 3,
        "auto_resume": True,
        "workspace_root": place,
        "evaluate_interval": 2,
        "checkpoint": {"interval": 1, "keep_latest_k": KEPT, "remote.url": url},
        **stack,
    }
    with AnyStackRunner(config, stop_at=stop_at) as runner:
        begun = runner.state.train.global_step
        runner.train()
        weights = runner.unwrapped_model.state_dict()
        whole = {
            name: value.full_tensor() if hasattr(value, "full_tensor") else value
            for name, value in weights.items()
        }
        ended = {
            "trace": runner.trace[-3:],
            **{name: value.clone() for name, value in whole.items()},
        }
        checkpoints = runner.workspace.checkpoints
    targets = sorted(
        path.name for path in (checkpoints / "targets").glob("*") if any(path.iterdir())
    )
    return begun, ended, targets, said


@pytest.mark.parametrize(
    "stack",
    [
        "parallel",
        pytest.param("ddp", marks=pytest.mark.slow),
        pytest.param("deepspeed", marks=[pytest.mark.slow, needs_deepspeed]),
    ],
)
def test_run_resumes_after_one_machine_or_all_were_replaced(
    stack: str, moto: ObjectServer, url: str, tmp_path: Path
) -> None:
    places = {name: tmp_path / name for name in ("alone", "machine", "a", "b", "c", "d", "e")}
    for place in places.values():
        place.mkdir()
    try:
        run_processes(can_have_mounts, str(places["machine"]), world_size=1)
    except PermissionError:
        pytest.skip("processes may not have mounts of their own here")

    def machines(disks: str, stop_at: int | None) -> list[Any]:
        own = [str(places[name]) for name in disks]
        return run_processes(
            train, str(places["machine"]), own, url, STACKS[stack], stop_at, timeout=170.0
        )

    alone = run_processes(
        train, str(places["alone"]), None, None, STACKS[stack], None, timeout=170.0
    )
    first = machines("ab", 3)
    half = machines("ac", 5)
    empty = machines("de", None)
    assert [(ranks[0][0], ranks[1][0]) for ranks in (first, half, empty)] == [
        (0, 0),
        (3, 3),
        (5, 5),
    ]
    assert [
        differences(ended, expected) for (_, ended, *_), (_, expected, *_) in zip(empty, alone)
    ] == [[], []]
    for ranks in (first, half, empty):
        # Nothing is missing: what is not here is where it belongs. Retention holds on each disk, for `best` and those on their way too.
        assert not [line for rank in ranks for line in rank[3] if "skipped" in line]
        assert all(len(targets) <= KEPT + 4 for _, _, targets, _ in ranks)
        assert set(ranks[1][2]) <= set(ranks[0][2])
    assert not [key for key in moto.objects(url.split("/")[2]) if "/lock" in key]
