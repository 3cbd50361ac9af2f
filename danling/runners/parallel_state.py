"""What a run on a mesh saves and restores: shards, parts of a model under the names of the whole, one position of the data."""

from __future__ import annotations

from typing import Any

from danling.checkpoints import FileCheckpointManager, TorchDistributedCheckpointManager
from danling.mesh import axes_with
from danling.mesh.model_states import ShardedModelStates
from danling.training.model_states import ModelStates

from .parallel_model import ParallelModel


class ParallelState(ParallelModel):
    """Checkpoints of a run on a mesh. Save, load and `state_dict` are called on all ranks."""

    def manager_class(self) -> Any:
        """Return the class of the checkpoint manager: DCP, or files where every rank holds the whole model. Called on all ranks.

        Raises:
            ValueError: If files are asked for, and a rank holds only a part.
        """
        if self.config.checkpoint.backend != "file":
            return TorchDistributedCheckpointManager
        if self.topology.axes.world_size != self.degree(*axes_with(divides_parameters=False)):
            raise ValueError(
                "Expected checkpoint.backend='dcp' where parameters are divided. Received: checkpoint.backend='file', "
                f"{self.topology.axes.describe()}. Unset it; the export of the weights, checkpoint.last_save_model_only, can be converted "
                "by `python -m torch.distributed.checkpoint.format_utils dcp_to_torch`."
            )
        return FileCheckpointManager

    keeps_streams = True

    def build_model_states(self) -> ModelStates:
        """Return how the states of shards, and of parts of a pipeline, are read and put back."""
        return ShardedModelStates(
            gather=lambda value: self.pipeline_domain.gather_objects(value),
            model=lambda: self.unwrapped_model,
            named_parameters=lambda: self.named_parameters(),
            optimizer=lambda: self.optimizer,
            ema=lambda: self.ema,
        )
