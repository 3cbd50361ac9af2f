"""The files of a DeepSpeed checkpoint: the directory (tag) of an engine, and in it the part that the runner saves.

Reading the runner's part does not need DeepSpeed and runs no code from the file. The engine's own files are read through a fixed table
of classes. To put divided states together, DeepSpeed's own converters are called; they unpickle, so this requires `trust`.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from danling.utils.tensors import canonical_name

from . import storage
from .engine_pickles import read_engine_file, require_trust
from .errors import CheckpointDamaged, CheckpointError
from .outline import Outline, tensors_in, without_tensors
from .target_store import RUNNER_FILE
from .torch_files import check_format, read_file

_WHOLE_MODEL = "mp_rank_00_model_states.pt"
"""Where the engine keeps the model, unless its weights are divided."""
_FIRST_SHARE = "zero_pp_rank_0_mp_rank_00_model_states.pt"


@dataclass(frozen=True)
class EngineTag:
    """Model and optimizer of a checkpoint that an engine reads itself.

    Attributes:
        path: The directory, which DeepSpeed calls a tag.
        stage: ZeRO stage it was saved at.
        world_size: Number of ranks that saved it.
        outline: What the runner saved of the engine.
    """

    path: Path
    stage: int
    world_size: int
    outline: Mapping[str, Any]


CLIENT_STATE = "danling"
"""Key of the runner's state in the engine's model file."""


@dataclass(frozen=True)
class EngineAhead:
    """The files of an engine that were written before an evaluation, whose metrics belong to the same state.

    Attributes:
        path: Their directory.
        step: Committed updates.
        client: The runner's state that was handed to the engine.
        written: `(size in bytes, SHA-256)` of the files that this rank wrote, by name.
    """

    path: Path
    step: int
    client: Mapping[str, Any]
    written: Mapping[str, tuple[int, str]]

    def link(self, state: object, path: Path) -> tuple[int, str] | None:
        """Link an unchanged file to a new path instead of writing it again; return its size and checksum.

        The runner's state in the file is the one from before the evaluation; a run can be resumed from it just as well.
        """
        found, source = self.written.get(path.name), self.path / path.name
        if found is None or storage.size_of(source) != found[0]:
            return None
        if isinstance(state, Mapping) and CLIENT_STATE in state:
            state = {**state, CLIENT_STATE: self.client}
        if storage.measure(lambda writer: torch.save(state, writer)) != found:  # type: ignore[arg-type]
            return None
        storage.link(source, path)
        return found


class HashingFiles:
    """Writes and reads the files of an engine: durable and hashed when written, and no error hides on one rank.

    What a DeepSpeed engine asks of its checkpoint engine. A rank whose write fails goes on to the engine's barriers, and the error is
    raised when all ranks have come through.
    """

    def __init__(self, *, trust: bool = False, ahead: EngineAhead | None = None) -> None:
        self.name = "danling"
        self.trust = trust
        self._ahead = ahead
        self.written: dict[str, tuple[int, str]] = {}
        self.error: Exception | None = None

    def create(self, info: object) -> None:
        """Nothing is to be prepared."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a directory that may be there already: every rank does."""
        self._try(lambda: storage.make_directory(Path(path)))

    def save(self, state_dict: object, path: str) -> None:
        """Write one file."""
        self._try(lambda: self._write(state_dict, Path(path)))

    def _write(self, state: object, path: Path) -> None:
        found = None if self._ahead is None else self._ahead.link(state, path)
        if found is None:
            found = storage.write_file(path, lambda writer: torch.save(state, writer))  # type: ignore[arg-type]
        self.written[path.name] = found

    def _try(self, action: Any) -> None:
        try:
            action()
        except Exception as error:
            self.error = self.error or error

    def load(self, path: str, map_location: object = None) -> Any:
        """Read one file of DeepSpeed's."""
        return read_engine_file(Path(path), map_location=map_location, trust=self.trust)

    def commit(self, info: object) -> bool:
        """Nothing is left to do."""
        return True

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        """Whether a rank writes what is equal on all."""
        return dp_rank == 0

    def is_decoupled(self) -> bool:
        """Whether files are written in the background."""
        return False

    def set_commit_info(self, info: object) -> None:
        """Nothing is committed later."""

    def get_commit_info(self) -> None:
        """Nothing is committed later."""

    def cleanup(self) -> None:
        """Nothing is held."""

    def preserves_storage_sharing(self) -> bool:
        """Whether tensors that share memory do so when they are read."""
        return True


def read_runner_file(path: Path) -> dict[str, Any]:
    """Return what the runner saved in a target, without model and optimizer unless it is an export."""
    return check_format(read_file(path / RUNNER_FILE), path)


def read_engine_target(path: Path, *, sections: Iterable[str] | None = None, trust: bool = False) -> dict[str, Any]:
    """Return the payload of a target as the other stacks save it: whole float32 weights, and the optimizer's state by name."""
    payload = read_runner_file(path)
    if "model" not in payload and (sections is None or "model" in sections):
        payload["model"] = consolidated_weights(path, trust=trust)
        if "engine" in payload and (sections is None or "optimizer" in sections):
            with _as_an_engine_writes(path):
                payload["optimizer"] = consolidated_optimizer(path, payload["engine"], trust=trust)
    return {name: value for name, value in payload.items() if sections is None or name in sections}


