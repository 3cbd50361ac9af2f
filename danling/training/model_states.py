"""The states of model, criterion, EMA, optimizer and schedule, by the names of the bare model, and how they are put back."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from danling.checkpoints.errors import CheckpointMismatch
from danling.checkpoints.exclusion import ExcludedFromLoading
from danling.optim.modes import evaluation_weights, modal, put_training_weights, training_weights
from danling.optim.state import load_named_state_dict, named_state_dict
from danling.utils.tensors import canonical_name, floating_dtype

from .ema import EMA

if TYPE_CHECKING:
    from danling.runners.torch_runner import TorchRunner

_TRAINED = "train_weights"
"""Key of the optimizer's state under which the weights of training are, where those of the model are others."""


class ModelStates:
    """Reads and writes the states of a model that this rank holds whole; stacks that divide it have their own class."""

    keeps_modes: bool = True
    """Whether an optimizer may have other weights in training than to evaluate, see `danling.optim.modes`."""

    def __init__(self, runner: TorchRunner) -> None:
        self.runner = runner

    # Model

    def model_state(self) -> dict[str, Any]:
        """Return parameters and persistent buffers by canonical name. Called on all ranks.

        Where the optimizer has other weights in training than to evaluate, those to evaluate are returned, as copies: readers of a
        checkpoint expect them. Those of training are in the state of the optimizer.
        """
        if not modal(self.runner.optimizer):
            return {canonical_name(name): value for name, value in self.runner.unwrapped_model.state_dict().items()}
        with evaluation_weights(self.runner.optimizer):
            return {
                canonical_name(name): value.clone() for name, value in self.runner.unwrapped_model.state_dict().items()
            }

    def load_model(self, state: Mapping[str, object], *, partial: bool = False) -> None:
        """Load weights by canonical name; see `TorchRunner.load_model`. Called on all ranks."""
        model = self.runner.unwrapped_model
        names = {canonical_name(name): name for name in model.state_dict()}
        state = _under_own_module(state, names)
        missing = sorted(names.keys() - state.keys())
        unexpected = sorted(state.keys() - names.keys())
        if unexpected or (missing and not partial):
            raise CheckpointMismatch(
                f"Expected the weights of this model. Received: missing={missing[:5]}, unexpected={unexpected[:5]} "
                f"({len(missing)} and {len(unexpected)} in all). {_mend_names(missing, unexpected)}"
            )
        here = model.state_dict()
        _check_shapes({name: here[names[name]] for name in state}, state)
        try:
            model.load_state_dict({names[name]: value for name, value in state.items()}, strict=not partial)
        except RuntimeError as error:
            raise CheckpointMismatch(f"Expected weights that fit this model. Received: {error}") from error

    # EMA

    def load_ema(self, state: Mapping[str, Any], *, partial: bool = False) -> None:
        """Restore the averaged weights; see `TorchRunner.load_ema`. Called on all ranks."""
        ema = self.averages()
        weights = state.get("weights")
        if partial and weights is not None:
            present = {canonical_name(name): value for name, value in self.runner.unwrapped_model.state_dict().items()}
            begun = {name: value for name, value in present.items() if name in ema.weights}
            state = {**state, "weights": {**begun, **weights}}
        try:
            ema.load_state_dict(state)
        except KeyError as error:
            raise CheckpointMismatch(str(error.args[0])) from error

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
            trained = {name: p.detach().clone() for name, p in self.runner.named_parameters() if id(p) in apart}
            state[_TRAINED] = {canonical_name(name): value for name, value in trained.items()}
        return state

    def load_optimizer(self, state: Mapping[str, object]) -> None:
        """Restore the optimizer's state by parameter name. Called on all ranks."""
        try:
            load_named_state_dict(self.runner.optimizer, state, self.runner.named_parameters())
        except ValueError as error:
            raise CheckpointMismatch(str(error)) from error
        trained: Mapping[str, Any] = state.get(_TRAINED, {}) if state["state"] else {}  # type: ignore[assignment]
        named = {canonical_name(name): parameter for name, parameter in self.runner.named_parameters()}
        put_training_weights(
            self.runner.optimizer, [(named[name], value) for name, value in trained.items() if name in named]
        )

    # What a checkpoint is read into

    def opened(self, payload: Mapping[str, object], excluded: ExcludedFromLoading) -> Mapping[str, object]:
        """Return a payload whose components can be taken apart where parts of them are left out of the load."""
        return payload

    def template(self) -> dict[str, Any] | None:
        """Return a state that says how tensors are laid out on this rank; `None` where they are read whole."""
        return None


