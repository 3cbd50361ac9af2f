"""G2 with nothing left: a run that is killed at any instant, and whose disk is gone, goes on from the object store and ends bitwise.

`make chaos N=1000` kills that often over all of these; here it is nine times.
"""

from __future__ import annotations

import random
import shutil
import threading
import time
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from support.chaos import ASKED, SEED, report, share
from support.fault_proxy import FaultProxy, When, fault_proxy
from support.object_servers import ObjectServer
from support.patience import patience
from support.processes import ProcessFailure, free_port, run_outcomes, run_processes
from support.saves import litter
from support.stacks import copied
from support.toys import TracingRunner, differences, whole_settings, whole_state
from torch import Tensor

import danling as dl
from danling.checkpoints.manifest import Manifest, is_name
from danling.cli.verify import verify

pytest.importorskip("obstore")
pytest.importorskip("moto")

STEPS, INTERVAL = 12, 2


class SlowRunner(TracingRunner, dl.Runner):
    """Takes its time over a step, so that a kill meets it at work, and writes down where the disk does not go with the machine."""

    place: str = ""
    not_saved = ("place",)

    def train_step(self, data: dict[str, Any]) -> tuple[Any, Tensor]:
        time.sleep(0.03)
        return super().train_step(data)

    def step(self) -> Any:
        outcome = super().step()
        if self.is_main_process:
            with Path(self.place).open("a") as notes:
                notes.write(f"made {self.state.train.global_step}\n")
        return outcome


def settings(
    root: Path, url: str | None, backend: str, axes: dict[str, int] | None, **changes: Any
) -> dict[str, Any]:
    """Return a configuration of a few steps that saves in every other one."""
    layout = {"stack": "parallel", "parallel": {"axes": axes}} if axes else {}
    policy = {
        "backend": backend,
        "interval": INTERVAL,
        "keep_latest_k": 2,
        "remote.url": url,
        **changes,
    }
    more = {
        "steps": STEPS,
        "evaluate_interval": 6,
        "auto_resume": True,
        "scheduler": {},
        "checkpoint": policy,
    }
    return whole_settings(root, **layout, **more)


def train(config: dict[str, Any], notes: str, wait: bool = False) -> dict[str, Any]:
    with SlowRunner(config) as runner:
        runner.place = notes
        if runner.is_main_process:
            with Path(notes).open("a") as file:
                file.write(f"begun {runner.state.train.global_step}\n")
        if wait:
            made = runner.step

            def step() -> Any:
                runner.checkpoint_manager.wait()
                runner.checkpoint_manager.wait_for_copies()
                return made()

            runner.step = step
        runner.train()
        return copied(whole_state(runner))


@cache
def left_alone(
    backend: str, world_size: int, axes: tuple[tuple[str, int], ...]
) -> tuple[list[dict[str, Any]], float]:
    """Return the states at the end of a run that nobody kills, and the seconds that it takes."""
    run_processes(
        free_port, world_size=world_size
    )  # what the first processes of a session have to load
    with TemporaryDirectory() as place:
        start = time.monotonic()
        config = settings(Path(place), None, backend, dict(axes) or None)
        states = run_processes(train, config, f"{place}/nobody", world_size=world_size, timeout=300)
        return states, time.monotonic() - start


