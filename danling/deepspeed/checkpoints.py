"""Checkpoints of a DeepSpeed engine: written by all ranks, and read without DeepSpeed and without running anything that is in them.

The engine's own files contain tensors, plain values and a handful of DeepSpeed's own records, which are read through a fixed table of
classes. To put divided states together, DeepSpeed's own converters are called; they unpickle, so this requires `trust`.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
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
from torch.utils._pytree import tree_map_only

from danling.checkpoints import storage
from danling.checkpoints.errors import CheckpointDamaged, CheckpointError, CheckpointMismatch
from danling.checkpoints.exchange import export_weights
from danling.checkpoints.manager import CollectiveCheckpointManager
from danling.checkpoints.manifest import Manifest, Record, archive_complaints, is_archive
from danling.checkpoints.reading import Outline, locate, tensors_in, without_tensors
from danling.checkpoints.reading import read_payload as read_any
from danling.checkpoints.snapshot import count_bytes, readable, to_host
from danling.checkpoints.target_store import RUNNER_FILE, SUMS, is_engine_target
from danling.checkpoints.torch_files import check_format, read_file
from danling.utils.tensors import canonical_name

from .engine import single_writer

CLIENT_STATE = "danling"
"""Key of the runner's state in the engine's model file."""

_WHOLE_MODEL = "mp_rank_00_model_states.pt"
"""Where the engine keeps the model, unless its weights are divided."""
_FIRST_SHARE = "zero_pp_rank_0_mp_rank_00_model_states.pt"

# Writing and loading


@dataclass(frozen=True)
class EngineTag:
    """Model and optimizer of a checkpoint that an engine reads itself."""

    path: Path
    outline: Mapping[str, Any]
    """Stage and number of ranks, groups of parameters, and states of the optimizer that are no tensors."""


def _is_shape(value: object) -> bool:
    return isinstance(value, torch.Size)


class HashingFiles:
    """What an engine uses as its checkpoint engine: files are durable and hashed when they are written.

    A rank whose write fails goes on to the engine's barriers, and the error is raised when all ranks have come through.
    """

    def __init__(self, *, trust: bool = False) -> None:
        self.name = "danling"
        self.trust = trust
        self.written: dict[str, tuple[int, str]] = {}
        self.error: Exception | None = None

    def create(self, info: object) -> None: ...

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self._try(lambda: storage.make_directory(Path(path)))

    def save(self, state_dict: object, path: str) -> None:
        def write() -> None:
            # As a tuple, a shape is one that DeepSpeed's readers do not know.
            state = tree_map_only(Tensor, readable, state_dict, is_leaf=_is_shape)
            found = storage.write_file(Path(path), lambda writer: torch.save(state, writer))  # type: ignore[arg-type]
            self.written[Path(path).name] = found

        self._try(write)

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            self.error = self.error or error

    def load(self, path: str, map_location: object = None) -> Any:
        return read_engine_file(Path(path), map_location=map_location, trust=self.trust)

    def commit(self, info: object) -> bool:
        return True

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        """Whether a rank writes the values that are equal on all ranks."""
        return dp_rank == 0

    def is_decoupled(self) -> bool:
        """Whether files are written in the background."""
        return False

    def set_commit_info(self, info: object) -> None: ...

    def get_commit_info(self) -> None: ...

    def cleanup(self) -> None: ...

    def preserves_storage_sharing(self) -> bool:
        """Whether tensors that share memory do so when they are read."""
        return True


class DeepSpeedCheckpointManager(CollectiveCheckpointManager):
    """Tags of a DeepSpeed engine as targets that are written once, and pointer files with the names; see `TargetStore`.

    Next to the engine's files is `runner.pth` with everything but model and optimizer; the same goes to the engine as its client
    state, so that `engine.load_checkpoint("checkpoints/targets", tag)` of a program without this library finds it too.

    The engine writes from its live tensors, so a save is finished when it returns, whatever `checkpoint.async_mode` says.
    """

    def __init__(self, *args: Any, engine: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._engine = engine

    def _save(
        self,
        payload: Mapping[str, object],
        names: list[str],
        *,
        epoch: int,
        global_step: int,
        ahead: bool = False,
    ) -> None:
        if self.settings.load_only:
            return
        # The engine writes in the foreground: only the upload may have failed in the background.
        if self.copier.copies:
            self._surface()
        self._ahead = None
        exported = "model" in payload
        parameters = [] if exported else self._engine.module.parameters()
        # Weights, float32 copies and two moments.
        needed = count_bytes(payload) + 16 * sum(
            getattr(p, "ds_numel", p.numel()) for p in parameters
        )
        record = self.on_main(lambda: self._open_target(needed, epoch, global_step))
        target = self.store.path(record.name)
        plain = self.on_all(lambda: to_host(payload))
        files = HashingFiles()
        is_main = self.domain.rank == 0
        if not exported:
            client = {CLIENT_STATE: {name: value for name, value in plain.items() if name != "ema"}}
            with single_writer(self._engine, files):
                self._engine.save_checkpoint(
                    str(target.parent), tag=record.name, client_state=client, save_latest=False
                )

        def publish() -> None:
            runner = storage.write_file(
                target / RUNNER_FILE,
                lambda writer: torch.save(dict(plain), writer),  # type: ignore[arg-type]
            )
            storage.sync_directory(target)
            storage.sync_directory(target.parent)
            storage.write_text(
                target / SUMS, Manifest(record, {**written, RUNNER_FILE: runner}).text()
            )
            self._publish(record, names, plain, [*files.written, RUNNER_FILE], put_off=put_off)

        try:
            self._agree(files.error)
            # All files are there. Rank 0 describes them, lets the names lead there and prunes.
            exchange = self.domain.gather_objects
            written = {
                name: found
                for of_rank in exchange(files.written)
                for name, found in of_rank.items()
            }
            put_off = self._is_copier_behind(exchange)
            self.on_main(publish)
            if not is_main:
                self._publish(record, names, plain, files.written, put_off=put_off)
            self._follow(record.sequence, exchange)
        except Exception:
            if is_main:
                self.store.give_up(record.name)
            raise
        if ahead:
            self._ahead = record.name

    def _open_target(self, needed: int, epoch: int, global_step: int) -> Record:
        record = super()._open_target(needed, epoch, global_step)
        storage.make_directory(self.store.path(record.name))
        return record

    def load_checkpoint(
        self,
        source: str | Path,
        *,
        template: Mapping[str, Any] | None = None,
        sections: Any = None,
    ) -> dict[str, object]:
        """Return the verified payload of a checkpoint; see `CheckpointManager.load_checkpoint`.

        In a checkpoint of an engine `model` and `optimizer` are an `EngineTag`, which the engine reads, unless sections are named.
        """
        path = self._fetched(source)
        if sections is not None or not self.on_main(lambda: is_engine_target(path)):
            trust = self.settings.trust
            return self.on_all(
                lambda: read_any(path, template=template, sections=sections, trust=trust)
            )
        payload = self.on_all(lambda: read_runner_file(path))
        if "model" in payload:
            raise CheckpointMismatch(
                f"Expected a full checkpoint. Received: {source}, an export of weights. Load it with `pretrained`."
            )
        tag = EngineTag(path, payload["engine"])
        return {**payload, "model": tag, "optimizer": tag}


def export_deepspeed_checkpoint(
    source: str | Path, path: str | Path, *, trust: bool = False, **options: Any
) -> list[Path]:
    """Put the weights of a checkpoint of the DeepSpeed manager together and write them for other programs. Call on one process.

    Args:
        source: A checkpoint directory, one of its pointer files, or a target.
        path: As in `export_weights`: a file for `torch.load`, a `.safetensors` file, or a directory.
        trust: Let DeepSpeed put the shares of several ranks, or of ZeRO 1 to 3, together: it unpickles them, which runs code in them.
        options: As in `export_weights`.
    """
    store, found = locate(source)
    store.verify(found, "full")
    target = store.target(found)
    if not is_engine_target(target):
        raise CheckpointError(
            f"Expected a checkpoint of the DeepSpeed manager. Received: {target}, without {RUNNER_FILE}."
        )
    payload = read_payload(target, sections=frozenset({"model", "ema"}), trust=trust)
    return export_weights(
        path, payload["model"], ema=payload.get("ema", {}).get("weights"), **options
    )


# Reading


def read_runner_file(path: Path) -> dict[str, Any]:
    """Return what the runner saved in a target, without model and optimizer unless it is an export."""
    return check_format(read_file(path / RUNNER_FILE), path)


def read_payload(
    path: Path,
    *,
    template: object = None,
    sections: frozenset[str] | None = None,
    mmap: bool = False,
    trust: bool = False,
) -> dict[str, Any]:
    """Return the payload of a target as the other stacks save it: whole float32 weights, and the optimizer's state by name."""
    payload = read_runner_file(path)
    if "model" not in payload and (sections is None or "model" in sections):
        payload["model"] = consolidated_weights(path, trust=trust)
        if "engine" in payload and (sections is None or "optimizer" in sections):
            payload["optimizer"] = consolidated_optimizer(path, payload["engine"], trust=trust)
    return {name: value for name, value in payload.items() if sections is None or name in sections}


