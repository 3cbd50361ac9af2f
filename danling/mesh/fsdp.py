"""FSDP2: which modules are wrapped, how gradients are reduced, and when shards are gathered."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.nn.utils.parametrize import is_parametrized

logger = logging.getLogger("danling")

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


def find_blocks(model: nn.Module, wanted: Sequence[str] | None = None) -> dict[str, nn.Module]:
    """Return the modules that are sharded, compiled and checkpointed one by one, outer ones before inner ones."""
    if wanted is None:
        paths: dict[nn.Module, str] = {}
        for path, block in _repeated(model, ""):
            paths.setdefault(block, path)  # several lists may share a layer
        return {path: block for block, path in paths.items()}
    found = {
        n: m for n, m in model.named_modules() if n and (n in wanted or type(m).__name__ in wanted)
    }
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
    repeats = isinstance(module, _CONTAINERS) or _is_uniform(module)
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if name == "parametrizations" and is_parametrized(module):
            continue  # the weights of one layer
        # FSDP2 gathers a block around its forward, which a list in a list does not have.
        if not repeats or isinstance(child, _CONTAINERS):
            yield from _repeated(child, f"{path}.")
        elif any(True for _ in child.parameters()):
            yield path, child


def _is_uniform(module: nn.Module) -> bool:
    kinds = {type(child) for child in module.children() if any(True for _ in child.parameters())}
    plain = kinds <= {nn.Linear, nn.Embedding, nn.LayerNorm, nn.Conv1d, nn.Conv2d, nn.Conv3d}
    return isinstance(module, nn.Sequential) and len(kinds) == 1 and not plain


def shard(model: nn.Module, mesh: DeviceMesh, blocks: Iterable[nn.Module], **kwargs: Any) -> None:
    """Shard blocks and the rest of a model in place. Call on all ranks of the mesh.

    The gradient becomes the sum over the mesh, not the mean: who divides is the accumulation window, once.
    """
    # Inner blocks first: `fully_shard` leaves out what is sharded already.
    for block in reversed(_apart(model, list(blocks))):
        fully_shard(block, mesh=mesh, **kwargs)
    fully_shard(model, mesh=mesh, **kwargs)
    for module in sharded_modules(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def _apart(model: nn.Module, blocks: list[nn.Module]) -> list[nn.Module]:
    """Return the blocks that share no parameter with anything else.

    Tied weights, and layers that several blocks share, are gathered with the rest of the model.
    """
    uses = _uses(model)
    paths = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    return [
        block
        for block in blocks
        if all(uses[key] == count * paths[id(block)] for key, count in _uses(block).items())
    ]


def _uses(module: nn.Module) -> Counter[int]:
    """Return under how many names a module has each parameter."""
    return Counter(
        id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False)
    )


def sharded_modules(model: nn.Module) -> list[FSDPModule]:
    """Return the modules of a model that FSDP2 wraps."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def set_gradient_sync(model: nn.Module, policy: str, *, last: bool) -> None:
    """Prepare the backward of a micro-batch."""
    for module in sharded_modules(model):
        module.set_requires_gradient_sync(last or policy != "last", recurse=False)
        module.set_requires_all_reduce(last or policy == "every", recurse=False)


def reshard(model: nn.Module) -> None:
    """Free what was gathered, so that the next forward reads the shards as they are now."""
    modules = sharded_modules(model)
    for module in modules:
        state = module._get_fsdp_state()
        if not state._is_root or state._training_state is TrainingState.IDLE:
            continue
        # An exception has ended a forward or a backward, in which FSDP2 believes to be.
        if not hasattr(module, "reset_iter_state"):
            raise RuntimeError(
                f"torch {torch.__version__} cannot leave a forward or backward of FSDP2 that an exception has ended. Construct the runner "
                "again with auto_resume=true, or install torch 2.13 or later."
            )
        module.reset_iter_state()
    for module in modules:
        module.reshard()


class UseBesideForward:
    """A hook of shards that names, once, a loss that was computed from one outside of the forward of its module.

    A forward computes from what FSDP2 has gathered, whose gradient FSDP2 sums over the ranks. That of a shard itself stays as its rank
    has it.

    Args:
        is_canonical: Whether gradients are added in one order, which leaves that of the shard itself out: an error then.
    """

    __torch_unserializable__ = (
        True  # else torch warns of the hook where a program pickles a parameter
    )

    def __init__(self, is_canonical: bool) -> None:
        self._is_canonical = is_canonical
        self._has_said = False

    def __call__(self, gradient: Tensor) -> None:
        """Called by a backward with the gradient of a shard, on the rank that has it."""
        if self._is_canonical:
            raise ValueError(
                "Expected a loss that reads parameters within the forward of their modules, with gradient_sum='canonical' and the axis "
                "shard. Received: one computed from a shard, such as by full_tensor(). Compute it in the forward of the module."
            )
        if not self._has_said:
            self._has_said = True
            logger.warning("%s", _BESIDE_FORWARD)

    @classmethod
    def watch(cls, parameters: Iterable[nn.Parameter], *, is_canonical: bool) -> None:
        """Put one hook on all of these shards that have none yet. No communication."""
        hook = cls(is_canonical)
        for parameter in parameters:
            hooks: Any = parameter._backward_hooks or {}
            if parameter.requires_grad and not any(
                isinstance(each, cls) for each in hooks.values()
            ):
                parameter.register_hook(hook)  # type: ignore[no-untyped-call]


_BESIDE_FORWARD = (
    "A loss is computed from a parameter that the axis shard divides, outside of the forward of its module, such as a penalty by "
    "full_tensor(). FSDP2 does not sum this gradient over the ranks: each shard gets only what its own rank has of it, which is too "
    "little. Compute the loss from p.full_tensor(grad_placements=[Partial()] * p.device_mesh.ndim), with Partial of "
    "torch.distributed.tensor, which sums it (this line comes then too), or in the forward of the module."
)
