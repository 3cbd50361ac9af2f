"""Exports weights to other programs and imports theirs: plain `state_dict` files and safetensors, in shards with an index if large.

EMA weights are written with the trained ones, under the same names: in the entry `ema` of a plain file, and for safetensors in files
that start with `ema`.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from danling.utils.files import open_file, plain_name, read_text
from danling.utils.plain import parse_json
from danling.utils.tensors import canonical_name, is_sharded

from . import storage
from .errors import CheckpointDamaged, CheckpointError, CheckpointMismatch, CheckpointNotFound
from .file_store import FileStore, has_sums, is_of_run, missing_sums, verify_alone
from .manifest import is_archive, is_name
from .reading import moment
from .target_store import TARGETS
from .torch_files import holds_format, is_own, read_file

if TYPE_CHECKING:
    from .manager import CheckpointManager

logger = logging.getLogger("danling")

DESCRIPTION = "model"
"""Directory below the metadata of a run in which a model is described."""

_CONFIG = "config.json"
_UNFINISHED = ".exporting-"
"""Prefix of a file that an export is writing, which it has locked."""
_SECONDS_TO_BEGIN = 10.0
"""How long a file of an export may not be locked yet."""
_SETS = ("ema", "model")
_AVERAGES = ("ema.safetensors.index.json", "ema.safetensors")
_WRITTEN = re.compile(
    r"(model|ema)(-\d{5,}-of-\d{5,})?\.safetensors|(model|ema)\.safetensors\.index\.json"
)


def export_weights(
    path: str | Path,
    model: Mapping[str, Tensor],
    *,
    ema: Mapping[str, Tensor] | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int | None = None,
    metadata: Mapping[str, str] | None = None,
) -> list[Path]:
    """Write weights for other programs, and return the files. Call on one rank; DTensors must have been gathered.

    A path that ends in `.safetensors` becomes that file; one without a suffix becomes a directory of safetensors, in shards with an
    index if large, as the Hugging Face libraries read them; any other suffix gives a file for `torch.load(weights_only=True)`: the
    `state_dict` itself, or `{"model": ..., "ema": ...}` with averaged weights. What an earlier export to the same path wrote and this
    one does not is removed after the new files are written, so that no directory has two models.

    Args:
        path: The file or directory.
        model: Weights by name; prefixes of DDP and `torch.compile` are removed from the names.
        ema: Averaged weights by name.
        dtype: Dtype to cast floating tensors to.
        max_shard_bytes: Size above which a directory gets several files; `None` writes one.
        metadata: Strings to put into the header of safetensors.
    """
    target = Path(path)
    sets = {
        name: _plain(weights, dtype)
        for name, weights in (("model", model), ("ema", ema))
        if weights is not None
    }
    if target.suffix not in ("", ".safetensors"):
        storage.make_directory(target.parent)
        content = sets if "ema" in sets else sets["model"]
        _put(target, lambda writer: torch.save(content, writer))
        return [target]
    directory, limit = target, max_shard_bytes
    stems = {"model": "model", "ema": "ema"}
    if target.suffix == ".safetensors":
        directory, limit = target.parent, None
        stems = {"model": target.stem, "ema": f"{target.stem}.ema"}
    # Before anything is written: an index leads to the files of its own export only.
    earlier = _earlier_export(target)
    storage.make_directory(directory)
    written = []
    for name, weights in sets.items():
        written += _write_safetensors(directory, stems[name], weights, limit, dict(metadata or {}))
    for path in earlier:
        if path not in written:
            storage.remove(path)
    return written


def _earlier_export(target: Path) -> list[Path]:
    """Return the files of an earlier export to the same path, the indices that lead to others first; nothing else is ours to remove."""
    if target.suffix == ".safetensors":
        averaged = target.with_name(f"{target.stem}.ema.safetensors")
        return [path for path in (target, averaged) if target.is_file() and path.is_file()]
    if not target.is_dir():
        return []
    found = [path for path in target.iterdir() if _WRITTEN.fullmatch(path.name)]
    return sorted(found, key=lambda path: (path.suffix != ".json", path.name))


def import_weights(path: str | Path, *, which: str = "model") -> dict[str, Tensor]:
    """Read weights that this library or another program wrote, onto the CPU. Runs nothing that is in the file.

    Args:
        path: A file of `torch.save` (a `state_dict`, alone or as `model` or `state_dict`), a `.safetensors` file, an index
            `*.safetensors.index.json`, or a directory with one of these.
        which: `"model"`, or `"ema"` for averaged weights that `export_weights` wrote.
    """
    if which not in _SETS:
        raise ValueError(f"Expected which to be one of {[*_SETS]}. Received: which={which!r}.")
    source = _located(Path(path), which)
    if source.name.endswith(".index.json"):
        weights = _read_index(source)
    elif source.suffix == ".safetensors":
        weights = _read_safetensors(source)
    else:
        return weights_in(_read_torch_file(source), source, which)
    return _canonical(weights)


def weights_in(loaded: Any, source: object, which: str = "model") -> dict[str, Tensor]:
    """Return the weights in the content of a file: a `state_dict`, alone or as `model` or `state_dict`."""
    found: Any = None
    if which == "model":
        if isinstance(loaded, Mapping) and "model" not in loaded:
            # As PyTorch Lightning and many published checkpoints have it.
            loaded = _below(loaded, "state_dict")
        # One level and no further: the other entries of a model within `model` would be left out in silence.
        found = _below(loaded, "model")
    elif isinstance(loaded, Mapping) and isinstance(loaded.get("model"), Mapping):
        # The state of an EMA has the weights in an entry.
        found = _below(loaded.get(which), "weights")
    if found is None:
        raise CheckpointNotFound(
            f"Expected weights ({which}). Received: {source}, which has none of that name."
        )
    if not isinstance(found, Mapping) or not all(
        isinstance(value, Tensor) for value in found.values()
    ):
        holds = (
            f"a mapping with {sorted(map(str, loaded))[:8]}"
            if isinstance(loaded, Mapping)
            else type(loaded).__name__
        )
        raise CheckpointMismatch(
            f"Expected a state_dict of tensors, alone or as 'model' or 'state_dict'. Received: {source}, which holds {holds}. Save "
            "`model.state_dict()` with torch.save."
        )
    return _canonical(found)


def _below(content: Any, name: str) -> Any:
    """Return the mapping that a mapping has under a name; the content itself where there is none."""
    found = content.get(name) if isinstance(content, Mapping) else None
    return found if isinstance(found, Mapping) else content


def read_model(
    manager: CheckpointManager, source: str | Path | Mapping[str, object], *, averages: bool = True
) -> dict[str, Tensor]:
    """Return the weights of a checkpoint of this library, or of what another program wrote. Call on all ranks.

    Args:
        manager: Finds and verifies checkpoints of this library.
        source: A name or a path of a checkpoint; or a file with a `state_dict`, a `.safetensors` file, its index, or a directory
            with one of them; or the content of such a file.
        averages: Return the averaged weights if there are any, since these were evaluated; otherwise the trained ones.
    """
    if isinstance(source, Mapping):
        ema = source.get("ema") if averages else None
        return _chosen(weights_in(source, "a mapping"), ema, "a mapping")
    sources = manager.checkpoints.sources_of(source)
    brought = None if sources is None else manager.on_all(lambda: sources.bring_file(str(source)))
    path = brought or Path(source)
    # The main process decides for all: a disk that is shared may show a file to one of them later.
    if manager.on_main(lambda: _is_foreign(path)):
        foreign, beside = manager.on_all(lambda: _import_sets(path, averages=averages))
        manager.checkpoints.release()
        return _chosen(foreign, beside, source)
    sections = ["model", "state", "ema"] if averages else ["model", "state"]
    payload = manager.load_checkpoint(source, sections=sections)
    manager.checkpoints.release()
    weights = payload.get("model")
    if not isinstance(weights, Mapping):
        raise CheckpointMismatch(
            f"Expected a checkpoint with a model. Received: {source} with {sorted(payload)}."
        )
    logger.info("%s holds the weights of %s.", source, moment(payload))
    return _chosen(dict(weights), payload.get("ema"), source)


def _import_sets(path: Path, *, averages: bool) -> tuple[dict[str, Tensor], object]:
    """Return the weights that another program or an export wrote, and what the same file or directory has as averages."""
    source = _located(path, "model")
    if not source.name.endswith((".index.json", ".safetensors")):
        content = _read_torch_file(source)
        beside = content.get("ema") if averages and isinstance(content, Mapping) else None
        return weights_in(content, source), beside
    has_both = averages and path.is_dir() and any((path / name).is_file() for name in _AVERAGES)
    ema = import_weights(path, which="ema") if has_both else None
    return import_weights(path), ema


def _chosen(weights: dict[str, Tensor], averages: object, source: object) -> dict[str, Tensor]:
    found = evaluated_weights(weights, averages)
    if found is None:
        return weights
    logger.info(
        "Taking the averaged weights of %s, which its run evaluated. pretrained_averages=false takes the trained ones.",
        source,
    )
    return found


def evaluated_weights(weights: Mapping[str, Tensor], averages: object) -> dict[str, Tensor] | None:
    """Return weights with their averages in place; `None` where there are no averages of them.

    Args:
        weights: Trained weights by name.
        averages: Averages by name, also as `{"weights": averages}`. What they lack, such as a second name of a tied weight, is taken from
            the name that it is tied to, or from `weights`.
    """
    averages = _below(averages, "weights")
    # A file of another program may have anything under the name `ema`.
    if not isinstance(averages, Mapping) or not averages:
        return None
    named = all(
        isinstance(value, Tensor) and isinstance(name, str) for name, value in averages.items()
    )
    if not named:
        return None
    averages = averages if averages.keys() <= weights.keys() else _canonical(averages)
    # Those of another model are none of these weights.
    if any(
        getattr(weights.get(name), "shape", None) != value.shape for name, value in averages.items()
    ):
        return None

    def tied_to(value: object) -> str | None:
        # A sharded checkpoint has tied weights twice, so that only their values tell.
        return next(
            (
                name
                for name in averages
                if isinstance(value, Tensor) and _is_same(weights[name], value)
            ),
            None,
        )

    found = dict(weights)
    for name, value in weights.items():
        source = name if name in averages else tied_to(value)
        if source is not None:
            found[name] = averages[source]
    return found


def _is_same(one: Tensor, other: Tensor) -> bool:
    return one is other or (
        one.shape == other.shape and one.dtype == other.dtype and bool(torch.equal(one, other))
    )


def _is_foreign(path: Path) -> bool:
    if path.is_dir():
        return any(
            (path / name).is_file()
            for name in ("model.safetensors", "model.safetensors.index.json")
        )
    # Without a suffix, the name of a checkpoint is a pointer to a target.
    pointer = is_name(path.name) and (path.parent / TARGETS).is_dir()
    if not path.is_file() or pointer or has_sums(path):
        return False
    return path.name.endswith((".safetensors", ".index.json")) or not holds_format(path)


def _read_torch_file(path: Path) -> object:
    """Read a file of `torch.save` after comparing it with its checksums, or with those inside of it if there are none next to it."""
    if has_sums(path):
        FileStore(path.parent).verify(path, "full")
        return read_file(path)
    if is_archive(path):
        verify_alone(path, "full", required=False)
    content = read_file(path)
    # A checkpoint of a run whose checksums were lost is not read as if it were a copy.
    if is_own(content) and is_of_run(path.parent):
        raise missing_sums(path)
    return content


def _canonical(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    # DDP puts `module.` before every name. Where some names lack it, it is a module of the user's.
    wrapped = all(name.startswith("module.") for name in weights)
    prefix = "module." if wrapped else ""
    return {canonical_name(name.removeprefix(prefix)): each for name, each in weights.items()}


def _plain(weights: Mapping[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
    strange = next(
        (name for name, tensor in weights.items() if not isinstance(tensor, Tensor)), None
    )
    if strange is not None:
        raise CheckpointMismatch(
            f"Expected tensors to export. Received: {str(strange)[:80]!r} with {type(weights[strange]).__name__}. Use another checkpoint."
        )
    sharded = next((name for name, tensor in weights.items() if is_sharded(tensor)), None)
    if sharded is not None:
        raise CheckpointError(
            f"Expected whole tensors to export. Received: {sharded} as a DTensor. Gather them first: "
            "torch.distributed.checkpoint.state_dict.get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))."
        )

    def cast(tensor: Tensor) -> Tensor:
        value = tensor.detach().cpu()
        if dtype is None or not value.is_floating_point():
            return value
        return value.to(dtype)

    # Once for each tensor, so that tied ones stay tied.
    distinct = {id(tensor): tensor for tensor in weights.values()}
    plain = {key: cast(tensor) for key, tensor in distinct.items()}
    return _canonical({name: plain[id(tensor)] for name, tensor in weights.items()})


def _put(path: Path, write: Any) -> None:
    _remove_unfinished(path)
    staged = path.with_name(f"{_UNFINISHED}{path.name}-{uuid.uuid4().hex[:8]}")

    def locked(writer: storage.HashingWriter) -> None:
        # Until the file is closed, or the process is killed.
        fcntl.flock(writer.fileno(), fcntl.LOCK_EX)
        write(writer)

    storage.write_file(staged, locked)
    storage.replace(staged, path)
    storage.sync_directory(path.parent)


def _remove_unfinished(path: Path) -> None:
    """Remove what killed exports to the same path have left: files that no process has locked, and that are not just being made."""
    own = re.compile(rf"{re.escape(_UNFINISHED + path.name)}-[0-9a-f]{{8}}")
    for name in filter(own.fullmatch, storage.names(path.parent)):
        # A lock that another process has is an OSError, and its file stays.
        with suppress(OSError), open_file(path.with_name(name), follow=False) as file:
            if time.time() - os.fstat(file.fileno()).st_mtime > _SECONDS_TO_BEGIN:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(path.with_name(name))


def _write_safetensors(
    directory: Path,
    stem: str,
    weights: dict[str, Tensor],
    limit: int | None,
    metadata: dict[str, str],
) -> list[Path]:
    safetensors = _safetensors()
    aliases = _aliases(weights)
    shards = _split(
        {name: tensor for name, tensor in weights.items() if name not in aliases}, limit
    )
    names = [stem]
    if len(shards) > 1:
        # As the Hugging Face libraries call the shards of a model.
        names = [f"{stem}-{i:05d}-of-{len(shards):05d}" for i in range(1, len(shards) + 1)]
    written, places = [], {}
    for file, shard in zip(names, shards):
        path = directory / f"{file}.safetensors"
        # safetensors refuses memory that tensors share; tied names are kept in the header and restored by import_weights.
        tied = {name: first for name, first in aliases.items() if first in shard}
        header = {"format": "pt", **metadata}
        if tied:
            header["tied"] = json.dumps(tied)
        content = safetensors.save(
            {name: _own_memory(tensor) for name, tensor in shard.items()}, metadata=header
        )
        _put(path, lambda writer, content=content: _write_in_order(writer, content))
        places.update(dict.fromkeys(shard, path.name))
        written.append(path)
    # Last, since the index makes the shards a model.
    if len(shards) > 1:
        size = sum(t.numel() * t.element_size() for shard in shards for t in shard.values())
        index = {"metadata": {"total_size": size}, "weight_map": places}
        path = directory / f"{stem}.safetensors.index.json"
        storage.write_text(path, _json(index))
        written.append(path)
    return written


def _write_in_order(writer: Any, content: bytes) -> None:
    """Write a safetensors file with the metadata of its header by name."""
    # The library writes the metadata in the order of a hash map, so equal weights gave other bytes.
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8
    writer.write(len(text).to_bytes(8, "little") + text)
    writer.write(memoryview(content)[end:])


def _own_memory(tensor: Tensor) -> Tensor:
    # A view of a larger storage, of which safetensors would see memory that is shared.
    shares = tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()
    return tensor.clone(memory_format=torch.contiguous_format) if shares else tensor.contiguous()


def _aliases(weights: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the names whose tensor is the very one of an earlier name."""
    first: dict[Any, str] = {}
    aliases = {}
    for name, tensor in weights.items():
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        # Those without elements all have the address 0.
        if tensor.numel() and first.setdefault(key, name) != name:
            aliases[name] = first[key]
    return aliases


