"""What a run on a mesh saves and restores: shards, parts of a model under the names of the whole, one position of the data."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from danling.checkpoints import CheckpointMismatch, FileCheckpointManager, TorchDistributedCheckpointManager, exclude
from danling.mesh import axes_with
from danling.mesh.parameter_copies import equalize
from danling.utils.names import canonical_name
from danling.utils.tensors import shard_like

from .parallel_model import ParallelModel

logger = logging.getLogger("danling")


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

    def equalize_buffers(self) -> None:
        """Give all ranks that share a part of the model the buffers of the first of them. Call on all ranks."""
        equalize(self.topology, [*self.model.buffers(), *self._criterion_tensors("buffers")])

    # Saving

    def optimizer_state_dict(self) -> dict[str, Any]:
        """Return the state by parameter name; in a pipeline the groups name the parameters of the whole model. Called on all ranks."""
        state = super().optimizer_state_dict()
        groups = self._whole_groups([list(group["params"]) for group in state["param_groups"]])
        named = [{**group, "params": names} for group, names in zip(state["param_groups"], groups)]
        return {"state": state["state"], "param_groups": named}

    def _whole_groups(self, mine: list[list[str]]) -> list[list[str]]:
        parts = self.pipeline_domain.gather_objects(mine)
        return [sorted({name for part in parts for name in part[index]}) for index in range(len(mine))]

    # Loading

    @property
    def allows_inexact_resume(self) -> bool:
        """`parallel.allow_degree_change`."""
        return bool(self.config.parallel.allow_degree_change)

    def _check_config(self, payload: Mapping[str, Any]) -> None:
        super()._check_config(payload)
        state, _ = exclude({"state": payload.get("state", {})}, self._state_entries())
        stored = state.get("state", {})
        before, ranks = stored.get("elastic", {}).get("streams"), stored.get("rng", {})
        if not before or before == self.stream_layout or not self._has_drawn(ranks):
            return
        change = f"{_described(before)}, now {_described(self.stream_layout)}"
        if not self.allows_inexact_resume:
            raise CheckpointMismatch(
                "Expected the degrees that the checkpoint was made with: its run has drawn random numbers (dropout, or in its datasets), "
                f"which others would draw otherwise. Received: stored {change}. Restore them, or set parallel.allow_degree_change=true to "
                "go on with other numbers."
            )
        logger.warning("parallel.allow_degree_change: not exactly the run that was stored: %s.", change)

    def _state_entries(self) -> list[str]:
        entries = self.config.checkpoint.exclude_from_loading or []
        listed = [entries] if isinstance(entries, str) else list(entries)
        return [entry for entry in listed if entry.partition(".")[0] == "state"]

    def read_checkpoint(self, checkpoint: str | Path) -> dict[str, Any]:
        """Return the verified payload of a checkpoint, of which this rank reads what it holds. Call on all ranks."""
        payload: dict[str, Any] = self.checkpoint_manager.load_checkpoint(checkpoint, template=self._template())
        return payload

    def _template(self) -> dict[str, Any]:
        template: dict[str, Any] = {"model": self.model_state_dict()}
        if self.ema is not None:
            template["ema"] = {"weights": dict(self.ema.weights)}
        if self.optimizer is not None:
            template["optimizer"] = {"state": dict(self.named_parameters())}
        return template

    def load_model(self, state: Mapping[str, Any], *, partial: bool = False) -> None:
        """Load model weights by canonical name into what this rank holds; see `TorchRunner.load_model`. Called on all ranks."""
        here = {canonical_name(name): value for name, value in self.unwrapped_model.state_dict().items()}
        share = self._share_of(state, here)
        super().load_model(share, partial=partial)

    def _share_of(self, state: Mapping[str, Any], here: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries of a whole model that this rank holds, laid out as they are here; names that nobody holds stay."""
        elsewhere = set().union(*self.pipeline_domain.gather_objects(set(here))) - here.keys()
        return {name: _laid_out(value, here.get(name)) for name, value in state.items() if name not in elsewhere}

    def load_ema(self, state: Mapping[str, Any], *, partial: bool = False) -> None:
        """Restore the averaged weights of what this rank holds; see `TorchRunner.load_ema`. Called on all ranks."""
        super().load_ema({**state, "weights": self._share_of(state["weights"], self.ema.weights)}, partial=partial)

    def load_optimizer(self, state: Mapping[str, Any]) -> None:
        """Restore the state of the parameters that this rank holds, by name. Called on all ranks.

        Raises:
            CheckpointMismatch: If the groups are not those of the whole model here.
        """
        here = dict(self.named_parameters())
        mine = super().optimizer_state_dict()["param_groups"]
        whole = self._whole_groups([list(group["params"]) for group in mine])
        stored = [self._matching(state["param_groups"], names) for names in whole]
        groups = [{**match, "params": group["params"]} for match, group in zip(stored, mine)]
        values = {
            name: {key: _laid_out(value, here[name]) for key, value in entry.items()}
            for name, entry in state["state"].items()
            if name in here
        }
        super().load_optimizer({"state": values, "param_groups": groups})

    def _matching(self, stored: Any, names: list[str]) -> Any:
        for group in stored:
            if set(group["params"]) == set(names):
                return group
        raise CheckpointMismatch(
            f"Expected optimizer state of this model's parameters, grouped as here. Received: {len(stored)} groups, none of which holds "
            f"{names[:5]} and nothing else. Restore optim.param_groups and the model, or add 'optimizer' to "
            "checkpoint.exclude_from_loading to start it afresh."
        )


def _described(streams: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={number}" for name, number in streams.items())


def _laid_out(value: Any, like: Any) -> Any:
    if isinstance(value, Tensor) and isinstance(like, Tensor) and value.shape == like.shape:
        return shard_like(value, like)
    return value
