"""The reference of the search computes what a loop of torch computes, and its comparison sees what differs."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from explore.by_hand import expected
from explore.comparing import differences
from explore.spec import (
    Average,
    Data,
    Event,
    MicroBatch,
    Optimizer,
    Program,
    Record,
    Schedule,
    Settings,
)
from torch import Tensor, nn
from torch.utils.data import TensorDataset

PROGRAM = Program(
    data=Data(train=11, val=5),
    optimizer=Optimizer("momentum", lr=0.05),
    settings=Settings(
        epochs=2,
        batch_size=3,
        accum_steps=2,
        drop_last=False,
        max_grad_norm=1.0,
        schedule=Schedule("linear"),
        ema=Average(0.5),
    ),
)


def tensors_of(split: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(len(split))
    count = {"train": 11, "val": 5}[split]
    return torch.randn(count, 3, generator=generator), torch.randn(count, 2, generator=generator)


PARTS: dict[str, Any] = {
    "make_model": lambda: nn.Linear(3, 2),
    "make_criterion": nn.MSELoss,
    "make_dataset": lambda split: TensorDataset(*tensors_of(split)),
}


def given() -> Record:
    """Return what the reference is given of a run that reads its samples in order."""
    weights = {name: tensor.clone() for name, tensor in nn.Linear(3, 2).state_dict().items()}
    batches = zip(*(torch.split(each, 3) for each in tensors_of("train")))
    micro_batches = [MicroBatch(0, batch, len(batch[0]), []) for batch in batches]
    return Record(initial=weights, micro_batches=micro_batches * 2)


def trained_by_torch(
    initial: dict[str, Tensor],
) -> tuple[dict[str, Tensor], dict[str, Tensor], float]:
    """Return weights, averages and the loss of the validation, of updates of six samples and of the five that are left."""
    model, inputs, targets = (
        nn.Linear(3, 2).double(),
        *(each.double() for each in tensors_of("train")),
    )
    model.load_state_dict(initial)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    average: Any = torch.optim.swa_utils.get_ema_multi_avg_fn
    averaged = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=average(0.5))
    averaged.update_parameters(model)  # the first call copies
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 - n / 4)
    for first in (0, 6, 0, 6):
        optimizer.zero_grad()
        loss: Any = nn.functional.mse_loss(
            model(inputs[first : first + 6]), targets[first : first + 6]
        )
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        averaged.update_parameters(model)
    val_inputs, val_targets = (each.double() for each in tensors_of("val"))
    with torch.no_grad():
        evaluated = float(nn.functional.mse_loss(averaged(val_inputs), val_targets))
    return model.state_dict(), averaged.module.state_dict(), evaluated


def test_reference_equals_torch() -> None:
    record = given()
    found = expected(PROGRAM, PARTS, record)
    weights, averages, loss = trained_by_torch(record.initial)
    for name in weights:
        torch.testing.assert_close(found.final[name], weights[name], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found.averages[name], averages[name], rtol=1e-12, atol=1e-12)
    assert found.evaluations[-1].result["loss"] == pytest.approx(loss, rel=1e-12)
    assert [update.rates[0] for update in found.updates] == pytest.approx(
        [0.05, 0.0375, 0.025, 0.0125]
    )


def test_reference_follows_a_larger_budget() -> None:
    program = replace(PROGRAM, events=(Event("budget", 1),))
    rates = [update.rates[0] for update in expected(program, PARTS, given()).updates]
    assert rates == pytest.approx([0.05, 0.025, 0.025, 0.0125])


def change(record: Record, what: str) -> None:
    if what == "weights":
        record.updates[1].after["weight"][0, 0] += 1e-3
    elif what == "averages":
        record.averages["weight"] = record.initial["weight"]
    elif what == "rates":
        record.updates[2].rates[0] *= 1.01
    elif what == "updates":
        record.updates.pop()
    elif what == "evaluations":
        record.evaluations[0].result["loss"] *= 1.001
    elif what == "predictions":
        record.predictions = torch.as_tensor(record.predictions).flip(0)
    elif what == "skipped":
        record.updates[3].committed = False
    elif what == "refused":
        record.refused = "ValueError: no"


@pytest.mark.parametrize(
    "what",
    ["weights", "averages", "rates", "updates", "evaluations", "predictions", "skipped", "refused"],
)
def test_comparison_sees_differences(what: str) -> None:
    record = given()
    exact, own = (expected(PROGRAM, PARTS, record, exact=exact) for exact in (True, False))
    found = copy.deepcopy(own)
    found.initial = record.initial
    assert differences(found, exact, own) == []
    change(found, what)
    assert differences(found, exact, own)
