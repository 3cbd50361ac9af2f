"""Checkpoints whose sums are right and whose payload has another form: `auto_resume` falls back, and nothing of the program is replaced."""

from __future__ import annotations

import copy
import json
import pickletools
import random
import shutil
from collections import Counter, deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy
import pytest
import torch
from support.hostile import reseal
from support.toys import Small, settings
from torch import nn

from danling.checkpoints import (
    CheckpointDamaged,
    CheckpointMismatch,
    CheckpointSettings,
    FileCheckpointManager,
    TorchDistributedCheckpointManager,
)
from danling.checkpoints.dcp_index import INDEX
from danling.checkpoints.directory import newest_record
from danling.checkpoints.torch_files import read_file
from danling.cli.main import main
from danling.distributed import LocalDomain

MANAGERS = {"file": FileCheckpointManager, "dcp": TorchDistributedCheckpointManager}


class Helper:
    """An object of the program, which is saved by its attributes."""

    def __init__(self) -> None:
        self.count = 0
        self.log_file = "own.log"


class Sums:
    """An object with a state."""

    def __init__(self) -> None:
        self.total, self.api_key = 0.0, "own"

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.total = state["total"]
        self.api_key = state.get("api_key", self.api_key)


class Keeper(Small):
    """Has an attribute of every kind, each of which training changes."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.model = nn.Sequential(nn.Linear(4, 2), nn.Identity())
        self.model[1].register_buffer("seen", torch.zeros(2), persistent=False)
        self.number, self.word, self.pair = 0, "begun", (0, 1j)
        self.list, self.table, self.names = [0], {"a": 0}, {"begun"}
        self.queue, self.counter = deque([0], maxlen=3), Counter(a=1)
        self.array, self.tensor, self.raw = numpy.zeros(3), torch.zeros(3), b"begun"
        self.generator, self.own_random = torch.Generator(), random.Random(1)
        self.helper, self.sums = Helper(), Sums()
        self.out_dir, self.api_token, self.nested = (
            "own",
            "own",
            {"deep": {"token": "own", "cache.path": "own"}},
        )
        self.data_dir = "own"
        self.root, self.credentials = Path("own"), ["own"]

    def describe(self) -> str:
        return self.word

    def train_step(self, data: Any) -> Any:
        self.model[0].bias.requires_grad_(False)
        self.model[1].seen += 1
        self.number, self.word, self.pair = self.number + 1, "trained", (self.number, 2j)
        self.list.append(self.number)
        self.table["a"] += 1
        self.names.add("trained")
        self.queue.append(self.number)
        self.counter["a"] += 1
        self.array += 1
        self.tensor += 1
        self.raw = b"trained"
        torch.rand((), generator=self.generator)
        self.own_random.random()
        self.helper.count += 1
        self.sums.total += 1.0
        self.nested["deep"]["count"] = self.number
        return super().train_step(data)


def config(root: Path, backend: str, **more: Any) -> dict[str, Any]:
    policy = {
        "interval": 2,
        "async_mode": "disabled",
        "backend": backend,
        **more.pop("checkpoint", {}),
    }
    return settings(root / "run", **{"steps": 4, "auto_resume": True, "checkpoint": policy, **more})


@pytest.fixture(scope="module", params=list(MANAGERS))
def trained(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, dict[str, Any]]:
    """Return the backend, the directory and the last payload of a run that was trained."""
    backend, root = request.param, tmp_path_factory.mktemp(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(
            root
        )  # as in each test: the identity of a run names the repository of the working directory
        with Keeper(config(root, backend)) as runner:
            runner.train()
            return backend, root, runner.read_checkpoint("latest")


def forge(root: Path, backend: str, payload: dict[str, Any]) -> None:
    """Save a payload as the newest checkpoint of the run, with sums that are right."""
    checkpoints = root / "run" / "checkpoints"
    record = newest_record(checkpoints)
    assert record is not None
    options: Any = {
        "run_id": record.run,
        "settings": CheckpointSettings(async_mode="disabled"),
        "step_mode": True,
    }
    manager = MANAGERS[backend](checkpoints, domain=LocalDomain(), **options)
    manager.begin(manager.find_latest())
    manager.save_checkpoint(payload, epoch=9, global_step=3)
    manager.close()


def put(value: Any, *path: str) -> Callable[[dict[str, Any]], None]:
    """Return what puts a value at a path of a payload."""

    def change(payload: dict[str, Any]) -> None:
        *above, last = path
        holder = payload
        for key in above:
            holder = holder[key]
        if value is None:
            del holder[last]
        else:
            holder[last] = value

    return change


def attribute(node: Any) -> Callable[[dict[str, Any]], None]:
    return put({"value": node}, "attributes", "number")


BYTES = torch.zeros(24, dtype=torch.uint8)
ARRAY = {"kind": "array", "dtype": "<f8", "shape": [3], "value": BYTES}
FORMS: dict[str, Callable[[dict[str, Any]], None]] = {
    "attributes that are a number": put(5, "attributes"),
    "observers that are a number": put(5, "observers"),
    "a state of an observer that is a number": put({"Norms": {"value": 5}}, "observers"),
    "a state of an observer of an unknown kind": put(
        {"Norms": {"value": {"kind": "odd"}}}, "observers"
    ),
    "attributes by numbers": put({1: {"value": 1}}, "attributes"),
    "an attribute that is a number": put(5, "attributes", "number"),
    "an attribute without a value": put({}, "attributes", "number"),
    "an attribute of so many ranks": put({"of": "two", "ranks": {}}, "attributes", "number"),
    "ranks that are a list": put({"of": 1, "ranks": [1]}, "attributes", "number"),
    "a value of one rank that is a list": put(
        {"of": 1, "ranks": {"0": [1]}}, "attributes", "number"
    ),
    "ranks without a value that are a number": put(
        {"value": 1, "of": 1, "without": 5}, "attributes", "number"
    ),
    "a value that is a list": attribute([1]),
    "a value without a kind": attribute({"items": [1]}),
    "a kind that is a number": attribute({"kind": 5}),
    "a kind that is not known": attribute({"kind": "function"}),
    "an integer that cannot be printed": attribute(10**5000),
    "a list without items": attribute({"kind": "list"}),
    "a list with a gap": attribute({"kind": "list", "items": {"0": 1, "2": 1}}),
    "a list of mappings": attribute({"kind": "list", "items": [{"kind": "left"}]}),
    "a set of lists": attribute({"kind": "set", "items": {"0": {"kind": "list", "items": []}}}),
    "a size of texts": attribute({"kind": "Size", "items": ["a"]}),
    "a queue of a negative length": attribute({"kind": "deque", "items": [1], "maxlen": -1}),
    "a mapping without keys": attribute({"kind": "dict", "items": [1]}),
    "a mapping with fewer keys": attribute({"kind": "dict", "keys": ["a"], "items": [1, 2]}),
    "a mapping by lists": attribute({"kind": "dict", "keys": [[1]], "items": [1]}),
    "a mapping by tuples of lists": attribute(
        {"kind": "dict", "keys": [{"kind": "tuple", "items": [[1]]}], "items": [1]}
    ),
    "an array of other bytes": attribute({**ARRAY, "shape": [4]}),
    "an array of a negative shape": attribute({**ARRAY, "shape": [-3]}),
    "an array of objects": attribute({**ARRAY, "dtype": "O"}),
    "an array of nothing": attribute({**ARRAY, "dtype": "<nothing"}),
    "an array of floats": attribute({**ARRAY, "value": torch.zeros(3)}),
    "a scalar with a shape": attribute({**ARRAY, "kind": "scalar"}),
    "a complex number of texts": attribute({"kind": "complex", "value": ["a", "b"]}),
    "bytes that are a text": attribute({"kind": "bytes", "value": "abc"}),
    "a tensor that is a number": attribute({"kind": "tensor", "device": "cpu", "value": 5}),
    "a shard that is a number": attribute({"kind": "shard", "value": 5}),
    "a reference to a number": attribute({"kind": "same", "path": 5}),
    "an object by numbers": attribute(
        {"kind": "object", "class": "Helper", "keys": [1], "items": [1]}
    ),
    "an object without a class": attribute({"kind": "object", "keys": ["a"], "items": [1]}),
    "a state that is a list": attribute({"kind": "stateful", "class": "Sums", "state": [1]}),
    "more that is a list": attribute(
        {"kind": "stateful", "class": "Sums", "state": 1, "more": [1]}
    ),
    "buffers that are a list": put([1], "buffers"),
    "a buffer that is a number": put({"value": 5}, "buffers", "1.seen"),
    "a buffer that is an array": put({"value": ARRAY}, "buffers", "1.seen"),
    "a gradient that is a text": put({"value": "no"}, "requires_grad", "0.bias"),
    "a gradient that is a tensor": put({"value": torch.zeros(2)}, "requires_grad", "0.bias"),
    "progress that is a list": put([1], "state", "train"),
    "a step that is a text": put("4", "state", "train", "global_step"),
    "a step that is negative": put(-1, "state", "train", "global_step"),
    "a step that is too large": put(10**400, "state", "train", "global_step"),
    "an epoch that is no number": put(float("nan"), "state", "train", "epoch"),
    "a weight that is a text": put("1", "state", "train", "weight_reference"),
    "attempts that are a text": put("1", "state", "elastic", "attempts"),
    "ranks that are a text": put("1", "state", "elastic", "data_replicas"),
    "results by names": put({"a": {}}, "state", "results"),
    "a result that is a number": put({"1": {"val": 5}}, "state", "results"),
    "an open result that is a number": put({"val": 5}, "state", "open_result"),
    "attributes of a metric that are a number": put(
        {"evaluation": {"acc": 5}}, "state", "metric_attributes"
    ),
    "a mark of texts": put(["a", "b"], "state", "metrics_mark"),
    "a position that is a number": put(5, "dataloaders", "train"),
    "a seed that is a text": put("abc", "runner", "seed"),
    "a section that is a number": put(5, "runner", "checkpoint"),
    "splits that are a number": put(5, "runner", "train_splits"),
    "exclusions that are a number": put(5, "runner", "checkpoint", "exclude_from_loading"),
    "no version": put(None, "format_version"),
    "a version of zero": put(0, "format_version"),
}


SHARDED = list(FORMS)[::5]
"""Sharded checkpoints are read by the same parser."""


@pytest.mark.parametrize(
    ("trained", "form"),
    [("file", form) for form in FORMS] + [("dcp", form) for form in SHARDED],
    indirect=["trained"],
)
def test_payload_of_another_form_is_skipped(
    form: str,
    trained: tuple[str, Path, dict[str, Any]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    backend, root, payload = trained
    shutil.copytree(root / "run", tmp_path / "run")
    forged = copy.deepcopy(payload)
    FORMS[form](forged)
    forge(tmp_path, backend, forged)
    caplog.clear()
    with Keeper(config(tmp_path, backend)) as runner:
        assert (
            runner.state.train.global_step == 4
            and runner.number == payload["attributes"]["number"]["value"]
        )
    skipped = [
        record.getMessage() for record in caplog.records if "is skipped" in record.getMessage()
    ]
    assert len(skipped) == 1 and "Expected" in skipped[0] and "\n" not in skipped[0]
    with (
        pytest.raises(CheckpointDamaged, match="Expected"),
        Keeper(config(tmp_path, backend, resume="latest", auto_resume=False)),
    ):
        pass


def test_target_with_an_empty_index_is_skipped(
    trained: tuple[str, Path, dict[str, Any]], tmp_path: Path
) -> None:
    backend, root, _ = trained
    if backend != "dcp":
        pytest.skip("a file has no index")
    shutil.copytree(root / "run", tmp_path / "run")
    checkpoints = tmp_path / "run" / "checkpoints"
    newest = checkpoints / "targets" / (checkpoints / "latest").read_text().strip()
    index = json.loads((newest / INDEX).read_text())
    (newest / INDEX).write_text(json.dumps({**index, "files": [], "tensors": {}, "values": {}}))
    reseal(checkpoints)
    with Keeper(config(tmp_path, backend)) as runner:
        assert runner.state.train.global_step == 2


HOSTILE = {"kind": "dict", "keys": ["token", "cache.path", "count"], "items": ["evil", "evil", 3]}


def test_secrets_and_places_of_the_program_are_not_restored(
    trained: tuple[str, Path, dict[str, Any]], tmp_path: Path
) -> None:
    backend, _, payload = trained
    evil = {name: {"value": "evil"} for name in ("out_dir", "api_token", "root", "describe")}
    evil["data_dir"] = {"value": {"kind": "deleted"}}
    payload = {**payload, "attributes": {**payload["attributes"], **evil}}
    forged = payload["attributes"]
    forged["nested"] = {"value": {"kind": "dict", "keys": ["deep"], "items": {"0": HOSTILE}}}
    forged["credentials"] = {"value": {"kind": "list", "items": ["evil", "evil"]}}
    forged["helper"] = {
        "value": {
            "kind": "object",
            "class": "Helper",
            "keys": ["count", "log_file"],
            "items": [7, "evil"],
            "deleted": ["log_file"],
        }
    }
    state = {"kind": "dict", "keys": ["total", "api_key"], "items": [7.0, "evil"]}
    forged["sums"] = {"value": {"kind": "stateful", "class": "Sums", "state": state}}
    with Keeper(config(tmp_path, backend)) as runner:
        runner.load_checkpoint(payload)
        assert (runner.out_dir, runner.api_token, runner.root) == ("own", "own", Path("own"))
        assert runner.data_dir == "own"
        assert runner.nested == {"deep": {"token": "own", "cache.path": "own", "count": 3}}
        assert runner.credentials == ["own"] and callable(runner.describe)
        assert (runner.helper.count, runner.helper.log_file) == (7, "own.log")
        assert (runner.sums.total, runner.sums.api_key) == (7.0, "own")


def test_secret_bytes_are_not_saved(tmp_path: Path) -> None:
    with Keeper(config(tmp_path, "file")) as runner:
        runner.api_token = b"a secret of the program"
        runner.raw = b"something else"
        saved = runner.state_dict()["attributes"]
        assert "api_token" not in saved and "raw" in saved


def test_value_refused_by_the_program_is_one_error(
    trained: tuple[str, Path, dict[str, Any]], tmp_path: Path
) -> None:
    backend, _, payload = trained
    wrong = {"kind": "generator", "class": "Generator", "state": torch.zeros(3, dtype=torch.uint8)}
    payload = {**payload, "attributes": {**payload["attributes"], "generator": {"value": wrong}}}
    with Keeper(config(tmp_path, backend)) as runner:
        with pytest.raises(
            CheckpointMismatch, match=r"whose self\.generator .* add 'attributes\.generator' to"
        ):
            runner.load_checkpoint(payload)
        del payload["attributes"]["generator"]
        payload["dataloaders"] = {"train": {"ranks": {"1": {}}}}
        with pytest.raises(CheckpointMismatch, match=r"whose dataloaders this run can restore"):
            runner.load_checkpoint(payload)


@pytest.mark.parametrize("attributes", [True, False])
def test_attributes_of_a_stranger_are_left_out(
    attributes: bool, trained: tuple[str, Path, dict[str, Any]], tmp_path: Path
) -> None:
    backend, root, _ = trained
    latest = root / "run" / "checkpoints" / ("latest.pth" if backend == "file" else "latest")
    with Keeper.from_checkpoint(
        latest, {"dir": str(tmp_path / "own"), "steps": 6}, attributes=attributes
    ) as runner:
        assert runner.state.train.global_step == 4 and torch.equal(
            runner.tensor, torch.full((3,), 4.0 * attributes)
        )
        assert (runner.word == "trained") is attributes
        runner.train()
        trained_to = runner.number
    # Its own checkpoints have the attributes that it has trained itself.
    with Keeper.from_checkpoint(tmp_path / "own", {"steps": 6}, attributes=attributes) as runner:
        assert runner.number == trained_to


@pytest.mark.parametrize("between", [b"", b"]0"])
@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("depth", [300, 5_000_000])
def test_key_of_nested_tuples_is_damage(
    tmp_path: Path, depth: int, zipped: bool, between: bytes
) -> None:
    # A dictionary with one key, tuples of one tuple; an operation without an effect may be between any two of them.
    pickled = b"\x80\x02})" + (b"\x85" + between) * depth + b"K\x01s."
    path = tmp_path / "forged.pth"
    torch.save({"weight": torch.zeros(2)}, path, _use_new_zipfile_serialization=zipped)
    if zipped:
        with ZipFile(path) as archive:
            records = {name: archive.read(name) for name in archive.namelist()}
        with ZipFile(path, "w") as archive:
            for name, content in records.items():
                archive.writestr(name, pickled if name.endswith("data.pkl") else content)
    else:
        with path.open("rb") as file:
            for _ in range(3):
                list(pickletools.genops(file))
            head = path.read_bytes()[: file.tell()]
        path.write_bytes(head + pickled + b"\x80\x02].")
    with pytest.raises(CheckpointDamaged):
        read_file(path)
    assert main(["inspect", str(path)]) == 1
