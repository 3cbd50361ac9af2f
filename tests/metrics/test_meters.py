from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support.processes import run_processes

from danling.distributed import Domain
from danling.metrics import Meters


def test_means_are_weighted_and_divided_once() -> None:
    meters = Meters()
    meters.update({"loss": 2.0, "acc": torch.tensor(0.5)}, weight=3)
    meters.update({"loss": torch.tensor(4.0, requires_grad=True)}, weight=torch.tensor(1))
    meters.add_totals("acc", torch.tensor(1), 1)
    assert meters.averages() == {"acc": 2.5 / 4, "loss": 2.5}
    assert meters.totals() == {"acc": (2.5, 4.0), "loss": (10.0, 4.0)}
    assert (meters["loss"].sum, meters["loss"].weight, meters["loss"].average) == (10.0, 4.0, 2.5)
    assert (
        len(meters) == 2
        and "loss" in meters
        and "f1" not in meters
        and list(meters) == ["loss", "acc"]
    )


def test_sums_are_float64() -> None:
    meters = Meters()
    for _ in range(10):
        meters.update({"loss": torch.tensor(1e8)}, weight=1)
        meters.update({"loss": torch.tensor(1.0)}, weight=1)
    assert meters.averages()["loss"] == (1e9 + 10) / 20


def test_the_mean_of_nothing_leaves_no_trace() -> None:
    meters = Meters()
    meters.update({"loss": torch.tensor(math.nan)}, weight=0)
    meters.update({"loss": math.nan}, weight=torch.tensor(0.0))
    meters.add_totals("acc", torch.tensor(0), torch.tensor(0))
    assert meters.averages() == {}
    assert not meters
    meters.update({"loss": 1.0})
    assert meters.averages() == {"loss": 1.0}
    assert meters


def test_a_vector_is_no_mean() -> None:
    with pytest.raises(ValueError, match=r"a tensor of shape \(2,\)"):
        Meters().update({"loss": torch.ones(2)})
    with pytest.raises(ValueError, match=r"a tensor of shape \(2,\)"):
        Meters().update({"loss": 1.0}, weight=torch.ones(2))


def test_state_is_plain_and_comes_back() -> None:
    meters = Meters()
    meters.update({"loss": 0.1}, weight=3)
    state = meters.state_dict()
    assert state == {"loss": [0.1 * 3, 3.0]}
    restored = Meters()
    restored.load_state_dict(state)
    restored.update({"loss": 0.7}, weight=2)
    meters.update({"loss": 0.7}, weight=2)
    assert restored.totals() == meters.totals()
    meters.reset()
    assert meters.averages() == {}


class _FakeAccelerator(torch.Tensor):
    """A tensor that says it is not on the CPU, and refuses to be waited for."""

    is_cpu = False

    def item(self) -> Any:
        raise AssertionError("waited for the device")

    __float__ = __bool__ = item


def test_values_on_a_device_are_not_waited_for() -> None:
    def on_device(value: float) -> torch.Tensor:
        return torch.tensor(value).as_subclass(_FakeAccelerator)

    meters = Meters()
    meters.update({"loss": on_device(2.0)}, weight=3)
    meters.update({"loss": on_device(4.0)}, weight=on_device(1.0))
    meters.update({"loss": on_device(math.nan)}, weight=on_device(0.0))
    meters.update({"acc": 0.5}, weight=on_device(2.0))
    with pytest.raises(ValueError, match="single number"):
        meters.update({"loss": torch.ones(3).as_subclass(_FakeAccelerator)})
    assert (
        isinstance(meters["loss"].sum, torch.Tensor) and meters["loss"].sum.dtype == torch.float64
    )
    assert meters.averages() == {"acc": 0.5, "loss": 2.5}


def test_totals_made_in_inference_mode_go_on_outside() -> None:
    meters = Meters()
    with torch.inference_mode():
        meters.update({"loss": torch.tensor(1.0).as_subclass(_FakeAccelerator)})
    meters.update({"loss": torch.tensor(3.0).as_subclass(_FakeAccelerator)})
    assert meters.averages() == {"loss": 2.0}


def _averages(
    values: list[list[tuple[str, float, float]]],
) -> tuple[dict[str, float], dict[str, list[float]]]:
    domain, meters = Domain(), Meters()
    for name, value, weight in values[domain.rank]:
        meters.update({name: value}, weight)
    return meters.averages(domain), meters.state_dict()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_means_over_ranks_with_different_names_or_none(world_size: int) -> None:
    values = [[("loss", 2.0, 3.0), ("b", 1.0, 1.0)], [("a", 5.0, 2.0), ("loss", 4.0, 1.0)], []][
        -world_size:
    ]
    results = run_processes(_averages, values, world_size=world_size, init_process_group=True)
    expected = {1: {}, 2: {"a": 5.0, "loss": 4.0}, 3: {"a": 5.0, "b": 1.0, "loss": 2.5}}[world_size]
    assert [averages for averages, _ in results] == [expected] * world_size
    # The local sums are untouched.
    assert [state for _, state in results] == [
        {n: [v * w, w] for n, v, w in mine} for mine in values
    ]
