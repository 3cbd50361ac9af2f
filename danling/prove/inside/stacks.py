"""The models and optimizers of a script by name, whichever stack divides them."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .samples import local_of

Piece = tuple[tuple[int, ...], tuple[int, ...], Tensor]
"""Where a rank's part of a tensor begins, the shape of the whole, and the part."""

_WRAPPERS = (
    "_orig_mod.",
    "_fsdp_wrapped_module.",
    "_checkpoint_wrapped_module.",
    "_forward_module.",
)


def rank_and_size() -> tuple[int, int]:
    """Return the rank and the number of processes."""
    if has_group():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def has_group() -> bool:
    """Whether the ranks know of each other."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def has_runner() -> bool:
    """Whether the script trains by a runner of danling, which divides samples over the ranks by itself."""
    kind = getattr(sys.modules.get("danling.runners.base_runner"), "BaseRunner", None)
    return kind is not None and any(issubclass(type(each), kind) for each in gc.get_objects())


def clean(name: str) -> str:
    """Return the name of a parameter without those of wrappers."""
    for part in _WRAPPERS:
        name = name.replace(part, "")
    # DistributedDataParallel within another wrapper puts it there twice.
    while name.startswith("module."):
        name = name[len("module.") :]
    return name


def roots() -> list[nn.Module]:
    """Return the modules with parameters that no other module contains."""
    # By type: `isinstance` wakes lazy proxies.
    every = [module for module in gc.get_objects() if issubclass(type(module), nn.Module)]
    # By `__dict__`: a module whose `__init__` is still to run has no `_modules`.
    inner = {
        id(child) for module in every for child in module.__dict__.get("_modules", {}).values()
    }
    return [
        m for m in every if id(m) not in inner and "_parameters" in m.__dict__ and has_parameters(m)
    ]


def has_parameters(module: nn.Module) -> bool:
    """Whether a module has any parameter."""
    return next(module.parameters(), None) is not None


def names_of(params: Sequence[Tensor]) -> dict[int, str]:
    """Return the names of parameters by their ids: those in the outermost module that has most of them."""
    wanted = {id(p) for p in params}
    found = dict[int, str]()
    named = [list(module.named_parameters()) for module in roots()]
    # The module that has most of them names them; others name only what is left.
    named.sort(key=lambda pairs: -sum(id(p) in wanted for _, p in pairs))
    taken: set[str] = set()
    for pairs in named:
        for name, parameter in pairs:
            if id(parameter) in wanted and id(parameter) not in found:
                name = clean(name)
                found[id(parameter)] = name if name not in taken else f"{name} ({len(taken)})"
                taken.add(found[id(parameter)])
    for number, param in enumerate(params):
        found.setdefault(id(param), f"parameter {number}")
    return found


def piece(tensor: Tensor, of: Tensor | None = None) -> Piece:
    """Return this rank's part of a parameter, or of its gradient. Only a DTensor of partial sums is a collective."""
    flat = getattr(tensor if of is None else of, "_unpadded_unsharded_size", None)
    if flat is not None:
        return _flat_piece(tensor.detach(), flat.numel())
    if hasattr(tensor, "placements"):
        if any(placement.is_partial() for placement in tensor.placements):
            tensor = tensor.full_tensor()  # type: ignore[attr-defined]
        else:
            from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

            _, offset = compute_local_shape_and_global_offset(
                tensor.shape,
                tensor.device_mesh,  # type: ignore[attr-defined]
                tensor.placements,
            )
            return tuple(offset), tuple(tensor.shape), local_of(tensor).to("cpu", copy=True)
    # Copied in any case: the step that follows changes the tensor in place.
    return (0,) * tensor.dim(), tuple(tensor.shape), tensor.detach().to("cpu", copy=True)


