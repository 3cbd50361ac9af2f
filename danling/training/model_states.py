"""Reads and loads the states of model, criterion, EMA and optimizer by name, whole or without frozen weights."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from danling.checkpoints.errors import CheckpointMismatch
from danling.optim.state import (
    evaluation_weights,
    load_named_state_dict,
    modal,
    named_state_dict,
    put_training_weights,
    training_weights,
)
from danling.utils.tensors import canonical_name, local_part, whole

from .ema import EMA, entries_of
from .tied_weights import with_tied_names

if TYPE_CHECKING:
    from danling.runners.torch_runner import TorchRunner

_TRAINED = "train_weights"
"""Key of the optimizer's state under which the weights of training are, where those of the model are others."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_AT_ONCE = 2**26
"""Bytes that are looked at in one piece."""
_PIECE = 2**20
"""Values that are multiplied by their factors at once: 8 MiB of them."""
_ODD = 0x1E3779B97F4A7C15
"""Odd, so that multiplying by it modulo 2**64 loses nothing; below 2**63, so that it is an integer of torch's."""


class ModelStates:
    """Reads and writes the states of a model that this rank holds whole; stacks that divide it have their own class."""

    keeps_modes: bool = True
    """Whether an optimizer may have other weights in training than to evaluate, see `danling.optim.state`."""

    def __init__(self, runner: TorchRunner) -> None:
        self.runner = runner
        self._converted: set[str] = set()
        """Weights whose dtype is another one than in the checkpoint that was loaded."""

    # Model

    def model_state(self) -> dict[str, Any]:
        """Return parameters and persistent buffers by canonical name. Called on all ranks.

        Where the optimizer has other weights in training than to evaluate, those to evaluate are returned, as copies: readers of a
        checkpoint expect them. Those of training are in the state of the optimizer.
        """
        copies = bool(modal(self.runner.optimizer))
        with evaluation_weights(self.runner.optimizer):
            state = self.runner.unwrapped_model.state_dict()
            return {
                canonical_name(name): value.clone() if copies else value
                for name, value in state.items()
            }

    def paths(self) -> list[str]:
        """Return the dotted paths of weights and averages in a checkpoint of this model, also of one that has none saved yet."""
        names = [canonical_name(name) for name in self.runner.unwrapped_model.state_dict()]
        return [f"{component}.{name}" for component in ("model", "ema.weights") for name in names]

    def _is_left_out(self, component: str, path: str) -> bool:
        """Whether a weight that a partial state lacks was to be left out. Without an entry for the component, any may be missing."""
        excluded = self.runner.run_state.excluded
        return not excluded.parts_of(component) or excluded.leaves_out(path)

    def load_model(self, state: Mapping[str, object], *, partial: bool = False) -> None:
        """Load weights by canonical name; see `TorchRunner.load_model`. Called on all ranks."""
        model = self.runner.unwrapped_model
        names = {canonical_name(name): name for name in model.state_dict()}
        prefix = "module."
        if (
            names
            and all(name.startswith(prefix) for name in names)
            and not any(name in names for name in state)
        ):
            # Of a model whose only part is called `module`, as what wraps a model calls it too.
            state = {f"{prefix}{name}": value for name, value in state.items()}
        # Before keys are compared: a file of safetensors has one name of each tied weight.
        state = with_tied_names(model, state)
        missing = sorted(names.keys() - state.keys())
        unexpected = sorted(state.keys() - names.keys())
        if partial:
            missing = [name for name in missing if not self._is_left_out("model", f"model.{name}")]
        if unexpected or missing:
            raise CheckpointMismatch(
                f"Expected the weights of this model. Received: missing={missing[:5]}, unexpected={unexpected[:5]} "
                f"({len(missing)} and {len(unexpected)} in all). Load into the model they were saved from, or rename the entries. To keep "
                f"what is new in this model, or to leave out what it lacks, add {entries_of('model', missing + unexpected)} to "
                "checkpoint.exclude_from_loading."
            )
        # Checked here, since torch's error for a wrong shape does not name the entry that leaves the weight out.
        here = model.state_dict()
        sized = _sized_by_modules(model)
        fixed = {
            name: value
            for name, value in state.items()
            if names[name].rpartition(".")[0] not in sized
        }
        _check_shapes({name: here[names[name]] for name in fixed}, fixed)
        # torch converts silently. The optimizer's state of these weights is converted with them.
        dtypes = {name: getattr(value, "dtype", None) for name, value in state.items()}
        self._converted = {
            name for name in dtypes if dtypes[name] != getattr(here[names[name]], "dtype", None)
        }
        try:
            model.load_state_dict(
                {names[name]: value for name, value in state.items()}, strict=not partial
            )
        except RuntimeError as error:
            raise CheckpointMismatch(
                f"Expected weights that fit this model. Received: {error}"
            ) from error

    # EMA

    def load_ema(self, state: Mapping[str, Any], *, partial: bool = False) -> None:
        """Restore the averaged weights; see `TorchRunner.load_ema`. Called on all ranks."""
        ema = self.averages()
        weights = state.get("weights")
        if partial and weights is not None:
            present = {
                canonical_name(name): value
                for name, value in self.runner.unwrapped_model.state_dict().items()
            }
            new = [name for name in ema.weights if self._is_left_out("ema", f"ema.weights.{name}")]
            begun = {name: present[name] for name in new if name in present}
            state = {**state, "weights": {**begun, **weights}}
        ema.load_state_dict(state)

    def averages(self) -> EMA:
        """Return the EMA of the weights, or refuse if there is none."""
        ema: EMA | None = self.runner.ema
        if ema is None:
            raise CheckpointMismatch(
                "Expected averaged weights to restore. Received: none, since ema.enabled=False. Set it, or leave the state out."
            )
        return ema

    # Optimizer

    def optimizer_state(self) -> dict[str, Any]:
        """Return the optimizer's state by parameter name. Called on all ranks."""
        optimizer = self.runner.optimizer
        state = named_state_dict(optimizer, self.runner.named_parameters())
        apart = {id(parameter) for parameter in training_weights(optimizer)}
        if apart:
            # Copies, as those of the model are: loading both in this process writes into the parameters first.
            trained = {
                name: p.detach().clone()
                for name, p in self.runner.named_parameters()
                if id(p) in apart
            }
            state[_TRAINED] = {canonical_name(name): value for name, value in trained.items()}
        return state

    def load_optimizer(self, state: Mapping[str, object]) -> None:
        """Restore the optimizer's state by parameter name. Called on all ranks."""
        try:
            named = self.runner.named_parameters()
            load_named_state_dict(self.runner.optimizer, state, named, converted=self._converted)
        except ValueError as error:
            raise CheckpointMismatch(str(error)) from error
        trained: Mapping[str, Any] = state.get(_TRAINED, {}) if state["state"] else {}  # type: ignore[assignment]
        parameters = {
            canonical_name(name): parameter for name, parameter in self.runner.named_parameters()
        }
        put_training_weights(
            self.runner.optimizer,
            [(parameters[name], value) for name, value in trained.items() if name in parameters],
        )

    # What a checkpoint is read into

    def template(self) -> dict[str, Any] | None:
        """Return a state that says how tensors are laid out on this rank; `None` where they are read whole."""
        return None


