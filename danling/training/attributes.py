"""Saves the attributes that users set on a runner, where they have changed, and restores them in place."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils._pytree import tree_map_only

from danling.checkpoints.errors import CheckpointMismatch, restoring
from danling.config.names import closest_typo
from danling.utils.encoding import MISSING
from danling.utils.secrets import names_secret

from .attribute_restore import DELETED, CannotRestore, Decoder, decode_tensor, is_deleted
from .attribute_snapshot import (
    COMPARED_BYTES,
    AttributeSnapshot,
    Entry,
    Key,
    is_left_out,
)
from .object_parts import is_code
from .rank_values import value_of_rank, values_of_all
from .user_attributes import (
    changeable_attributes,
    declared_names,
    own_attributes,
    parameters_of,
    unsaved_buffers,
)

if TYPE_CHECKING:
    from danling.runners.base_runner import BaseRunner

logger = logging.getLogger("danling")

REMEMBERED_BYTES = 2**26
"""Most bytes of attributes, in sum, that an update copies, so that it can be computed again."""
_MOST_NAMED = 20
"""Attributes that one line of the log names."""


def _put_nothing_back(chosen: Collection[str] | None = None) -> None:
    """What `remember` returns where no attribute is remembered."""


class KeptAttributes:
    """Saves the attributes of the user's, `requires_grad` and the buffers that are not persistent, where they have changed.

    An attribute has changed if its digest differs from that before the restore, when the program alone had set it. What a loaded
    checkpoint has stays saved. Values that differ between ranks are saved for each rank.
    """

    def __init__(self, runner: BaseRunner) -> None:
        self._runner = runner
        self._begun: Mapping[Key, Entry] = {}
        self._members: Mapping[str, list[str]] = {}
        self._kept: set[Key] = set()
        self._restored: dict[str, bytes] = {}
        self._named: set[str] = set()
        self._misspelt: set[str] = set()
        self._paths: AttributeSnapshot | None = None
        """A snapshot that knows the objects of the library, which a small one at each update need not walk over."""
        self.too_large: set[str] = set()
        """Attributes beyond the limit when all were remembered last."""
        self._has_listed = False

    def begin(self) -> None:
        """Remember the values that the program has set. Called before anything is restored."""
        snapshot = AttributeSnapshot.at_all(self._runner)
        self._begun, self._members = snapshot.entries, snapshot.members

    def remember(self, names: Collection[str] | None = None) -> Callable[..., None]:
        """Copy the attributes and the objects in `metrics`, up to `REMEMBERED_BYTES`. May be called on one rank.

        Args:
            names: Which ones, for each update again; `None` is all.

        Returns:
            A function that restores them and removes attributes that were set since; given names, it restores those alone.
        """
        runner = self._runner
        kept: dict[str, tuple[Any, object]] = {}
        if names is not None and not names:
            self.too_large = set()
            return _put_nothing_back
        if names is None:
            snapshot, values = (
                AttributeSnapshot(runner, with_metrics=True),
                changeable_attributes(runner),
            )
        else:
            if self._paths is None:
                self._paths = AttributeSnapshot(runner, with_metrics=True)
            snapshot = AttributeSnapshot(runner, paths_of=self._paths, with_metrics=True)
            values = {
                name: value
                for name, value in changeable_attributes(runner).items()
                if name in names
            }
        size = 0
        self.too_large = set()
        declared = declared_names(runner, "saved")
        for name, value in values.items():
            entry = snapshot.attribute(name, value, declared=name in declared)
            if size + entry.size <= REMEMBERED_BYTES:
                size += entry.size
                # The encoding refers to the tensors of the program, which the update writes to.
                kept[name] = tree_map_only(Tensor, Tensor.clone, entry.node), value
            else:
                self.too_large.add(name)

        def set_again(name: str, before: object) -> None:
            # What `metrics` contains was put back in place; the names of its entries are no attributes.
            is_metric = name == "metrics" or name.startswith("metrics[")
            is_there = before is MISSING or getattr(runner, name, MISSING) is before
            if not (is_metric or is_there):
                setattr(runner, name, before)

        def put_back(chosen: Collection[str] | None = None) -> None:
            decoder = Decoder(snapshot, exact=True)
            for name, (node, value) in kept.items():
                if chosen is None or name in chosen:
                    set_again(name, decoder.decode(node, value, name, name))
            if chosen is not None:
                return
            # Too large to be copied: one that was replaced is there again, one that was written to is not.
            for name in values.keys() - kept.keys():
                set_again(name, values[name])
            for name in (own_attributes(runner).keys() - values.keys()) & vars(runner).keys():
                delattr(runner, name)

        return put_back

    def digests(self) -> dict[str, bytes]:
        """Return a digest of each attribute and object in `metrics`, up to `COMPARED_BYTES` in sum. May be called on one rank."""
        snapshot = AttributeSnapshot(self._runner, with_metrics=True)
        declared = declared_names(self._runner, "saved")
        size = 0
        found = {}
        for name, value in changeable_attributes(self._runner).items():
            entry = snapshot.attribute(name, value, declared=name in declared)
            if size + entry.size <= COMPARED_BYTES and entry.node != {"kind": "left"}:
                size += entry.size
                found[name] = snapshot.digest_of(entry.node)
        return found

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Put attributes and the objects in `metrics` back on exit, and name those that cannot be. May be called on one rank."""
        put_back = self.remember()
        large = set(self.too_large)
        before = self._not_copied(large)
        try:
            yield
        finally:
            put_back()
            now = self._not_copied(large)
            self._warn(
                sorted(path for path in before.keys() & now.keys() if before[path] != now[path]),
                f"they have no encoding, or take more than {REMEMBERED_BYTES >> 20} MiB in sum. Set try_evaluation=false, or change them "
                "elsewhere than in evaluate_step",
                about="Changed by the trial of an evaluation, and not put back: ",
            )

    def _not_copied(self, large: Collection[str]) -> dict[str, object]:
        """Return by path what tells whether a value has changed that `remember` leaves out."""
        snapshot = AttributeSnapshot(self._runner, with_metrics=True)
        declared = declared_names(self._runner, "saved")
        found = dict[str, object]()
        for name, value in changeable_attributes(self._runner).items():
            entry = snapshot.attribute(name, value, declared=name in declared)
            found.update({path: seen for path, seen in entry.left.items() if seen is not None})
            if name in large and entry.size <= COMPARED_BYTES:
                found[name] = snapshot.digest_of(entry.node)
        return found

    def note_put_back(self, names: Collection[str]) -> None:
        """Log which attributes a skipped update puts back, and warn of those that it does not."""
        too_large = sorted(self.too_large.intersection(names))
        put_back = sorted(set(names) - self.too_large)
        if put_back and self._runner.is_main_process:
            logger.info(
                "A skipped update puts back %s.", ", ".join(f"self.{name}" for name in put_back)
            )
        self._warn(
            too_large,
            f"they take more than {REMEMBERED_BYTES >> 20} MiB in sum, and train_step changes them. Make them buffers of the model if a "
            "skipped update must not change them",
            about="Not put back after a skipped update: ",
        )

    # Saving

    def state(self) -> dict[str, dict[str, Any]]:
        """Return the entries of a checkpoint, those alone that are not empty. Called on all ranks."""
        # Each rank warns of its own values before the ranks exchange what they save.
        now = self._entries()
        mine, unsavable = self._changed(now)
        self._warn_of_unsaved(
            unsavable,
            "changed since the program set it, and no checkpoint can contain it: a resumed run has another one. Make the object in "
            "__init__ and give it `state_dict` and `load_state_dict`, or name the attribute in `not_saved` on the class",
        )
        self._list_without_encoding(now, unsavable)
        return values_of_all(self._runner.world, mine, now)

    def _changed(self, now: Mapping[Key, Entry]) -> tuple[set[Key], list[str]]:
        """Return what is saved since it has changed, and the paths of what has changed and cannot be saved."""
        kept = self._kept | {("attributes", name) for name in declared_names(self._runner, "saved")}
        mine = set[Key]()
        unsavable = list[str]()
        for key, entry in now.items():
            begun = self._begun.get(key, Entry())
            left = entry.left.items()
            unsavable += [
                path for path, seen in left if seen is not None and seen != begun.left.get(path)
            ]
            replaced = (
                path for path, value in entry.fixed.items() if begun.fixed.get(path, value) != value
            )
            unsavable += [path for path in replaced if entry.node != {"kind": "left"}]
            # What a checkpoint has once had stays in all later ones, even where it is back at its first value.
            has_changed = entry.digest != begun.digest or key in kept
            if has_changed and entry.node != {"kind": "left"}:
                # A restore needs the objects that `__init__` made.
                if entry.needs.items() <= begun.needs.items():
                    mine.add(key)
                else:
                    unsavable.append(key[1])
        return mine, unsavable

    # Another replica group

    def of_rank(self) -> dict[str, dict[str, Any]]:
        """Return what this rank would save, and all of `requires_grad` and buffers, for a rank that may have changed others.

        No communication: may be called on one rank.
        """
        now = self._entries()
        mine, _ = self._changed(now)
        found: dict[str, dict[str, Any]] = {}
        for key, entry in now.items():
            is_sent = key in mine or key[0] != "attributes"
            if is_sent and entry.node != {"kind": "left"}:
                found.setdefault(key[0], {})[key[1]] = {
                    "value": tree_map_only(Tensor, Tensor.clone, entry.node)
                }
        return found

    def take_over(self, section: str, payload: Mapping[str, Any]) -> None:
        """Restore a section of what `of_rank` returned on a rank of another group."""
        kept = set(self._kept)
        self.load(section, payload)
        # It is in the middle of a training: what has changed is saved as ever, and what is set from here on is no surprise.
        self._kept = kept
        self._restored = {}

    def _list_without_encoding(self, now: Mapping[Key, Entry], named: Collection[str]) -> None:
        """Name once what no checkpoint of this run contains, less what a warning has named."""
        listed = {
            path: what
            for entry in now.values()
            for path, what in entry.listed.items()
            if path not in named
        }
        if self._has_listed or not listed:
            return
        self._has_listed = True
        shown = [f"self.{path} ({what})" for path, what in list(listed.items())[:_MOST_NAMED]]
        if len(listed) > _MOST_NAMED:
            shown.append(f"{len(listed) - _MOST_NAMED} more")
        if self._runner.is_main_process:
            logger.info(
                "No checkpoint of this run contains the following attributes, since their types have no encoding: %s. A resumed run has "
                "them as the program sets them. Give the class `state_dict` and `load_state_dict` to have one saved, or name the attribute "
                "in `not_saved`.",
                ", ".join(shown),
            )

    def _entries(self) -> dict[Key, Entry]:
        """Return all that is saved where it has changed, with what the program has set and is not there any more."""
        runner = self._runner
        found = AttributeSnapshot.at_all(runner, self._members).entries
        here = {("attributes", name) for name in own_attributes(runner)} | {
            ("buffers", name) for name in unsaved_buffers(runner)
        }
        # A parameter that is gone is no change of an attribute: the section `requires_grad` has those that are there.
        deleted = Entry(DELETED, DELETED["kind"].encode())
        gone = self._begun.keys() - here
        return found | {key: deleted for key in gone if key[0] in ("attributes", "buffers")}

    def before_training(self) -> None:
        """Warn of attributes that no checkpoint will contain, or that were set anew after a restore. May be called on one rank."""
        snapshot = AttributeSnapshot.at_all(self._runner)
        restored = self._restored
        self._restored = {}
        self._warn(
            [name for name, digest in restored.items() if snapshot.digest(name) != digest],
            "set again after the checkpoint was restored; the run continues with the new value",
        )
        for path, reason in snapshot.unseen.items():
            self._warn_of_unsaved([path], reason)
        self._warn_of_misspelt()

    def _warn_of_misspelt(self) -> None:
        """Name what `saved` and `not_saved` declare where the runner has almost such an attribute instead."""
        runner = self._runner
        names = {declared: declared_names(runner, declared) for declared in ("saved", "not_saved")}
        own = vars(runner).keys() - runner.library_names
        # Of two names that are declared, such as bank_a and bank_b, a program may have one.
        others = sorted(own.difference(*names.values()))
        for declared, of_class in names.items():
            for name in sorted(of_class - own - self._misspelt):
                meant = closest_typo(name, others)
                if meant is not None and runner.is_main_process:
                    self._misspelt.add(name)
                    logger.warning(
                        "`%s` names %r, which the runner does not have. Did you mean %r?",
                        declared,
                        name,
                        meant,
                    )

    def _warn(self, names: Collection[str], what: str, *, about: str = "") -> None:
        if names and self._runner.is_main_process:
            logger.warning("%s%s: %s.", about, ", ".join(f"self.{name}" for name in names), what)

    def _warn_of_unsaved(self, paths: Iterable[str], why: str) -> None:
        names = [path for path in paths if path not in self._named]
        self._named.update(names)
        self._warn(names, why, about="Not saved: ")

    # Loading

    def load(self, section: str, payload: Mapping[str, Any]) -> None:
        """Restore the section `requires_grad`, `buffers` or `attributes` in place. Called on all ranks."""
        runner = self._runner
        stored = {
            name: value_of_rank(runner.world, section, name, entry)
            for name, entry in (payload.get(section) or {}).items()
        }
        stored = {name: node for name, node in stored.items() if node is not MISSING}
        self._kept |= {(section, name) for name in stored}
        if section == "requires_grad":
            parameters = parameters_of(runner)
            for name in stored.keys() & parameters.keys():
                parameters[name].requires_grad_(bool(stored[name]))
        elif section == "buffers":
            buffers = unsaved_buffers(runner)
            for name in stored.keys() & buffers.keys():
                part, key = buffers[name]
                if is_deleted(stored[name]):
                    del part._buffers[key]
                elif stored[name] is None:
                    part._buffers[key] = None
                else:
                    part._buffers[key] = decode_tensor(stored[name], part._buffers[key])
        else:
            self._load_attributes(stored)

    def _load_attributes(self, stored: Mapping[str, object]) -> None:
        runner = self._runner
        own = own_attributes(self._runner)
        before = AttributeSnapshot.at_all(self._runner)
        begun = {
            name: self._begun.get(("attributes", name), Entry()).digest
            for name in own.keys() - stored.keys()
        }
        self._warn(
            sorted(
                name for name, digest in begun.items() if before.digest(name) not in (b"", digest)
            ),
            "changed since the program set it; the checkpoint is of before that and has no value",
        )
        if not stored:
            return
        decoder = Decoder(before)
        left_out = {*runner.library_names, *declared_names(runner, "not_saved")}
        for name, node in stored.items():
            # No file replaces a method of the runner, which would be code that a file has chosen.
            is_of_class = name not in own and is_code(type(runner), name)
            if is_of_class or name in left_out:
                continue
            current = own.get(name, MISSING)
            if is_deleted(node):
                # A path or a secret is the program's, also where training deleted it.
                is_kept = isinstance(current, (str, PurePath)) and is_left_out(
                    name, names_secret(name, before.secret_keys)
                )
                if name in vars(runner) and not is_kept:
                    delattr(runner, name)
                continue
            with restoring(f"self.{name}", f"attributes.{name}"):
                try:
                    value = decoder.decode(node, current, name, name)
                except CannotRestore as error:
                    raise CheckpointMismatch(
                        f"Expected self.{name} to be {error} when the checkpoint is restored. Received: {type(current).__name__}. Make it "
                        f"in __init__, or add 'attributes.{name}' to checkpoint.exclude_from_loading."
                    ) from None
                if value is not MISSING and value is not current:
                    setattr(runner, name, value)
        # Compared when the training begins: what the program sets after the restore wins, and is named.
        now = AttributeSnapshot.at_all(runner)
        self._restored = {name: now.digest(name) for name in stored}
