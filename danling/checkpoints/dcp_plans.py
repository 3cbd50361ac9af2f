"""How a nested state becomes the flat one of `torch.distributed.checkpoint`, and back."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem, SavePlan

from danling.utils.tensors import is_sharded

from .archive import archive_complaints
from .errors import CheckpointDamaged, CheckpointError
from .plan_cache import PlanCache
from .replicas import own_share

Path = tuple[Any, ...]


def flatten(state: Mapping[str, object]) -> tuple[dict[str, Any], dict[str, Path]]:
    """Return the leaves of a state by dotted name, and the path of each.

    A leaf is a tensor, or the largest part that holds none: settings and results go into one entry each instead of one a value, keep
    their empty parts and their integer keys, and come back as they were.
    """
    flat: dict[str, Any] = {}
    paths: dict[str, Path] = {}
    for path, leaf in _leaves(state, ()):
        name = ".".join(map(str, path))
        if name in flat:
            raise CheckpointError(
                f"Expected one value for each name. Received: two parts of the state named {name!r}. Rename one."
            )
        flat[name], paths[name] = leaf, path
    return flat, paths


def _leaves(value: Any, path: Path) -> list[tuple[Path, Any]]:
    if (path and not _holds_tensor(value)) or isinstance(value, Tensor):
        return [(path, value)]
    if isinstance(value, Mapping):
        strange = next((key for key in value if not isinstance(key, str)), None)
        if strange is not None:
            raise CheckpointError(
                f"Expected string keys above tensors. Received: {'.'.join(map(str, path))}[{strange!r}]. Key it by a string."
            )
        return [leaf for key, item in value.items() for leaf in _leaves(item, (*path, key))]
    return [leaf for index, item in enumerate(value) for leaf in _leaves(item, (*path, index))]


def _holds_tensor(value: object) -> bool:
    if isinstance(value, Tensor):
        return True
    if isinstance(value, Mapping):
        return any(_holds_tensor(item) for item in value.values())
    return isinstance(value, (list, tuple)) and any(_holds_tensor(item) for item in value)


def nest(flat: Mapping[str, object], paths: Mapping[str, Path]) -> dict[str, object]:
    """Return the state that `flatten` was given; tuples that held tensors come back as lists."""
    root: dict[Any, Any] = {}
    for name, leaf in flat.items():
        *parents, last = paths[name]
        holder = root
        for key in parents:
            holder = holder.setdefault(key, {})
        holder[last] = leaf
    nested: dict[str, Any] = _with_lists(root)
    return nested


def _with_lists(value: object) -> Any:
    # Only what `nest` has built is looked into: a plain leaf may be a dictionary with integer keys of its own.
    if isinstance(value, _Leaf):
        return value.content
    if type(value) is not dict:
        return value
    if value and all(type(key) is int for key in value):
        return [_with_lists(value[index]) for index in sorted(value)]
    return {key: _with_lists(item) for key, item in value.items()}


class _Leaf:
    """A plain leaf on its way back."""

    def __init__(self, content: object) -> None:
        self.content = content


class SavePlanner(DefaultSavePlanner):
    """Plans a save of a nested state, flattened by `flatten`; the stock loaders and converters restore the nesting."""

    def __init__(self, left_out: frozenset[str] = frozenset(), cache: PlanCache | None = None) -> None:
        super().__init__()
        self.left_out = left_out
        self.cache = cache

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Flatten the state."""
        with self._answering():
            self.state_dict, self.mappings = flatten(state_dict)
        for name in self.left_out & self.state_dict.keys():
            del self.state_dict[name], self.mappings[name]
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        """Plan what this rank has; an empty plan stands for that of the save before, which the coordinator need not be sent."""
        with self._answering():
            plan = self._of_own_share(super().create_local_plan())
        known = self.cache is not None and self.cache.is_known(plan)
        return SavePlan([], usable=False) if known else plan

    def _of_own_share(self, plan: SavePlan) -> SavePlan:
        items = own_share(plan.items, self.state_dict)
        written = {item.index.fqn for item in items}
        others = {item.index.fqn for item in plan.items} - written
        paths = {name: path for name, path in plan.planner_data.items() if name not in others}
        return replace(plan, items=items, planner_data=paths)

    @contextmanager
    def _answering(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            if self.cache is not None:
                self.cache.fail_to_plan()
            raise

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Share the work out. Called on the coordinator."""
        if self.cache is None:
            return super().create_global_plan(all_plans)
        if all_plans[0].usable:
            all_plans, self.cache.metadata = super().create_global_plan(all_plans)
        assert self.cache.metadata is not None
        # A copy: what the ranks have written is added to it.
        return all_plans, replace(self.cache.metadata)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Take over what this rank is to write."""
        self.plan = new_plan if self.cache is None else self.cache.finish(new_plan)
        return self.plan


class LoadPlanner(DefaultLoadPlanner):
    """Fills a flat state; plain values are read by torch's safe reader only."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Read one plain value."""
        name = read_item.dest_index.fqn
        problems = archive_complaints(value)
        if problems:
            raise CheckpointDamaged(f"Expected a readable entry. Received: {name}: {'; '.join(problems)}")
        value.seek(0)
        try:
            self.state_dict[name] = _Leaf(torch.load(value, weights_only=True))
        except Exception as error:
            raise CheckpointDamaged(
                f"Expected a readable entry. Received: {name}, on which torch.load fails: {error}"
            ) from error


def destinations(
    metadata: Metadata, template: Mapping[str, object] | None, sections: frozenset[str] | None
) -> dict[str, object]:
    """Return fresh memory for everything that a checkpoint holds, by dotted name: nothing of it is skipped in silence."""
    layouts = flatten(template)[0] if template is not None else {}
    found: dict[str, Any] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if sections is not None and metadata.planner_data[name][0] not in sections:
            continue
        if not isinstance(entry, TensorStorageMetadata):
            found[name] = None
            continue
        # The state of an optimizer lies as its parameter does: `optimizer.state.NAME.exp_avg` as `optimizer.state.NAME`.
        like, dtype = layouts.get(name, layouts.get(name.rpartition(".")[0])), entry.properties.dtype
        if like is None and template is not None and metadata.planner_data[name][0] in template:
            found[name] = torch.empty(entry.size, dtype=dtype, device="meta")
        elif isinstance(like, Tensor) and is_sharded(like) and like.shape == entry.size:
            found[name] = torch.empty_like(like, dtype=dtype, requires_grad=False)
        else:
            found[name] = torch.empty(entry.size, dtype=dtype)
    return found