def _flat_piece(local: Tensor, size: int) -> Piece:
    """Return this rank's part of the parameter into which FSDP1 has joined others; the last ranks have padding."""
    shards = -(-size // local.numel())
    start = min(rank_and_size()[0] % shards * local.numel(), size)
    return (start,), (size,), local[: size - start].to("cpu", copy=True)


def placed(pieces: Sequence[Piece], shape: Sequence[int]) -> Sequence[Piece]:
    """Return the parts of the ranks, in order; plain tensors that are divided by hand get the place of their rank in the whole.

    That is possible where one dimension of the whole is as many times theirs as there are ranks.
    """
    own = pieces[0][1]
    dims = [dim for dim in range(len(shape)) if len(own) == len(shape) and own[dim] != shape[dim]]
    if len(dims) != 1 or own[dims[0]] * len(pieces) != shape[dims[0]]:
        return pieces
    divided = [int(dim == dims[0]) for dim in range(len(own))]
    return [
        (tuple(order * share * size for share, size in zip(divided, own)), tuple(shape), part)
        for order, (_, _, part) in enumerate(pieces)
    ]


def assembled(pieces: Sequence[Piece], shape: Sequence[int]) -> Tensor | None:
    """Return the whole tensor from the parts of the ranks in order; `None` where they do not make one of this shape."""
    if not pieces:
        return None
    pieces = placed(pieces, shape)
    if pieces[0][1] != tuple(shape):
        return None
    whole = torch.zeros(tuple(shape), dtype=pieces[0][2].dtype)
    # The first rank last: of copies its own is taken.
    for offset, _, part in reversed(pieces):
        whole[tuple(slice(start, start + length) for start, length in zip(offset, part.shape))] = (
            part
        )
    return whole


def put(parameter: Tensor, whole: Tensor) -> None:
    """Overwrite a parameter, or this rank's part of it."""
    offset, _, part = piece(parameter)
    own = whole[tuple(slice(start, start + length) for start, length in zip(offset, part.shape))]
    if not torch.equal(own.to(part.dtype), part):
        local = local_of(parameter)
        # The last shards of FSDP1 have padding.
        (local if local.shape == own.shape else local[: len(own)]).copy_(own)


# Plain loops, DDP, FSDP2, and FSDP1


def fsdp_roots() -> list[nn.Module]:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(fsdp, "FullyShardedDataParallel", None)
    if kind is None:
        return []

    def has_parts(module: nn.Module) -> bool:
        # Without `use_orig_params` it has its own parameters, see `_flat_piece`.
        return issubclass(type(module), kind) and bool(getattr(module, "_use_orig_params", False))

    return [root for root in roots() if any(map(has_parts, root.modules()))]


@contextmanager
def whole_parameters(module: nn.Module | None, *, writes: bool = False) -> Iterator[None]:
    """Have the parameters of FSDP1 be whole. Called on all ranks."""
    if module is None:
        yield
        return
    kind = sys.modules["torch.distributed.fsdp"].FullyShardedDataParallel
    with kind.summon_full_params(module, with_grads=not writes, writeback=writes):
        yield


def gradients_of(params: Sequence[Tensor]) -> dict[str, Piece]:
    """Return the gradients of parameters, by name. Called on all ranks."""
    for root in fsdp_roots():
        with whole_parameters(root):
            return {
                clean(n): piece(p.grad) for n, p in root.named_parameters() if p.grad is not None
            }
    names = names_of(params)
    return {names[id(p)]: piece(p.grad, p) for p in params if p.grad is not None}


def named_tensors(root: nn.Module, *, writes: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and buffers of a module. Called on all ranks."""
    with whole_parameters(root if root in fsdp_roots() else None, writes=writes):
        for pairs in (root.named_parameters(), root.named_buffers()):
            for name, tensor in pairs:
                if not tensor.is_meta:
                    yield clean(name), tensor


class Trained:
    """The parameters of an optimizer, by name."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.names: dict[int, str] = {}

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The groups of the optimizer."""
        groups: list[dict[str, Any]] = self.optimizer.param_groups
        return groups

    def _params(self) -> list[Tensor]:
        params = [p for group in self.groups for p in group["params"]]
        if any(id(p) not in self.names for p in params):
            self.names = names_of(params)
        return params

    @contextmanager
    def _named(self, writes: bool = False) -> Iterator[list[tuple[str, Tensor]]]:
        for root in fsdp_roots():
            with whole_parameters(root, writes=writes):
                yield [(clean(name), p) for name, p in root.named_parameters() if p.requires_grad]
            return
        params = self._params()
        yield [(self.names[id(p)], p) for p in params]

    def gradients(self) -> dict[str, Piece]:
        """Return the gradients; zeros where there is none."""
        with self._named() as named:
            return {
                name: piece(torch.zeros_like(p) if p.grad is None else p.grad, p)
                for name, p in named
            }

    def weights(self) -> dict[str, Piece]:
        """Return the parameters."""
        with self._named() as named:
            return {name: piece(p) for name, p in named}

    def put(self, value: Callable[[str, Sequence[int]], Tensor | None]) -> None:
        """Overwrite the parameters."""
        with torch.no_grad(), self._named(writes=True) as named:
            for name, parameter in named:
                whole = value(name, parameter.shape)
                if whole is not None:
                    put(parameter, whole)


# DeepSpeed


class Engine(Trained):
    """The parameters of an engine of DeepSpeed, of any stage."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine.optimizer)
        self._trained = [
            (clean(name), p) for name, p in engine.module.named_parameters() if p.requires_grad
        ]

    @contextmanager
    def _named(self, writes: bool = False) -> Iterator[list[tuple[str, Tensor]]]:
        yield self._trained

    def gradients(self) -> dict[str, Piece]:
        from deepspeed.utils import safe_get_full_grad

        found = [(name, p, safe_get_full_grad(p)) for name, p in self._trained]
        return {
            name: piece(torch.zeros(_shape(p)) if gradient is None else gradient.float())
            for name, p, gradient in found
        }

    def weights(self) -> dict[str, Piece]:
        from deepspeed.utils import safe_get_full_fp32_param

        found = [(name, p, safe_get_full_fp32_param(p)) for name, p in self._trained]
        return {
            name: piece(p if whole is None else whole.reshape(_shape(p)))
            for name, p, whole in found
        }

    def put(self, value: Callable[[str, Sequence[int]], Tensor | None]) -> None:
        from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param

        with torch.no_grad():
            for name, parameter in self._trained:
                whole = value(name, _shape(parameter))
                if whole is None:
                    continue
                if safe_get_full_fp32_param(parameter) is not None:
                    safe_set_full_fp32_param(parameter, whole.float())
                if parameter.numel():
                    parameter.copy_(whole.reshape(parameter.shape))


def _shape(parameter: Tensor) -> tuple[int, ...]:
    # Of ZeRO-3, whose parameters are empty while no layer uses them.
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def optimizers() -> Iterable[Any]:
    """Return the optimizers of the script; of those that wrap one another the parameters are the same."""
    kind = torch.optim.Optimizer
    found: Mapping[tuple[int, ...], Any] = {
        tuple(id(p) for group in each.param_groups for p in group["params"]): each
        for each in gc.get_objects()
        if issubclass(type(each), kind) and "param_groups" in each.__dict__
    }
    return found.values()


def engine_of(root: nn.Module) -> Trained | None:
    """Return the parameters of an engine of DeepSpeed; `None` for other modules."""
    return Engine(root) if type(root).__name__ == "DeepSpeedEngine" else None