def _split(weights: dict[str, Tensor], limit: int | None) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in weights.items():
        needed = tensor.numel() * tensor.element_size()
        # A tensor that is larger than the limit is alone in its file.
        if limit is not None and shards[-1] and size + needed > limit:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += needed
    return shards


def _located(path: Path, which: str) -> Path:
    candidates = [path]
    if path.is_dir():
        candidates = [
            path / f"{which}{ending}"
            for ending in (".safetensors.index.json", ".safetensors", ".pth")
        ]
    elif path.suffix == ".safetensors" and which == "ema":
        candidates = [path.with_name(f"{path.stem}.ema.safetensors")]
    found = next((candidate for candidate in candidates if candidate.is_file()), None)
    if found is None:
        raise CheckpointNotFound(
            f"Expected weights ({which}). Received: {str(path)!r}, without {', '.join(c.name for c in candidates)}."
        )
    return found


def _read_index(path: Path) -> dict[str, Tensor]:
    try:
        places: dict[str, str] = dict(parse_json(read_text(path))["weight_map"])
        files = {plain_name(file) for file in places.values()}
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointDamaged(
            f"Expected an index of safetensors. Received: {path}: {error!r}"
        ) from error
    weights: dict[str, Tensor] = {}
    for name in sorted(files):
        if not (path.parent / name).is_file():
            raise CheckpointNotFound(
                f"Expected every file of {path}. Received: {name}, which is missing."
            )
        weights.update(_read_safetensors(path.parent / name))
    missing = sorted(places.keys() - weights.keys())
    if missing:
        raise CheckpointDamaged(
            f"Expected all tensors of {path}. Received files without: {', '.join(missing[:10])}."
        )
    return weights


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    _safetensors()
    from safetensors import safe_open

    try:
        with safe_open(path, framework="pt") as file:
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
            tied = parse_json((file.metadata() or {}).get("tied", "{}"))
        shared = {name: weights[first] for name, first in dict(tied).items()}
    # safetensors raises its own errors, and the header may have anything as `tied`.
    except Exception as error:
        raise CheckpointDamaged(
            f"Expected a readable file. Received: {path}, on which safetensors fails: {error}"
        ) from error
    return {**weights, **shared}


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError(
            "Expected safetensors for .safetensors files. Install it: pip install safetensors."
        ) from error
    return safetensors.torch


