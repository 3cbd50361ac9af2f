"""What a training saves: its components, and what `state` has besides counters, as parts in the order in which they are restored."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from danling.checkpoints.errors import CheckpointMismatch

from .carry import map_carry
from .model_states import criterion_state, load_criterion, remainder_of_optimizer
from .run_state import StatePart

if TYPE_CHECKING:
    from danling.runners.torch_runner import TorchRunner


def component_parts(runner: TorchRunner) -> list[StatePart]:
    """Return frozen weights, model, criterion, averages, optimizer and scheduler."""
    weights = _Weights(runner)

    def load_optimizer(state: Mapping[str, object], excluded: Collection[str]) -> None:
        runner.load_optimizer(remainder_of_optimizer(state, excluded, runner.optimizer_state_dict))

    def load_scheduler(state: Mapping[str, object], excluded: Collection[str]) -> None:
        kept = runner.scheduler.state_dict() if any(path.startswith("scheduler.") for path in excluded) else {}
        runner.load_scheduler({**kept, **state})

    return [
        StatePart("frozen", weights.frozen, weights.check_frozen, exists=weights.leaves_out, optional=True),
        StatePart("model", weights.model, weights.load_model),
        StatePart(
            "criterion",
            lambda: criterion_state(runner.criterion),
            lambda state, _: load_criterion(runner.criterion, state),
            exists=lambda: bool(criterion_state(runner.criterion)),
        ),
        StatePart("ema", weights.averages, weights.load_averages, exists=lambda: runner.ema is not None),
        StatePart(
            "optimizer",
            lambda: runner.optimizer_state_dict(),
            load_optimizer,
            exists=lambda: runner.optimizer is not None,
        ),
        StatePart(
            "scheduler",
            lambda: runner.scheduler.state_dict(),
            load_scheduler,
            exists=lambda: runner.scheduler is not None,
        ),
    ]


class _Weights:
    """Model and averages in a checkpoint, whole or without frozen weights.

    The checkpoint says which of the two was saved, and `checkpoint.trainable_only` what will be saved: a run may change between them.
    """

    def __init__(self, runner: TorchRunner) -> None:
        self._runner = runner
        self._stored_without = False
        """Whether the checkpoint that is being loaded has only trained weights."""

    def leaves_out(self) -> bool:
        """Whether frozen weights are left out of what is saved now."""
        return bool(self._runner.config.checkpoint.trainable_only)

    def frozen(self) -> dict[str, object]:
        """Return what identifies the frozen weights."""
        return self._runner._parts.frozen.identity()

    def check_frozen(self, state: Mapping[str, Any], excluded: Collection[str]) -> None:
        """Compare the frozen weights with those that a checkpoint was made on, if it has only trained weights."""
        self._stored_without = bool(state) or "frozen" in excluded
        if state:
            self._runner._parts.frozen.check(state, self._load_base)

    def _load_base(self) -> bool:
        """Load the weights that `config.pretrained` names, from which the run began, and return whether it names some."""
        base = self._runner.config.pretrained
        if base:
            self._runner.load_pretrained(base)
        return bool(base)

    def model(self) -> Mapping[str, object]:
        """Return the weights that are saved."""
        return self._to_save(self._runner.model_state_dict())

    def load_model(self, state: Mapping[str, object], excluded: Collection[str]) -> None:
        """Restore weights, of which the frozen ones are those that the model was made with."""
        frozen = self._runner._parts.frozen
        if self._stored_without:
            state = frozen.completed(state, self._runner.model_state_dict())
        elif self.leaves_out():
            frozen.note_moved(state, self._runner.model_state_dict())
        self._runner.load_model(state, partial=any(path.startswith("model.") for path in excluded))

    def averages(self) -> Mapping[str, object]:
        """Return the averages that are saved."""
        state = self._runner.ema.state_dict()
        return {**state, "weights": self._to_save(state["weights"])}

    def load_averages(self, state: Mapping[str, object], excluded: Collection[str]) -> None:
        """Restore averages, of which those of frozen weights are as they are here."""
        ema = self._runner.ema
        averages: dict[str, Any] = {"weights": {}, "num_updates": ema.num_updates, **state}
        if self._stored_without:
            averages["weights"] = self._runner._parts.frozen.completed(averages["weights"], ema.weights)
        self._runner.load_ema(averages, partial=any(path.startswith("ema.weights") for path in excluded))

    def _to_save(self, weights: Mapping[str, object]) -> Mapping[str, object]:
        return self._runner._parts.frozen.without(weights) if self.leaves_out() else weights


def progress_parts(runner: TorchRunner) -> list[StatePart]:
    """Return what a training adds to the entry `state` of a checkpoint."""
    parts = runner._parts

    def load_counters(stored: Mapping[str, object], _: Collection[str]) -> None:
        runner.state.load_train(stored)
        runner.window.agreed_reference = runner.state.train.weight_reference

    def load_train_metrics(seen: Mapping[str, Any], _: Collection[str]) -> None:
        assert parts.train_metrics is not None
        parts.train_metrics.load_state_dict(seen if runner.placement.metrics.rank == 0 else {})

    return [
        # Takes the place of the part `train` of `BaseRunner`, which knows no window and so no reference weight.
        StatePart(
            "train",
            lambda: {**asdict(runner.state.train), "weight_reference": runner.window.agreed_reference},
            load_counters,
        ),
        StatePart.attribute(parts.results, "open", key="open_result", convert=dict),
        # `bare` is what checkpoints call batches without a target.
        StatePart(
            "bare",
            lambda: parts.loss.targetless,
            lambda known, _: setattr(parts.loss, "targetless", known),
            default=lambda: None,
        ),
        StatePart(
            "meters",
            lambda: runner.meters.state_dict(),
            # Sums over all ranks were saved, so only one of the ranks whose sums are added may restore them.
            lambda sums, _: runner.meters.load_state_dict(sums if runner.placement.metrics.rank == 0 else {}),
            default=dict,
        ),
        # Merged over all ranks, as the meters are; filled in by `state_dict`.
        StatePart(
            "train_metrics", dict, load_train_metrics, exists=lambda: parts.train_metrics is not None, default=dict
        ),
        # Filled in by `state_dict` with what all ranks carry.
        StatePart("carry", lambda: None, lambda stored, _: load_carry(runner, stored), default=lambda: None),
        StatePart.stateful("losses", lambda: parts.losses, resets=True),
        StatePart.stateful("scores", lambda: runner.standing.board),
        StatePart.stateful("scaler", lambda: runner.precision.scaler),
        StatePart.stateful("phases", lambda: runner._phases),
    ]


def carry_of_all(runner: TorchRunner) -> dict[str, Any] | None:
    """Return what each rank carries, on the CPU; `None` where none carries anything. Called on all ranks."""
    ranks = runner.world.gather_objects(map_carry(runner.carry, lambda tensor: tensor.detach().cpu()))
    if all(each is None for each in ranks):
        return None
    return {"replicas": runner.placement.data_replicas, "ranks": ranks}


def load_carry(runner: TorchRunner, stored: Mapping[str, Any] | None) -> None:
    """Restore what this rank carries, on its device. Called after the positions in the loaders are restored."""
    runner.carry = None
    if stored is None:
        return
    sources = [runner.source(split) for split in runner.train_splits]
    if stored["replicas"] == runner.placement.data_replicas and len(stored["ranks"]) == runner.world_size:
        runner.carry = map_carry(stored["ranks"][runner.rank], lambda tensor: tensor.to(runner.device))
    elif any(source.consumed and source.remaining_batches() != 0 for source in sources):
        raise CheckpointMismatch(
            f"Expected {len(stored['ranks'])} ranks, {stored['replicas']} of which read different data: each has a self.carry of its "
            f"own in the middle of this pass. Received: {runner.world_size}, of which {runner.placement.data_replicas} read different "
            "data. Go on with the same number, or from a checkpoint at the end of a pass."
        )
