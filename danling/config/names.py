"""What a name means: stacks and their aliases, older keys, names of other trainers, and slips of the pen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from danling.utils.messages import did_you_mean, warn_user
from danling.utils.secrets import hide_secrets

from .sections import Config, fields_of

# Stacks


@dataclass(frozen=True, kw_only=True)
class StackTraits:
    """What a configuration has to know of a stack.

    Attributes:
        aliases: Other values of `stack` that mean this one.
        default_backend: What `checkpoint.backend="auto"` means on it; `None` where the stack writes its own kind.
        unread: Sections and dotted keys that have no effect on it.
        counts_flops: Whether torch sees the operations of a whole update on it, so that they can be counted: no rank computes a part of
            the model, and nothing is compiled.
    """

    aliases: tuple[str, ...] = ()
    default_backend: str | None = "file"
    unread: tuple[str, ...] = ()
    counts_flops: bool = False


STACKS: Mapping[str, StackTraits] = {
    "ddp": StackTraits(
        aliases=("auto", "torch"),
        unread=("parallel", "fsdp", "deepspeed", "accelerate"),
        counts_flops=True,
    ),
    "parallel": StackTraits(
        default_backend="dcp", unread=("deepspeed", "accelerate", "compile.optimize_ddp")
    ),
    "deepspeed": StackTraits(
        aliases=("ds",),
        default_backend=None,
        unread=("parallel", "fsdp", "accelerate", "compile.optimize_ddp", "checkpoint.backend"),
    ),
    "accelerate": StackTraits(unread=("parallel", "fsdp", "deepspeed"), counts_flops=True),
    "graph": StackTraits(unread=("parallel", "fsdp", "deepspeed", "accelerate")),
}
"""The stacks by name. `danling.runners.extensions` names the class of each."""

ALIASES: Mapping[str, str] = {
    alias: name for name, row in STACKS.items() for alias in (name, *row.aliases)
}
"""Every accepted value of `stack`, and the stack that it means."""

FILE_SECTIONS = ("deepspeed", "accelerate")
"""Sections that may be given as the path of a file of that library's."""

BACKENDS: tuple[str, ...] = tuple(
    dict.fromkeys(row.default_backend for row in STACKS.values() if row.default_backend)
)
"""The values of `checkpoint.backend` that `auto` may mean, that of the first stack first."""


# Older keys

OLDER_KEYS = {
    "platform": "stack",
    "checkpoint_async": "checkpoint.async_enabled",
    "checkpoint_interval": "checkpoint.interval",
}


def warn_older(name: str) -> None:
    """Warn that a key is an older one, with the one that replaces it."""
    warn_user(f"{name!r} is an older key: use {OLDER_KEYS[name]!r}.", DeprecationWarning)


# Other trainers

