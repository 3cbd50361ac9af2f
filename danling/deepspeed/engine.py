"""A DeepSpeed engine: how it is imported, built and taken down, and where it keeps gradients and optimizer state.

The only module that knows the inside of DeepSpeed's optimizers.
"""

from __future__ import annotations

import gc
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch import distributed as dist

from danling.optim.state import added_names as names_added
from danling.utils.secrets import without_secrets

LOWEST_VERSION = "0.19.8"
"""The release that the tests train with. Wrong gradients are reported for earlier ones, up to 0.19.3 at least (DeepSpeed issue 8224)."""


def import_deepspeed(device: torch.device) -> object:
    """Import DeepSpeed and return it.

    Raises:
        ImportError: If it is not installed, or older than the tests know it.
    """
    if find_spec("deepspeed") is None:
        raise ImportError(
            "Expected the package deepspeed for stack='deepspeed'. Received: it is not installed. Install it: "
            "pip install deepspeed."
        )
    version = metadata.version("deepspeed")
    if _numbers(version) < _numbers(LOWEST_VERSION):
        raise ImportError(
            f"Expected deepspeed>={LOWEST_VERSION}, the lowest version that the tests train with: wrong gradients are reported for earlier "
            f"ones. Received: deepspeed {version}. Run `pip install 'deepspeed>={LOWEST_VERSION}'`."
        )
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    if device.type != "cpu":
        return import_module("deepspeed")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    deepspeed = import_module("deepspeed")
    # Collectives over shared memory are compiled at first use, and gloo does what they do.
    import_module("deepspeed.ops").__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:3]]


@contextmanager
def local_rank_known(local_rank: int) -> Iterator[None]:
    """Let DeepSpeed, which refuses to start without, read `LOCAL_RANK` in a process that was started without a launcher."""
    if {"LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"} & os.environ.keys():
        yield
        return
    os.environ["LOCAL_RANK"] = str(local_rank)
    try:
        yield
    finally:
        # Programs that this process starts would take it for a launcher's.
        os.environ.pop("LOCAL_RANK", None)


def leave_process_group() -> None:
    """Leave the process group, and let DeepSpeed forget what it keeps of it, so that another engine can follow."""
    gc.collect()
    comm = import_module("deepspeed.comm")
    if dist.is_initialized():
        # DeepSpeed knows nothing of the group until an engine is built, which may have been refused.
        (comm if comm.is_initialized() else dist).destroy_process_group()


def build_engine(
    deepspeed: Any, model: nn.Module, optimizer: object, settings: Mapping[str, object]
) -> object:
    """Return an engine around a model. Call on all ranks."""
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, _, _, _ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        model_parameters=trained if optimizer is None else None,
        config=dict(settings),
        dist_init_required=None,
    )
    # It has been read by now, and is written into every checkpoint of the engine.
    kept = engine.config
    public = without_secrets(kept)
    kept.clear()
    kept.update(public)
    return engine


def zero_stage(engine: Any) -> int:
    """Return the ZeRO stage of an engine, 0 without one. From 1 the optimizer is divided over the ranks, from 3 the weights too."""
    return 0 if engine is None else int(engine.zero_optimization_stage())


def flat_parameters(engine: Any) -> list[Tensor]:
    """Return the flat float32 parameters of this rank's share, one or more for each group of the optimizer."""
    optimizer = engine.optimizer
    # In this order those of ZeRO 3, of ZeRO 1 and 2, and of bfloat16 weights under stage 1.
    for name in (
        "fp32_partitioned_groups_flat",
        "single_partition_of_fp32_groups",
        "fp32_groups_flat_partition",
    ):
        if hasattr(optimizer, name):
            return list(getattr(optimizer, name))
    raise AttributeError(
        f"Expected one of DeepSpeed's ZeRO optimizers. Received: {type(optimizer).__name__}."
    )