# What `from_pretrained` of transformers and peft reads with the weights


def _json(content: Mapping[str, object]) -> str:
    """Return JSON as transformers writes it."""
    return json.dumps(content, indent=2, sort_keys=True) + "\n"


def describe_model(model: object) -> dict[str, str]:
    """Return what a model of transformers is made from: JSON by the name of the file that `from_pretrained` reads.

    Empty for any other model, and for one with adapters, for which peft writes its own files.
    """
    if hasattr(model, "peft_config"):
        return {}
    described = {}
    for attribute, name in (("config", _CONFIG), ("generation_config", "generation_config.json")):
        part: Any = getattr(model, attribute, None)
        # Asked of the class: models of other libraries answer to any name.
        if callable(getattr(type(part), "to_json_string", None)) and callable(
            getattr(type(part), "save_pretrained", None)
        ):
            described[name] = str(part.to_json_string())
    if _CONFIG not in described:
        return {}
    content = json.loads(described[_CONFIG])
    # As transformers writes it; FSDP puts its own name before that of the class.
    content["architectures"] = [type(model).__name__.removeprefix("FSDP")]
    return {**described, _CONFIG: _json(content)}


def write_description(described: Mapping[str, str], directory: Path) -> None:
    """Write the files of `describe_model`."""
    if described:
        storage.make_directory(directory)
    for name, text in described.items():
        storage.write_text(directory / name, text)