_NAMES_ELSEWHERE = {
    "accum_steps": "accumulate_grad_batches gradient_accumulation_steps grad_accum_steps gradient_accumulation grad_accum "
    "accumulation_steps",
    "auto_resume": "resume_from_checkpoint",
    "checkpoint.interval": "save_steps save_every save_interval checkpoint_every every_n_epochs",
    "checkpoint.keep_latest_k": "save_total_limit save_top_k keep_last",
    "compile.enable": "torch_compile compile_model",
    "compile.precompile_artifact_dir": "artifact_dir shared_dir",
    "dataloader.batch_size": "per_device_train_batch_size train_batch_size bs",
    "dataloader.num_workers": "dataloader_num_workers workers",
    "dataloader.pin_memory": "dataloader_pin_memory",
    "dataloader.val.batch_size": "per_device_eval_batch_size eval_batch_size val_batch_size",
    "ema.decay": "ema_decay",
    "ema.enabled": "use_ema",
    "epochs": "max_epochs num_epochs num_train_epochs n_epochs total_epochs",
    "evaluate_interval": "eval_steps eval_interval eval_every val_check_interval check_val_every_n_epoch",
    "log_interval": "logging_steps log_every_n_steps log_every print_freq",
    "max_grad_norm": "gradient_clip_val grad_clip clip_grad clip_grad_norm gradient_clipping",
    "optim.betas": "adam_beta1 adam_beta2 beta1 beta2",
    "optim.eps": "eps adam_epsilon",
    "optim.lr": "learning_rate base_lr",
    "optim.momentum": "momentum",
    "optim.type": "optimizer_type optim_type optimizer opt",
    "optim.weight_decay": "wd",
    "parallel.activation_checkpointing": "gradient_checkpointing",
    "patience": "early_stopping early_stopping_patience",
    "precision": "mixed_precision amp fp16 bf16 fp8 dtype use_amp",
    "scheduler.type": "lr_scheduler_type lr_scheduler sched",
    "scheduler.warmup_steps": "warmup warmup_steps warmup_ratio num_warmup_steps",
    "score_mode": "greater_is_better",
    "score_name": "metric_for_best_model",
    "seed": "random_seed manual_seed",
    "steps": "max_steps total_steps num_steps max_iters num_iters",
    "try_evaluation": "num_sanity_val_steps",
    "wandb.enabled": "report_to use_wandb",
    "workspace_root or dir": "output_dir default_root_dir save_dir out_dir log_dir logging_dir",
}
_NO_SETTINGS = {
    "torchrun --nproc-per-node N": "devices gpus nproc_per_node num_processes",
    "torchrun --nnodes N": "num_nodes nnodes",
    "the variable CUDA_VISIBLE_DEVICES": "accelerator device",
    "stack and parallel.axes": "strategy",
    "name": "run_name",
    "steps, and the argument of evaluate_steps": "fast_dev_run limit_train_batches limit_val_batches overfit_batches",
    "the criterion, such as nn.CrossEntropyLoss(label_smoothing=0.1)": "label_smoothing_factor",
    "the checkpoint `best`, which runner.load_checkpoint('best') loads": "load_best_model_at_end",
    "nn.SyncBatchNorm.convert_sync_batchnorm(model) in __init__": "sync_batchnorm",
    "methods that a subclass overrides, and runner.observers": "callbacks",
}
"""Names of other trainers for what is no key of this library, by what does it here."""
_OF_LAUNCHER = ["local_rank", "rank", "world_size"]
"""What torchrun sets for each process. Programs set them for their own use."""
_PLACES = {name: place for place, names in _NAMES_ELSEWHERE.items() for name in names.split()}
_NO_PLACES = {name: answer for answer, names in _NO_SETTINGS.items() for name in names.split()}
_ANSWERS = _NO_PLACES | dict.fromkeys(_OF_LAUNCHER, "torchrun, which sets it for each process")
_DECIDING = ("optim.", "scheduler.", "ema.", "dataloader.")
"""Sections that change the training: their keys are refused at the top level."""
METHODS_ELSEWHERE = {
    "training_step": "train_step",
    "validation_step": "evaluate_step",
    "test_step": "evaluate_step",
    "eval_step": "evaluate_step",
    "prediction_step": "infer_step",
    "predict_step": "infer_step",
    "configure_optimizers": "build_optimizer",
    "create_optimizer": "build_optimizer",
    "create_scheduler": "build_scheduler",
    "create_optimizer_and_scheduler": "build_optimizer",
    "compute_metrics": "self.metrics",
    "training_epoch_end": "train_epoch",
    "on_epoch_begin": "train_epoch",
    "on_epoch_end": "train_epoch",
    "on_epoch_start": "train_epoch",
    "on_train_epoch_end": "train_epoch",
    "on_train_epoch_start": "train_epoch",
    "validation_epoch_end": "evaluate_epoch",
    "on_evaluate": "evaluate_epoch",
    "on_test_epoch_end": "evaluate_epoch",
    "on_validation_end": "evaluate_epoch",
    "on_validation_epoch_end": "evaluate_epoch",
    "on_validation_epoch_start": "evaluate_epoch",
    "on_validation_start": "evaluate_epoch",
    "on_fit_end": "train",
    "on_fit_start": "train",
    "on_train_begin": "train",
    "on_train_end": "train",
    "on_train_start": "train",
    "on_step_begin": "train_step",
    "on_train_batch_start": "train_step",
    "on_step_end": "step",
    "on_train_batch_end": "step",
    "on_validation_batch_end": "evaluate_step",
    "on_validation_batch_start": "evaluate_step",
    "on_after_backward": "complete_gradients",
    "on_before_optimizer_step": "optimizer_step",
    "optimizer_zero_grad": "zero_gradients",
    "configure_gradient_clipping": "clip_gradients",
    "on_load_checkpoint": "load_state_dict",
    "on_save_checkpoint": "state_dict",
    "transfer_batch_to_device": "to_device",
    "collate_fn": "dataloader.collate_fn",
    "data_collator": "dataloader.collate_fn",
    "get_eval_dataloader": "self.datasets",
    "get_train_dataloader": "self.datasets",
    "test_dataloader": "self.datasets",
    "train_dataloader": "self.datasets",
    "val_dataloader": "self.datasets",
}
"""Methods that other trainers call, and the hooks here for the same."""
ATTRIBUTES_ELSEWHERE = {
    "net": "model",
    "network": "model",
    "loss": "criterion",
    "loss_fn": "criterion",
    "loss_function": "criterion",
    "optim": "optimizer",
    "optimizers": "optimizer",
    "lr_scheduler": "scheduler",
    "train_dataset": "datasets",
    "train_dataloader": "dataloaders",
    "train_loader": "dataloaders",
    "data_loader": "dataloaders",
}
"""Attributes of other trainers, and the component that is assigned here for the same."""
READ_ELSEWHERE = {
    "log": "self.log_metric(name, value)",
    "log_dict": "self.log_metric(name, value) for each",
    "current_epoch": "self.train_state.epoch",
    "epoch": "self.train_state.epoch",
    "global_step": "self.train_state.global_step",
    "trainer": "the runner itself",
    "accelerator": "the runner itself",
    "hparams": "self.config",
    "save_hyperparameters": "self.config, which is saved with the run",
    "manual_backward": "self.backward(loss)",
    "fit": "runner.train()",
    "validate": "runner.evaluate('val')",
    "test": "runner.evaluate('test')",
    "predict": "runner.infer(split)",
    "add_callback": "an override of a hook",
    "optimizers": "self.optimizer",
    "lr_schedulers": "self.scheduler",
    "save": "runner.save_checkpoint(), or `danling export` for weights alone",
    "save_model": "runner.save_pretrained(directory)",
    "load": "runner.load_checkpoint(source)",
    "to": "self.device, to which the model is moved after __init__",
    "cuda": "self.device, to which the model is moved after __init__",
    "eval": "runner.evaluate(split), or self.unwrapped_model.eval()",
    "forward": "self.model(inputs)",
    "global_rank": "self.rank",
    "is_global_zero": "self.is_main_process",
}
"""Attributes and methods of other trainers that programs read, and what is read or called here for the same."""