def gradient_shares(engine: Any) -> list[Tensor]:
    """Return this rank's share of a window's averaged gradient after its last backward: the tensors that the optimizer applies."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "fp32_groups_gradient_flat_partition"):  # bfloat16 weights under stage 1
        return list(optimizer.fp32_groups_gradient_flat_partition)
    if _offloads(optimizer):
        return [flat.grad for flat in flat_parameters(engine) if flat.grad is not None]
    shares = optimizer.averaged_gradients.values()
    lists = [
        [share] if isinstance(share, Tensor) else share for share in shares if share is not None
    ]
    return [tensor for tensors in lists for tensor in tensors if tensor is not None]


def _offloads(optimizer: object) -> bool:
    return bool(
        getattr(optimizer, "cpu_offload", False) or getattr(optimizer, "offload_optimizer", False)
    )


def discard_gradients(engine: Any) -> None:
    """Throw the gradient of the window away, as the engine does with one that is not finite."""
    engine.zero_grad()
    optimizer = engine.optimizer
    # Each of DeepSpeed's optimizers keeps the gradient elsewhere.
    if not zero_stage(engine):
        return
    if hasattr(optimizer, "clear_hp_grads"):
        optimizer.clear_hp_grads()
        return
    optimizer.zero_grad(set_to_none=True)
    if zero_stage(engine) == 3:
        optimizer._pre_step()
        optimizer._overflow_clean_up(optimizer.loss_scale)
        return
    optimizer.micro_step_id = -1
    optimizer._release_preflattened_grad_buffers()
    if _offloads(optimizer):
        optimizer._offload_accumulated_param_ids = set()
        optimizer.reset_cpu_buffers()
        return
    for index in list(optimizer.averaged_gradients):
        optimizer.averaged_gradients[index] = None
    for index in list(optimizer.all_grad_tensors):
        optimizer.all_grad_tensors[index] = None


def gathered(engine: Any, *, modify: bool = False) -> AbstractContextManager[None]:
    """Return a context in which the weights are whole on every rank. Enter on all ranks."""
    if zero_stage(engine) < 3:
        return nullcontext()
    zero = import_module("deepspeed").zero
    context: AbstractContextManager[None] = zero.GatheredParameters(
        list(engine.module.parameters()), modifier_rank=0 if modify else None
    )
    return context


def full_state(engine: Any, parameter: nn.Parameter) -> dict[str, object]:
    """Return the optimizer's whole state of one parameter; empty before the first update. Call on all ranks."""
    utils = import_module("deepspeed.utils")
    # The engine ties parameters to their state in the first update of a process, which a run that has just been resumed has not made.
    link = getattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state", None)
    if link is not None and _state_like(engine):
        # It does so with the step of the first group, and takes those of the others for done.
        engine.optimizer._hp_optimizer_states_linked = False
        link()
    # DeepSpeed gathers everything as float32.
    return {
        key: utils.safe_get_full_optimizer_state(parameter, key).to(value.dtype)
        if _is_wide(value)
        else _copied(value)
        for key, value in _state_like(engine).items()
    }


def _state_like(engine: Any) -> Mapping[str, object]:
    inner = engine.basic_optimizer
    return next(
        (inner.state[flat] for flat in flat_parameters(engine) if inner.state.get(flat)), {}
    )


def scalar_states(engine: object) -> dict[str, object]:
    """Return the optimizer's states that belong to no element of a parameter, such as the number of steps."""
    return {key: value for key, value in _state_like(engine).items() if not _is_wide(value)}


def added_names(engine: Any) -> list[str]:
    """Return the names of what the optimizer's `state_dict` has that is not of one parameter."""
    divided = engine.optimizer
    if not hasattr(divided, "_set_fp32_optimizer_param_groups"):
        return names_added(engine.basic_optimizer)
    # Under ZeRO 3 the groups of the optimizer have the parameters of its state for the time of a save only.
    divided._set_fp32_optimizer_param_groups()
    try:
        return names_added(engine.basic_optimizer)
    finally:
        divided._clear_fp32_optimizer_param_groups()


def load_full_states(engine: Any, states: Sequence[tuple[Any, Mapping[str, Any]]]) -> None:
    """Divide whole states of parameters over the ranks. Call on all ranks."""
    like = next((state for _, state in states if state), None)
    if like is None:
        return
    utils = import_module("deepspeed.utils")
    inner = engine.basic_optimizer
    flat_ones = flat_parameters(engine)
    for flat in flat_ones:
        inner.state[flat] = {
            key: torch.zeros_like(flat, dtype=value.dtype) if _is_wide(value) else _copied(value)
            for key, value in like.items()
        }
    if hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    for parameter, state in states:
        for key, value in state.items():
            if not _is_wide(value):
                continue
            value = value.to(flat_ones[0].device)
            if not hasattr(parameter, "ds_tensor"):
                utils.safe_set_full_optimizer_state(parameter, value, key)
                continue
            # The shares of ZeRO 3 are equally long, the last ones filled up; DeepSpeed's own division does not see to that.
            size = parameter.ds_tensor.numel()
            start = size * dist.get_rank(parameter.ds_process_group)
            own, share = value.flatten()[start : start + size], value.new_zeros(size)
            share[: own.numel()] = own
            utils.safe_set_local_optimizer_state(parameter, share, key)


def _copied(value: object) -> object:
    return value.clone() if isinstance(value, Tensor) else value


def _is_wide(value: object) -> TypeGuard[Tensor]:
    """Whether a state has a value for each element of a parameter, unlike the number of steps."""
    return isinstance(value, Tensor) and value.dim() > 0


@contextmanager
def single_writer(engine: Any, writer: object) -> Iterator[None]:
    """Let another object write and read the files of the engine's checkpoints."""
    before = engine.checkpoint_engine
    engine.checkpoint_engine = writer
    # The recovery script is written by one rank while the others wait for it: what fails there would hang them.
    engine._copy_recovery_script = lambda path: None
    try:
        yield
    finally:
        engine.checkpoint_engine = before
        del engine._copy_recovery_script
