"""What makes two runs the same: the canonical configuration, its hash, and differences that matter."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from danling.utils.plain import flatten
from danling.utils.secrets import without_secrets

# These settings do not change what a run learns: they set its place, speed, output files and length. The budgets are here
# because a run that is continued with a larger one must find its own directory.
LAYOUT = frozenset(
    {"stack", "parallel", "backend", "init_method", "comm", "ft", "deepspeed", "compile"}
)
LAYOUT_OF_FSDP = frozenset(
    {
        "fsdp.enabled",
        "fsdp.reshard_after_forward",
        "fsdp.offload_policy",
        "fsdp.blocks",
        "fsdp.gradient_sync",
    }
)
NAMES = frozenset(
    {"name", "lineage", "experiment", "workspace_root", "dir", "checkpoint_dir", "log_file"}
)
SOURCES = frozenset({"resume", "auto_resume"})
RECORDS = frozenset({"secret_keys", "local_keys", "git_diff"})
OUTPUT = frozenset(
    {
        "log",
        "log_interval",
        "log_seconds",
        "tensorboard",
        "wandb",
        "mlflow",
        "trackio",
        "checkpoint",
    }
)
SUPERVISION = frozenset({"gc", "profiling", "heartbeat", "audit", "elastic"})
BUDGETS = frozenset({"steps", "epochs", "max_time", "patience", "min_delta", "max_skipped_updates"})
EVALUATION = frozenset({"evaluate_interval", "evaluate_splits", "train_metrics", "try_evaluation"})
NOT_SEMANTIC = (
    LAYOUT
    | LAYOUT_OF_FSDP
    | NAMES
    | SOURCES
    | RECORDS
    | OUTPUT
    | SUPERVISION
    | BUDGETS
    | EVALUATION
)
LOADING = frozenset(
    {
        "num_workers",
        "persistent_workers",
        "prefetch_factor",
        "pin_memory",
        "pin_memory_device",
        "in_order",
        "snapshot_every_n_steps",
        "timeout",
        "multiprocessing_context",
    }
)
# Part of the run's identity, but a run that goes on from a checkpoint may change them: its weights no longer come from
# `pretrained`, and an update that is not finite would have ended it.
RESUMABLE = frozenset({"pretrained", "pretrained_averages", "skip_nonfinite_grad"})


LATER: dict[str, object] = {
    "dataloader.own_state": False,
    "ema.buffers": "copy",
    "pretrained_averages": True,
}
"""Keys that came after the first format of an id, with their defaults: one that has its default leaves the id as it was."""


def canonical(settings: Mapping[str, Any], *, replicas: int = 1) -> dict[str, Any]:
    """Return what changes the result of a run, of plain settings, sorted by key; empty sections are left out.

    Batch size, accumulation and number of ranks enter as their product: the samples of an update. Secrets are left out: a new token makes
    no other run.
    """
    sized = with_update_sizes(
        without_secrets(settings, settings.get("secret_keys") or ()), replicas
    )
    kept = {name: value for name, value in sized.items() if name not in NOT_SEMANTIC}
    if isinstance(kept.get("fsdp"), Mapping):
        kept["fsdp"] = {
            name: value
            for name, value in kept["fsdp"].items()
            if f"fsdp.{name}" not in NOT_SEMANTIC
        }
    if isinstance(kept.get("accelerate"), Mapping):
        # What else it says of numbers is `precision`; the rest is where it runs.
        kept["accelerate"] = (
            {"mixed_precision": "fp8"} if kept["accelerate"].get("mixed_precision") == "fp8" else {}
        )
    if isinstance(kept.get("dataloader"), Mapping):
        kept["dataloader"] = _reduced(kept["dataloader"], LOADING)
    for key, usual in LATER.items():
        section, _, name = key.rpartition(".")
        if section and isinstance(kept.get(section), Mapping):
            kept[section] = {
                n: value for n, value in kept[section].items() if n != name or value != usual
            }
        elif not section and kept.get(name) == usual:
            kept.pop(name, None)
    return dict(sorted(_reduced(kept).items(), key=lambda item: str(item[0])))


def _reduced(settings: Mapping[str, object], left_out: Collection[str] = ()) -> dict[str, Any]:
    """Return settings without some names, and without empty sections: reading `config.model` creates one, so it means nothing."""
    kept = {name: value for name, value in settings.items() if name not in left_out}
    result = {
        n: _reduced(value, left_out) if isinstance(value, Mapping) else value
        for n, value in kept.items()
    }
    return {name: value for name, value in result.items() if value != {}}


def digest(settings: Mapping[str, object]) -> str:
    """Return 16 hexadecimal digits of the SHA-256 of plain settings; the same in every process and on every machine."""
    text = json.dumps(
        _normal_numbers(settings), sort_keys=True, separators=(",", ":"), ensure_ascii=True
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _normal_numbers(value: object) -> object:
    # Equal configurations have equal hashes, and Python finds 1 equal to 1.0.
    if isinstance(value, float) and math.isfinite(value) and value == int(value):
        return int(value)
    if isinstance(value, dict):
        # Keys that are numbers are text here, as in JSON: they could not be sorted among others.
        return {str(name): _normal_numbers(item) for name, item in value.items()}
    return [_normal_numbers(item) for item in value] if isinstance(value, list) else value


def changed(settings: Mapping[str, object], usual: Mapping[str, object]) -> dict[str, Any]:
    """Return the settings, nested as they are, that differ from the usual ones or are not among them."""
    result: dict[str, Any] = {}
    for name, value in settings.items():
        before = usual.get(name)
        if isinstance(value, Mapping):
            inner = changed(value, before if isinstance(before, Mapping) else {})
            if inner:
                result[name] = inner
        elif name not in usual or value != before:
            result[name] = value
    return result


def differences(
    stored: Mapping[str, Any],
    now: Mapping[str, Any],
    *,
    stored_replicas: int = 1,
    replicas: int = 1,
) -> list[str]:
    """Return how two whole configurations differ in what changes the result, one line a key.

    Budgets may change, but not the mode. A seed that one of them leaves open is no difference. Batch size and accumulation may be
    traded for one another and for ranks as long as an update has as many samples.
    """
    listed = {"secret_keys": [*(stored.get("secret_keys") or ()), *(now.get("secret_keys") or ())]}
    stored, now = {**stored, **listed}, {**now, **listed}
    before = flatten(canonical(stored, replicas=stored_replicas))
    after = flatten(canonical(now, replicas=replicas))
    skipped = set(RESUMABLE)
    # An open seed is drawn when a run begins, and a resumed one has that of the checkpoint.
    if before.get("seed") is None or after.get("seed") is None:
        skipped.add("seed")
    lines = []
    modes = [
        next((name for name in ("epochs", "steps") if settings.get(name) is not None), None)
        for settings in (stored, now)
    ]
    if None not in modes and modes[0] != modes[1]:
        shown = [
            f"{mode} ({mode}={settings[mode]!r})"
            for mode, settings in zip(modes, (stored, now))
            if mode
        ]
        lines.append(f"mode: stored {shown[0]}, now {shown[1]}")
    sizes, sizes_now = update_sizes(stored, stored_replicas), update_sizes(now, replicas)
    common = [place for place in sizes if place in sizes_now]
    if common:
        skipped.update(key for key in (*before, *after) if is_update_key(key))
        lines += [
            f"{sizes_now[place].key}: stored {sizes[place]}, now {sizes_now[place]}"
            for place in common
            if sizes[place].samples != sizes_now[place].samples
        ]
    return lines + [line for key, line in _changes(before, after).items() if key not in skipped]


def compile_differences(stored: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """Return how the compile settings of two whole configurations differ, one line a key; empty where neither compiles anything.

    Compiled code rounds, and draws random numbers, otherwise than the code of the module. The folder of compiled code is no
    difference: it contains the code that the run would compile anyway.
    """
    before, after = _compile_settings(stored), _compile_settings(now)
    if not (before.get("compile.enable") or after.get("compile.enable")):
        return []
    return list(_changes(before, after).values())


def _compile_settings(settings: Mapping[str, object]) -> dict[str, object]:
    flat = {name: value for name, value in flatten(settings).items() if name.startswith("compile.")}
    flat.pop("compile.precompile_artifact_dir", None)
    if str(settings.get("stack")).lower() == "graph":
        # That stack compiles in any case, and otherwise than all the others.
        flat |= {"compile.enable": True, "stack": "graph"}
    return flat


def _changes(before: Mapping[str, object], after: Mapping[str, object]) -> dict[str, str]:
    """Return a line for each key whose values differ, by the key."""
    return {
        key: f"{key}: stored {_shown(before, key)}, now {_shown(after, key)}"
        for key in sorted(before.keys() | after.keys())
        if _normal_numbers(before.get(key)) != _normal_numbers(after.get(key))
    }


def _shown(flat: Mapping[str, object], key: str) -> str:
    return repr(flat[key]) if key in flat else "absent"


def overlay(base: dict[str, Any], other: Mapping[str, object]) -> None:
    """Put nested values over others, key by key."""
    for name, value in other.items():
        if isinstance(value, Mapping) and isinstance(base.get(name), Mapping):
            overlay(base[name], value)
        else:
            base[name] = value


SIZES = ("batch_size", "global_batch_size", "micro_batch_size")
"""Keys under `dataloader` that say how samples make batches and updates."""


class UpdateSize(NamedTuple):
    """Samples of an update over all ranks and micro-batches, the dotted key that says so, and what they are the product of."""

    samples: int
    key: str
    source: str

    def __str__(self) -> str:
        return f"{self.samples} samples an update ({self.source})"


def update_sizes(settings: Mapping[str, Any], replicas: int) -> dict[str, UpdateSize]:
    """Return the samples of an update by section: `dataloader`, or `dataloader.<split>` for splits with their own sizes.

    Empty where the configuration does not say, as for a loader of the user's.
    """
    common = settings.get("dataloader")
    if not isinstance(common, Mapping):
        return {}
    accum_steps = settings.get("accum_steps", 1)
    own = {f"dataloader.{name}": section for name, section in _train_sections(settings).items()}
    found = {
        place: _size_of(section, place, accum_steps, replicas) for place, section in own.items()
    }
    named = settings.get("train_splits") or ()
    # What all splits share is that of an update if a split that is trained on has no size in its section.
    if not any(found.values()) or any(found.get(f"dataloader.{split}") is None for split in named):
        found["dataloader"] = _size_of(common, "dataloader", accum_steps, replicas)
    sizes = {place: size for place, size in found.items() if size is not None}
    if len({size.samples for size in sizes.values()}) == 1:
        # One size for all splits may be written in any section.
        return {"dataloader": next(iter(sizes.values()))}
    return sizes


def _train_sections(settings: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the sections under `dataloader` of splits that are trained on, by name."""
    sections = {
        name: section
        for name, section in settings["dataloader"].items()
        if isinstance(section, Mapping)
    }
    named = settings.get("train_splits")
    if named is None:
        named = [name for name in sections if name.startswith("train")]
    return {name: section for name, section in sections.items() if name in named}


