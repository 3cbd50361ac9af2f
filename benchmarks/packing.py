"""How full the blocks of `danling.data.Packed` are, and what a block costs.

    python benchmarks/packing.py [--documents 10000000]

First the documentation that is installed with Python: the topics of `help()` and the docstrings of the standard library, cut into words
and signs. Share of the tokens in the blocks (or batches) that are no padding, for blocks of 512 and 2048 tokens:

- best fit within chunks, as `Packed` packs; with the longest first over all documents at once, for comparison;
- first fit in random order, and next fit (a block is closed when a document does not fit), as simple packers do;
- padding to the longest of a batch of 32: in random order, and sorted by length; `TokenBudget` of 8192 tokens.

Then a data set of many documents, of which only the lengths exist: seconds to construct, microseconds a block in the order of an epoch,
and of a position that is looked up at random, and bytes a document.
"""

from __future__ import annotations

import argparse
import ast
import re
import resource
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from pydoc_data import topics

import torch

from danling.data import Packed, TokenBudget
from danling.data.packing import best_fit

WORDS = re.compile(r"\w+|[^\w\s]|\n")


def corpus() -> Iterator[str]:
    """Yield the topics of `help()`, and the docstrings of modules, classes and functions of the standard library."""
    yield from topics.topics.values()
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if {"site-packages", "test", "tests"} & set(path.relative_to(root).parts):
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except SyntaxError:
            continue  # files that are for other versions of Python
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                yield ast.get_docstring(node) or ""


def first_fit(sizes: Sequence[int], length: int) -> int:
    """Return the number of blocks when each document goes into the first one that has room."""
    rooms: list[int] = []
    for size in sizes:
        for block, room in enumerate(rooms):
            if room >= size:
                rooms[block] -= size
                break
        else:
            rooms.append(length - size)
    return len(rooms)


def next_fit(sizes: Sequence[int], length: int) -> int:
    """Return the number of blocks when a block is closed as soon as a document does not fit."""
    blocks, room = 0, 0
    for size in sizes:
        if size > room:
            blocks, room = blocks + 1, length
        room -= size
    return blocks


def padded(sizes: Sequence[int], batch_size: int = 32) -> int:
    """Return the tokens of batches that are padded to their longest document."""
    batches = (sizes[first : first + batch_size] for first in range(0, len(sizes), batch_size))
    return sum(len(batch) * max(batch) for batch in batches)


def fill(lengths: list[int], length: int) -> None:
    """Print the shares for one size of blocks."""
    pieces = [min(length, size - start) for size in lengths for start in range(0, size, length)]
    shuffled = [
        pieces[index]
        for index in torch.randperm(
            len(pieces), generator=torch.Generator().manual_seed(0)
        ).tolist()
    ]
    total = sum(lengths)
    documents = [range(size) for size in lengths]
    budget = TokenBudget([range(size) for size in pieces], 8192, pieces)
    spent = sum(len(batch) * batch[0].size for batch in map(budget.pieces, range(len(budget))))
    shares = {
        "Packed": Packed(documents, length, lengths, too_long="split").efficiency,
        "best fit, all at once": total
        / length
        / len(best_fit(sorted(pieces, reverse=True), length)),
        "first fit": total / length / first_fit(shuffled, length),
        "next fit": total / length / next_fit(shuffled, length),
        "TokenBudget": total / spent,
        "padding, sorted": total / padded(sorted(pieces)),
        "padding": total / padded(shuffled),
    }
    for name, share in shares.items():
        print(f"  {length:5d} tokens  {name:<22} {share:.4f}")


def timed(look: Callable[[int], object], positions: Sequence[int]) -> float:
    """Return the microseconds of one look."""
    begun = time.process_time()
    for position in positions:
        look(position)
    return (time.process_time() - begun) / len(positions) * 1e6


def scale(documents: int, length: int) -> None:
    """Print what many documents cost."""
    generator = torch.Generator().manual_seed(0)
    lengths = (torch.rand(documents, generator=generator).pow(3) * (length - 10) + 10).int()
    before, begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    blocks = Packed(range(documents), length, lengths)
    seconds = time.process_time() - begun
    more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * (
        1 if sys.platform == "darwin" else 1024
    )
    blocks.set_epoch(1)
    in_order = timed(
        blocks.pieces, range(len(blocks) // 2, min(len(blocks) // 2 + 50_000, len(blocks)))
    )
    at_random = timed(
        blocks.pieces, torch.randint(len(blocks), (50,), generator=generator).tolist()
    )
    print(
        f"  {documents} documents, {len(blocks)} blocks of {length} tokens, share of tokens {blocks.efficiency:.4f}"
    )
    print(
        f"  {seconds:.1f} s to construct ({seconds / len(blocks) * 1e6:.1f} us a block), {in_order:.1f} us a block in order,"
    )
    print(f"  {at_random / 1e3:.1f} ms a block at a random position")
    held = lengths.nbytes + 8 * len(blocks._counts)
    print(
        f"  {held / documents:.2f} bytes a document, {more / documents:.2f} more at the peak of construction"
    )


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--documents", type=int, default=10_000_000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    lengths = [length for length in (len(WORDS.findall(text)) for text in corpus()) if length]
    print(
        f"Python {sys.version.split()[0]}: {len(lengths)} documents, {sum(lengths)} tokens, the longest {max(lengths)}"
    )
    for length in (512, 2048):
        fill(lengths, length)
    print("Lengths alone")
    scale(options.documents, 2048)


if __name__ == "__main__":
    main()