def _sized_by_modules(model: nn.Module) -> set[str]:
    """Return the names of modules that may give their tensors another size as they load: those of observers follow from what they saw."""
    loads = {name: type(module)._load_from_state_dict for name, module in model.named_modules()}
    return {
        name for name, load in loads.items() if not load.__module__.startswith("torch.nn.modules.")
    }


def _check_shapes(here: Mapping[str, object], state: Mapping[str, object]) -> None:
    """Refuse weights of other shapes, with the entries that leave them out of the load."""
    shapes = {
        name: (getattr(state[name], "shape", None), getattr(here[name], "shape", None))
        for name in state
    }
    others = {
        name: pair for name, pair in shapes.items() if None not in pair and pair[0] != pair[1]
    }
    if others:
        listed = ", ".join(
            f"{name} of {tuple(a or ())}, here {tuple(b or ())}"
            for name, (a, b) in list(others.items())[:5]
        )
        raise CheckpointMismatch(
            f"Expected weights of this model's shapes. Received: {listed} ({len(others)} in all). To keep those of the new model, add "
            f"{entries_of('model', others)} to checkpoint.exclude_from_loading."
        )


# Frozen weights: left out of checkpoints, and known again by a digest


class FrozenWeights:
    """Separates trained from frozen parts of a model.

    A parameter that required a gradient at construction or at any save of the run counts as trained, also where it was frozen afterwards;
    so do buffers. Frozen weights must not change: every save reads them once, and compares a sum over the bits and
    their places.

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
        """Whether the current save leaves frozen weights out."""
        return bool(self._runner.config.checkpoint.trainable_only)

    def note_trained(self) -> None:
        """Count what requires a gradient now as trained. May be called on one rank."""
        named = self._runner.unwrapped_model.named_parameters()
        self._trained |= {
            canonical_name(name) for name, parameter in named if parameter.requires_grad
        }

    # Saving

    def saved(self, weights: Mapping[str, object]) -> Mapping[str, object]:
        """Return the weights that are saved."""
        return self._only_trained(weights) if self.leaves_out() else weights

    def _only_trained(self, state: Mapping[str, object]) -> dict[str, object]:
        frozen = self._frozen()
        # Another name of a frozen weight, as that of a tied one, is as frozen.
        tied = {
            local_part(value).data_ptr() for value in frozen.values() if local_part(value).numel()
        }
        return {
            name: value
            for name, value in state.items()
            if name not in frozen
            and not (
                isinstance(value, Tensor)
                and local_part(value).numel()
                and local_part(value).data_ptr() in tied
            )
        }

    def identity(self) -> dict[str, object]:
        """Return the digest of the frozen weights and the names of the trained parts. Called on all ranks."""
        frozen = self._frozen()
        sums = {name: bit_sum(tensor) for name, tensor in frozen.items()}
        changed = [name for name, value in sums.items() if self._sums.get(name, value) != value]
        if changed:
            raise ValueError(
                "Expected weights without a gradient to stay as they are with checkpoint.trainable_only=true. Received: other values of "
                f"{', '.join(changed[:5])} ({len(changed)} in all) than at the first save, or when the run was resumed. Register "
                "weights that you change by hand, such as a teacher's, as buffers, or set checkpoint.trainable_only=false."
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
        trained = set(stored["trained"])
        base = self._runner.config.pretrained
        frozen = self._without(trained)
        found = digest_of(frozen)
        if found != stored["sha256"] and base:
            # Only now, since reading them takes as long as reading a checkpoint. The run may have begun from these.
            self._runner.load_pretrained(base)
            frozen = self._without(trained)
            found = digest_of(frozen)
        if found != stored["sha256"]:
            raise CheckpointMismatch(
                f"Expected the frozen weights that the checkpoint was made on, with the SHA-256 {stored['sha256'][:12]}. Received: "
                f"{found[:12]} over {len(frozen)} weights. checkpoint.trainable_only=true has kept what was trained alone: make the model "
                "from the same base, in the same precision, with the same parts frozen, or name the file of the base in `pretrained`, "
                "with pretrained_averages=false if the run began from its trained weights."
            )
        self._trained |= trained
        self._sums = {name: bit_sum(tensor) for name, tensor in frozen.items()}
        self._digest = frozenset(frozen), found

    def loadable(
        self, state: Mapping[str, Any], present: Callable[[], Mapping[str, Any]]
    ) -> Mapping[str, Any]:
        """Return the weights to load: what a checkpoint lacks is as `present` returns it. Called on all ranks."""
        if self.leaves_out() and not self._stored_without:
            # Frozen after they were trained, or changed by hand: a model that is made from the base lacks such values.
            here = present()
            names = [name for name in self._frozen() if name in state and name in here]
            self._trained |= {
                name
                for name in names
                if digest_of({"": state[name]}) != digest_of({"": here[name]})
            }
        return self.completed(state, present()) if self._stored_without else state

    def completed(self, state: Mapping[str, Any], here: Mapping[str, Any]) -> Mapping[str, Any]:
        """Add the frozen weights of `here` to a state if the checkpoint has only trained weights, and return it."""
        if not self._stored_without:
            return state
        kept = self._only_trained(here)
        return {**{name: value for name, value in here.items() if name not in kept}, **state}

    def _without(self, trained: Collection[str]) -> dict[str, Tensor]:
        named = (
            (canonical_name(name), p) for name, p in self._runner.unwrapped_model.named_parameters()
        )
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
    # Values of 16 bytes, such as complex128, count byte by byte.
    values = flat.view(_INTEGERS.get(flat.element_size(), torch.uint8))
    # An odd number for each place. They follow no line, on which several values could change places without a trace.
    mixed = (
        torch.arange(1, min(values.numel(), _PIECE) + 1, dtype=torch.int64, device=values.device)
        * _ODD
    )
    mixed = (mixed ^ (mixed >> 29)) * _ODD
    factors = (mixed ^ (mixed >> 32)) | 1
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for piece in torch.split(values, _PIECE):
        # The sum so far is multiplied as well, so that equal places of two pieces count differently.
        total = total * _ODD + (piece * factors[: piece.numel()]).sum()
    return int(total)
