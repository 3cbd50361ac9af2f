"""FSDP2: which modules are wrapped, how gradients are reduced, and when shards are gathered."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)


def find_blocks(model: nn.Module, wanted: Sequence[str] | None = None) -> dict[str, nn.Module]:
    """Return the modules that are sharded, compiled and checkpointed one by one, outer ones before inner ones."""
    if wanted is None:
        return dict(_repeated(model, ""))
    found = {n: m for n, m in model.named_modules() if n and (n in wanted or type(m).__name__ in wanted)}
    seen = {*found, *(type(module).__name__ for module in found.values())}
    missing = [name for name in wanted if name not in seen]
    if missing:
        classes = sorted({type(module).__name__ for module in model.modules()})
        raise ValueError(
            f"Expected fsdp.blocks to name modules of the model or their classes (classes here: {', '.join(classes)}). Received: "
            f"{missing}. Correct them."
        )
    return found


def _repeated(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)) or _is_uniform(module):
            if any(True for _ in child.parameters()):
                yield path, child
        else:
            yield from _repeated(child, f"{path}.")


def _is_uniform(module: nn.Module) -> bool:
    kinds = {type(child) for child in module.children() if any(True for _ in child.parameters())}
    plain = kinds <= {nn.Linear, nn.Embedding, nn.LayerNorm, nn.Conv1d, nn.Conv2d, nn.Conv3d}
    return isinstance(module, nn.Sequential) and len(kinds) == 1 and not plain


def shard(model: nn.Module, mesh: DeviceMesh, blocks: Iterable[nn.Module], **kwargs: Any) -> None:
    """Shard blocks and the rest of a model in place. Call on all ranks of the mesh.

    The gradient becomes the sum over the mesh, not the mean: who divides is the accumulation window, once.
    """
    for block in reversed(_apart(model, list(blocks))):
        fully_shard(block, mesh=mesh, **kwargs)
    fully_shard(model, mesh=mesh, **kwargs)
    for module in sharded_modules(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def _apart(model: nn.Module, blocks: list[nn.Module]) -> list[nn.Module]:
    """Return the blocks that share no parameter with anything else: tied weights are gathered with the rest of the model."""
    uses: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            uses[id(parameter)] = uses.get(id(parameter), 0) + 1

    def own(block: nn.Module) -> bool:
        here: dict[int, int] = {}
        for module in block.modules():
            for parameter in module.parameters(recurse=False):
                here[id(parameter)] = here.get(id(parameter), 0) + 1
        return all(uses[key] == count for key, count in here.items())

    return [block for block in blocks if own(block)]


def sharded_modules(model: nn.Module) -> list[FSDPModule]:
    """Return the modules of a model that FSDP2 wraps."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def set_gradient_sync(model: nn.Module, policy: str, *, last: bool) -> None:
    """Prepare the backward of a micro-batch."""
    for module in _roots(model):
        module.set_requires_gradient_sync(last or policy != "last")
        module.set_requires_all_reduce(last or policy == "every")


def _roots(model: nn.Module) -> list[FSDPModule]:
    if isinstance(model, FSDPModule):
        return [model]
    return [root for child in model.children() for root in _roots(child)]


def reshard(model: nn.Module) -> None:
    """Free what was gathered, so that the next forward reads the shards as they are now."""
    for module in sharded_modules(model):
        module.reshard()


def resolve_dtype(name: object) -> torch.dtype | None:
    """Return a dtype by its name, short or long; `None` stays."""
    if name is None or isinstance(name, torch.dtype):
        return name
    short = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp64": "float64"}
    dtype = getattr(torch, short.get(str(name).lower(), str(name).lower()), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"Expected the name of a dtype, such as 'bf16'. Received: {name!r}.")
    return dtype


_DTYPES = ("param_dtype", "reduce_dtype", "output_dtype")


def mixed_precision_policy(given: object) -> MixedPrecisionPolicy:
    """Return the policy of `fsdp.mp_policy`."""
    if isinstance(given, MixedPrecisionPolicy):
        return given
    known = (*_DTYPES, "cast_forward_inputs")
    settings = dict(given.items()) if isinstance(given, Mapping) else None
    if given and (settings is None or any(name not in known for name in settings)):
        raise ValueError(
            f"Expected fsdp.mp_policy to be a mapping with keys out of {list(known)}. Received: {given!r}."
        )
    values: dict[str, Any] = {
        name: resolve_dtype(value) if name in _DTYPES else bool(value) for name, value in (settings or {}).items()
    }
    return MixedPrecisionPolicy(**values)


def offload_policy(given: object, device: torch.device) -> OffloadPolicy | None:
    """Return the policy of `fsdp.offload_policy`."""
    if given is None or given is False or isinstance(given, OffloadPolicy):
        return given or None
    if given is not True and str(given).lower() != "cpu":
        raise ValueError(f"Expected fsdp.offload_policy to be 'cpu' or none. Received: fsdp.offload_policy={given!r}.")
    # Only a machine with an accelerator has pinned memory.
    return CPUOffloadPolicy(pin_memory=device.type != "cpu")
