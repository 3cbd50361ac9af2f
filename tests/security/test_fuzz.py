"""Random damage to checkpoints of every kind, on every road: nothing wrong is loaded, nothing hangs, no error is without a name.

Placements put links, pipes, devices, hard links, foreign owners and enormous files into each place of a run, a stream, its store and a
folder of compiled code, for each command and each start: nothing outside is touched.

Forged checkpoints, whose sums are right and whose contents are hostile, are as many: what is in them may be loaded, but no file outside is
touched, nothing takes 60 seconds or 2 GB, and no error is without a name.

`make fuzz N=10000` tries so many; `FUZZ_SEED` begins elsewhere. A case is named by its number, which is what its choices are drawn from.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import resource
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from support import hostile
from support.canary import look_at
from support.fuzz import forge, spoil
from support.placements import place
from support.recorded import record_run, recorded_settings
from support.streams import reference
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
from danling.graph.artifacts import Artifacts
from danling.stream import DirectoryStore, FileChannel, SQLiteChannel
from danling.workspace.run_directory import RunInUseError

GIVEN = os.environ.get("FUZZ_CASES")
SEED = int(os.environ.get("FUZZ_SEED", "0"))
"""The number of the first case."""
SECONDS, BYTES = 60, 2 << 30


class Original:
    """A directory of checkpoints as it was written, and what each name of it holds."""

    def __init__(self, kind: str, directory: Path) -> None:
        self.kind, self.directory = kind, directory
        found = [
            path
            for path in directory.iterdir()
            if path.is_file() and not path.name.endswith(".sha256")
        ]
        self.names = sorted(path.name for path in found)
        self.payloads = {name: read_payload(self._file(name)) for name in self.names}
        self.by_step = {step_of(payload): payload for payload in self.payloads.values()}
        sums = next(iter([*directory.glob("*.sha256"), *directory.rglob("manifest.sha256")]), None)
        self.run_id = Manifest.parse(sums.read_text()).record.run if sums else "none"

    def _file(self, name: str) -> Path:
        path = self.directory / name
        return path if path.suffix else self.directory / "targets" / path.read_text().strip()

    def manager(self, directory: Path) -> Any:
        kind = (
            TorchDistributedCheckpointManager
            if self.kind in ("dcp", "engine")
            else FileCheckpointManager
        )
        settings = CheckpointSettings(async_mode="disabled")
        owner = directory if self.kind != "alone" else directory.parent / "own"
        return kind(
            owner, domain=LocalDomain(), run_id=self.run_id, settings=settings, step_mode=True
        )


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
    return {"evaluated": read_model(original.manager(directory), directory / name)}


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
    return {"evaluated": torch.load(out, weights_only=True)} if code == 0 else {}


def _run(original: Original, directory: Path, name: str) -> Any:
    """A whole runner that goes on from what it finds."""
    stored = original.by_step[max(original.by_step)]["runner"]
    kept = {
        key: value
        for key, value in stored.items()
        if key not in ("dir", "checkpoint_dir", "workspace_root", "log_file")
    }
    source = (
        {"pretrained": str(directory / name)}
        if original.kind == "alone"
        else {"resume": str(directory / name)}
    )
    with TracingRunner(
        {**kept, "log": False, "workspace_root": str(directory.parent / "runs"), **source}
    ) as runner:
        part = "evaluated" if "pretrained" in source else "model"
        return {part: {k: v.clone() for k, v in runner.unwrapped_model.state_dict().items()}}


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
        faulthandler.dump_traceback(sys.__stderr__)  # that of the test has no descriptor
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
            assert differences(loaded, original.by_step[step_of(loaded)]) == [], (
                "another state than was saved"
            )
        return
    expected = original.payloads[name]
    if original.kind == "dcp" and name in ("latest", "best"):
        # One of these pointers in place of the other is a whole checkpoint of the run: which, only its step tells.
        assert any(_holds(payload, loaded) for payload in original.payloads.values()), (
            "another state than was saved"
        )
        return
    assert _holds(expected, loaded), "another state than was saved"


def _holds(expected: Mapping[str, Any], loaded: Mapping[str, Any]) -> bool:
    averages = (expected.get("ema") or {}).get("weights", {})
    # What was evaluated has the averages where there are some.
    evaluated = {**expected["model"], **averages}
    parts = {**expected, "train": expected["state"]["train"], "evaluated": evaluated}
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
    cases: range,
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
        for case in cases:
            random = Random(f"{kind} {case}")
            original = random.choice(originals)
            directory = Path(
                shutil.copytree(original.directory, place / "case" / original.directory.name)
            )
            changed = change(directory, random)
            road, name = random.choices(list(roads), weights)[0], random.choice(original.names)
            if original.kind == "alone":
                road = {"auto_resume": "pretrained"}.get(
                    road, "inspect" if road in URL_ROADS else road
                )
            try:
                with no_hang(case):
                    ends[attempt(original, directory, road, name)] += 1
            except Exception as error:
                failures.append(
                    f"case {case}: {original.kind}, {changed}, {road} of {name}: {error!r}"
                )
            shutil.rmtree(place / "case")
            capsys.readouterr()
    finally:
        logging.getLogger("danling").setLevel(logging.NOTSET)
    with capsys.disabled():
        print(f"\n{len(cases)} {kind} checkpoints: {dict(ends.most_common())}")
    assert not failures, "\n".join([f"{len(failures)} failures", *failures[:10]])
    return ends


def numbers_of_cases(quick: int, slow: int) -> pytest.MarkDecorator:
    """Have a test try some cases, and as one that is slow those that follow; or all that `make fuzz` asks for."""
    first, second = range(SEED, SEED + quick), range(SEED + quick, SEED + quick + slow)
    if GIVEN is not None:
        return pytest.mark.parametrize("cases", [range(SEED, SEED + int(GIVEN))], ids=["given"])
    return pytest.mark.parametrize(
        "cases", [first, pytest.param(second, marks=pytest.mark.slow)], ids=["first", "more"]
    )


@pytest.mark.timeout(0)
@numbers_of_cases(60, 300)
def test_random_damage(
    cases: range, originals: list[Original], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ends = _fuzz("damaged", cases, originals, tmp_path, ROADS, spoil, _try, capsys)
    assert ends["refused"] > len(cases) // 10 and ends["right"] > 0


def _snapshot(root: Path) -> dict[str, tuple[int, int, int] | bytes]:
    """Return what is around the directory of a case: contents of files, and what tells that one was replaced."""
    around = [
        path
        for path in sorted(root.rglob("*"))
        if path.is_file() and "case" not in path.relative_to(root).parts[:1]
    ]
    return {
        str(path): (path.stat().st_ino, path.stat().st_mtime_ns, hash(path.read_bytes()))
        for path in around
    }


def _memory(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return (
        int(next(line for line in status.splitlines() if line.startswith(f"{field}:")).split()[1])
        << 10
    )


@contextmanager
def bounded_memory() -> Iterator[None]:
    """Refuse more than 2 GB on top of what there is, and fail where as much was asked for."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_memory("VmSize") + BYTES, limits[1]))
    try:
        yield
    except Exception as error:
        seen: BaseException | None = error
        known: list[BaseException] = []
        while seen is not None and seen not in known:  # a chain of causes may lead back
            known.append(seen)
            assert not isinstance(seen, MemoryError) and "allocate memory" not in str(seen), (
                f"2 GB: {seen!r}"
            )
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
@numbers_of_cases(50, 150)
def test_forged_checkpoints(
    cases: range, originals: list[Original], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "around" / "below").mkdir(parents=True)
    victim = tmp_path / "victim.txt"
    for file in (victim, tmp_path / "around" / "below" / victim.name):
        file.write_text("a user's work")

    def change(directory: Path, random: Random) -> list[str]:
        return forge(directory, random, victim)

    ends = _fuzz(
        "forged", cases, originals, tmp_path, ROADS_OF_FORGERIES, change, _try_forged, capsys
    )
    assert ends["refused"] > len(cases) // 10 and ends["read"] > 0