def _size_of(
    section: Mapping[str, object], place: str, accum_steps: object, replicas: int
) -> UpdateSize | None:
    samples, batch = section.get("global_batch_size"), section.get("batch_size")
    if isinstance(samples, int):
        return UpdateSize(samples, f"{place}.global_batch_size", f"global_batch_size={samples}")
    if not isinstance(batch, int) or not isinstance(accum_steps, int):
        return None
    ranks = f"{replicas} rank{'s' if replicas != 1 else ''}"
    source = f"batch_size={batch} x accum_steps={accum_steps} x {ranks}"
    return UpdateSize(batch * accum_steps * replicas, f"{place}.batch_size", source)


def with_update_sizes(settings: Mapping[str, object], replicas: int) -> dict[str, Any]:
    """Return settings with the samples of an update as `global_batch_size`, in the place of all that they follow from.

    Batch sizes of splits that are only evaluated are left out: metrics do not depend on them. With `gradient_sum: canonical` the size of
    micro-batches stays, as the unit that is added.
    """
    sizes = update_sizes(settings, replicas)
    loading = settings.get("dataloader")
    if not isinstance(loading, Mapping):
        return dict(settings)
    kept = {name: value for name, value in settings.items() if name != "accum_steps" or not sizes}
    trained = _train_sections(settings)
    if settings.get("gradient_sum") == "canonical":
        held = [section.get("micro_batch_size") for section in (loading, *trained.values())]
        kept["gradient_sum"] = (
            f"canonical, micro_batch_size={'/'.join(str(size) for size in held if size is not None)}"
        )

    def resized(
        section: Mapping[str, object], place: str, *, is_trained: bool
    ) -> dict[str, object]:
        left_out = SIZES if sizes or not is_trained else ("micro_batch_size",)
        result = {name: value for name, value in section.items() if name not in left_out}
        return {**result, "global_batch_size": sizes[place].samples} if place in sizes else result

    sections = {
        name: resized(section, f"dataloader.{name}", is_trained=name in trained)
        for name, section in loading.items()
        if isinstance(section, Mapping)
    }
    return {**kept, "dataloader": resized(loading, "dataloader", is_trained=True) | sections}


def is_update_key(key: str) -> bool:
    """Return whether a dotted key is one that the samples of an update follow from."""
    return key == "accum_steps" or (
        key.startswith("dataloader.") and key.rpartition(".")[2] in SIZES
    )
