"""Weights that are not trained: left out of checkpoints, and known again by a digest."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from danling.checkpoints.errors import CheckpointMismatch
from danling.utils.tensors import canonical_name, local_part, whole

if TYPE_CHECKING:
    from danling.runners.torch_runner import TorchRunner

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_AT_ONCE = 2**26
"""Bytes that are looked at in one piece."""
_PIECE = 2**20
"""Values that are multiplied by their factors at once: 8 MiB of them."""
_ODD = 0x1E3779B97F4A7C15
"""Odd, so that multiplying by it modulo 2**64 loses nothing; below 2**63, so that it is an integer of torch's."""


class FrozenWeights:
    """Tells what of a model is trained from what is frozen.

    A parameter that required a gradient at construction or at any save of the run counts as trained, also where it was frozen afterwards;
    so do buffers. What is frozen must stay as it is: every save compares a sum over the bits and their places, for which the weights are
    read once.

    A checkpoint says whether it has all weights or the trained ones, and `checkpoint.trainable_only` which of them will be saved.
    """

    def __init__(self, runner: TorchRunner) -> None:
        self._runner = runner
        self._trained: set[str] = set()
        self._sums: dict[str, int] = {}
        self._digest: tuple[frozenset[str], str] | None = None
        self._stored_without = False
        """Whether the checkpoint that is being loaded has only trained weights."""

    def leaves_out(self) -> bool:
        """Whether frozen weights are left out of what is saved now."""
        return bool(self._runner.config.checkpoint.trainable_only)

    def note_trained(self) -> None:
        """Count what requires a gradient now as trained. May be called on one rank."""
        named = self._runner.unwrapped_model.named_parameters()
        self._trained |= {canonical_name(name) for name, parameter in named if parameter.requires_grad}

    # Saving

    def saved(self, weights: Mapping[str, object]) -> Mapping[str, object]:
        """Return the weights that are saved."""
        return self._only_trained(weights) if self.leaves_out() else weights

    def _only_trained(self, state: Mapping[str, object]) -> dict[str, object]:
        frozen = self._frozen()
        # Another name of a frozen weight, as that of a tied one, is as frozen.
        tied = {local_part(value).data_ptr() for value in frozen.values() if local_part(value).numel()}
        return {
            name: value
            for name, value in state.items()
            if name not in frozen
            and not (isinstance(value, Tensor) and local_part(value).numel() and local_part(value).data_ptr() in tied)
        }

    def identity(self) -> dict[str, object]:
        """Return what the frozen weights are known by, and the names of what is trained. Called on all ranks."""
        frozen = self._frozen()
        sums = {name: bit_sum(tensor) for name, tensor in frozen.items()}
        changed = [name for name, value in sums.items() if self._sums.get(name, value) != value]
        if changed:
            raise ValueError(
                "Expected weights without a gradient to stay as they are with checkpoint.trainable_only=true. Received: other values of "
                f"{', '.join(changed[:5])} ({len(changed)} in all) than at the first save, or when the run was resumed. Make what is "
                "changed by hand, such as a teacher, a buffer, or set checkpoint.trainable_only=false."
            )
        self._sums = sums
        names = frozenset(frozen)
        if self._digest is None or self._digest[0] != names:
            self._digest = names, digest_of(frozen)
        return {"sha256": self._digest[1], "trained": sorted(self._trained)}

    # Loading, in this order

    def check(self, stored: Mapping[str, Any], excluded: Collection[str]) -> None:
        """Refuse a checkpoint that was made on other frozen weights. Called on all ranks."""
        self._stored_without = bool(stored) or "frozen" in excluded
        if not stored:
            return
        trained, base = set(stored["trained"]), self._runner.config.pretrained
        frozen = self._without(trained)
        found = digest_of(frozen)
        if found != stored["sha256"] and base:
            # The run may have begun from these.
            self._runner.load_pretrained(base)
            frozen = self._without(trained)
            found = digest_of(frozen)
        if found != stored["sha256"]:
            raise CheckpointMismatch(
                f"Expected the frozen weights that the checkpoint was made on, with the SHA-256 {stored['sha256'][:12]}. Received: "
                f"{found[:12]} over {len(frozen)} weights. checkpoint.trainable_only=true has kept what was trained alone: make the model "
                "from the same base, in the same precision, with the same parts frozen, or name the file of the base in `pretrained`."
            )
        self._trained |= trained
        self._sums = {name: bit_sum(tensor) for name, tensor in frozen.items()}
        self._digest = frozenset(frozen), found

    def loadable(self, state: Mapping[str, Any], present: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
        """Return the weights to load: what a checkpoint lacks is as `present` returns it. Called on all ranks."""
        if self.leaves_out() and not self._stored_without:
            # Frozen after they were trained, or changed by hand: a model that is made from the base lacks such values.
            here = present()
            names = [name for name in self._frozen() if name in state and name in here]
            self._trained |= {name for name in names if digest_of({"": state[name]}) != digest_of({"": here[name]})}
        return self.completed(state, present()) if self._stored_without else state

    def completed(self, state: Mapping[str, Any], here: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a state with what is frozen as it is here, if the checkpoint has only trained weights."""
        if not self._stored_without:
            return state
        kept = self._only_trained(here)
        return {**{name: value for name, value in here.items() if name not in kept}, **state}

    def _without(self, trained: Collection[str]) -> dict[str, Tensor]:
        named = ((canonical_name(name), p) for name, p in self._runner.unwrapped_model.named_parameters())
        return {name: parameter.detach() for name, parameter in named if name not in trained}

    def _frozen(self) -> dict[str, Tensor]:
        self.note_trained()
        return self._without(self._trained)


def digest_of(weights: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of names, dtypes, shapes and bits, the same in every layout. Called on all ranks."""
    total = hashlib.sha256()
    for name in sorted(weights):
        tensor = whole(weights[name]).detach().contiguous()
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        bits = tensor.reshape(-1).view(torch.uint8)
        for begin in range(0, bits.numel(), _AT_ONCE):
            piece: Any = bits[begin : begin + _AT_ONCE].cpu().numpy()
            total.update(piece)
    return total.hexdigest()


def bit_sum(tensor: Tensor) -> int:
    """Return a sum over the bits of a tensor, which is another one where values have changed, or have changed places.

    The bits of each value, read as an integer, count times an odd number of its place, modulo 2**64. A GB of 32-bit floats takes
    2.6 s of one core (1.3 by a plain sum), of 16-bit ones 3.0 (3.4).
    """
    flat = local_part(tensor).detach().contiguous().reshape(-1)
    integers = _INTEGERS.get(flat.element_size())
    values = flat.view(torch.uint8 if integers is None else integers)
    factors = _factors(min(values.numel(), _PIECE), values.device)
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for piece in torch.split(values, _PIECE):
        # The sum so far is multiplied as well, so that equal places of two pieces count differently.
        total = total * _ODD + (piece * factors[: piece.numel()]).sum()
    return int(total)


def _factors(number: int, device: torch.device) -> Tensor:
    """Return an odd number for each place. They follow no line, on which several values could change places without a trace."""
    mixed = torch.arange(1, number + 1, dtype=torch.int64, device=device) * _ODD
    mixed = (mixed ^ (mixed >> 29)) * _ODD
    return (mixed ^ (mixed >> 32)) | 1