def read_outline(path: Path) -> Outline:
    """Return what the runner saved with the engine's files; see `reading.read_outline`."""
    payload = read_runner_file(path)
    return Outline("engine", path, list(tensors_in(payload)), without_tensors(payload))


@contextmanager
def _as_an_engine_writes(path: Path) -> Iterator[None]:
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointDamaged(
            f"Expected the files of an engine. Received: {path}, with another content: {error!r}."
        ) from error


def _converter(module: str, path: Path, trust: bool) -> Any:
    """Return a module of DeepSpeed that puts shares together; it unpickles them."""
    if not trust:
        raise _untrusted(
            f"{path}: its shares are put together by DeepSpeed's own converters, which unpickle them; the same stage on the same number "
            "of ranks, with nothing of the tag left out, needs none of that"
        )
    if find_spec("deepspeed") is None:
        raise CheckpointError(
            f"Expected deepspeed, which puts the shares of {path} together. Received: it is not installed. Install it: "
            "pip install deepspeed; or export the checkpoint where it is."
        )
    return import_module(module)


def consolidated_weights(path: Path, *, trust: bool = False) -> dict[str, Tensor]:
    """Return the whole float32 weights of a target by canonical name, put together from the shares of all ranks."""
    if not any(path.glob("*_optim_states.pt")):
        module = read_engine_file(path / _WHOLE_MODEL, trust=trust)
        with _as_an_engine_writes(path):
            return {canonical_name(name): tensor for name, tensor in module["module"].items()}
    converter = _converter("deepspeed.utils.zero_to_fp32", path, trust)
    # The converter prints its progress.
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        found = dict(
            converter.get_fp32_state_dict_from_zero_checkpoint(str(path.parent), tag=path.name)
        )
    # Weights that the optimizer lacks and DeepSpeed's conversion so leaves out, such as frozen ones under ZeRO 1.
    whole = path / _WHOLE_MODEL
    module = read_engine_file(whole if whole.is_file() else path / _FIRST_SHARE)["module"]
    missing = [
        name for name, value in module.items() if isinstance(value, Tensor) and name not in found
    ]
    if missing and not whole.is_file():
        raise CheckpointError(
            f"Expected all weights of the model in {path}. Received: none for {', '.join(missing[:5])} ({len(missing)} in all), which no "
            "optimizer had. Under ZeRO 3 give the optimizer all parameters that require a gradient, and freeze the others."
        )
    found |= {
        name: module[name].float() if module[name].is_floating_point() else module[name]
        for name in missing
    }
    return {canonical_name(name): tensor.detach().clone() for name, tensor in found.items()}


