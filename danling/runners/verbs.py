"""The verbs of a runner: what a stack implements and a user overrides."""

from __future__ import annotations

from typing import Any


class RunnerVerbs:
    """Every method that a stack provides. A stack that lacks one raises `NotImplementedError`, which names it."""

    # Execution

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train to the end of the budget. Called on all ranks."""
        raise self._missing("train")

    def train_epochs(self, *args: Any, **kwargs: Any) -> Any:
        """Train epoch by epoch. Called on all ranks."""
        raise self._missing("train_epochs")

    def train_epoch(self, *args: Any, **kwargs: Any) -> Any:
        """Train one pass over one split. Called on all ranks."""
        raise self._missing("train_epoch")

    def train_steps(self, *args: Any, **kwargs: Any) -> Any:
        """Train update by update. Called on all ranks."""
        raise self._missing("train_steps")

    def train_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run one micro-batch forward and backward. Called on all ranks."""
        raise self._missing("train_step")

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        """Back-propagate a loss. Called on all ranks."""
        raise self._missing("backward")

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Close the accumulation window and decide its update. Called on all ranks."""
        raise self._missing("step")

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Apply a committed update. Called on all ranks."""
        raise self._missing("optimizer_step")

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate whole splits. Called on all ranks."""
        raise self._missing("evaluate")

    def evaluate_epoch(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate all of one split. Called on all ranks."""
        raise self._missing("evaluate_epoch")

    def evaluate_steps(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate a bounded number of batches of one split. Called on all ranks."""
        raise self._missing("evaluate_steps")

    def evaluate_step(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate one batch. Called on all ranks."""
        raise self._missing("evaluate_step")

    def infer(self, *args: Any, **kwargs: Any) -> Any:
        """Predict every sample of a split. Called on all ranks."""
        raise self._missing("infer")

    def infer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Predict one batch. Called on all ranks."""
        raise self._missing("infer_step")

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Return the loss of a prediction. Called on all ranks."""
        raise self._missing("compute_loss")

    def batch_weight(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the loss of a batch is averaged over. Called on all ranks."""
        raise self._missing("batch_weight")

    def summarize(self, *args: Any, **kwargs: Any) -> Any:
        """Return the figures of an evaluation. Called on all ranks."""
        raise self._missing("summarize")

    # Checkpoints

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the full state. Called on all ranks."""
        raise self._missing("state_dict")

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Restore a full state. Called on all ranks."""
        raise self._missing("load_state_dict")

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Save the full state. Called on all ranks."""
        raise self._missing("save_checkpoint")

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Restore the full state of a checkpoint. Called on all ranks."""
        raise self._missing("load_checkpoint")

    def load_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """Load only the model of a checkpoint. Called on all ranks."""
        raise self._missing("load_pretrained")

    def read_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Return the payload of a checkpoint. Called on all ranks."""
        raise self._missing("read_checkpoint")

    def load_model(self, *args: Any, **kwargs: Any) -> Any:
        """Load model weights. Called on all ranks."""
        raise self._missing("load_model")

    def load_ema(self, *args: Any, **kwargs: Any) -> Any:
        """Restore the averaged weights. Called on all ranks."""
        raise self._missing("load_ema")

    def load_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Restore the optimizer. Called on all ranks."""
        raise self._missing("load_optimizer")

    def load_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        """Restore the scheduler. Called on all ranks."""
        raise self._missing("load_scheduler")

    def load_dataloaders(self, *args: Any, **kwargs: Any) -> Any:
        """Restore the position in the loaders. Called on all ranks."""
        raise self._missing("load_dataloaders")

    # Construction

    def materialize_model(self, *args: Any, **kwargs: Any) -> Any:
        """Move, compile and wrap the model. Called on all ranks."""
        raise self._missing("materialize_model")

    def build_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Return the optimizer of the configuration. Called on all ranks."""
        raise self._missing("build_optimizer")

    def build_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        """Return the scheduler of the configuration. Called on all ranks."""
        raise self._missing("build_scheduler")

    def build_datasampler(self, *args: Any, **kwargs: Any) -> Any:
        """Return the sampler of a split. Called on all ranks."""
        raise self._missing("build_datasampler")

    def build_dataloaders(self, *args: Any, **kwargs: Any) -> Any:
        """Build a loader for every dataset that has none. Called on all ranks."""
        raise self._missing("build_dataloaders")

    def train_context(self, *args: Any, **kwargs: Any) -> Any:
        """Return the context of the forward and backward of a micro-batch. Called on all ranks."""
        raise self._missing("train_context")

    def forward_context(self, *args: Any, **kwargs: Any) -> Any:
        """Return the context of a forward. Called on all ranks."""
        raise self._missing("forward_context")

    # Supervision and sources: nothing to do unless a stack says so

    def init_checkpoint_manager(self) -> Any:
        """Build `checkpoint_manager`. A stack provides it. Called on all ranks."""

    def init_fault_tolerance(self) -> Any:
        """Join the fault-tolerance service when `config.ft.enabled`. A stack provides it. Called on all ranks."""

    def init_tensorboard(self) -> Any:
        """Open the TensorBoard writer when `config.tensorboard`. A stack provides it. Called on all ranks."""

    def init_wandb(self) -> Any:
        """Open the Weights & Biases run when `config.wandb.enabled`. A stack provides it. Called on all ranks."""

    def init_signal_handlers(self) -> Any:
        """Watch for SIGTERM, SIGINT and SIGUSR1. A stack provides it. Called on all ranks."""

    def init_heartbeat(self) -> Any:
        """Start the heartbeat when `config.heartbeat.enabled`. A stack provides it. Called on all ranks."""

    def init_garbage_collection(self) -> Any:
        """Pace garbage collection when `config.gc.interval` is set. A stack provides it. Called on all ranks."""

    def restore(self) -> Any:
        """Load what the configuration names as a source. A stack provides it. Called on all ranks."""

    def _missing(self, verb: str) -> NotImplementedError:
        return NotImplementedError(
            f"Expected {type(self).__name__} to implement `{verb}`. Subclass TorchRunner, ParallelRunner, DeepSpeedRunner "
            f"or Runner, or override `{verb}`."
        )
