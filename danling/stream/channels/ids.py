"""Which ids stand at which places of a log, in about 16 bytes an id."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable

import torch

_FEW = 65_536


class IdIndex:
    """Hashes of ids and their places: sorted arrays for most, a dictionary for the latest.

    It answers with candidates, since different ids may have the same hash; whoever asks compares them with the log.
    """

    def __init__(self) -> None:
        self._hashes = array("q")
        self._places = array("q")
        self._latest: dict[int, list[int]] = {}

    def add(self, key: bytes, place: int) -> None:
        """Add an id.

        Args:
            key: The id as it stands in the log.
            place: Its place.
        """
        self._latest.setdefault(hash(key), []).append(place)
        if len(self._latest) >= max(_FEW, len(self._hashes) // 4):
            self._sort()

    def extend(self, keys: Iterable[bytes], first: int) -> None:
        """Add the ids of places that follow each other, quicker than one by one where they are many.

        Args:
            keys: The ids as they stand in the log.
            first: The place of the first.
        """
        self._hashes.extend(map(hash, keys))
        self._places.extend(range(first, first + len(self._hashes) - len(self._places)))
        self._sort()

    def candidates(self, key: bytes) -> list[int]:
        """Return the places of all ids with the hash of this one."""
        wanted = hash(key)
        found = list(self._latest.get(wanted, ()))
        index = bisect_left(self._hashes, wanted)
        while index < len(self._hashes) and self._hashes[index] == wanted:
            found.append(self._places[index])
            index += 1
        return found

    def _sort(self) -> None:
        for value, places in self._latest.items():
            self._hashes.extend([value] * len(places))
            self._places.extend(places)
        self._latest = {}
        if not self._hashes:
            return
        hashes = torch.frombuffer(self._hashes, dtype=torch.int64)
        places_there = torch.frombuffer(self._places, dtype=torch.int64)
        values, order = hashes.sort()
        places_there.copy_(places_there[order])
        hashes.copy_(values)
