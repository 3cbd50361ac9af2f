"""Digests of tensors: 64 bits over every bit of a tensor, exact, computed on its device, and the same however it is divided over ranks.

The bits of each element, as a signed integer, are multiplied by an odd key of its place in the last dimension; the upper half of the
64-bit product is folded into the lower one; the results of a row are added, multiplied by an odd key of the row, and added again. All of
it is integer arithmetic modulo 2^64, in which the order of a sum does not matter: shards of a tensor, each hashed at its place in the
whole, add up to the digest of the whole, exactly, on every layout.

A single element that changes always changes the digest, since each step is a bijection of that element. Several that change cancel out by
chance in about one of 2^58 cases: the sum over rows loses up to six bits, where differences are even. This is a bound for faults and
not for an adversary, who can compute the keys.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from danling.utils.tensors import is_sharded, local_part
from danling.utils.trees import leaves

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LONGEST_ROW = 1 << 16
"""Elements of a vector that are keyed as one row; a longer one is keyed as rows of so many."""
_AT_ONCE = {"cpu": 1 << 17}
_AT_ONCE_ELSEWHERE = 1 << 23
"""Elements that are hashed at once; 8 bytes for each are needed meanwhile. On the CPU they stay in its cache."""
_GOLDEN = 0x9E3779B97F4A7C15


def key_of(*words: object) -> int:
    """Return the odd key of some words, such as the name of a tensor: an integer of 64 bits with a sign, the same in every process."""
    text = "\0".join(map(str, words)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True) | 1


class Hasher:
    """Computes digests on a device. Nothing waits for the device, and nothing is communicated."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._tables: dict[bool, Tensor] = {}
        self._places: dict[Any, tuple[int, ...]] = {}
        self._other: Hasher | None = None
        self._at_once = _AT_ONCE.get(device.type, _AT_ONCE_ELSEWHERE)

    @torch.no_grad()
    def digest(self, tensor: Tensor) -> Tensor:
        """Return the share of the digest of a tensor that this rank's part of it has: 0-dim int64 on the device
        of the tensor; 0 where it holds none.
        """
        parts = _parts(tensor)
        if parts:
            return torch.stack(
                [self.digest(part) * key_of(number) for number, part in enumerate(parts)]
            ).sum()
        shape, offset = tuple(tensor.shape), self.offset(tensor)
        local = _stored(local_part(tensor.detach()))
        if local.device != self.device:
            # Digest tensors of host memory on the host: to send them one by one would wait for the device each time.
            return self._elsewhere(local.device).digest(tensor)
        if local.numel() == 0:
            return torch.zeros((), dtype=torch.int64, device=self.device)
        if local.is_complex():
            local, shape, offset = torch.view_as_real(local), (*shape, 2), (*offset, 0)
        bits = local.view(_BITS[local.element_size()])
        if bits.dim() < 2:
            return self._of_vector(bits.reshape(-1), offset[0] if offset else 0)
        rows = self._rows(shape[:-1], offset[:-1], tuple(bits.shape[:-1]))
        columns = self._keys(False, offset[-1] + bits.shape[-1])[offset[-1] :]
        return self._of_rows(bits.reshape(-1, bits.shape[-1]), rows, columns)

    @torch.no_grad()
    def digest_held(self, tensor: Tensor) -> Tensor:
        """Return the digest of this rank's part of a tensor, to compare with the same part alone: 0-dim int64 on the tensor's device.

        Its place in a whole is no part of it, so that 8 bytes are hashed at a time: a third of the time of `digest` in float32.
        """
        local = local_part(tensor.detach())
        keyed = key_of(local.dtype, tuple(local.shape))
        if local.device != self.device:
            return self._elsewhere(local.device).digest_held(local)
        if _parts(local):
            return self.digest(local) * keyed
        bits = _real(_stored(local)).reshape(-1)
        # A view of wider numbers needs a length and a place in memory that they divide.
        number = 8 // bits.element_size()
        length = len(bits) - len(bits) % number if bits.storage_offset() % number == 0 else 0
        total = self._of_vector(bits[:length].view(torch.int64), 0)
        if length < len(bits):
            total = total + self._of_vector(
                bits[length:].view(_BITS[bits.element_size()]), 0
            ) * _signed(_GOLDEN)
        return total * keyed

    def _elsewhere(self, device: torch.device) -> Hasher:
        if self._other is None or self._other.device != device:
            self._other = Hasher(device)
        return self._other

    def offset(self, tensor: Any) -> tuple[int, ...]:
        """Return where this rank's part of a tensor begins in the whole."""
        if not is_sharded(tensor):
            return (0,) * int(tensor.dim())
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        known = tuple(tensor.shape), tensor.placements, id(tensor.device_mesh)
        if known not in self._places:
            found = compute_local_shape_and_global_offset(
                tensor.shape, tensor.device_mesh, tensor.placements
            )
            self._places[known] = tuple(found[1])
        return self._places[known]

    def _rows(self, whole: Sequence[int], offset: Sequence[int], local: Sequence[int]) -> Tensor:
        """Return the keys of the rows of a part, by their numbers in the whole."""
        keys = self._keys(True, math.prod(whole))
        keys = keys[: math.prod(whole)]
        if tuple(whole) == tuple(local):
            return keys
        part = tuple(slice(start, start + length) for start, length in zip(offset, local))
        return keys.reshape(tuple(whole))[part].reshape(-1)

    def _of_vector(self, bits: Tensor, start: int) -> Tensor:
        # Rows of a fixed length of the whole tensor: the rest of a row, whole rows, the beginning of one.
        total = torch.zeros((), dtype=torch.int64, device=self.device)
        done = 0
        while done < len(bits):
            row, column = divmod(start + done, _LONGEST_ROW)
            left = len(bits) - done
            number, length = 1, min(left, _LONGEST_ROW - column)
            if length == _LONGEST_ROW:
                number = left // _LONGEST_ROW
            piece = bits[done : done + number * length].reshape(number, length)
            rows = self._keys(True, row + number)[row : row + number]
            total = total + self._of_rows(piece, rows, self._keys(False, column + length)[column:])
            done += number * length
        return total

    def _of_rows(self, bits: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        number, length = bits.shape
        columns = columns[:length]
        at_once = max(1, self._at_once // length)
        pieces = [slice(start, start + at_once) for start in range(0, number, at_once)]
        sums = [(self._row_sums(bits[piece], columns) * rows[piece]).sum() for piece in pieces]
        return torch.stack(sums).sum()

    def _row_sums(self, bits: Tensor, columns: Tensor) -> Tensor:
        terms = torch.empty(bits.shape, dtype=torch.int64, device=self.device)
        torch.mul(bits, columns, out=terms)
        halves = terms.view(torch.int32).view(*bits.shape, 2)
        # Without it a difference in high bits alone, such as that of signs, would keep most bits of the sum as they are.
        halves[..., 0].bitwise_xor_(halves[..., 1])
        return terms.sum(-1)

    def _keys(self, of_rows: bool, number: int) -> Tensor:
        """Return at least so many keys of rows or columns: odd, pseudo-random, the same on every device."""
        known = self._tables.get(of_rows)
        if known is None or len(known) < number:
            places = torch.arange(max(number, 1024), dtype=torch.int64, device=self.device)
            known = self._tables[of_rows] = mixed(2 * places + of_rows) | 1
        return known

    # Samples

    @torch.no_grad()
    def digest_samples(self, data: object) -> Tensor:
        """Return the digest of the samples of a batch, 0-dim int64: the same in whatever order, and in however many batches they come.

        Rows of tensors of the same length are taken for parts of one sample each. Only tensors, numbers and text count.
        """
        by_length: dict[int, Tensor] = {}
        total = torch.zeros((), dtype=torch.int64, device=self.device)
        for path, leaf in leaves(data, opened=_opened):
            if not isinstance(leaf, (Tensor, bool, int, float, str, bytes)):
                continue
            name = "".join(f".{key}" for key in path)
            if not isinstance(leaf, Tensor):
                total = total + key_of(name, repr(leaf))
            elif is_sharded(leaf) or _parts(leaf) or leaf.dim() == 0:
                total = total + self.digest(leaf).to(self.device) * key_of(name)
            elif leaf.numel():
                part = _real(_stored(leaf).to(self.device))
                bits = part.reshape(len(leaf), -1).view(_BITS[part.element_size()])
                columns = self._keys(False, bits.shape[1])[: bits.shape[1]]
                sums = self._row_sums(bits, columns) * key_of(name)
                by_length[len(leaf)] = sums + by_length.get(len(leaf), 0)
        # The parts of a sample are mixed together: the sum over samples forgets their order, and not
        # which image had which label.
        for sums in by_length.values():
            total = total + mixed(sums).sum()
        return total


def mixed(values: Tensor) -> Tensor:
    """Return integers of 64 bits whose bits all depend on all bits of the given ones: the finalizer of SplitMix64, a bijection.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014).
    """
    values = (values + 1) * _signed(_GOLDEN)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        values = (values ^ _shifted(values, shift)) * _signed(factor)
    return values ^ _shifted(values, 31)


def _shifted(values: Tensor, by: int) -> Tensor:
    # The shift of signed integers fills with the sign.
    return (values >> by) & ((1 << (64 - by)) - 1)


def _parts(tensor: Tensor) -> list[Tensor]:
    """Return the tensors that a tensor with a special layout consists of; empty for one whose elements are in strides."""
    if tensor.is_nested:
        return list(tensor.unbind())
    if tensor.layout is torch.sparse_coo:
        # Those of a tensor that is not coalesced, too, whose `indices` torch does not hand out.
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _stored(tensor: Tensor) -> Tensor:
    """Return a tensor whose memory has its values as they are: quantized ones as integers, conjugated and negated ones computed."""
    return tensor.int_repr() if tensor.is_quantized else tensor.resolve_conj().resolve_neg()


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _opened(value: object) -> object:
    """Return the fields of a dataclass in its place."""
    if is_dataclass(value) and not isinstance(value, (type, Mapping)):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return value