class LostMachines:
    """A run in a store, whose machines are killed and their disks emptied, and the run that is left alone."""

    def __init__(
        self,
        place: Path,
        server: ObjectServer,
        endpoint: str | None = None,
        *,
        backend: str,
        world_size: int = 1,
        axes: dict[str, int] | None = None,
    ) -> None:
        self.server, self.place, self.notes = server, place, place / "notes"
        self.bucket = server.make_bucket()
        self._environment = server.environment(endpoint)
        self._how = (backend, axes)
        self._world_size = world_size
        self._machines = 0
        self.alone, self.lasted = left_alone(backend, world_size, tuple((axes or {}).items()))

    def attempt(
        self, *, timeout: float = 300, stop: threading.Event | None = None, wait: bool = False
    ) -> list[Any] | None:
        """Begin on an empty machine; return the states at the end, or `None` where it was killed, and empty its disk."""
        self._machines += 1
        root = self.place / f"machine-{self._machines}"
        config = settings(root, f"s3://{self.bucket}/runs", *self._how)
        outcomes = run_outcomes(
            train,
            config,
            str(self.notes),
            wait,
            world_size=self._world_size,
            timeout=timeout,
            stop=stop,
            environment=self._environment,
        )
        if all(outcome.error is None for outcome in outcomes):
            self._look_at(root)
            return [outcome.value for outcome in sorted(outcomes, key=lambda outcome: outcome.rank)]
        assert all(
            outcome.error is None or isinstance(outcome.error, ProcessFailure)
            for outcome in outcomes
        ), outcomes
        shutil.rmtree(root, ignore_errors=True)
        return None

    def _look_at(self, root: Path) -> None:
        assert litter(root) == []
        places = list(root.rglob("checkpoints"))
        # A machine that finds all updates in the store, and reads them in parts, has nothing to save.
        assert len(places) == 1 or (not places and self.saved() == STEPS)
        for checkpoints in places:
            assert not [verdict for verdict in verify(checkpoints, "full") if verdict["problems"]]

    def ends_bitwise(self, states: list[Any] | None) -> bool:
        assert states is not None
        return all(
            differences(ended, alone) == [] for ended, alone in zip(states, self.alone, strict=True)
        )

    def saved(self) -> int:
        manifests = [key for key in self.server.objects(self.bucket) if key.endswith(".sha256")]
        return max((self._manifest(key).record.step for key in manifests), default=0)

    def _manifest(self, key: str) -> Manifest:
        return Manifest.parse(self.server.read(self.bucket, key).decode())

    def begun(self) -> list[int]:
        return [int(line.split()[1]) for line in self._lines() if line.startswith("begun")]

    def made(self) -> int:
        return int(self._lines()[-1].split()[1])

    def _lines(self) -> list[str]:
        return self.notes.read_text().splitlines() if self.notes.exists() else []

    def remote_litter(self) -> list[str]:
        keys = list(self.server.objects(self.bucket))
        prefix = next(key.partition("/checkpoints/")[0] for key in keys if "/checkpoints/" in key)
        below = [key.partition("/checkpoints/")[2] for key in keys if "/checkpoints/" in key]
        manifests = [
            self._manifest(f"{prefix}/checkpoints/{key}")
            for key in below
            if key.endswith(".pth.sha256")
        ]
        expected = {
            f"objects/{digest}" for manifest in manifests for _, digest in manifest.files.values()
        }
        for name in filter(is_name, below):
            target = self.server.read(self.bucket, f"{prefix}/checkpoints/{name}").decode().strip()
            expected.add(f"targets/{target}")
        left = [*expected ^ {"/".join(key.split("/")[:2]) for key in below if "/" in key}]
        return left + [key for key in keys if key.startswith(f"{prefix}/lock")]