# Placements


def _command(*words: str) -> Callable[[Path, Path], None]:
    """Call a command on a run, in which files are that no run has written."""

    def act(run: Path, root: Path) -> None:
        code = main(
            [word.format(run=run, out=root / "out.pth", curves=root / "out.png") for word in words]
        )
        assert code in (0, 1, 2, 3), code

    return act


def _started(run: Path, **settings: Any) -> TracingRunner:
    kept = {"steps": 9, "keep": 1, **settings}
    checkpoint = {
        "interval": 1,
        "keep_latest_k": kept.pop("keep"),
        "backend": run.parent.name,
        "async_enabled": False,
    }
    return TracingRunner(
        recorded_settings(checkpoint=checkpoint) | {"dir": str(run), "auto_resume": True} | kept
    )


def _auto_resumed(run: Path, root: Path) -> None:
    with _started(run) as runner:
        runner.train()


def _resumed_elsewhere(run: Path, root: Path) -> None:
    source = run / "checkpoints" / ("latest.pth" if run.parent.name == "file" else "latest")
    with _started(root / "file" / "own", auto_resume=False, resume=str(source)) as runner:
        runner.train()


def _started_beside(run: Path, root: Path) -> None:
    with _started(
        run, dir=None, workspace_root=str(run.parents[1]), lineage=run.parent.name
    ) as runner:
        runner.train()


def _evaluated(run: Path, root: Path) -> None:
    with _started(run, checkpoint={"load_only": True}) as runner:
        runner.evaluate(["val"])


def _from_checkpoint_of(run: Path, root: Path) -> None:
    with TracingRunner.from_checkpoint(run / "checkpoints", {"dir": str(root / "own")}):
        pass


