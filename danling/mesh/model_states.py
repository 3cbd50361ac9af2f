"""The states of a model and its optimizer that are divided: shards, and parts of a pipeline under the names of the whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from danling.checkpoints.errors import CheckpointMismatch
from danling.distributed import Domain
from danling.training.model_states import ModelStates
from danling.utils.tensors import canonical_name, is_sharded, shard_like


def rebind_optimizer(
    optimizer: Any,
    names: Mapping[int, str],
    model: nn.Module,
    kept: Iterable[nn.Parameter],
    *,
    pipeline: Domain,
) -> None:
    """Point an optimizer that the user made at the parameters that have replaced its own, by name."""
    if optimizer.state:
        raise ValueError(
            "Expected an optimizer without a state at the end of __init__: the parallel stack replaces the parameters it was made for. "
            f"Received: a {type(optimizer).__name__} that has stepped. Let the runner restore it from a checkpoint."
        )
    now = {canonical_name(name): parameter for name, parameter in model.named_parameters()}
    known = {id(parameter) for parameter in kept}
    trained = 0
    for group in optimizer.param_groups:
        # A parameter of another stage has no successor here.
        found = [now.get(names[id(p)]) if id(p) in names else p for p in group["params"]]
        group["params"] = [p for p in found if p is not None]
        trained += sum(id(p) in known for p in group["params"])
    if not sum(pipeline.gather_objects(trained)):
        raise ValueError(
            f"Expected an optimizer over parameters of the model. Received: a {type(optimizer).__name__} that would train "
            "nothing. Make it over self.model.parameters(), after the model is complete, or set `optim.type` and let the runner "
            "build it."
        )
    keep_kinds_apart(optimizer)


def keep_kinds_apart(optimizer: Any) -> None:
    """Update parameters one by one where those of a group are on different meshes, since one call cannot take them together."""
    for group in optimizer.param_groups:
        kinds = {p.device_mesh if is_sharded(p) else None for p in group["params"]}
        if len(kinds) > 1:
            for option in ("foreach", "fused"):
                if option in group:
                    group[option] = False


if TYPE_CHECKING:
    from danling.runners.parallel_runner import ParallelRunner


class ShardedModelStates(ModelStates):
    """Reads and writes this rank's parts of a model."""

    keeps_modes = False

    runner: ParallelRunner

    def load_model(self, state: Mapping[str, object], *, partial: bool = False) -> None:
        """Load weights by canonical name into this rank's parts. Called on all ranks."""
        super().load_model(self._share_of(state, self.model_state()), partial=partial)

    def load_ema(self, state: Mapping[str, Any], *, partial: bool = False) -> None:
        """Restore the averaged weights of this rank's parts. Called on all ranks."""
        weights = self._share_of(state["weights"], self.averages().weights)
        super().load_ema({**state, "weights": weights}, partial=partial)

    def optimizer_state(self) -> dict[str, Any]:
        """Return the state by parameter name; in a pipeline the groups name the parameters of the whole model. Called on all ranks."""
        state = super().optimizer_state()
        groups = self._whole_groups(state["param_groups"])
        named = [{**group, "params": names} for group, names in zip(state["param_groups"], groups)]
        return {"state": state["state"], "param_groups": named}

    def load_optimizer(self, state: Mapping[str, Any]) -> None:
        """Restore the state of the parameters that this rank holds, by name. Called on all ranks."""
        here = dict(self.runner.named_parameters())
        mine = super().optimizer_state()["param_groups"]
        stored = [group_of(state["param_groups"], names) for names in self._whole_groups(mine)]
        groups = [{**match, "params": group["params"]} for match, group in zip(stored, mine)]
        values = {
            name: {key: laid_out(value, here[name]) for key, value in entry.items()}
            for name, entry in state["state"].items()
            if name in here
        }
        super().load_optimizer({"state": values, "param_groups": groups})
        # A stage whose parameters are on one mesh may have written how its group is stepped.
        keep_kinds_apart(self.runner.optimizer)

    def template(self) -> dict[str, Any]:
        """Return a state that says how tensors are laid out on this rank: one reads its own shards of a checkpoint."""
        template: dict[str, Any] = {"model": self.model_state()}
        averages = self.runner.ema
        if averages is not None:
            template["ema"] = {"weights": dict(averages.weights)}
        if self.runner.optimizer is not None:
            template["optimizer"] = {"state": dict(self.runner.named_parameters())}
        return template

    def _share_of(self, state: Mapping[str, object], here: Mapping[str, object]) -> dict[str, object]:
        """Return the entries of a whole model that this rank holds, laid out as they are here; names that no rank holds stay."""
        elsewhere = set().union(*self.runner.pipeline_domain.gather_objects(set(here))) - here.keys()
        return {name: laid_out(value, here.get(name)) for name, value in state.items() if name not in elsewhere}

    def _whole_groups(self, groups: Sequence[Mapping[str, Any]]) -> list[list[str]]:
        """Return the names of the parameters of each group on all ranks of the pipeline together."""
        mine = [list(group["params"]) for group in groups]
        parts = self.runner.pipeline_domain.gather_objects(mine)
        return [sorted({name for part in parts for name in part[index]}) for index in range(len(mine))]


def group_of(stored: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Mapping[str, object]:
    """Return the stored group of an optimizer that holds the parameters of these names and no others."""
    for group in stored:
        if set(group["params"]) == set(names):
            return group
    raise CheckpointMismatch(
        f"Expected optimizer state of this model's parameters, grouped as here. Received: {len(stored)} groups, none of which holds "
        f"{list(names[:5])} and nothing else. Restore optim.param_groups and the model, or add 'optimizer' to "
        "checkpoint.exclude_from_loading to start it afresh."
    )


def laid_out(value: object, like: object) -> Any:
    """Return a whole tensor in the layout that another one of its shape has here; anything else as it is."""
    if isinstance(value, Tensor) and isinstance(like, Tensor) and value.shape == like.shape:
        return shard_like(value, like)
    return value
