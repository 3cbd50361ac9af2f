"""What an update may write to, copied and put back bitwise; batches that are kept; attempts that do or do not agree."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from danling.audit.attempts import Attempts, attempted, mismatch
from danling.audit.hashing import Hasher
from danling.audit.held import HeldState, remember_optimizer, remember_scaler
from danling.audit.kept_batches import copied, digest_of, memory_of
from danling.audit.reached import remember_attributes
from danling.audit.update_audit import tensors_of
from danling.distributed.domain import LocalDomain

CPU = torch.device("cpu")


def stepped(kind: type, model: nn.Module, **options: Any) -> Any:
    """Return an optimizer that has made a step."""
    optimizer = kind(model.parameters(), lr=0.1, **options)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return optimizer


def state_of(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Return clones of all tensors of a model and its optimizer."""
    found = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    for number, state in enumerate(optimizer.state.values()):
        for key, value in state.items():
            found.update({name: tensor.clone() for name, tensor in tensors_of(value, f"{number}/{key}")})
    return found


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.LBFGS, torch.optim.Adagrad])
def test_weights_and_optimizers_are_put_back_in_place(kind: type) -> None:
    model = nn.Linear(3, 2)
    optimizer = kind(model.parameters(), lr=0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)

    def tensors() -> Any:
        yield from model.named_parameters()
        for number, state in enumerate(optimizer.state.values()):
            for key, value in state.items():
                yield from tensors_of(value, f"{number}/{key}")

    held = HeldState(tensors, [lambda: remember_optimizer(optimizer)], CPU)
    before, copy, places = state_of(model, optimizer), held.copy(), [p.data_ptr() for p in model.parameters()]
    optimizer.step(closure)
    optimizer.param_groups[0]["lr"] = 0.5
    assert held.changed(copy)
    first = state_of(model, optimizer)
    assert held.put_back(copy) == [] == held.changed(copy)
    after = state_of(model, optimizer)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert optimizer.param_groups[0]["lr"] == 0.1 and [p.data_ptr() for p in model.parameters()] == places
    optimizer.step(closure)
    second = state_of(model, optimizer)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_state_that_a_step_makes_is_gone_again() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    put_back = remember_optimizer(optimizer)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    put_back()
    assert not optimizer.state


def test_a_copy_that_has_changed_itself_is_named_and_shared_clones_are_not_copied_again() -> None:
    tensors = {"a": torch.ones(3), "b": torch.zeros(2, dtype=torch.bool)}
    held = HeldState(lambda: tensors.items(), [], CPU)
    copy = held.copy()
    tensors["b"][0] = True
    later = held.copy(copy)
    assert later.clones["a"] is copy.clones["a"] and later.clones["b"] is not copy.clones["b"]
    copy.clones["b"][1] = True
    assert held.put_back(copy) == ["b"]


def test_a_scaler_may_step_again() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(model(torch.ones(2, 3)).sum()).backward()
    scaler.unscale_(optimizer)
    put_back = remember_scaler(scaler)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.step(optimizer)
    put_back()
    scaler.step(optimizer)