PLACED_RUNS: dict[str, tuple[int, Callable[[Path, Path], None]]] = {
    "auto_resume": (8, _auto_resumed),
    "resume": (2, _resumed_elsewhere),
    "a start beside it": (2, _started_beside),
    "evaluation": (2, _evaluated),
    "from_checkpoint": (1, _from_checkpoint_of),
    "runs": (2, _command("runs", "{run}")),
    "explain": (2, _command("explain", "{run}")),
    "diff": (1, _command("diff", "{run}", "{run}")),
    "ranks": (1, _command("ranks", "{run}")),
    "plot": (1, _command("plot", "{run}", "-o", "{curves}")),
    "inspect": (2, _command("inspect", "{run}", "--config", "--tensors")),
    "verify": (3, _command("verify", "{run}")),
    "export": (2, _command("export", "{run}", "{out}", "--force")),
}
"""How often each start and command is taken on a run."""


def _used_stream(directory: Path, root: Path) -> None:
    tensors = {"x": torch.arange(4.0)}
    store = DirectoryStore(directory / "store")
    for channel in (FileChannel(directory / "log"), SQLiteChannel(directory / "log.sqlite")):
        with closing(channel):
            name = f"b{channel.published()}"
            store.put(name, tensors)
            channel.append([reference(name, tensors, sample=name)])
            for ref in channel.read(channel.committed(), channel.published()):
                store.get(ref)
            assert channel.claim("run")
            channel.commit(channel.published())
            store.discard([name])
    store.usage()


def _used_code(directory: Path, root: Path) -> None:
    """Start twice: nothing is found but what the first start has compiled."""
    found = []
    for _ in range(2):
        code = Artifacts(
            directory / "run" / "compiled" / "code", signed=True, world=LocalDomain(), leads=True
        )
        code.open()
        assert code.folder is not None
        found = [path.name for path in code.folder.rglob("*")]
        (code.folder / "mine.so").write_text("code")
        code.close()
    assert set(found) <= {"mine.so", "earlier.so"}, found


@pytest.fixture(scope="module")
def placed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of each kind of checkpoints, a stream with its store, and a run with compiled code and the key that signs it."""
    root = tmp_path_factory.mktemp("placed")
    for backend in ("file", "dcp"):
        with _started(
            root / backend / "run", steps=8, keep=0, heartbeat={"enabled": True}
        ) as runner:
            runner.train()
    _used_stream(root / "stream", root)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(root / "compiled" / "me"))
        _used_code(root / "compiled", root)
    return {
        "file": root / "file",
        "dcp": root / "dcp",
        "stream": root / "stream",
        "compiled": root / "compiled",
    }


NAMED = (CheckpointError, ValueError, OSError, RunInUseError, KeyError)


@pytest.mark.timeout(0)
@numbers_of_cases(25, 75)
def test_placements(
    cases: range,
    placed: dict[str, Path],
    canary: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logging.getLogger("danling").setLevel(logging.CRITICAL)
    ends: Counter[str] = Counter()
    failures: list[str] = []
    weights = [weight for weight, _ in PLACED_RUNS.values()]
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    before = look_at(canary)
    for case in cases:
        random = Random(f"placed {case}")
        kind = random.choices(sorted(placed), (2, 5, 5, 2))[0]
        root = tmp_path / "case"
        directory = Path(shutil.copytree(placed[kind], root / kind))
        monkeypatch.setenv("XDG_CACHE_HOME", str(root / "compiled" / "me"))
        name = "use"
        act = _used_stream if kind == "stream" else _used_code
        if kind in ("file", "dcp"):
            name = random.choices(list(PLACED_RUNS), weights)[0]
            directory, act = directory / "run", PLACED_RUNS[name][1]
        done = place("run" if directory.name == "run" else kind, directory, canary, random)
        try:
            with no_hang(case), bounded_memory():
                act(directory, root)
            ends["right"] += 1
        except NAMED as error:
            ends["refused"] += 1
            # The system's own error names what is wrong and the path.
            names_path = isinstance(error, OSError) and error.filename is not None
            if "Expected " not in str(error) and not names_path:
                failures.append(
                    f"case {case}: {kind}, {done}, {name}: an error without a name: {error!r}"
                )
        except BaseException as error:
            failures.append(f"case {case}: {kind}, {done}, {name}: {error!r}")
        if look_at(canary) != before:
            failures.append(f"case {case}: {kind}, {done}, {name}: touched what is outside")
            break
        gc.collect()
        shutil.rmtree(root, ignore_errors=True)
        capsys.readouterr()
    logging.getLogger("danling").setLevel(logging.NOTSET)
    with capsys.disabled():
        print(f"\n{len(cases)} placements: {dict(ends.most_common())}")
    assert not failures, "\n".join([f"{len(failures)} failures", *failures[:40]])
    assert ends["right"] > len(cases) // 10 and ends["refused"] > 0
