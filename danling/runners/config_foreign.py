"""Settings that other trainers have at the top level, where this library leaves room for a user's own keys."""

from __future__ import annotations

from typing import Any

_KEYS = {
    "accum_steps": (
        "accumulate_grad_batches",
        "gradient_accumulation_steps",
        "grad_accum_steps",
        "gradient_accumulation",
    ),
    "checkpoint.interval": ("save_steps", "save_every", "checkpoint_every"),
    "dataloader.batch_size": ("batch_size", "per_device_train_batch_size", "train_batch_size"),
    "dataloader.num_workers": ("num_workers", "dataloader_num_workers"),
    "ema.decay": ("ema_decay",),
    "epochs": ("max_epochs", "num_epochs", "num_train_epochs", "n_epochs"),
    "evaluate_interval": ("eval_steps", "eval_interval", "eval_every", "val_check_interval"),
    "log_interval": ("logging_steps", "log_every_n_steps", "log_every"),
    "max_grad_norm": ("gradient_clip_val", "grad_clip", "clip_grad", "clip_grad_norm", "gradient_clipping"),
    "optim.lr": ("lr", "learning_rate"),
    "optim.type": ("optimizer_type", "optim_type"),
    "optim.weight_decay": ("weight_decay",),
    "patience": ("early_stopping", "early_stopping_patience"),
    "precision": ("mixed_precision", "amp", "fp16", "bf16"),
    "seed": ("random_seed", "manual_seed"),
    "steps": ("max_steps", "total_steps", "num_steps", "max_iters"),
    "workspace_root": ("output_dir", "default_root_dir", "save_dir"),
}


def foreign_settings(config: Any, *, builds_loaders: bool, builds_optimizer: bool) -> list[str]:
    """Return a sentence for every top-level key that another trainer would read and this library does not.

    A user may well read a key of his own in `__init__`, so none is named that his class of configuration declares, none where the
    library's key is set too, and none where it would have had no use for it.

    Args:
        config: A whole configuration.
        builds_loaders: Whether loaders were built from datasets.
        builds_optimizer: Whether the optimizer was built from `config.optim`.
    """
    try:
        usual = type(config)()
    except Exception:
        return []  # it asks for arguments or settings, so that nobody can tell what it declares
    needs = {"dataloader": builds_loaders, "optim": builds_optimizer}
    return [
        f"{name} is a key of your own, which the library does not read: its key is {key}."
        for key, names in _KEYS.items()
        for name in names
        if name in config
        and config[name] not in (None, False)
        and name not in usual
        and needs.get(key.partition(".")[0], True)
        and not _is_set(config, usual, key)
    ]


def _is_set(config: Any, usual: Any, key: str) -> bool:
    section, _, name = key.rpartition(".")
    if key in ("steps", "epochs"):
        return config.steps is not None or config.epochs is not None  # the two exclude one another
    own, other = (config.get(section) or {}, usual.get(section) or {}) if section else (config, usual)
    return name in own and (name not in other or own[name] != other[name])
