"""Digests of tensors against the same arithmetic in plain integers, and in shards."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from support.processes import run_processes
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from danling.audit.hashing import _LONGEST_ROW, Hasher, mixed

CPU = torch.device("cpu")
WORD = (1 << 64) - 1
DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


def splitmix(value: int) -> int:
    value = (value + 1) * 0x9E3779B97F4A7C15 & WORD
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & WORD
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & WORD
    return value ^ (value >> 31)


def by_hand(tensor: Tensor) -> int:
    """The digest of a tensor of two dimensions, element by element in Python's integers."""
    width = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    total = 0
    for r, row in enumerate(tensor.view(width).tolist()):
        inner = 0
        for c, bits in enumerate(row):
            term = bits * (splitmix(2 * c) | 1) & WORD
            inner += (term & ~0xFFFFFFFF) | ((term ^ (term >> 32)) & 0xFFFFFFFF)
        total += inner * (splitmix(2 * r + 1) | 1)
    return total & WORD


def digest(tensor: Tensor, hasher: Hasher | None = None) -> int:
    return int((hasher or Hasher(CPU)).digest(tensor)) & WORD


def test_finalizer_equals_splitmix() -> None:
    values = [0, 1, -1, 12345, -(1 << 63), (1 << 63) - 1]
    found = mixed(torch.tensor(values, dtype=torch.int64))
    assert [int(x) & WORD for x in found] == [splitmix(value & WORD) for value in values]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_digest_equals_a_computation_with_integers(dtype: torch.dtype) -> None:
    tensor = (torch.randn(5, 7, generator=torch.Generator().manual_seed(3)) * 9).to(dtype)
    assert digest(tensor) == by_hand(tensor)


def test_every_single_bit_counts_and_so_do_signs_of_zero_and_the_place() -> None:
    tensor, hasher, seen = torch.randn(3, 4), Hasher(CPU), set()
    for place in range(12):
        for bit in range(32):
            other = tensor.clone()
            other.view(torch.int32).view(-1)[place] ^= -(1 << 31) if bit == 31 else 1 << bit
            seen.add(digest(other, hasher))
    assert len(seen) == 12 * 32 and digest(tensor, hasher) not in seen
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))
    assert digest(torch.tensor([1.0, 2.0])) != digest(torch.tensor([2.0, 1.0]))


def test_two_changed_signs_in_one_tensor_do_not_cancel_out() -> None:
    """A sum of keys alone would keep 33 bits of what differs."""
    tensor, hasher = torch.ones(30, 40), Hasher(CPU)
    draw, seen = random.Random(1), set()
    for _ in range(2000):
        first, second = draw.sample(range(1200), 2)
        other = tensor.clone().view(-1)
        other[[first, second]] *= -1
        seen.add((digest(other.view(30, 40), hasher), frozenset((first, second))))
    assert len({value for value, _ in seen}) == len({pair for _, pair in seen})


def test_rows_at_once_views_and_memory_layout_make_no_difference() -> None:
    hasher = Hasher(CPU)
    large = torch.randn(700, 300)
    whole = digest(large, hasher)
    hasher._at_once = 1000
    assert digest(large, hasher) == whole
    assert digest(large.t().contiguous().t(), hasher) == whole
    image = torch.randn(2, 3, 4, 5)
    assert digest(image.contiguous(memory_format=torch.channels_last), hasher) == digest(
        image, hasher
    )
    assert digest(torch.zeros(0), hasher) == 0 == digest(torch.zeros(3, 0), hasher)
    assert digest(torch.tensor(1.5)) == digest(torch.tensor([1.5]))
    assert digest(torch.complex(large[:2], large[2:4])) == digest(
        torch.stack([large[:2], large[2:4]], -1)
    )


def test_parts_of_a_long_vector_add_up() -> None:
    hasher, vector = Hasher(CPU), torch.randn(3 * _LONGEST_ROW + 77)
    for cut in (1, 1000, _LONGEST_ROW, 2 * _LONGEST_ROW + 5):
        parts = [
            hasher._of_vector(part.view(torch.int32), start)
            for part, start in ((vector[:cut], 0), (vector[cut:], cut))
        ]
        assert int(sum(parts)) & WORD == digest(vector, hasher)  # type: ignore[call-overload]


