"""The sources of a run: the batches of every split, and the position in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack

from .source import BatchSource


class Sources(dict[str, BatchSource]):
    """Batches by split. A loader that a program puts in the place of another one, or adds, is taken in when it is asked for.

    Args:
        loaders: Returns the loaders by split, as they are now.
        build: Makes a loader for every dataset that has none.
        open: Returns the batches of a loader of a split.
        epoch: Returns the epochs completed, at which a split that is added begins.
    """

    def __init__(
        self,
        loaders: Callable[[], Mapping[str, Iterable[object]]],
        *,
        build: Callable[[], None],
        open: Callable[[str, Iterable[object]], BatchSource],
        epoch: Callable[[], int],
    ) -> None:
        super().__init__()
        self.open = open
        self._loaders, self._build, self._epoch = loaders, build, epoch
        self._replaced: list[BatchSource] = []

    def open_all(self) -> None:
        """Open every loader that is there now."""
        self.clear()
        self.update({split: self.open(split, loader) for split, loader in self._loaders().items()})

    def of(self, split: str) -> BatchSource:
        """Return the batches of a split; opened anew where its loader is another one now.

        Args:
            split: The split, which has a dataset or a loader.

        Raises:
            ValueError: If nothing has made a loader for it.
        """
        if split not in self._loaders():
            self._build()
        if split not in self._loaders():
            raise ValueError(
                f"Expected `build_dataloaders` to put a loader for every dataset into `self.dataloaders`. Received: none for {split!r}. "
                "Call super().build_dataloaders() in it, or put the loader there in __init__."
            )
        loader, known = self._loaders()[split], self.get(split)
        if known is not None and known.loader is loader:
            return known
        added = self.open(split, loader)
        if epoch := self._epoch() if known is None else known.epoch:
            added.set_epoch(epoch)
        if known is not None:
            self._replaced.append(known)
        self[split] = added
        return added

    def among(self, splits: Iterable[str]) -> dict[str, BatchSource]:
        """Return those of some splits, in the order of these.

        Args:
            splits: The splits; one without a source is left out.
        """
        return {split: self[split] for split in splits if split in self}

    def close(self) -> None:
        """Close all of them, those that were replaced too; one that fails does not keep the others from it."""
        with ExitStack() as stack:
            for source in (*self._replaced, *self.values()):
                stack.callback(source.close)
