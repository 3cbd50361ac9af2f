from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from danling.data import move_to_device

META = torch.device("meta")
Pair = namedtuple("Pair", ["left", "right"])


class Record:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    def to(self, device: Any) -> Record:
        return Record(self.value.to(device))


def test_nothing_happens_for_the_cpu() -> None:
    batch = {"input": torch.ones(2)}
    assert move_to_device(batch, torch.device("cpu")) is batch


def test_tensors_are_found_at_any_depth() -> None:
    one = torch.ones(2)
    batch = {
        "list": [one, (one, {"deep": one})],
        "pair": Pair(one, "text"),
        "ordered": OrderedDict(a=one),
        "user": UserDict(a=one),
        "record": Record(one),
        "packed": pack_sequence([one]),
        "others": (None, 3, 2.5, b"bytes", "text", range(3), torch.float32),
    }
    moved = move_to_device(batch, META)
    assert (
        moved["list"][0].is_meta
        and moved["list"][1][0].is_meta
        and moved["list"][1][1]["deep"].is_meta
    )
    assert (
        isinstance(moved["pair"], Pair)
        and moved["pair"].left.is_meta
        and moved["pair"].right == "text"
    )
    assert isinstance(moved["ordered"], OrderedDict) and moved["ordered"]["a"].is_meta
    assert isinstance(moved["user"], UserDict) and moved["user"]["a"].is_meta
    assert moved["record"].value.is_meta
    assert isinstance(moved["packed"], PackedSequence) and moved["packed"].data.is_meta
    assert (
        moved["others"][:5] == (None, 3, 2.5, b"bytes", "text")
        and moved["others"][6] is torch.float32
    )
    assert not one.is_meta