def place_of(name: str, root: type[Config], *, in_code: bool = False) -> str | None:
    """Return where a top-level name belongs in the library's configuration, `None` when it is not known.

    Known are names of other trainers, and the keys of the library's own sections; in code only of sections that change the training.
    """
    plain = name.replace("-", "_")
    places = [
        place
        for place in _leaves(root).get(plain, ())
        if not in_code or place.startswith(_DECIDING)
    ]
    # A key of several sections, such as `warmup`, is most likely what other trainers mean by it.
    return _PLACES.get(plain) or " or ".join(places) or None


def warn_elsewhere(name: str) -> None:
    """Warn that a key set in code is a name of another trainer, which the library does not read; users may have such keys."""
    answer = _NO_PLACES.get(name)
    if answer is not None:
        warn_user(
            f"The library does not read the key {name!r} of other trainers. Use {answer}. If the key is your own, declare it in a class "
            "derived from RunnerConfig, which ends this warning.",
            UserWarning,
        )


def refusal(
    name: str, received: str, root: type[Config], known: Iterable[str], secret_keys: Iterable[str]
) -> str:
    """Return why a top-level key that is not declared is refused, and what to do."""
    place, elsewhere = place_of(name, root), _ANSWERS.get(name)
    declared = "declare it in a class derived from RunnerConfig"
    if place is not None:
        advice = f". Its place is {place}. To use the name for your own key, {declared}."
    elif elsewhere is not None:
        advice = f". Use {elsewhere}. To use the name for your own key, {declared}."
    else:
        nearest = did_you_mean(name, [*fields_of(root), *known])
        advice = f", which neither the library nor the program knows.{nearest} For your own key, {declared}, or set it before parse()."
    return f"Expected keys that are read. Received: {hide_secrets(received, list(secret_keys))}{advice}"


@cache
def _leaves(root: type[Config], prefix: str = "") -> Mapping[str, list[str]]:
    """Return the dotted places of every key below the sections of a class, by the key."""
    places: dict[str, list[str]] = {}
    for field in fields_of(root).values():
        if field.section is not None:
            for name, deeper in _leaves(field.section, f"{prefix}{field.name}.").items():
                places.setdefault(name, []).extend(deeper)
        elif prefix:
            places.setdefault(field.name, []).append(f"{prefix}{field.name}")
    return places


def closest_typo(name: object, known: Iterable[str]) -> str | None:
    """Return the known key that `name` is one slip away from, `None` for a known key or a truly different name.

    A slip is one letter more, less or other, two letters swapped, or other capitals, dashes or underscores. Very short keys
    are near to too many words (`dir` to `dim`, `ft` to `fft`): in three letters no letter may be other, in two none may differ.
    """
    options = list(known)
    if not isinstance(name, str) or name in options:
        return None
    return next((option for option in options if _is_slip(_plain(name), _plain(option))), None)


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def _is_slip(name: str, option: str) -> bool:
    if len(name) == len(option):
        wrong = [pair for pair in zip(name, option) if pair[0] != pair[1]]
        swapped = len(wrong) == 2 and wrong[0] == wrong[1][::-1]
        return not wrong or (len(wrong) == 1 and len(option) > 3) or (swapped and len(option) > 2)
    short, long = sorted((name, option), key=len)
    return len(option) > 2 and any(
        long[:place] + long[place + 1 :] == short for place in range(len(long))
    )
