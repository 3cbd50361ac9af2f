"""Training on a DeepSpeed engine: ZeRO and offload under the loops, decisions and checkpoint names of the training core."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from danling.deepspeed import engine as engines
from danling.deepspeed.reduction import EngineReduction
from danling.training import GradientReduction

from .deepspeed_state import DeepSpeedState


class DeepSpeedRunner(DeepSpeedState):
    """Trains on a DeepSpeed engine, with ZeRO 0 to 3 and offload as `config.deepspeed` says.

    The engine's configuration is derived from the runner's own keys and `config.deepspeed` is merged over it; a contradiction is an error
    that names both keys. The optimizer is the one set in `__init__`, that of `config.optim`, or that of `config.deepspeed.optimizer`;
    `self.optimizer` is the optimizer inside the engine, whose learning rates a scheduler moves. The scheduler may be DeepSpeed's too.

    Weighing, finiteness, clipping and skipping are those of `TorchRunner`: the engine averages gradients, divides them over the ranks and
    steps. `self.model` is the engine after construction, `self.unwrapped_model` the bare model.

    Under ZeRO 3 the weights are divided over the ranks: every forward is a collective, in evaluation too, where a rank that is out of
    batches takes part with a batch that does not count. Outside, `with runner.whole_weights():` makes them whole; enter it on all ranks.

    Raises:
        ImportError: If DeepSpeed is not installed: `pip install 'danling[deepspeed]'`.
    """

    # Update

    def build_reduction(self) -> GradientReduction:
        """Return what asks the engine for the gradient, and lets it update."""
        return EngineReduction(
            self.optimizer,
            self.named_parameters,
            self.precision.scaler,
            engine=self.engine,
            domain=self.data_domain,
            device=self.device,
            max_norm=self._max_norm,
            broadcast_buffers=self.equalize_buffers,
        )

    def update_averages(self) -> None:
        """Let the averaged weights follow the update, for which the weights are made whole."""
        with self.whole_weights():
            super().update_averages()

    # Evaluation

    @property
    def _evaluates_together(self) -> bool:
        """Whether a forward is a collective: under ZeRO 3, on several ranks."""
        return self.divides_weights and self.distributed

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Put the averaged weights into the model, and the trained ones back on exit. Enter on all ranks."""
        applied = self.ema.applied()
        with engines.gathered(self.engine, modify=True):
            applied.__enter__()
        try:
            yield
        finally:
            with engines.gathered(self.engine, modify=True):
                applied.__exit__(None, None, None)
