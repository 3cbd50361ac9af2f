"""Where the objects of a run lie in a store, and which of them count. Pure functions of names.

Below `url/lineage[-code_id]/id/` lies what the run directory has, under the names that it has there:

    lock                                         who writes, see `danling.remote.lease`
    checkpoints/objects/<sha256>                 contents of file checkpoints; equal contents lie there once
    checkpoints/<name>.pth.sha256                the manifest of a file checkpoint: its digest names the object
    checkpoints/targets/<target>/<file>          files of a sharded checkpoint, as they lie in the run directory
    checkpoints/targets/<target>/manifest.sha256 the manifest of a sharded checkpoint
    checkpoints/<name>                           the name of the target that `latest`, `best`, ... lead to
    files/<path>                                 the run's other files, below the path that they have in the run directory

What is visible when: a file checkpoint counts under a name when the manifest of that name is there. It is put after the object that it
names, and the one of `latest` is put last, as on the disk. A target counts when its manifest is there; it is put after all other files of
the target, and before the pointers. Every one of these puts is atomic, so that nothing that counts is ever incomplete.
What is removed goes in the reverse order: pointer or manifest first, contents last. An object that no manifest names, and files of a target
without a manifest, are what a killed upload leaves; the next writer removes them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from danling.checkpoints.manifest import is_name
from danling.checkpoints.store import is_target

CHECKPOINTS = "checkpoints"
FILES = "files"
LOCK = "lock"
OBJECTS = "objects"
TARGETS = "targets"
SUMS = "manifest.sha256"
FILE_SUMS = ".pth.sha256"

_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class RunLayout:
    """Keys of the objects of one run.

    Attributes:
        family: `lineage`, or `lineage-code_id`: the name of the directory in which the runs of a line of work lie.
        run: Name of the run directory: the id of the run, with a number where there are several of it.
    """

    family: str
    run: str

    @property
    def root(self) -> str:
        """The prefix of all keys of the run, without a slash at its end."""
        return f"{self.family}/{self.run}"

    @property
    def lock(self) -> str:
        """Key of the lock."""
        return f"{self.root}/{LOCK}"

    @property
    def checkpoints(self) -> str:
        """Prefix of everything about checkpoints, without a slash at its end."""
        return f"{self.root}/{CHECKPOINTS}"

    @property
    def files(self) -> str:
        """Prefix of the run's other files, without a slash at its end."""
        return f"{self.root}/{FILES}"

    def object(self, digest: str) -> str:
        """Return the key of the contents of a file checkpoint with this SHA-256."""
        return f"{self.checkpoints}/{OBJECTS}/{digest}"

    def manifest(self, name: str) -> str:
        """Return the key of the manifest of a file checkpoint, such as `latest`."""
        return f"{self.checkpoints}/{name}{FILE_SUMS}"

    def target_file(self, target: str, file: str) -> str:
        """Return the key of a file of a target."""
        return f"{self.checkpoints}/{TARGETS}/{target}/{file}"

    def target_manifest(self, target: str) -> str:
        """Return the key of the manifest of a target."""
        return self.target_file(target, SUMS)

    def pointer(self, name: str) -> str:
        """Return the key of a pointer to a target, such as `latest`."""
        return f"{self.checkpoints}/{name}"

    def file(self, path: str) -> str:
        """Return the key of another file of the run, by its path relative to the run directory."""
        return f"{self.files}/{path}"


@dataclass(frozen=True)
class Listed:
    """What the keys of a run's checkpoints say, before anything is read.

    Attributes:
        manifests: Names of file checkpoints, such as `latest`, that have a manifest.
        objects: Digests of the contents that are there.
        pointers: Names that lead to a target.
        complete: Targets that have a manifest.
        parts: Keys of the files of each target, those without a manifest included; relative to the checkpoints' prefix.
    """

    manifests: frozenset[str]
    objects: frozenset[str]
    pointers: frozenset[str]
    complete: frozenset[str]
    parts: Mapping[str, frozenset[str]]


def listed(keys: Iterable[str]) -> Listed:
    """Tell what lies below the prefix of a run's checkpoints. Keys of no known form are nobody's, and left out."""
    manifests, objects, pointers, complete = set(), set(), set(), set()
    parts: dict[str, set[str]] = {}
    for key in keys:
        head, _, rest = key.partition("/")
        if not rest:
            if key.endswith(FILE_SUMS) and is_name(key.removesuffix(FILE_SUMS)):
                manifests.add(key.removesuffix(FILE_SUMS))
            elif is_name(key):
                pointers.add(key)
        elif head == OBJECTS and _DIGEST.fullmatch(rest):
            objects.add(rest)
        elif head == TARGETS:
            target, _, file = rest.partition("/")
            if is_target(target) and file:
                parts.setdefault(target, set()).add(key)
                if file == SUMS:
                    complete.add(target)
    sets = {target: frozenset(keys) for target, keys in parts.items()}
    return Listed(frozenset(manifests), frozenset(objects), frozenset(pointers), frozenset(complete), sets)


def unreferenced(
    found: Listed, *, digests: Collection[str], targets: Collection[str], spared: Collection[str] = ()
) -> list[str]:
    """Return the keys that no name leads to, in the order in which they are to be removed: manifests before contents."""
    gone = [f"{OBJECTS}/{digest}" for digest in sorted(found.objects - {*digests, *spared})]
    for target in sorted(found.parts.keys() - {*targets, *spared}):
        manifest = f"{TARGETS}/{target}/{SUMS}"
        rest = sorted(found.parts[target] - {manifest})
        gone += [manifest, *rest] if target in found.complete else rest
    return gone
