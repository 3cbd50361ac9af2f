"""Tables and mappings as datasets: refused where `[index]` is no sample, and what the error says to write trains."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import StackDataset, Subset, TensorDataset

import danling as dl

pandas = pytest.importorskip("pandas")


class Toy(dl.Runner):
    def __init__(self, dataset: Any, **order: Any) -> None:
        loader = {"batch_size": 4, **(order or {"shuffle": False})}
        super().__init__({"epochs": 1, "seed": 1, "log": False, "dataloader": loader})
        torch.manual_seed(0)
        self.model = nn.Linear(4, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.criterion = nn.CrossEntropyLoss()
        self.datasets = {"train": dataset}


TABLE = "Write TensorDataset(torch.tensor(frame[inputs].to_numpy())"
STACK = "Write StackDataset(**entries)"
FRAME = pandas.DataFrame(numpy.eye(4, dtype="float32"))
NOT_BY_PLACE = [
    # Square: without the check, its columns would be trained on.
    (FRAME, f"Received: a DataFrame, of which [index] is a column. {TABLE}"),
    (Subset(FRAME, range(4)), "Expected datasets['train'].dataset to have a sample at each index"),
    (FRAME[0].iloc[::-1], f"Received: a Series, of which [index] is looked up by label. {TABLE}"),
    ({"input": torch.ones(8, 4)}, f"looked up among its keys ['input']. {STACK}"),
]


class Columns(Mapping[Any, Any]):
    """Columns by name and rows by index, as a TensorDict has them, which answers no `in` either."""

    def __init__(self, columns: dict[str, torch.Tensor]) -> None:
        self.columns = columns

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, int):
            return {name: column[key] for name, column in self.columns.items()}
        return self.columns[key]

    def __contains__(self, key: object) -> bool:
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        return iter(range(len(self)))

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))


@pytest.mark.parametrize(("dataset", "said"), NOT_BY_PLACE, ids=["frame", "part", "series", "dict"])
def test_a_table_or_mapping_is_refused_with_what_to_write(dataset: object, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        Toy(dataset)


def test_what_the_errors_of_tables_and_mappings_say_to_write_trains() -> None:
    rows = [(torch.eye(4)[index % 4], torch.tensor(index % 2)) for index in range(8)]
    inputs, targets = torch.stack([row[0] for row in rows]), torch.tensor([row[1] for row in rows])
    frame = pandas.DataFrame(inputs.numpy(), columns=list("abcd")).assign(y=targets.numpy())
    tensors = [torch.tensor(frame[which].to_numpy()) for which in (list("abcd"), "y")]
    columns: Any = {"input": inputs, "target": targets}
    stacked = StackDataset(**columns)
    found = []
    for dataset in (
        rows,
        TensorDataset(*tensors),
        stacked,
        Columns(columns),
        pandas.Series(rows),
        dict(enumerate(rows)),
    ):
        with Toy(dataset) as runner:
            runner.train()
            model: Any = runner.unwrapped_model
            found.append(model.weight.detach().clone())
    assert all(torch.equal(found[0], other) for other in found[1:])


class Cache(dict[int, Any]):
    """A mapping that makes each sample when it is read first."""

    def __missing__(self, index: int) -> Any:
        self[index] = torch.eye(4)[index % 4], torch.tensor(index % 2)
        return self[index]

    def __len__(self) -> int:
        return 8


class Rows(dict[str, torch.Tensor]):
    """A dictionary of columns that reads rows by index."""

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, int):
            return tuple(column[key] for column in self.values())
        return super().__getitem__(key)

    def __len__(self) -> int:
        return 8


def test_a_mapping_read_by_keys_of_the_program_or_in_its_own_way_trains_as_a_list_does() -> None:
    rows = [(torch.eye(4)[index % 4], torch.tensor(index % 2)) for index in range(8)]
    keyed: Any = {f"sample {index}": row for index, row in enumerate(rows)}
    labels = list(range(7, -1, -1))
    columns = Rows(x=torch.stack([row[0] for row in rows]), y=torch.stack([row[1] for row in rows]))
    programs: list[tuple[Any, dict[str, Any]]] = [
        (rows, {}),
        (Subset(keyed, list(keyed)), {}),
        (Subset(pandas.Series(rows[::-1], index=labels), range(8)), {}),
        (keyed, {"sampler": list(keyed)}),
        (Cache(), {}),
        (columns, {}),
    ]
    found = []
    for dataset, order in programs:
        with Toy(dataset, **order) as runner:
            runner.train()
            model: Any = runner.unwrapped_model
            found.append(model.weight.detach().clone())
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_a_frame_is_refused_with_a_sampler_too() -> None:
    with pytest.raises(ValueError, match="of which \\[index\\] is a column"):
        Toy(FRAME, sampler=range(4))
