"""Whether a state is fit to be saved: its weights are finite, and what is saved once for all ranks is the same on them."""

from __future__ import annotations

import hashlib
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn

from danling.utils.messages import listed

from .outcome import NonFiniteError
from .pass_settings import modules_of

if TYPE_CHECKING:
    from danling.runners.torch_runner import TorchRunner

logger = logging.getLogger("danling")


class FiniteWeights:
    """Refuses to save weights that are not finite: the optimizer's step may make them from a finite gradient.

    Parameters that are trained are read once for each save. Frozen ones, which no update changes, are looked at in the first save, and
    named; buffers are not looked at, since they may hold -inf by design.
    """

    def __init__(self, runner: TorchRunner) -> None:
        self._runner = runner
        self._seen: set[int] = set()
        """`id` of the frozen parameters that were looked at."""

    def check(self) -> None:
        """Raise where a weight is not finite on some rank. One small collective: called on all ranks."""
        runner, domain = self._runner, self._runner.placement.optimizer
        held = {name: (p, runner.preparation.held(p)) for name, p in runner.named_parameters()}
        bad = _not_finite({name: local for name, (p, local) in held.items() if p.requires_grad})
        frozen = {
            name: local
            for name, (p, local) in held.items()
            if not p.requires_grad and id(p) not in self._seen
        }
        self._seen.update(id(p) for p, _ in held.values() if not p.requires_grad)
        for name in _not_finite(frozen)[:1]:
            logger.warning(
                "The frozen parameter %s is not finite. It is saved as it is; values that are -inf by design belong in a buffer.",
                name,
            )
        # A flag first: names travel only where there are some.
        flag = torch.tensor(float(bool(bad)), dtype=torch.float64)
        if not domain.all_reduce(flag, "max").item():
            return
        found = domain.gather_objects(bad)
        names = list(dict.fromkeys(name for of_rank in found for name in of_rank))
        ranks = [rank for rank, of_rank in enumerate(found) if of_rank]
        others = f" and {len(names) - 1} more parameters" if len(names) > 1 else ""
        raise NonFiniteError(
            f"Expected finite weights to save after step {runner.state.train.global_step}. Received: {names[0]!r}{others} with NaN or "
            f"infinity on ranks {ranks}. Loss and gradient were finite: the step of {type(runner.optimizer).__name__} or your own code "
            "made them. Nothing was saved, and the last checkpoint stays. Raise eps of the optimizer, lower the learning rate, or set "
            "max_grad_norm; then resume."
        )


class ExtraStates:
    """Names modules whose `get_extra_state` differs between ranks: a checkpoint has one state of model and criterion, for all ranks."""

    def __init__(self, runner: TorchRunner) -> None:
        self._runner = runner
        self._named: set[str] = set()

    def check(self) -> None:
        """Compare the states at a save. A small collective: called on all ranks."""
        domain = self._runner.placement.optimizer
        # Stages of a pipeline have other modules.
        if domain.size == 1 or self._runner.preparation.in_pipeline:
            return
        # The method of `nn.Module` itself raises an error.
        mine = {
            name: _digest_of(module.get_extra_state())
            for name, module in modules_of(self._runner)
            if type(module).get_extra_state is not nn.Module.get_extra_state
        }
        # Also of a rank that has none: a module may be on some ranks only.
        found = domain.gather_objects(mine)
        names = [
            name
            for name in dict.fromkeys(chain(*found))
            if len({of_rank[name] for of_rank in found if name in of_rank}) > 1
            and name not in self._named
        ]
        self._named.update(names)
        if names and domain.rank == 0:
            logger.warning(
                "get_extra_state() of %s returns something else on other ranks. A checkpoint has that of the first rank, with which all "
                "ranks resume: let it depend on what all ranks know, make it a buffer, or keep it in an attribute of the runner, which is "
                "saved for each rank.",
                listed(names),
            )


def _is_plain_tensor(value: object) -> TypeGuard[Tensor]:
    if not isinstance(value, Tensor) or type(value) not in (Tensor, nn.Parameter):
        return False
    return value.layout is torch.strided and not (value.is_meta or value.is_quantized)


def _digest_of(value: object) -> bytes:
    digest = hashlib.sha1(usedforsecurity=False)
    _feed(digest, value)
    return digest.digest()


def _feed(digest: Any, value: object) -> None:
    """Add plain values and tensors to a digest; others, such as tensors that are divided over ranks, count by their class."""
    if _is_plain_tensor(value):
        held = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        digest.update(
            f"{held.dtype} {tuple(held.shape)}".encode()
            + held.reshape(-1).view(torch.uint8).numpy().tobytes()
        )
    elif isinstance(value, Mapping):
        digest.update(f"mapping of {len(value)}:".encode())
        for key, item in value.items():
            _feed(digest, key)
            _feed(digest, item)
    elif isinstance(value, (list, tuple)):
        digest.update(f"sequence of {len(value)}:".encode())
        for item in value:
            _feed(digest, item)
    else:
        plain = value is None or isinstance(value, (bool, int, float, complex, str, bytes))
        digest.update(f"{value!r};".encode() if plain else f"{type(value).__name__};".encode())


@torch.no_grad()
def _not_finite(weights: Mapping[str, Tensor]) -> list[str]:
    """Return the names of tensors with NaN or infinity."""
    # Integers are finite, and a tensor on the device `meta` has no values.
    known = {
        name: tensor
        for name, tensor in weights.items()
        if (tensor.is_floating_point() or tensor.is_complex())
        and tensor.numel()
        and not tensor.is_meta
    }
    wide = {name: tensor for name, tensor in known.items() if tensor.dtype.itemsize > 1}
    narrow = known.keys() - wide.keys()
    suspects = [name for name in known if name in narrow]
    if wide:
        # One pass, which reads each weight once. A norm may also overflow.
        norms = _norms(list(wide.values()))
        # One answer for each device, for which the host waits.
        by_device: dict[torch.device, list[Tensor]] = defaultdict(list)
        for norm in norms:
            by_device[norm.device].append(norm.float())
        if not all(bool(torch.stack(each).isfinite().all()) for each in by_device.values()):
            suspects += [name for name, norm in zip(wide, norms) if not bool(norm.isfinite())]
    # Types of eight bits have no arithmetic operations.
    exact = ((name, known[name].float() if name in narrow else known[name]) for name in suspects)
    return [name for name, tensor in exact if not bool(tensor.isfinite().all())]


def _norms(tensors: list[Tensor]) -> Sequence[Tensor]:
    """Return the 2-norm of each tensor. Those of a library's class, such as quantized weights, may have no operation for all at once."""
    try:
        return torch._foreach_norm(tensors, 2.0)
    except NotImplementedError:
        return [_norm(tensor) for tensor in tensors]


def _norm(tensor: Tensor) -> Tensor:
    is_plain = type(tensor) in (Tensor, nn.Parameter)
    values: Tensor = (
        tensor if is_plain or not hasattr(tensor, "dequantize") else tensor.dequantize()
    )
    found: Tensor = torch.linalg.vector_norm(values)
    return found