@contextmanager
def _as_an_engine_writes(path: Path) -> Iterator[None]:
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointDamaged(
            f"Expected the files of an engine. Received: {path}, with another content: {error!r}."
        ) from error


def consolidated_weights(path: Path, *, trust: bool = False) -> dict[str, Tensor]:
    """Return the whole float32 weights of a target by canonical name, put together from the shares of all ranks."""
    if not any(path.glob("*_optim_states.pt")):
        whole = read_engine_file(path / _WHOLE_MODEL, trust=trust)
        with _as_an_engine_writes(path):
            return {canonical_name(name): tensor for name, tensor in whole["module"].items()}
    require_trust(trust, path)
    _require_deepspeed(path)
    convert = import_module("deepspeed.utils.zero_to_fp32").get_fp32_state_dict_from_zero_checkpoint
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        found: Mapping[str, Tensor] = convert(str(path.parent), tag=path.name)
    return {canonical_name(name): tensor.detach().clone() for name, tensor in _completed(found, path).items()}


def _completed(weights: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
    """Add what the optimizer does not hold, and DeepSpeed's conversion so leaves out: frozen weights under ZeRO 1, for one."""
    whole = path / _WHOLE_MODEL
    module = read_engine_file(whole if whole.is_file() else path / _FIRST_SHARE)["module"]
    missing = [name for name, value in module.items() if isinstance(value, Tensor) and name not in weights]
    if missing and not whole.is_file():
        raise CheckpointError(
            f"Expected all weights of the model in {path}. Received: none for {', '.join(missing[:5])} ({len(missing)} in all), which no "
            "optimizer held. Under ZeRO 3 give the optimizer all parameters that require a gradient, and freeze the others."
        )
    added = {name: module[name].float() if module[name].is_floating_point() else module[name] for name in missing}
    return {**weights, **added}


def _require_deepspeed(path: Path) -> None:
    if find_spec("deepspeed") is None:
        raise CheckpointError(
            f"Expected deepspeed, which puts the shares of {path} together. Received: it is not installed. Install it: "
            "pip install deepspeed; or export the checkpoint where it is."
        )


def consolidated_optimizer(path: Path, engine: Mapping[str, Any], *, trust: bool = False) -> dict[str, Any]:
    """Return the whole state of the optimizer by parameter name, through DeepSpeed's universal checkpoint."""
    if int(engine["stage"]) == 0:
        found = read_engine_file(path / _WHOLE_MODEL, trust=trust)["optimizer"]
        return _named(found, engine["param_groups"])
    require_trust(trust, path)
    _require_deepspeed(path)
    with TemporaryDirectory(prefix="danling-universal-") as folder:
        convert = import_module("deepspeed.checkpoint.ds_to_universal")
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            convert.main(_conversion(path, Path(folder)))
        names = [name for group in engine["param_groups"] for name in group["params"]]
        weights = consolidated_weights(path, trust=trust)
        state = {
            name: _universal_state(Path(folder) / "zero" / name, weights[name].shape, engine["scalars"])
            for name in names
        }
    return {
        "state": {name: entry for name, entry in state.items() if entry},
        "param_groups": [dict(group) for group in engine["param_groups"]],
    }


def _conversion(path: Path, folder: Path) -> Namespace:
    return Namespace(
        input_folder=str(path),
        output_folder=str(folder),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )


def _universal_state(folder: Path, shape: torch.Size, scalars: Mapping[str, object]) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for file in sorted(folder.glob("*.pt")):
        if file.stem not in ("fp32", "step"):
            found = read_engine_file(file)
            tensor = found["param"] if isinstance(found, Mapping) else found
            state[file.stem] = tensor.reshape(-1)[: shape.numel()].reshape(shape)
    scalar = {key: value.clone() if isinstance(value, Tensor) else value for key, value in scalars.items()}
    return {**state, **scalar} if state else {}


def _named(state: Mapping[str, Any], groups: Any) -> dict[str, object]:
    names = {
        index: name
        for group, own in zip(state["param_groups"], groups)
        for index, name in zip(group["params"], own["params"])
    }
    named = {names[index]: dict(entry) for index, entry in state["state"].items()}
    return {"state": named, "param_groups": [dict(group) for group in groups]}


# The backend of DeepSpeed engines


def read_payload(
    path: Path,
    *,
    template: object = None,
    sections: frozenset[str] | None = None,
    mmap: bool = False,
    trust: bool = False,
) -> dict[str, Any]:
    """Return the payload of a target; see `Backend.read_payload`."""
    return read_engine_target(path, sections=sections, trust=trust)


def read_outline(path: Path) -> Outline:
    """Return what the runner saved beside the engine's files; see `Backend.read_outline`."""
    payload = read_runner_file(path)
    return Outline("engine", path, list(tensors_in(payload)), without_tensors(payload))
