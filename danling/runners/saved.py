"""What of a torch runner is saved and restored beside its components: counters, sums, scores, and which weights were frozen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import cached_property
from typing import TYPE_CHECKING, Any

from danling.checkpoints.errors import CheckpointMismatch
from danling.training.carry import map_carry
from danling.training.frozen import FrozenWeights
from danling.training.run_state import StatePart
from danling.utils.tensors import canonical_name

if TYPE_CHECKING:
    from .assembly import TorchParts
    from .torch_runner import TorchRunner


class SavedParts:
    """What a torch runner adds to the checkpoints of every runner."""

    def __init__(self, runner: TorchRunner, parts: TorchParts) -> None:
        self.runner = runner
        self._parts = parts

    def check_saving(self) -> None:
        """Refuse to leave frozen weights out of checkpoints where what writes them cannot."""
        runner = self.runner
        if not runner.config.checkpoint.trainable_only:
            return
        several = int(runner.config.parallel.axes.pipeline) != 1 and runner.stack == "parallel"
        if several or runner.stack == "deepspeed":
            received = "parallel.axes.pipeline above 1" if several else "stack='deepspeed'"
            raise ValueError(
                "Expected a stack on which every rank knows all weights for checkpoint.trainable_only=true. Received: "
                f"{received}. Leave it out there; for adapters alone call `runner.save_pretrained(directory)`."
            )

    def note_trained(self) -> None:
        """Count what requires a gradient at construction as trained, also where it is frozen before the first save."""
        if self.runner.config.checkpoint.trainable_only:
            self.frozen.note_trained()

    def load_base(self) -> bool:
        """Load the weights that `config.pretrained` names, from which the run began, and return whether it names some."""
        base = self.runner.config.pretrained
        if base:
            self.runner.load_pretrained(base)
        return bool(base)

    @cached_property
    def frozen(self) -> FrozenWeights:
        runner = self.runner
        return FrozenWeights(
            lambda: ((canonical_name(name), p) for name, p in runner.unwrapped_model.named_parameters())
        )

    def progress_parts(self) -> list[StatePart]:
        """Return what a training adds to the entry `state` of a checkpoint, in the order in which it is restored."""
        runner, parts = self.runner, self._parts

        def load_counters(stored: Mapping[str, object]) -> None:
            runner.state.load_train(stored)
            runner.window.agreed_reference = runner.state.train.weight_reference

        def load_train_metrics(seen: Mapping[str, Any]) -> None:
            assert parts.train_metrics is not None
            parts.train_metrics.load_state_dict(seen if runner.placement.metrics.rank == 0 else {})

        return [
            # Takes the place of the part `train` of `BaseRunner`, which knows no window and so no reference weight.
            StatePart(
                "train",
                lambda: {**asdict(runner.state.train), "weight_reference": runner.window.agreed_reference},
                lambda stored, _: load_counters(stored),
            ),
            StatePart(
                "open_result",
                lambda: dict(parts.results.open),
                lambda stored, _: setattr(parts.results, "open", dict(stored)),
                default=dict,
            ),
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
                "train_metrics",
                dict,
                lambda seen, _: load_train_metrics(seen),
                exists=lambda: parts.train_metrics is not None,
                default=dict,
            ),
            # `state_dict` puts what all ranks carry into its place.
            StatePart("carry", lambda: None, lambda stored, _: self.load_carry(stored), default=lambda: None),
            StatePart.stateful("losses", lambda: parts.losses, resets=True),
            StatePart.stateful("scores", lambda: runner.standing.board),
            StatePart.stateful("scaler", lambda: runner.precision.scaler),
            StatePart.stateful("phases", lambda: runner._phases),
        ]

    def carry_of_all(self) -> dict[str, Any] | None:
        """Return what each rank carries, on the CPU; `None` where none carries anything. Called on all ranks."""
        runner = self.runner
        ranks = runner.world.gather_objects(map_carry(runner.carry, lambda tensor: tensor.detach().cpu()))
        return (
            None
            if all(each is None for each in ranks)
            else {"replicas": runner.placement.data_replicas, "ranks": ranks}
        )

    def load_carry(self, stored: Mapping[str, Any] | None) -> None:
        """Restore what this rank carries, on its device. Called after the positions in the loaders are restored."""
        runner = self.runner
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

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Leave a save in a training out of its speed, and flush the trackers with it."""
        reporter = self.runner._reporter
        with self.runner._session.saving():
            if not self.runner._session.running:
                yield
                return
            with reporter.aside("checkpoint"):
                yield
        reporter.trackers.flush()
