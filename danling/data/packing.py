"""Makes blocks without padding, and batches of a number of tokens, of documents of many lengths."""

from __future__ import annotations

import io
import os
from abc import abstractmethod
from array import array
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from danling.distributed import LaunchEnvironment
from danling.utils.files import write_atomically

from .keyed import reads_batches
from .order import OrderedDataset, epoch_order, length_of
from .randomness import derive_seed

Lengths = Tensor | Sequence[int] | Callable[[int], int] | str | os.PathLike[str] | None
IGNORED = -100
"""The label that no loss of torch counts."""
FIELDS = ("position_ids", "labels", "document_ids")
_CHUNK = 4096
_GROUPS = 256
"""Blocks or batches that a chunk has at least, so that the last one, which is not full, weighs little."""
_KEPT_CHUNKS = 2
# The number of a block takes the lower bits in `best_fit`: a chunk has far fewer than 2**32 blocks.
_ROOM_BITS = 32


class Piece(NamedTuple):
    """A part of a document, mostly all of it: its index in the dataset, the first token, and the number of tokens."""

    document: int
    start: int
    size: int


class _Grouped(OrderedDataset):
    """Groups of documents, made within chunks.

    A chunk is a fixed set of documents, drawn from all of them. How many groups it makes depends on the lengths in it alone. So the
    groups of all chunks are counted once, and in any epoch the chunk of a position is found by these counts and grouped when it is
    needed. An epoch goes through the chunks, and through the groups of each, in an order keyed by the seed and the epoch; documents of
    equal length change places.
    """

    _fix_of_limit: str
    """What to do about a document that is longer than the limit."""

    def __init__(
        self,
        dataset: Any,
        limit: int,
        lengths: Lengths,
        keys: Sequence[str],
        *,
        chunk: int | None,
        shuffle: bool,
        splits: bool,
    ) -> None:
        kind = type(self).__name__
        length_of(dataset, f"what {kind} reads")
        if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
            raise ValueError(
                f"Expected {kind} to get a positive number of tokens. Received: {limit!r} ({type(limit).__name__})."
            )
        self.dataset = dataset
        self.keys = (keys,) if isinstance(keys, str) else tuple(keys)
        self.limit = limit
        self.shuffle = shuffle
        self.lengths = document_lengths(dataset, lengths, self.keys[0])
        longest = int(self.lengths.max())
        if not longest:
            raise ValueError(
                f"Expected documents with tokens. Received: {len(self.lengths)} documents of length 0."
            )
        if longest > limit and not splits:
            index = int(self.lengths.argmax())
            more = int((self.lengths > limit).sum())
            raise ValueError(
                f"Expected documents of at most {limit} tokens. Received: {more} longer ones, the longest at index {index} with "
                f"{longest} tokens. Shorten or leave them out, or {self._fix_of_limit}."
            )
        self.tokens_in_all = int(self.lengths.sum())
        documents = len(self.lengths)
        self.chunk = min(
            chunk or max(_CHUNK, _GROUPS * limit * documents // self.tokens_in_all), documents
        )
        # Not of the run's seed: the groups in each chunk are counted here, before a loader sets it.
        seed = derive_seed("chunks", documents) if shuffle else None
        self._members = epoch_order(documents, seed)
        self._counts, self._digest = [], 0
        for number in range(-(-documents // self.chunk)):
            sizes = [piece.size for piece in self._pieces(number)]
            # Groups follow from the sizes alone: their checksum tells whether a saved position
            # still fits.
            self._digest = crc32(array("Q", sizes).tobytes(), self._digest)
            self._counts.append(len(self._grouped(sizes)))
        self._plans: dict[int, list[list[Piece]]] = {}
        """The groups of the chunks that were read last, by chunk."""
        self._arrange()

    @abstractmethod
    def _grouped(self, sizes: list[int]) -> list[list[int]]:
        """Return the groups of pieces of these sizes, which fall, as lists of their numbers."""

    def __len__(self) -> int:
        return self._ends[-1]

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_plans": {}}  # made again where they are needed

    def set_seed(self, seed: int) -> None:
        """Take the order from another seed. The library's loader calls it with its own."""
        self.seed = seed
        self._arrange()

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch. The library's loader calls it."""
        self.epoch = epoch
        self._arrange()
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def parts(self) -> dict[str, object]:
        """Return the dataset of the documents."""
        return {".dataset": self.dataset}

    def pieces(self, position: int) -> list[Piece]:
        """Return what the item at a position of the epoch is made of."""
        if not 0 <= position < len(self):
            raise IndexError(
                f"Expected a position between 0 and {len(self) - 1}. Received: position={position}."
            )
        place = bisect_right(self._ends, position)
        number = self._order[place]
        if number not in self._plans:
            # Two are kept: a batch may have the end of one chunk and the beginning of the next.
            while len(self._plans) >= _KEPT_CHUNKS:
                del self._plans[next(iter(self._plans))]
            pieces = self._pieces(number, self._derived("documents", number))
            groups = self._grouped([piece.size for piece in pieces])
            order = epoch_order(len(groups), self._derived("groups", number)).indices(
                0, len(groups)
            )
            self._plans[number] = [[pieces[n] for n in groups[index]] for index in order]
        begin = self._ends[place - 1] if place else 0
        return self._plans[number][position - begin]

    def fingerprint(self, epoch: int) -> dict[str, str]:
        """Return what positions depend on, as text."""
        return {
            "documents": f"{len(self.lengths)}, checksum of their lengths {self._digest:08x}",
            "tokens at most": str(self.limit),
            "documents of a chunk": str(self.chunk),
            "shuffle": str(self.shuffle),
        }

    def _arrange(self) -> None:
        self._plans.clear()
        chunks = len(self._counts)
        self._order = epoch_order(chunks, self._derived("chunks")).indices(0, chunks)
        self._ends = list(accumulate(self._counts[number] for number in self._order))

    def _derived(self, purpose: str, *more: int) -> int | None:
        return derive_seed(self.seed, purpose, self.epoch, *more) if self.shuffle else None

    def _pieces(self, chunk: int, seed: int | None = None) -> list[Piece]:
        """Return the pieces in a chunk, the largest first."""
        documents = torch.tensor(self._members.indices(chunk * self.chunk, self.chunk))
        if seed is not None:
            # Before the stable sort by size below, so that documents of one length change places and nothing else does.
            documents = documents[
                torch.tensor(epoch_order(len(documents), seed).indices(0, len(documents)))
            ]
        lengths = self.lengths[documents].long()
        parts = (lengths + self.limit - 1) // self.limit  # none of an empty document
        # The number of each part in its document: its place, less all parts before.
        number = torch.arange(int(parts.sum())) - (parts.cumsum(0) - parts).repeat_interleave(parts)
        documents, starts = documents.repeat_interleave(parts), number * self.limit
        sizes = (lengths.repeat_interleave(parts) - starts).clamp(max=self.limit)
        sizes, falling = sizes.sort(descending=True, stable=True)
        return list(
            map(Piece, documents[falling].tolist(), starts[falling].tolist(), sizes.tolist())
        )

    def _read(self, pieces: Sequence[Piece]) -> list[object]:
        """Return the documents of some pieces."""
        indices = [piece.document for piece in pieces]
        if reads_batches(self.dataset):
            return list(self.dataset.__getitems__(indices))
        return [self.dataset[index] for index in indices]

    def _tokens(self, sample: object, key: str, document: int) -> Tensor:
        """Return the tokens of a document under a key, of the length that it was said to have."""
        tokens = torch.as_tensor(sample[key] if isinstance(sample, Mapping) else sample)
        if tokens.ndim != 1 or len(tokens) != self.lengths[document]:
            raise ValueError(
                f"Expected {key!r} of document {document} to have {int(self.lengths[document])} tokens, as in `lengths`. Received: shape "
                f"{tuple(tokens.shape)}. Pass the lengths of this dataset, or delete the file that they are kept in."
            )
        return tokens


class Packed(_Grouped):
    """Blocks of `length` tokens, filled with whole documents.

    An item is a mapping with a tensor of shape (length,) for each of `keys`, and what `fields` names: `position_ids`, which begin at 0
    in each document; `labels`, the first key with -100 at the first token of each document and at padding; and `document_ids`, which
    number the documents of the block, padding being the last. A transformers model that gets `position_ids` and no mask lets no
    document attend to another one; for other models see `cu_seqlens`.

    Documents are packed by best fit, the longest first, within chunks. Which block a position has follows from the seed, the epoch and the
    position, so a run resumes exactly at any position, with any number of workers and processes. The order is the dataset's own: do not
    set `dataloader.shuffle`. The number of blocks is the same in each epoch.

    Args:
        dataset: A map-style dataset of documents: mappings that hold their tokens under `keys`, or the tokens themselves.
        length: Tokens of a block.
        lengths: Tokens of each document: an array; a function of its index; a path, where the lengths are kept once they are counted;
            `None` reads all documents to count them.
        keys: What of a document is packed; the first one has the tokens.
        fields: The fields to add, out of `position_ids`, `labels` and `document_ids`.
        too_long: `"error"` refuses documents longer than a block, `"split"` cuts them into blocks and a rest.
        pad: What fills the end of a block under `keys`.
        chunk: Documents of a chunk; `None` takes 4,096, or more where these make less than 256 blocks.
        shuffle: Draw chunks and their order; else documents are packed in the order of the dataset, chunk by chunk.

    Raises:
        ValueError: If the dataset is no map-style one, lengths do not fit it, or a document is too long.
    """

    _fix_of_limit = "raise length, or set too_long='split'"

    def __init__(
        self,
        dataset: Any,
        length: int,
        lengths: Lengths = None,
        *,
        keys: Sequence[str] = ("input_ids",),
        fields: Sequence[str] = FIELDS[:2],
        too_long: str = "error",
        pad: int = 0,
        chunk: int | None = None,
        shuffle: bool = True,
    ) -> None:
        if too_long not in ("error", "split"):
            raise ValueError(
                f"Expected too_long to be 'error' or 'split'. Received: too_long={too_long!r}."
            )
        if unknown := sorted(set(fields) - set(FIELDS)):
            raise ValueError(f"Expected fields out of {list(FIELDS)}. Received: {unknown}.")
        self.fields = tuple(fields)
        self.pad = pad
        super().__init__(
            dataset, length, lengths, keys, chunk=chunk, shuffle=shuffle, splits=too_long == "split"
        )

    @property
    def efficiency(self) -> float:
        """Share of the tokens in the blocks that are no padding."""
        return self.tokens_in_all / (len(self) * self.limit)

    def __getitem__(self, position: int) -> dict[str, Tensor]:
        """Return the block at a position of the epoch."""
        pieces = self.pieces(position)
        documents = self._read(pieces)
        sizes = [piece.size for piece in pieces]
        rest = self.limit - sum(sizes)
        block: dict[str, Tensor] = {}
        for key in self.keys:
            tokens = [
                self._tokens(sample, key, piece.document)[piece.start : piece.start + piece.size]
                for sample, piece in zip(documents, pieces, strict=True)
            ]
            # Padding of labels that the user gives must not count in the loss.
            filling = IGNORED if key == "labels" else self.pad
            block[key] = torch.cat([*tokens, tokens[0].new_full((rest,), filling)])
        # Padding counts as one more document.
        stretches = [*sizes, rest] if rest else sizes
        if "position_ids" in self.fields:
            block["position_ids"] = torch.cat([torch.arange(size) for size in stretches])
        if "labels" in self.fields:
            # A copy, since `input_ids` keeps the tokens that the labels leave out.
            labels = block.get("labels", block[self.keys[0]]).clone()
            # Else the last token of a document would have to predict the first of another one.
            labels[[0, *accumulate(sizes[:-1])]] = IGNORED
            labels[self.limit - rest :] = IGNORED
            block["labels"] = labels
        if "document_ids" in self.fields:
            block["document_ids"] = torch.arange(len(stretches)).repeat_interleave(
                torch.tensor(stretches)
            )
        return block

    def _grouped(self, sizes: list[int]) -> list[list[int]]:
        return best_fit(sizes, self.limit)


class TokenBudget(_Grouped):
    """Batches of documents of similar length that hold at most `tokens` tokens, padding included.

    An item is a whole batch: do not set `dataloader.batch_size`. It goes through `dataloader.collate_fn`, which gets the list of
    documents, or is padded to its longest document: a tensor of shape (documents, longest) for each of `keys`, with `attention_mask`, and
    `labels`, the first key with -100 at padding. The weight of a batch is the number of its labels that count.

    Batches are cut within chunks, from documents sorted by length; some end early, where that saves much padding. Which batch a position
    has follows from the seed, the epoch and the position, so a run resumes exactly, with any number of workers and processes; each process
    reads one batch at a time. The order is the dataset's own: do not set `dataloader.shuffle`. The number of batches is the same in each
    epoch.

    Args:
        dataset: A map-style dataset of documents; see `Packed`.
        tokens: Tokens of a batch at most: documents times the longest of them.
        lengths: Tokens of each document; see `Packed`.
        keys: What of a document is padded; the first one has the tokens.
        pad: What fills the end of a document under `keys`.
        chunk: Documents of a chunk; `None` takes 4,096, or more where these make less than 256 batches.
        shuffle: Draw chunks and their order; else they are cut in the order of the dataset.

    Raises:
        ValueError: If the dataset is no map-style one, lengths do not fit it, or a document is longer than `tokens`.
    """

    _fix_of_limit = "raise tokens"

    def __init__(
        self,
        dataset: Any,
        tokens: int,
        lengths: Lengths = None,
        *,
        keys: Sequence[str] = ("input_ids",),
        pad: int = 0,
        chunk: int | None = None,
        shuffle: bool = True,
    ) -> None:
        self.pad = pad
        super().__init__(dataset, tokens, lengths, keys, chunk=chunk, shuffle=shuffle, splits=False)

    def __getitem__(self, position: int) -> list[object]:
        """Return the documents of the batch at a position of the epoch."""
        pieces = self.pieces(position)
        documents = self._read(pieces)
        # Only for the check of the lengths: a longer document would exceed the budget that the
        # batch was cut by.
        for sample, piece in zip(documents, pieces, strict=True):
            self._tokens(sample, self.keys[0], piece.document)
        return documents

    def collate(self, documents: Sequence[Any]) -> dict[str, Tensor]:
        """Return the batch of some documents, padded to the longest."""
        columns = {
            key: [
                torch.as_tensor(each[key] if isinstance(each, Mapping) else each)
                for each in documents
            ]
            for key in self.keys
        }
        batch: dict[str, Tensor] = {}
        for key, values in columns.items():
            filling = IGNORED if key == "labels" else self.pad
            batch[key] = pad_sequence(values, batch_first=True, padding_value=filling)
        # The first key has the tokens: another one, such as the text to be generated, may have other lengths.
        lengths = torch.tensor([len(tokens) for tokens in columns[self.keys[0]]])
        batch["attention_mask"] = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
        if "labels" not in batch:
            batch["labels"] = batch[self.keys[0]].masked_fill(batch["attention_mask"] == 0, IGNORED)
        return batch

    def _grouped(self, sizes: list[int]) -> list[list[int]]:
        """Cut where the padded sizes of all batches are least, and each batch counts for a 32nd of its budget more."""
        end = len(sizes)
        changes = [*(number for number in range(1, end) if sizes[number] != sizes[number - 1]), end]
        # The least cost of all documents before a place where a batch may end, and where that batch begins.
        costs, starts = {0: 0}, {}
        for first, size in enumerate(sizes):
            if first not in costs:
                continue  # no batch ends before it
            full = min(first + self.limit // size, end)
            for last in (*changes[bisect_right(changes, first) : bisect_left(changes, full)], full):
                cost = costs[first] + 32 * (last - first) * size + self.limit
                if last not in costs or cost < costs[last]:
                    costs[last], starts[last] = cost, first
        groups = []
        while end:
            groups.append(list(range(starts[end], end)))
            end = starts[end]
        return groups[::-1]


def best_fit(sizes: Sequence[int], length: int) -> list[list[int]]:
    """Return which sizes share a block of `length`, by their numbers: each goes where the least room is left that is enough for it.

    Args:
        sizes: At most `length` each; the largest first fills the blocks best.
        length: Size of a block.
    """
    blocks: list[list[int]] = []
    rooms: list[int] = []  # room and number of each block that is not full, as one integer, rising
    for number, size in enumerate(sizes):
        # Room is in the upper bits: the first entry from here on has the least room that is enough.
        at = bisect_left(rooms, size << _ROOM_BITS)
        if at < len(rooms):
            found = rooms.pop(at)
            room, block = found >> _ROOM_BITS, found & ((1 << _ROOM_BITS) - 1)
            blocks[block].append(number)
        else:
            room = length
            block = len(blocks)
            blocks.append([number])
        if room > size:
            insort(rooms, (room - size) << _ROOM_BITS | block)
    return blocks


def cu_seqlens(document_ids: Tensor) -> Tensor:
    """Return where documents begin in a flattened batch, and its end, as functions of attention for variable lengths take it.

    Args:
        document_ids: Of `Packed`, of shape (length,) or (blocks, length).

    Returns:
        Of dtype int32 and shape (documents + 1,), on the same device. On an accelerator the host waits for it.
    """
    begins = torch.ones_like(document_ids, dtype=torch.bool)
    begins[..., 1:] = document_ids[..., 1:] != document_ids[..., :-1]
    starts = begins.flatten().nonzero().flatten()
    return torch.cat([starts, starts.new_tensor([document_ids.numel()])]).int()


def document_lengths(dataset: Any, lengths: Lengths, key: str) -> Tensor:
    """Return the number of tokens of each document, in int32; counted, if they are not given or kept at a path.

    Raises:
        ValueError: If there are not as many as documents, or one is negative.
    """
    documents = len(dataset)
    path = Path(lengths) if isinstance(lengths, (str, os.PathLike)) else None
    if path is not None and path.exists():
        found = torch.load(path, weights_only=True)
    elif callable(lengths):
        found = [lengths(index) for index in range(documents)]
    elif lengths is None or path is not None:
        from tqdm import tqdm

        hidden = None if LaunchEnvironment.read().rank == 0 else True  # None: shown on a terminal
        shown = tqdm(
            range(documents), desc="lengths", unit=" documents", disable=hidden, leave=False
        )
        samples = (dataset[index] for index in shown)
        found = [len(sample[key] if isinstance(sample, Mapping) else sample) for sample in samples]
    else:
        found = lengths
    found = torch.as_tensor(found)
    is_list = tuple(found.shape) == (documents,) and not found.is_floating_point()
    if not documents or not is_list or int(found.min()) < 0:
        where, other = (f" in {path}", ", or delete the file") if path else ("", "")
        raise ValueError(
            f"Expected a length of at least 0 for each of the {documents} documents of {type(dataset).__name__}. Received: "
            f"{found.dtype} of shape {tuple(found.shape)}{where}. Pass the lengths of this dataset{other}."
        )
    found = found.to(torch.int32)
    # Several ranks may come here at once: each writes the same whole file, so none reads half.
    if path is not None and not path.exists():
        file = io.BytesIO()
        torch.save(found, file)
        write_atomically(path, file.getvalue())
    return found
