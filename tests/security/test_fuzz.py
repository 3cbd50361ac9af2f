"""Random damage to checkpoints of every kind, on every road: nothing wrong is loaded, nothing hangs, no error is without a name.

Forged checkpoints, whose sums are right and whose contents are hostile, are as many: what is in them may be loaded, but no file outside is
touched, nothing takes 60 seconds or 2 GB, and no error is without a name.

`make fuzz N=10000` tries so many; `FUZZ_SEED` begins elsewhere. A case is named by its number, which is what its choices are drawn from.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import resource
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from support import hostile
from support.fuzz import forge, spoil
from support.recorded import record_run
from support.toys import TracingRunner, differences

from danling.checkpoints import (
    CheckpointError,
    CheckpointNotFound,
    CheckpointSettings,
    FileCheckpointManager,
    TorchDistributedCheckpointManager,
    read_config,
    read_model,
)
from danling.checkpoints.manifest import Manifest
from danling.checkpoints.reading import read_payload
from danling.checkpoints.storage import hash_file
from danling.cli.inspect import read_contents
from danling.cli.main import main
from danling.distributed import LocalDomain

CASES, SEED = int(os.environ.get("FUZZ_CASES", "150")), int(os.environ.get("FUZZ_SEED", "0"))
SECONDS, BYTES = 60, 2 << 30


class Original:
    """A directory of checkpoints as it was written, and what each name of it holds."""

    def __init__(self, kind: str, directory: Path) -> None:
        self.kind, self.directory = kind, directory
        found = [path for path in directory.iterdir() if path.is_file() and not path.name.endswith(".sha256")]
        self.names = sorted(path.name for path in found)
        self.payloads = {name: read_payload(self._file(name)) for name in self.names}
        self.by_step = {step_of(payload): payload for payload in self.payloads.values()}
        sums = next(iter([*directory.glob("*.sha256"), *directory.rglob("manifest.sha256")]), None)
        self.run_id = Manifest.parse(sums.read_text()).record.run if sums else "none"

    def _file(self, name: str) -> Path:
        path = self.directory / name
        return path if path.suffix else self.directory / "targets" / path.read_text().strip()

    def manager(self, directory: Path) -> Any:
        kind = TorchDistributedCheckpointManager if self.kind in ("dcp", "engine") else FileCheckpointManager
        settings = CheckpointSettings(async_mode="disabled")
        owner = directory if self.kind != "alone" else directory.parent / "own"
        return kind(owner, domain=LocalDomain(), run_id=self.run_id, settings=settings, step_mode=True)


def step_of(payload: Mapping[str, Any]) -> int:
    return int(payload["state"]["train"]["global_step"])


# Roads: each returns parts of a payload, which must be those of the checkpoint that was asked for.


def _auto_resume(original: Original, directory: Path, name: str) -> Any:
    manager = original.manager(directory)
    found = manager.find_latest()
    if found is None:
        manager.checkpoints.refuse_lost()
        return None
    return manager.load_checkpoint(found)


def _resume(original: Original, directory: Path, name: str) -> Any:
    return original.manager(directory).load_checkpoint(directory / name)


def _pretrained(original: Original, directory: Path, name: str) -> Any:
    return {"model": read_model(original.manager(directory), directory / name)}


def _from_checkpoint(original: Original, directory: Path, name: str) -> Any:
    return {"runner": read_config(directory / name)}


def _verify(original: Original, directory: Path, name: str) -> Any:
    whole = name < "ckpt-s000000000008"
    code = main(["verify", str(directory if whole else directory / name)])
    assert code in (0, 1, 3), code
    return {}


def _inspect(original: Original, directory: Path, name: str) -> Any:
    contents = read_contents(directory / name)
    assert contents.kind in ("file", "sharded", "engine"), contents.kind
    state = contents.plain["state"]
    return {"runner": contents.plain["runner"], "train": state["train"]}


def _export(original: Original, directory: Path, name: str) -> Any:
    out = directory.parent / "out.pth"
    code = main(["export", str(directory / name), str(out), "--force"])
    assert code in (0, 1, 2, 3), code
    return {"model": torch.load(out, weights_only=True)} if code == 0 else {}


def _run(original: Original, directory: Path, name: str) -> Any:
    """A whole runner that goes on from what it finds."""
    stored = original.by_step[max(original.by_step)]["runner"]
    kept = {
        key: value
        for key, value in stored.items()
        if key not in ("dir", "checkpoint_dir", "workspace_root", "log_file")
    }
    source = {"pretrained": str(directory / name)} if original.kind == "alone" else {"resume": str(directory / name)}
    with TracingRunner({**kept, "log": False, "workspace_root": str(directory.parent / "runs"), **source}) as runner:
        return {"model": {k: v.clone() for k, v in runner.unwrapped_model.state_dict().items()}}


ROADS: dict[str, tuple[int, Callable[[Original, Path, str], Any]]] = {
    "auto_resume": (4, _auto_resume),
    "resume": (4, _resume),
    "pretrained": (3, _pretrained),
    "from_checkpoint": (2, _from_checkpoint),
    "verify": (3, _verify),
    "inspect": (3, _inspect),
    "export": (3, _export),
    "a run": (1, _run),
}
"""How often each is taken, and what it does."""


def _of_url(*words: str) -> Callable[[Original, Path, str], Any]:
    """Put the directory where a store has it, and call a command with its URL."""

    def road(original: Original, directory: Path, name: str) -> Any:
        store = directory.parent / "bucket"
        copy = Path(shutil.copytree(directory, store / "line" / "id" / "checkpoints"))
        (copy / "objects").mkdir()
        for file in copy.glob("*.pth"):
            shutil.copy(file, copy / "objects" / hash_file(file))
        url = f"file://{store}/line/id/checkpoints/{name}"
        code = main([word.format(url=url, out=directory.parent / "out.pth") for word in words])
        assert code in (0, 1, 2, 3), code
        return {}

    return road


def _inspect_all(original: Original, directory: Path, name: str) -> Any:
    assert main(["inspect", str(directory / name), "--config", "--tensors"]) in (0, 1, 2)
    return {}


URL_ROADS = {
    "export of a URL": (6, _of_url("export", "{url}", "{out}", "--force")),
    "inspect of a URL": (1, _of_url("inspect", "{url}", "--tensors")),
    "verify of a URL": (1, _of_url("verify", "{url}")),
}


@contextmanager
def no_hang(case: int) -> Iterator[None]:
    def late(*arguments: Any) -> None:
        faulthandler.dump_traceback()
        raise AssertionError(f"case {case} hangs")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> list[Original]:
    root = tmp_path_factory.mktemp("originals")
    found = []
    for kind in ("file", "dcp"):
        run = record_run(root / kind, checkpoint={"backend": kind})
        found.append(Original(kind, run / "checkpoints"))
    engine = Path(shutil.copytree(found[1].directory, root / "engine" / "checkpoints"))
    kept = (engine / "latest").read_text().strip()
    payload = read_payload(engine / "targets" / kept)
    for path in [*engine.iterdir(), *(engine / "targets").iterdir()]:
        if path.is_file() and path.name != "latest":
            path.unlink()
        elif path.parent.name == "targets" and path.name != kept:
            shutil.rmtree(path)
    hostile.engine_target(engine, payload)
    alone = root / "alone" / "copies"
    alone.mkdir(parents=True)
    shutil.copy(found[0].directory / "best.pth", alone)
    return [*found, Original("engine", engine), Original("alone", alone)]


def _judge(original: Original, road: str, name: str, loaded: Any) -> None:
    if road == "auto_resume":
        if loaded is not None:
            assert differences(loaded, original.by_step[step_of(loaded)]) == [], "another state than was saved"
        return
    expected = original.payloads[name]
    if original.kind == "dcp" and name in ("latest", "best"):
        # One of these pointers in place of the other is a whole checkpoint of the run: which, only its step tells.
        assert any(_holds(payload, loaded) for payload in original.payloads.values()), "another state than was saved"
        return
    assert _holds(expected, loaded), "another state than was saved"


def _holds(expected: Mapping[str, Any], loaded: Mapping[str, Any]) -> bool:
    parts = {**expected, "train": expected["state"]["train"]}
    return not any(differences(value, parts[part]) for part, value in loaded.items())


def _try(original: Original, directory: Path, road: str, name: str) -> str:
    try:
        loaded = ROADS[road][1](original, directory, name)
    except (CheckpointError, ValueError, FileNotFoundError) as error:
        assert str(error).startswith("Expected "), f"an error without a name: {error!r}"
        return "nothing there" if isinstance(error, CheckpointNotFound) else "refused"
    _judge(original, road, name, loaded)
    return "right" if loaded else "said" if loaded is not None else "from scratch"


def _fuzz(
    kind: str,
    originals: list[Original],
    place: Path,
    roads: Mapping[str, tuple[int, Any]],
    change: Callable[[Path, Random], list[str]],
    attempt: Callable[[Original, Path, str, str], str],
    capsys: pytest.CaptureFixture[str],
) -> Counter[str]:
    """Change a copy of a checkpoint for each case, take a road to it, and return how often it ended how; fail if any case has failed."""
    logging.getLogger("danling").setLevel(logging.CRITICAL)
    ends: Counter[str] = Counter()
    failures: list[str] = []
    weights = [weight for weight, _ in roads.values()]
    try:
        for case in range(SEED, SEED + CASES):
            random = Random(f"{kind} {case}")
            original = random.choice(originals)
            directory = Path(shutil.copytree(original.directory, place / "case" / original.directory.name))
            changed = change(directory, random)
            road, name = random.choices(list(roads), weights)[0], random.choice(original.names)
            if original.kind == "alone":
                road = {"auto_resume": "pretrained"}.get(road, "inspect" if road in URL_ROADS else road)
            try:
                with no_hang(case):
                    ends[attempt(original, directory, road, name)] += 1
            except Exception as error:
                failures.append(f"case {case}: {original.kind}, {changed}, {road} of {name}: {error!r}")
            shutil.rmtree(place / "case")
            capsys.readouterr()
    finally:
        logging.getLogger("danling").setLevel(logging.NOTSET)
    with capsys.disabled():
        print(f"\n{CASES} {kind} checkpoints: {dict(ends.most_common())}")
    assert not failures, "\n".join([f"{len(failures)} failures", *failures[:10]])
    return ends


@pytest.mark.timeout(0)
def test_random_damage(originals: list[Original], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ends = _fuzz("damaged", originals, tmp_path, ROADS, spoil, _try, capsys)
    assert ends["refused"] > CASES // 10 and ends["right"] > 0


def _snapshot(root: Path) -> dict[str, tuple[int, int, int] | bytes]:
    """Return what is around the directory of a case: contents of files, and what tells that one was replaced."""
    around = [
        path for path in sorted(root.rglob("*")) if path.is_file() and "case" not in path.relative_to(root).parts[:1]
    ]
    return {str(path): (path.stat().st_ino, path.stat().st_mtime_ns, hash(path.read_bytes())) for path in around}


def _memory(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith(f"{field}:")).split()[1]) << 10


@contextmanager
def bounded_memory() -> Iterator[None]:
    """Refuse more than 2 GB on top of what there is, and fail where as much was asked for."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_memory("VmSize") + BYTES, limits[1]))
    try:
        yield
    except Exception as error:
        seen: BaseException | None = error
        while seen is not None:
            assert not isinstance(seen, MemoryError) and "allocate memory" not in str(seen), f"2 GB: {seen!r}"
            seen = seen.__cause__ or seen.__context__
        raise
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


ROADS_OF_FORGERIES = {**ROADS, **URL_ROADS, "inspect": (3, _inspect_all), "a run": (4, _run)}


def _try_forged(original: Original, directory: Path, road: str, name: str) -> str:
    root = directory.parents[1]
    before = _snapshot(root)
    try:
        with bounded_memory():
            ROADS_OF_FORGERIES[road][1](original, directory, name)
        end = "read"
    except (CheckpointError, ValueError, FileNotFoundError) as error:
        assert str(error).startswith("Expected "), f"an error without a name: {error!r}"
        end = "refused"
    finally:
        assert _snapshot(root) == before, "touched what is outside"
    return end


@pytest.mark.timeout(0)
def test_forged_checkpoints(originals: list[Original], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "around" / "below").mkdir(parents=True)
    victim = tmp_path / "victim.txt"
    for file in (victim, tmp_path / "around" / "below" / victim.name):
        file.write_text("a user's work")

    def change(directory: Path, random: Random) -> list[str]:
        return forge(directory, random, victim)

    ends = _fuzz("forged", originals, tmp_path, ROADS_OF_FORGERIES, change, _try_forged, capsys)
    assert ends["refused"] > CASES // 10 and ends["read"] > 0