class Holder(nn.Module):
    """A module with attributes of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen, self.last = 0, [1], deque([1], maxlen=3)
        self.by_name: dict[str, int] = {"a": 1}
        self.inner = nn.Linear(1, 1)


def test_counters_and_containers_are_put_back_and_modules_left_alone() -> None:
    holder = Holder()
    seen, inner = holder.seen, holder.inner
    put_back = remember_attributes(holder)
    holder.calls, holder.new, holder.inner = 5, 1, nn.Linear(2, 2)
    holder.seen.append(2)
    holder.last.append(2)
    holder.by_name.update(a=2, b=3)
    holder.eval()
    put_back()
    assert (holder.calls, holder.seen, list(holder.last), holder.by_name) == (0, [1], [1], {"a": 1})
    assert holder.seen is seen and holder.training and not hasattr(holder, "new") and holder.inner is not inner


@dataclass
class Sample:
    """A batch of a class of its own."""

    image: Tensor
    name: str


class Plain:
    """A batch that says nothing of itself."""

    def __init__(self) -> None:
        self.x = torch.arange(4.0)
        self.me = [self]


class Key:
    """A key that is named by its place in memory."""


def batches_of_all_kinds() -> dict[str, Any]:
    """Return batches whose copies were once taken for other ones, or could not be made."""
    names = numpy.array([[1, "a"], ["b"]], dtype=object)
    nested = torch.nested.nested_tensor([torch.ones(1, 2), torch.ones(2, 2)], layout=torch.strided)
    return {
        "tensor": torch.arange(6.0),
        "mapping": {"a": torch.ones(2), "b": [1, "x"]},
        "dataclass": (Sample(torch.zeros(2, 2), "n"), None),
        "circle": Plain(),
        "set": [torch.ones(1), {f"name {number}" for number in range(50)} | {None, 3}],
        "objects": [torch.ones(1), names, {Key(): 1, (1, 2): 2}],
        "nested": {"x": nested, "y": torch.ones(1)},
        "csr": {"x": torch.eye(3).to_sparse_csr(), "y": torch.ones(1)},
    }


@pytest.mark.parametrize("kind", batches_of_all_kinds())
def test_copies_of_batches_have_the_digests_and_not_the_memory(kind: str) -> None:
    hasher, batch = Hasher(CPU), batches_of_all_kinds()[kind]

    def digests(data: Any) -> list[tuple[str, int]]:
        return [(name, int(digest)) for name, digest in digest_of(data, hasher)]

    other = copied(batch)
    assert digests(other) == digests(batch) and not memory_of(other) & memory_of(batch) and memory_of(batch)


def test_a_copy_of_a_slice_takes_no_more_than_it_and_shares_what_is_shared() -> None:
    whole = torch.arange(10_000.0)
    batch = {"x": whole[100:108], "first": whole[100:102], "by": whole[101:107].view(2, 3).t(), "whole": torch.ones(3)}
    other = copied(batch)
    assert all(torch.equal(other[name], batch[name]) for name in batch)
    assert other["by"].stride() == (1, 3) and other["x"].untyped_storage().nbytes() < 64
    other["x"][0] = -1
    assert other["first"][0] == -1 and whole[100] == 100


def test_any_leaf_changes_the_digest_of_a_batch_and_what_cannot_be_copied_is_said() -> None:
    hasher = Hasher(CPU)
    found = [
        [int(d) for _, d in digest_of(data, hasher)]
        for data in ({"a": 1, "b": torch.ones(2)}, {"a": 2, "b": torch.ones(2)}, {"a": 1, "b": torch.zeros(2)})
    ]
    assert len(set(map(tuple, found))) == 3
    with pytest.raises(ValueError, match="Expected batches that can be copied with audit.replay_interval"):
        copied({"a": (number for number in range(3))})


def classes(*values: int) -> Attempts:
    """Return what attempts come to that have these values one after the other."""
    left = iter(values[1:])
    return attempted({(0, "x"): values[0]}, lambda: {(0, "x"): next(left)}, domain=LocalDomain(), device=CPU, replays=1)


@pytest.mark.parametrize(
    ("values", "made", "agree", "usual", "odd"),
    [
        ((1, 1), 2, True, True, []),
        ((1, 2, 1), 3, False, True, [2]),
        ((2, 1, 1), 3, False, True, [1]),
        ((1, 2, 3, 1, 1), 5, False, True, [2, 3]),
        ((1, 2, 3, 4, 5), 5, False, False, [2, 3, 4, 5]),
        ((1, 2, 3, 3, 1), 5, False, False, [2, 3, 4]),
    ],
)
def test_attempts_are_made_until_the_last_is_one_of_most(
    values: tuple[int, ...], made: int, agree: bool, usual: bool, odd: list[int]
) -> None:
    found = classes(*values)
    assert (len(found.records), found.agree, found.last_is_usual, found.odd) == (made, agree, usual, odd)


def test_what_is_said_of_them_names_the_device_only_where_most_agree() -> None:
    said = mismatch(classes(1, 2, 1), "update 3", domain=LocalDomain(), device=CPU)
    assert "Expected update 3 to come to the same bits" in said and "rank 0 on cpu of" in said
    assert "x differ, in number 2 of 3 attempts" in said and "a device or a link is to be suspected" in said
    said = mismatch(classes(1, 2, 3, 4, 5), "update 3", domain=LocalDomain(), device=CPU)
    assert "numbers 2, 3, 4, 5 of 5 attempts" in said and "danling doctor --determinism" in said
