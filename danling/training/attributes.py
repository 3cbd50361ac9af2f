"""Saves the attributes that users set on a runner, where they have changed, and restores them in place."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from danling.checkpoints.errors import CheckpointMismatch
from danling.data.generators import Generators
from danling.utils.tensors import canonical_name

from .encoding import MISSING, CannotRestore, Decoder, Encoder

if TYPE_CHECKING:
    from danling.runners.base_runner import BaseRunner

logger = logging.getLogger("danling")

REMEMBERED_BYTES = 2**26
"""Most bytes of attributes, in sum, that an update copies, so that it can be computed again."""
COMPARED_BYTES = 2**30
"""Most bytes of attributes to compare, in sum; a message names the others, unless the class lists them in `saved` or `not_saved`."""

Key = tuple[str, str]
"""A section of a checkpoint, and a name in it."""


class _Seen:
    """Encoded values at one moment, by section and name: digests, parts left out, and classes that a restore needs."""

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder
        self.nodes: dict[Key, Any] = {}
        self.digests: dict[Key, bytes] = {}
        self.left: dict[Key, dict[str, object]] = {}
        self.needs: dict[Key, dict[str, str]] = {}
        self._compared = 0

    def add(self, key: Key, value: object, encoder: Encoder, *, declared: bool = False) -> None:
        encoder.begin(declared=declared)
        name = key[1]
        node = encoder.encode(value, name, name)
        if self._compared + encoder.size > COMPARED_BYTES and not declared:
            encoder.unseen[name] = f"is not compared beyond {COMPARED_BYTES >> 30} GiB in sum"
            return
        self._compared += encoder.size
        self.nodes[key], self.digests[key] = node, encoder.digest(node)
        self.left[key], self.needs[key] = encoder.left, encoder.needs


class KeptAttributes:
    """Saves the attributes of the user's, `requires_grad` and the buffers that are not persistent, where they have changed.

    An attribute has changed if its digest differs from that before the restore, when the program alone had set it. What a loaded
    checkpoint has stays saved. Values that differ between ranks are saved for each rank.
    """

    def __init__(self, runner: BaseRunner) -> None:
        self._runner = runner
        self._begun: _Seen | None = None
        self._kept: set[Key] = set()
        self._restored: dict[Key, bytes] = {}
        self._named: set[str] = set()

    def begin(self) -> None:
        """Remember the values that the program has set. Called before anything is restored."""
        self._begun = self._look()

    def _look(self) -> _Seen:
        seen, of_model = _Seen(self._encoder()), Encoder()
        for name, parameter in self._parameters().items():
            seen.add(("requires_grad", name), parameter.requires_grad, of_model)
        for name, (part, key) in self._buffers().items():
            seen.add(("buffers", name), part._buffers[key], of_model)
        declared = _declared(type(self._runner), "saved")
        for name, value in self._own().items():
            seen.add(("attributes", name), value, seen.encoder, declared=name in declared)
        return seen

    # Values

    def _own(self) -> dict[str, object]:
        """Return the attributes of the user's, those of the class among them."""
        runner, kind = self._runner, type(self._runner)
        left_out = {*runner.library_names, *_declared(kind, "not_saved"), "saved", "not_saved"}
        of_class = {
            name: value
            for each in reversed(kind.__mro__)
            if not each.__module__.startswith("danling.") and each is not object
            for name, value in vars(each).items()
            if not name.startswith("__") and isinstance(value, (list, dict, set))
        }
        return {name: value for name, value in {**of_class, **vars(runner)}.items() if name not in left_out}

    def _modules(self) -> list[tuple[str, nn.Module]]:
        """Return model and criterion, with what the names of their tensors begin with."""
        runner = self._runner
        model = runner.unwrapped_model if isinstance(runner.model, nn.Module) else None
        return [(n, m) for n, m in (("", model), ("criterion.", runner.criterion)) if isinstance(m, nn.Module)]

    def _parameters(self) -> dict[str, nn.Parameter]:
        return {
            f"{at}{canonical_name(name)}": parameter
            for at, module in self._modules()
            for name, parameter in module.named_parameters()
        }

    def _buffers(self) -> dict[str, tuple[nn.Module, str]]:
        """Return where the buffers that are not persistent are, by name."""
        return {
            f"{at}{canonical_name(f'{prefix}.{name}'.strip('.'))}": (part, name)
            for at, module in self._modules()
            for prefix, part in module.named_modules()
            for name in sorted(part._non_persistent_buffers_set)
            if part._buffers.get(name) is not None
        }

    def _components(self) -> dict[str, object]:
        """Return objects that other parts of a checkpoint save, by path."""
        runner = self._runner
        found: dict[str, object] = {"/": runner}
        for name in runner.library_names & vars(runner).keys():
            value = vars(runner)[name]
            found[f"/{name}"] = value
            for part, each in _parts_of(value):
                found[f"/{name}/{part}"] = each
        for at, module in self._modules():
            found.update((f"/{at}{name}/module", each) for name, each in module.named_modules())
            tensors = [*module.named_parameters(), *module.named_buffers()]
            found.update((f"/{at}{canonical_name(name)}", each) for name, each in tensors)
        return found

    def _encoder(self) -> Encoder:
        runner = self._runner

        @cache
        def keyed() -> set[int]:
            found = Generators({"datasets": runner.datasets, "dataloaders": runner.dataloaders}).found
            return set(map(id, found.values()))

        return Encoder(self._components, keyed=keyed, secret_keys=runner.config.secret_keys or ())

    # An update that is computed again

    def remember(self) -> Callable[[], None]:
        """Copy the attributes, up to `REMEMBERED_BYTES`, and return a function that restores them. May be called on one rank."""
        encoder, runner, size = self._encoder(), self._runner, 0
        kept: dict[str, tuple[Any, object]] = {}
        for name, value in self._own().items():
            encoder.begin(declared=False)
            node = encoder.encode(value, name, name)
            if size + encoder.size <= REMEMBERED_BYTES:
                size += encoder.size
                kept[name] = _changed_tensors(node, Tensor.clone), value

        def put_back() -> None:
            decoder = Decoder(encoder)
            for name, (node, value) in kept.items():
                before = decoder.decode(node, value, name)
                if before is not MISSING and getattr(runner, name, MISSING) is not before:
                    setattr(runner, name, before)

        return put_back

    # Saving

    def state(self) -> dict[str, dict[str, Any]]:
        """Return the entries of a checkpoint, those alone that are not empty. Called on all ranks."""
        world, now = self._runner.world, self._look()
        changed = self._changed(now)
        self._name_unsavable(now, changed)
        mine = {key for key in changed if self._is_savable(key, now)}
        keys = sorted(set().union(*world.gather_objects(mine)))
        if not keys:
            return {}
        ranks = world.gather_objects([now.digests.get(key) for key in keys])
        digests = dict(zip(keys, map(set, zip(*ranks))))
        entries = {key: {"value": now.nodes[key]} for key in keys if len(digests[key]) == 1}
        differing = [key for key in keys if key not in entries]
        nodes = []
        if differing:
            mine_of_these = {key: now.nodes[key] for key in differing if key in now.nodes}
            nodes = world.gather_objects(_changed_tensors(mine_of_these, Tensor.cpu))
        for key in differing:
            values = {str(rank): each[key] for rank, each in enumerate(nodes) if key in each}
            # Parts of a pipeline have tensors of other names: what those have that have it is equal.
            is_equal = key[0] != "attributes" and len(digests[key] - {None}) == 1
            entries[key] = {"value": next(iter(values.values()))} if is_equal else {"of": world.size, "ranks": values}
        found: dict[str, dict[str, Any]] = {}
        for section, name in keys:
            found.setdefault(section, {})[name] = entries[section, name]
        return found

    def _changed(self, now: _Seen) -> set[Key]:
        begun = self._begun.digests if self._begun is not None else {}
        declared = {("attributes", name) for name in _declared(type(self._runner), "saved")}
        return {key for key, digest in now.digests.items() if digest != begun.get(key) or key in self._kept | declared}

    def _is_savable(self, key: Key, now: _Seen) -> bool:
        # A restore needs the objects that `__init__` made.
        there = self._begun.needs.get(key, {}) if self._begun is not None else {}
        return not _is_left(now.nodes[key]) and now.needs[key].items() <= there.items()

    def _name_unsavable(self, now: _Seen, changed: set[Key]) -> None:
        found = []
        for key, seen in now.left.items():
            begun = self._begun.left.get(key, {}) if self._begun is not None else {}
            found += [path for path, value in seen.items() if value is not None and value != begun.get(path, value)]
            if key in changed and not _is_left(now.nodes[key]) and not self._is_savable(key, now):
                found.append(key[1])
        self._name(
            found,
            "changed since the program set it, and a checkpoint cannot hold it: a resumed run goes on with another one. Make the object in "
            "__init__ and give it `state_dict` and `load_state_dict`, or name the attribute in `not_saved` on the class",
        )

    def before_training(self) -> None:
        """Warn of attributes that no checkpoint will contain, or that were set anew after a restore. May be called on one rank."""
        now, restored = self._look(), self._restored
        self._restored = {}
        self._warn(
            [name for (_, name), digest in restored.items() if now.digests.get(("attributes", name)) != digest],
            "set anew after the checkpoint was restored; the run goes on with the new value",
        )
        for path, reason in now.encoder.unseen.items():
            self._name(
                [path],
                f"{reason}. Name the attribute in `saved` on the class where training changes it, such as saved = ('teacher',), else in "
                "`not_saved`",
            )

    def _name(self, paths: Iterable[str], what: str) -> None:
        names = [path for path in paths if path not in self._named]
        self._named.update(names)
        if names and self._runner.is_main_process:
            logger.warning("Not saved: %s: %s.", ", ".join(f"self.{path}" for path in names), what)

    def _warn(self, names: Sequence[str], what: str) -> None:
        if names and self._runner.is_main_process:
            logger.warning("%s: %s.", ", ".join(f"self.{name}" for name in names), what)

    # Loading

    def load(self, section: str, payload: Mapping[str, Any]) -> None:
        """Restore the section `requires_grad`, `buffers` or `attributes` in place. Called on all ranks."""
        stored = {name: self._mine(section, name, entry) for name, entry in (payload.get(section) or {}).items()}
        stored = {name: node for name, node in stored.items() if node is not MISSING}
        self._kept |= {(section, name) for name in stored}
        if section == "requires_grad":
            parameters = self._parameters()
            for name in stored.keys() & parameters.keys():
                parameters[name].requires_grad_(bool(stored[name]))
        elif section == "buffers":
            buffers = self._buffers()
            for name in stored.keys() & buffers.keys():
                part, key = buffers[name]
                part._buffers[key] = Decoder(Encoder()).decode(stored[name], part._buffers[key], name)
        else:
            self._load_attributes(stored)

    def _load_attributes(self, stored: Mapping[str, Any]) -> None:
        before, runner, own = self._look(), self._runner, self._own()
        self._warn(
            sorted(
                name
                for section, name in self._changed(before)
                if section == "attributes" and name not in stored and name in own
            ),
            "changed since the program set it; the checkpoint is of before that and has no value",
        )
        if not stored:
            return
        decoder = Decoder(before.encoder)
        left_out = {*runner.library_names, *_declared(type(runner), "not_saved")}
        for name, node in stored.items():
            if name in left_out:
                continue
            current = own.get(name, MISSING)
            try:
                value = decoder.decode(node, current, name)
            except CannotRestore as error:
                raise CheckpointMismatch(
                    f"Expected self.{name} to be {error} when the checkpoint is restored. Received: {type(current).__name__}. Make it "
                    f"in __init__, or add 'attributes.{name}' to checkpoint.exclude_from_loading."
                ) from None
            if value is not MISSING and value is not current:
                setattr(runner, name, value)
        digests = self._look().digests
        self._restored = {key: digests[key] for name in stored if (key := ("attributes", name)) in digests}

    def _mine(self, section: str, name: str, entry: Mapping[str, Any]) -> Any:
        if "value" in entry:
            return entry["value"]
        world = self._runner.world
        if entry["of"] != world.size:
            raise CheckpointMismatch(
                f"Expected {entry['of']} processes: the checkpoint has a value of self.{name} for each of them. Received: {world.size}. "
                f"Resume on as many, or add '{section}.{name}' to checkpoint.exclude_from_loading, which keeps the value of the program."
            )
        return entry["ranks"].get(str(world.rank), MISSING)


def _declared(kind: type, what: str) -> set[str]:
    """Return the names in `saved` or `not_saved` of a class and its bases."""
    return {name for each in kind.__mro__ for name in vars(each).get(what, ())}


def _is_left(node: object) -> bool:
    return isinstance(node, dict) and node.get("kind") == "left"


def _changed_tensors(node: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(node, dict):
        return {key: _changed_tensors(item, change) for key, item in node.items()}
    return change(node) if isinstance(node, Tensor) else list(node) if isinstance(node, list) else node


def _parts_of(value: object) -> Iterator[tuple[str, object]]:
    """Yield what a component is made of: the entries of a mapping, the optimizers of several, the schedules of a sequence."""
    if isinstance(value, Mapping):
        yield from ((str(name), each) for name, each in value.items())
    if isinstance(value, (Optimizer, LRScheduler)) or hasattr(value, "param_groups"):
        for name in ("optimizers", "schedulers", "_schedulers", "optimizer", "scheduler", "inner", "base_optimizer"):
            within = getattr(value, name, None)
            for number, each in enumerate(within if isinstance(within, (list, tuple)) else [within]):
                if isinstance(each, (Optimizer, LRScheduler)):
                    yield f"{name}[{number}]", each
                    yield from _parts_of(each)