def read_description(
    directory: Path, weights: Mapping[str, Tensor], dtype: torch.dtype | None
) -> dict[str, str]:
    """Return the files that `from_pretrained` reads with some weights; they name the precision of the weights."""
    if not (directory / _CONFIG).is_file():
        raise ValueError(
            f"Expected a run of a model of transformers, which is described in {directory}. Received: no {_CONFIG} there. Leave --format "
            "out for the weights alone; of a model with adapters, or one that holds a model of transformers, call "
            "`runner.save_pretrained(directory)` or the model's own `save_pretrained`."
        )
    described = {path.name: read_text(path) for path in sorted(directory.glob("*.json"))}
    content = json.loads(described[_CONFIG])
    kept = next((tensor.dtype for tensor in weights.values() if tensor.is_floating_point()), None)
    content["dtype"] = str(dtype or kept or torch.float32).removeprefix("torch.")
    return {**described, _CONFIG: _json(content)}


def save_pretrained(model: nn.Module, directory: str | Path, **options: Any) -> None:
    """Call the `save_pretrained` of a model with its weights under the names that it was made with."""
    weights = {canonical_name(name): tensor for name, tensor in model.state_dict().items()}
    check_pretrained(model).save_pretrained(str(directory), state_dict=weights, **options)


def check_pretrained(model: nn.Module) -> Any:
    """Return a model that has `save_pretrained`."""
    if not callable(getattr(type(model), "save_pretrained", None)):
        raise TypeError(
            f"Expected a model with `save_pretrained`, such as one of transformers or peft. Received: {type(model).__name__}. Inside "
            "`with runner.whole_weights():` call it on the part of the model that has it; for bare weights there is `danling export`."
        )
    return model