def _layouts() -> Iterator[tuple[tuple[int, ...], list[object]]]:
    yield (10, 6), [Shard(0), Replicate()]
    yield (10, 6), [Replicate(), Shard(1)]
    yield (10, 7), [Shard(0), Shard(1)]
    yield (9, 7, 5), [Shard(1), Shard(2)]
    yield (9, 7, 5), [Shard(2), Shard(0)]
    yield (11,), [Shard(0), Replicate()]
    yield (_LONGEST_ROW + 3,), [Shard(0), Shard(0)]
    yield (13, 4), [Shard(0), Shard(0)]
    yield (3, 2), [Shard(0), Shard(0)]


def _shards() -> list[tuple[int, int]]:
    mesh, hasher, found = (
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")),
        Hasher(CPU),
        [],
    )
    for shape, placements in _layouts():
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(4))
        sharded = distribute_tensor(whole, mesh, placements)
        assert isinstance(sharded, DTensor)
        divided = [d for d, placement in enumerate(placements) if isinstance(placement, Shard)]
        counts = all(mesh.get_local_rank(d) == 0 for d in (0, 1) if d not in divided)
        share = hasher.digest(sharded) if counts else torch.zeros((), dtype=torch.int64)
        torch.distributed.all_reduce(share)
        found.append((int(share) & WORD, digest(whole)))
    return found


def test_shards_over_a_mesh_add_up_to_the_digest_of_the_whole() -> None:
    for found in run_processes(_shards, world_size=4, init_process_group=True):
        assert (
            all(added == whole for added, whole in found)
            and len({whole for _, whole in found}) == 7
        )


def test_samples_are_the_same_in_any_order_and_any_division_into_batches() -> None:
    hasher, generator = Hasher(CPU), torch.Generator().manual_seed(1)
    batch = {"input": torch.randn(6, 3, generator=generator), "target": torch.arange(6)}

    def of(indices: list[int], **other: object) -> int:
        return (
            int(
                hasher.digest_samples(
                    {**{key: value[indices] for key, value in batch.items()}, **other}
                )
            )
            & WORD
        )

    whole = of([0, 1, 2, 3, 4, 5])
    assert of([3, 1, 5, 0, 2, 4]) == whole == (of([0, 1]) + of([2, 3, 4, 5])) & WORD
    assert of([0, 1, 2, 3, 4, 4]) != whole and of([0, 1, 2]) != whole
    crossed = {"input": batch["input"], "target": batch["target"][[1, 0, 2, 3, 4, 5]]}
    assert int(hasher.digest_samples(crossed)) & WORD != whole  # inputs with the targets of others
    assert of([0, 1], text="a") != of([0, 1], text="b")
    assert int(hasher.digest_samples([torch.tensor(2.0), object()])) != 0


@pytest.mark.parametrize(
    "layout",
    ["sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "nested", "conjugated", "negated"],
)
def test_tensors_of_layouts_of_their_own_have_digests_of_all_bits(layout: str) -> None:
    """Such as the matrix of a graph in a buffer, and a batch of rows of several lengths."""

    def made(value: float) -> Tensor:
        dense = torch.tensor([[0.0, value], [2.0, 0.0]])
        if layout == "nested":
            return torch.nested.nested_tensor(
                [dense[0], dense.reshape(-1)[:3]], layout=torch.jagged
            )
        if layout in ("conjugated", "negated"):
            conjugated = torch.complex(dense, dense).conj()
            return conjugated.imag if layout == "negated" else conjugated
        return dense.to_sparse(
            layout=getattr(torch, layout), blocksize=(1, 1) if layout == "sparse_bsr" else None
        )

    first, same, other = made(1.0), made(1.0), made(1.5)
    assert digest(first) == digest(same) != digest(other)
    hasher = Hasher(CPU)
    batches = [int(hasher.digest_samples({"input": tensor})) for tensor in (first, same, other)]
    assert batches[0] == batches[1] != batches[2]
    if layout in ("conjugated", "negated"):
        assert digest(first) == digest(first.resolve_conj().resolve_neg().clone())
