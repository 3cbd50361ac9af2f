"""Tell a slip of the pen from a name of one's own."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations

ENGINE_KEYS = (
    "activation_checkpointing",
    "aio",
    "amp",
    "autotuning",
    "bf16",
    "checkpoint",
    "comms_logger",
    "communication_data_type",
    "compile",
    "compression_training",
    "csv_monitor",
    "curriculum_learning",
    "data_efficiency",
    "data_types",
    "dataloader_drop_last",
    "disable_allgather",
    "dump_state",
    "elasticity",
    "expert_parallel",
    "flops_profiler",
    "fp16",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "gradient_predivide_factor",
    "hybrid_engine",
    "memory_breakdown",
    "nebula",
    "optimizer",
    "pipeline",
    "prescale_gradients",
    "progressive_layer_drop",
    "scheduler",
    "seq_parallel_communication_data_type",
    "sequence_parallel_size",
    "sparse_attention",
    "sparse_gradients",
    "steps_per_print",
    "tensor_parallel",
    "tensorboard",
    "torch_autocast",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "wall_clock_breakdown",
    "wandb",
    "weight_quantization",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "zero_optimization",
)
"""Keys that DeepSpeed reads. It silently ignores any other, so that a misspelled key would have no effect."""


def slip_of(name: object, known: Iterable[str]) -> str | None:
    """Return the known key that `name` is one slip away from, `None` for a known key or a truly different name.

    A slip is one letter more, less or other, two letters swapped, or other capitals, dashes or underscores. Very short keys
    are near to too many words (`dir` to `dim`, `ft` to `fft`): in three letters no letter may be other, in two none may differ.
    """
    options = list(known)
    if not isinstance(name, str) or name in options:
        return None
    plain = _plain(name)
    return next((option for option in options if _is_slip(plain, _plain(option))), None)


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def _is_slip(name: str, option: str) -> bool:
    if name == option:
        return True
    if len(option) <= 2 or abs(len(name) - len(option)) > 1:
        return False
    if len(name) == len(option):
        return _swapped(name, option) or (len(option) > 3 and sum(map(str.__ne__, name, option)) == 1)
    longer, shorter = (name, option) if len(name) > len(option) else (option, name)
    return any(longer[:index] + longer[index + 1 :] == shorter for index in range(len(longer)))


def _swapped(name: str, option: str) -> bool:
    return any(
        name[:left] + name[right] + name[left + 1 : right] + name[left] + name[right + 1 :] == option
        for left, right in combinations(range(len(name)), 2)
    )