def consolidated_optimizer(
    path: Path, engine: Mapping[str, Any], *, trust: bool = False
) -> dict[str, Any]:
    """Return the whole state of the optimizer by parameter name, through DeepSpeed's universal checkpoint."""
    with _as_an_engine_writes(path):
        if int(engine["stage"]) == 0:
            stored = read_engine_file(path / _WHOLE_MODEL, trust=trust)["optimizer"]
            names = {
                index: name
                for group, own in zip(stored["param_groups"], engine["param_groups"])
                for index, name in zip(group["params"], own["params"])
            }
            state = {names[index]: dict(entry) for index, entry in stored["state"].items()}
        else:
            state = _universal_states(path, engine, trust)
        return {"state": state, "param_groups": [dict(group) for group in engine["param_groups"]]}


def _universal_states(
    path: Path, engine: Mapping[str, Any], trust: bool
) -> dict[str, dict[str, Any]]:
    converter = _converter("deepspeed.checkpoint.ds_to_universal", path, trust)
    weights = consolidated_weights(path, trust=trust)
    states: dict[str, dict[str, Any]] = {}
    with TemporaryDirectory(prefix="danling-universal-") as folder:
        options = Namespace(
            input_folder=str(path),
            output_folder=folder,
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            converter.main(options)
        for name in (name for group in engine["param_groups"] for name in group["params"]):
            shape = weights[name].shape
            state = {}
            for file in sorted(Path(folder, "zero", name).glob("*.pt")):
                # The weight itself, and a number that `scalars` has.
                if file.stem not in ("fp32", "step"):
                    found = read_engine_file(file)
                    # The state may be flat, with padding at its end.
                    tensor = found["param"] if isinstance(found, Mapping) else found
                    state[file.stem] = tensor.reshape(-1)[: shape.numel()].reshape(shape)
            if state:
                scalars = engine["scalars"].items()
                state |= {
                    key: value.clone() if isinstance(value, Tensor) else value
                    for key, value in scalars
                }
                states[name] = state
    return states


# The engine's own files

_RECORDS = (
    ("deepspeed.utils.tensor_fragment", "fragment_address"),
    ("deepspeed.runtime.fp16.loss_scaler", "LossScaler"),
    ("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"),
    ("deepspeed.runtime.zero.config", "ZeroStageEnum"),
)
_ENUM = "ZeroStageEnum"


class _Record:
    """A record of DeepSpeed's in a process that does not use it."""

    def __init__(self, *values: Any) -> None:
        self.values = values


def _member(kind: Any, name: object) -> object:
    """Return a member of an enumeration: Python 3.11.0 to 3.11.3 write one as `getattr` of its class and its name."""
    if getattr(kind, "__name__", None) != _ENUM or type(name) is not str:
        raise ValueError(f"getattr of {name!r} is no part of an engine's file")
    return kind(name) if issubclass(kind, _Record) else kind.__members__[name]


def read_engine_file(path: Path, *, map_location: Any = "cpu", trust: bool = False) -> Any:
    """Return the content of a file that the engine has written."""
    if storage.size_of(path) is None:
        # A named pipe would be waited for.
        raise CheckpointDamaged(
            f"Expected a file of DeepSpeed's. Received: {path}, which {storage.absence(path)}."
        )
    problems = archive_complaints(path, tensors=False) if is_archive(path) else []
    if problems:
        raise CheckpointDamaged(
            f"Expected a file of DeepSpeed's. Received: {path}: {'; '.join(problems)}"
        )
    table: list[Any] = [(_member, "builtins.getattr")]
    for module, name in _RECORDS:
        # The engine has imported what its own files are made of.
        kind = getattr(sys.modules.get(module), name, None)
        table.append((kind or type(name, (_Record,), {}), f"{module}.{name}"))
    try:
        with torch.serialization.safe_globals(table):
            return torch.load(path, map_location=map_location, weights_only=True)
    except Exception as error:
        if "weights_only" not in str(error):
            raise CheckpointDamaged(
                f"Expected a file of DeepSpeed's. Received: {path}: {error}"
            ) from error
        if not trust:
            raise _untrusted(
                f"{path}, which holds more than tensors, plain values and records of an engine"
            ) from error
    try:
        return torch.load(path, map_location=map_location, weights_only=False)
    except Exception as error:
        raise CheckpointDamaged(
            f"Expected a file of DeepSpeed's. Received: {path}, on which torch.load fails: {error}"
        ) from error


def _untrusted(what: str) -> CheckpointError:
    return CheckpointError(
        f"Expected checkpoint.trust=true (`danling export --trust`) to read {what}. Received: checkpoint.trust=false. Unpickling runs "
        "whatever is in a file: set it if you know who wrote the checkpoint."
    )