def _under_own_module(state: Mapping[str, object], names: Collection[str]) -> Mapping[str, object]:
    """Return weights under the names of a model whose only part is called `module`, as what wraps a model calls it too."""
    prefix = "module."
    wrapped = bool(names) and all(name.startswith(prefix) for name in names)
    if not wrapped or any(name in names for name in state):
        return state
    return {f"{prefix}{name}": value for name, value in state.items()}


def _mend_names(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    """Name the prefix behind which the checkpoint has all that is missing, as checkpoints of Lightning do."""
    first = missing[0] if missing else ""
    for name in unexpected:
        prefix = name.removesuffix(first)
        if missing and name.endswith(f".{first}") and {f"{prefix}{other}" for other in missing} <= {*unexpected}:
            return (
                f"The checkpoint has these names behind the prefix {prefix!r}. Save its weights without it: "
                f"torch.save({{name[{len(prefix)}:]: weight for name, weight in torch.load(path)['state_dict'].items() "
                f"if name.startswith({prefix!r})}}, 'weights.pth')."
            )
    return "Load into the model they were saved from."


def _check_shapes(here: Mapping[str, object], state: Mapping[str, object]) -> None:
    """Refuse weights of other shapes, with the entries that leave them out of the load."""
    shapes = {name: (getattr(state[name], "shape", None), getattr(here[name], "shape", None)) for name in state}
    others = {name: pair for name, pair in shapes.items() if None not in pair and pair[0] != pair[1]}
    if others:
        listed = ", ".join(
            f"{name} of {tuple(a or ())}, here {tuple(b or ())}" for name, (a, b) in list(others.items())[:5]
        )
        entries = sorted({f"model.{name.rpartition('.')[0] or name}" for name in others})
        raise CheckpointMismatch(
            f"Expected weights of this model's shapes. Received: {listed} ({len(others)} in all). To keep those of the new model, add "
            f"{', '.join(map(repr, entries[:5]))} to checkpoint.exclude_from_loading."
        )


def criterion_state(criterion: object) -> dict[str, object]:
    """Return the parameters and persistent buffers of a criterion; empty where it has none, or is no module."""
    return dict(criterion.state_dict()) if isinstance(criterion, nn.Module) else {}


def load_criterion(criterion: Any, state: Mapping[str, object]) -> None:
    """Restore the parameters and buffers of a criterion."""
    try:
        criterion.load_state_dict(dict(state))
    except RuntimeError as error:
        raise CheckpointMismatch(f"Expected the state of this criterion. Received: {error}") from error


def cast_floating(weights: Mapping[str, Tensor], name: str | None) -> dict[str, Tensor]:
    """Return the weights with the floating ones in the dtype that `checkpoint.export_dtype` names; `None` keeps theirs."""
    dtype = None if name is None else floating_dtype(name, key="checkpoint.export_dtype")
    return {key: w.to(dtype) if dtype is not None and w.is_floating_point() else w for key, w in weights.items()}


def weights_to_export(
    config: Mapping[str, object], model: Mapping[str, Tensor], ema: EMA | None, *, dtype: str | None, version: int
) -> dict[str, object]:
    """Return the payload of an export."""
    payload: dict[str, Any] = {"format_version": version, "runner": config, "model": cast_floating(model, dtype)}
    if ema is not None:
        payload["ema"] = {"weights": cast_floating(ema.weights, dtype), "num_updates": ema.num_updates}
    return payload
