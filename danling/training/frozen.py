"""Weights that are not trained: left out of checkpoints, and known again by a digest."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from danling.checkpoints.errors import CheckpointMismatch
from danling.utils.tensors import local_part, whole

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
    """

    def __init__(self, named_parameters: Callable[[], Iterable[tuple[str, nn.Parameter]]]) -> None:
        self._named_parameters = named_parameters
        self._trained: set[str] = set()
        self._sums: dict[str, int] = {}
        self._digest: tuple[frozenset[str], str] | None = None

    def note_trained(self) -> None:
        """Count what requires a gradient now as trained. May be called on one rank."""
        self._trained |= {name for name, parameter in self._named_parameters() if parameter.requires_grad}

    def without(self, state: Mapping[str, object]) -> dict[str, object]:
        """Return the entries of a state that are not frozen."""
        frozen = self._frozen()
        # Another name of a frozen weight, as that of a tied one, is as frozen.
        tied = {local_part(value).data_ptr() for value in frozen.values() if local_part(value).numel()}
        return {name: value for name, value in state.items() if name not in frozen and not _is_one_of(value, tied)}

    def completed(self, state: Mapping[str, object], here: Mapping[str, object]) -> dict[str, object]:
        """Return what `without` returned, with what is frozen as it is here."""
        kept = self.without(here)
        return {**{name: value for name, value in here.items() if name not in kept}, **state}

    def note_moved(self, state: Mapping[str, Any], here: Mapping[str, Any]) -> None:
        """Count as trained what a whole state has other values of than the model was made with. Called on all ranks.

        Such weights were frozen after they had been trained, or were changed by hand: a model that is made from the base has them not.
        """
        names = [name for name in self._frozen() if name in state and name in here]
        self._trained |= {name for name in names if digest_of({"": state[name]}) != digest_of({"": here[name]})}

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

    def check(self, stored: Mapping[str, Any], load_base: Callable[[], bool] = lambda: False) -> None:
        """Refuse a checkpoint that was made on other frozen weights. Called on all ranks."""
        trained = set(stored["trained"])
        frozen = self._without(trained)
        found = digest_of(frozen)
        if found != stored["sha256"] and load_base():
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

    def _parameters(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self._named_parameters()}

    def _without(self, trained: Collection[str]) -> dict[str, Tensor]:
        return {name: value for name, value in self._parameters().items() if name not in trained}

    def _frozen(self) -> dict[str, Tensor]:
        self.note_trained()
        return self._without(self._trained)


def _is_one_of(value: object, places: set[int]) -> bool:
    return isinstance(value, Tensor) and bool(local_part(value).numel()) and local_part(value).data_ptr() in places


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
