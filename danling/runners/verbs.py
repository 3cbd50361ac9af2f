"""The verbs of a runner: what a stack implements and a user overrides."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from danling.metrics import Meters
    from danling.training import UpdateOutcome

Results = dict[int, dict[str, dict[str, float]]]
"""Evaluated and trained figures by completed epoch or global step, then by split."""

Splits = str | Sequence[str] | None
"""One split, several, or `None` for those that the configuration or their names say."""


class RunnerVerbs:
    """Every method that a stack provides. A stack that lacks one raises `NotImplementedError`, which names it."""

    # Training

    def train(self, train_splits: Splits = None, evaluate_splits: Splits = None) -> Results:
        """Train to the end of the budget, and return all results."""
        raise self._missing("train")

    def train_epochs(self, train_splits: Splits = None, evaluate_splits: Splits = None) -> Results:
        """Train epoch by epoch."""
        raise self._missing("train_epochs")

    def train_steps(self, train_splits: Splits = None, evaluate_splits: Splits = None) -> Results:
        """Train update by update."""
        raise self._missing("train_steps")

    def train_epoch(self, split: str = "train") -> dict[str, float]:
        """Train one pass over one split, and return its figures."""
        raise self._missing("train_epoch")

    def train_step(self, data: Any) -> tuple[Any, Any]:
        """Run one micro-batch forward and backward, and return prediction and loss."""
        raise self._missing("train_step")

    def backward(self, loss: Tensor) -> None:
        """Back-propagate the mean-reduced loss of a micro-batch, 0-dim."""
        raise self._missing("backward")

    def step(self) -> UpdateOutcome:
        """Close the accumulation window and decide its update."""
        raise self._missing("step")

    def optimizer_step(self) -> None:
        """Apply a committed update."""
        raise self._missing("optimizer_step")

    def train_context(self) -> AbstractContextManager[Any]:
        """Return the context of the forward and backward of a micro-batch."""
        raise self._missing("train_context")

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return the context of a forward."""
        raise self._missing("forward_context")

    def compute_loss(self, pred: Any, target: Any) -> Tensor:
        """Return the loss of a prediction, 0-dim."""
        raise self._missing("compute_loss")

    def batch_weight(self, data: Any, target: Any) -> float | Tensor:
        """Return what the loss of a batch is averaged over."""
        raise self._missing("batch_weight")

    # Evaluation and inference

    def evaluate(self, splits: Splits = None) -> dict[str, dict[str, float]]:
        """Evaluate splits, and return their figures."""
        raise self._missing("evaluate")

    def evaluate_epoch(self, split: str) -> dict[str, float]:
        """Evaluate all of one split."""
        raise self._missing("evaluate_epoch")

    def evaluate_steps(self, split: str, steps: int | None = None) -> dict[str, float]:
        """Evaluate a bounded number of batches of one split."""
        raise self._missing("evaluate_steps")

    def evaluate_step(self, data: Any) -> tuple[Any, Any]:
        """Evaluate one batch, and return prediction and loss."""
        raise self._missing("evaluate_step")

    def summarize(self, split: str, totals: Meters) -> dict[str, float]:
        """Return the figures of an evaluation."""
        raise self._missing("summarize")

    @overload
    def infer(self, split: str | None = None, *, stream: Literal[False] = False) -> list[Any]: ...
    @overload
    def infer(self, split: str | None = None, *, stream: Literal[True]) -> Iterator[Any]: ...
    def infer(self, split: str | None = None, *, stream: bool = False) -> list[Any] | Iterator[Any]:
        """Predict every sample of a split."""
        raise self._missing("infer")

    def infer_step(self, data: Any) -> Any:
        """Return the prediction of one batch."""
        raise self._missing("infer_step")

    # Construction

    def materialize_model(self) -> None:
        """Move, compile and wrap the model."""
        raise self._missing("materialize_model")

    def build_optimizer(self) -> Optimizer:
        """Return the optimizer of the configuration."""
        raise self._missing("build_optimizer")

    def build_scheduler(self) -> Any:
        """Return the scheduler of the configuration."""
        raise self._missing("build_scheduler")

    def init_fault_tolerance(self) -> None:
        """Join the fault-tolerance service when `config.ft.enabled`; nothing to do unless a stack says so."""

    # Loading, each a part of a checkpoint

    def load_pretrained(self, checkpoint: str | Path) -> None:
        """Load only the model of a checkpoint."""
        raise self._missing("load_pretrained")

    def load_model(self, state: Mapping[str, Any], *, partial: bool = False) -> None:
        """Load model weights by name."""
        raise self._missing("load_model")

    def load_ema(self, state: Mapping[str, Any], *, partial: bool = False) -> None:
        """Restore the averaged weights."""
        raise self._missing("load_ema")

    def load_optimizer(self, state: Mapping[str, Any]) -> None:
        """Restore the optimizer."""
        raise self._missing("load_optimizer")

    def load_scheduler(self, state: Mapping[str, Any]) -> None:
        """Restore the scheduler."""
        raise self._missing("load_scheduler")

    def _missing(self, verb: str) -> NotImplementedError:
        return NotImplementedError(
            f"Expected {type(self).__name__} to implement `{verb}`. Subclass TorchRunner, ParallelRunner, DeepSpeedRunner "
            f"or Runner, or override `{verb}`."
        )
