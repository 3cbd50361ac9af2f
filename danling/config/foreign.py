"""Top-level keys that nothing would read: leaves of the library's sections, and what other trainers call its settings."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from danling.utils.messages import did_you_mean
from danling.utils.secrets import hide_secrets

from .fields import Config, fields_of

_NAMES = {
    "accum_steps": (
        "accumulate_grad_batches",
        "gradient_accumulation_steps",
        "grad_accum_steps",
        "gradient_accumulation",
        "grad_accum",
        "accumulation_steps",
    ),
    "auto_resume": ("resume_from_checkpoint",),
    "checkpoint.interval": ("save_steps", "save_every", "save_interval", "checkpoint_every", "every_n_epochs"),
    "checkpoint.keep_latest_k": ("save_total_limit", "save_top_k", "keep_last"),
    "compile.enable": ("torch_compile", "compile_model"),
    "dataloader.batch_size": ("per_device_train_batch_size", "train_batch_size", "bs"),
    "dataloader.num_workers": ("dataloader_num_workers", "workers"),
    "dataloader.pin_memory": ("dataloader_pin_memory",),
    "dataloader.val.batch_size": ("per_device_eval_batch_size", "eval_batch_size", "val_batch_size"),
    "ema.decay": ("ema_decay",),
    "ema.enabled": ("use_ema",),
    "epochs": ("max_epochs", "num_epochs", "num_train_epochs", "n_epochs", "total_epochs"),
    "evaluate_interval": ("eval_steps", "eval_interval", "eval_every", "val_check_interval", "check_val_every_n_epoch"),
    "log_interval": ("logging_steps", "log_every_n_steps", "log_every", "print_freq"),
    "max_grad_norm": ("gradient_clip_val", "grad_clip", "clip_grad", "clip_grad_norm", "gradient_clipping"),
    "optim.betas": ("adam_beta1", "adam_beta2", "beta1", "beta2"),
    "optim.eps": ("eps", "adam_epsilon"),
    "optim.lr": ("learning_rate", "base_lr"),
    "optim.momentum": ("momentum",),
    "optim.type": ("optimizer_type", "optim_type", "optimizer", "opt"),
    "optim.weight_decay": ("wd",),
    "parallel.activation_checkpointing": ("gradient_checkpointing",),
    "patience": ("early_stopping", "early_stopping_patience"),
    "precision": ("mixed_precision", "amp", "fp16", "bf16", "dtype", "use_amp"),
    "scheduler.type": ("lr_scheduler_type", "lr_scheduler", "sched"),
    "scheduler.warmup_steps": ("warmup", "warmup_steps", "warmup_ratio", "num_warmup_steps"),
    "score_mode": ("greater_is_better",),
    "score_name": ("metric_for_best_model",),
    "seed": ("random_seed", "manual_seed"),
    "steps": ("max_steps", "total_steps", "num_steps", "max_iters", "num_iters"),
    "try_evaluation": ("num_sanity_val_steps",),
    "wandb.enabled": ("report_to", "use_wandb"),
    "workspace_root or dir": ("output_dir", "default_root_dir", "save_dir", "out_dir", "log_dir", "logging_dir"),
}
_PLACES = {name: place for place, names in _NAMES.items() for name in names}
OWN_KEY = "A key of your own is declared in a class derived from RunnerConfig, or set in code before parse()."
_ELSEWHERE = {
    **dict.fromkeys(("devices", "gpus", "nproc_per_node", "num_processes"), "torchrun --nproc-per-node N"),
    **dict.fromkeys(("num_nodes", "nnodes"), "torchrun --nnodes N"),
    **dict.fromkeys(("accelerator", "device"), "the variable CUDA_VISIBLE_DEVICES"),
    **dict.fromkeys(("local_rank", "rank", "world_size"), "torchrun, which tells each process"),
    "strategy": "stack and parallel.axes",
}
"""What is no setting here, and what says it instead."""


def place_of(name: str, root: type[Config]) -> str | None:
    """Return where a top-level name belongs in the library's configuration, `None` when it is not known."""
    plain = name.replace("-", "_")
    # A leaf of several sections, such as `warmup`, is most likely what other trainers mean by it.
    return _PLACES.get(plain) or " or ".join(_leaves(root).get(plain, ())) or None


def refusal(
    name: str,
    received: str,
    root: type[Config],
    own: Iterable[str],
    *,
    mend: str = OWN_KEY,
    secret_keys: Collection[str] = (),
) -> str:
    """Return why a key that nobody declares or reads is refused, and the mend."""
    expected = f"Expected keys that are read. Received: {hide_secrets(received, secret_keys)}"
    place = place_of(name, root)
    if place is not None:
        return f"{expected}. Its place is {place}."
    if name in _ELSEWHERE:
        return f"{expected}. That is said by {_ELSEWHERE[name]}."
    return f"{expected}, which neither the library nor the program knows.{did_you_mean(name, [*fields_of(root), *own])} {mend}"


def _leaves(root: type[Config], prefix: str = "") -> Mapping[str, list[str]]:
    """The dotted places of every key below the sections of a class, by the key."""
    places: dict[str, list[str]] = {}
    for field in fields_of(root).values():
        if field.section is not None:
            for name, deeper in _leaves(field.section, f"{prefix}{field.name}.").items():
                places.setdefault(name, []).extend(deeper)
        elif prefix:
            places.setdefault(field.name, []).append(f"{prefix}{field.name}")
    return places


def describe_received(name: str, value: object) -> str:
    """Return a key and its value as one writes them in code; a long value is cut."""
    text = repr(value)
    return f"{name}={text if len(text) <= 60 else text[:57] + '...'}"