@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("part", "few", "backend", "world_size", "axes"),
    [
        (0.12, 6, "file", 1, None),
        pytest.param(0.08, 3, "dcp", 2, {"shard": 2}, marks=pytest.mark.slow),
    ],
    ids=["file", "dcp on 2"],
)
def test_killed_at_random_instants_and_the_disk_emptied_each_time(
    part: float,
    few: int,
    backend: str,
    world_size: int,
    axes: dict[str, int] | None,
    tmp_path: Path,
    moto: ObjectServer,
) -> None:
    kills = share(part, otherwise=few)
    instants = random.Random(f"{backend} {SEED}")
    done = ends = 0
    gone_on = False
    while done < kills:
        lost = LostMachines(
            tmp_path / str(ends), moto, backend=backend, world_size=world_size, axes=axes
        )
        states, before = None, done
        while done < kills and states is None:
            safe = lost.saved()
            states = lost.attempt(timeout=instants.uniform(0.3, 1.2) * lost.lasted / patience(1))
            done += states is None
            # Nothing that was complete in the store is lost.
            assert (
                not lost.begun() or lost.begun()[-1] >= safe or len(lost.begun()) < lost._machines
            )
        states = lost.attempt() if states is None else states
        assert lost.ends_bitwise(states) and lost.remote_litter() == []
        gone_on |= any(lost.begun())
        # None of these files is large enough to go up in parts.
        assert moto.unfinished_uploads(lost.bucket) == 0
        shutil.rmtree(lost.place)
        ends += 1
        report(
            f"at random instants, the disk emptied: {backend}, {world_size} processes",
            done - before,
            1,
        )
    # A few kills may all come before the first save; that one in a save goes on from the store is shown below.
    assert done == kills and (gone_on or not ASKED)


def killed_where_it_waits(lost: LostMachines, proxy: FaultProxy, when: When, *, after: int) -> None:
    """Let a machine wait in a request for good, and kill it there."""
    seen: list[object] = []

    def counted(request: Any) -> bool:
        if not when(request):
            return False
        seen.append(request)
        return len(seen) > after

    fault, stop = proxy.hold(when=counted), threading.Event()

    def kill() -> None:
        fault.came.wait(120)
        stop.set()

    killer = threading.Thread(target=kill)
    killer.start()
    assert lost.attempt(stop=stop, wait=True) is None and fault.hit >= 1
    killer.join()
    # It never comes: whoever sent it is dead.
    fault.status = 500
    proxy.heal()


def is_pointer(request: Any) -> bool:
    return request.is_upload and request.path.endswith("/checkpoints/latest")


def is_manifest(request: Any) -> bool:
    return request.is_upload and request.path.endswith((".sha256",))


@pytest.mark.parametrize(
    ("backend", "when", "loses"),
    [
        ("file", is_manifest, True),
        pytest.param("dcp", is_manifest, True, marks=pytest.mark.slow),
        ("dcp", is_pointer, False),
    ],
    ids=["file: contents, manifest", "dcp: contents, manifest", "dcp: manifest, pointer"],
)
def test_killed_between_the_parts_of_a_save(
    backend: str, when: When, loses: bool, tmp_path: Path, moto: ObjectServer
) -> None:
    with fault_proxy(moto.endpoint) as proxy:
        lost = LostMachines(tmp_path, moto, proxy.endpoint, backend=backend)
        killed_where_it_waits(lost, proxy, when, after=2)
        safe, made = lost.saved(), lost.made()
        states = lost.attempt()
        # It went on from what was complete: at most one interval was lost, and nothing where only the name was missing.
        assert lost.begun() == [0, safe] and safe > 0
        assert made - safe <= INTERVAL if loses else safe == made
        assert lost.ends_bitwise(states) and lost.remote_litter() == []


def test_empty_machine_with_the_end_in_the_store_ends_alike(
    tmp_path: Path, moto: ObjectServer
) -> None:
    lost = LostMachines(tmp_path, moto, backend="dcp", world_size=2, axes={"shard": 2})
    assert lost.ends_bitwise(lost.attempt()) and lost.saved() == STEPS
    # What two machines have left that were killed in a save: one before the last that is complete, one after it.
    prefix = next(
        key.partition("/targets/")[0] for key in moto.objects(lost.bucket) if "/targets/" in key
    )
    for target in ("00000001-0123abcd", "00000099-0123abcd"):
        moto.write(lost.bucket, f"{prefix}/targets/{target}/__0_0.distcp", b"left")
    assert lost.remote_litter() != []
    assert lost.ends_bitwise(lost.attempt())
    # It had nothing to save.
    assert lost.begun() == [0, STEPS] and lost.remote_litter() == []
