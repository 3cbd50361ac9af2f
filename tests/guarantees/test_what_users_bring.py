"""G14: what users bring themselves comes back bitwise: samplers, streams, loaders, generators and states of datasets.

Each case is trained in one process without a stop; in a second one to the first, a middle and the last update of epochs 0, 1 and 2,
and into an accumulation window; and from each of these to the end in a third one. The order of samples, what they held and the weights
are the same.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from support.processes import run_processes
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import danling as dl

LENGTH, BATCH = 10, 2
LOADERS: dict[str, Any] = {"torch": DataLoader, "stateful": StatefulDataLoader}


def a_sample(index: int, noise: float) -> dict[str, Any]:
    inputs = torch.tensor([index / LENGTH, noise, 1.0])
    return {"input": inputs, "target": inputs[:1] * 2, "index": index, "noise": noise}


def of_global_streams() -> float:
    return torch.rand(()).item() + float(numpy.random.rand()) + random.random()


class Rows(Dataset[dict[str, Any]]):
    """Rows with noise that a transform draws, by default from all global streams."""

    def __init__(self, transform: Any = None) -> None:
        self.transform = {"noise": [transform or of_global_streams]}

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> dict[str, Any]:
        return a_sample(int(index), self.transform["noise"][0]())


class Draws:
    def __init__(self, rng: Any) -> None:
        self.rng = rng

    def __call__(self) -> float:
        return (
            torch.rand((), generator=self.rng).item()
            if isinstance(self.rng, torch.Generator)
            else self.rng.random()
        )


class DrawsLazily(Draws):
    """Seeds its generator when it is first called, as augmentation libraries do."""

    def __init__(self) -> None:
        super().__init__(None)

    def __call__(self) -> float:
        if self.rng is None:
            self.rng = numpy.random.default_rng(torch.initial_seed() % 2**32)
        return super().__call__()


class Counts(Rows):
    not_saved = ("reads",)

    reads = 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.reads += 1
        return a_sample(index, self.reads / 100)

    def state_dict(self) -> dict[str, Any]:
        return {"reads": self.reads}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.reads = state["reads"]


class Shuffles:
    """A sampler without `__len__` that shuffles its list in place by Python's global stream, and has a state therefore."""

    def __init__(self) -> None:
        self.order = list(range(LENGTH))

    def __iter__(self) -> Iterator[int]:
        random.shuffle(self.order)
        return iter(self.order)

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order = state["order"]


class Permutes:
    def __init__(self, rng: Any = numpy.random) -> None:
        self.rng = None if rng is numpy.random else rng

    def __iter__(self) -> Iterator[int]:
        return iter((numpy.random if self.rng is None else self.rng).permutation(LENGTH).tolist())

    def __len__(self) -> int:
        return LENGTH


class Lists:
    def __iter__(self) -> Iterator[list[int]]:
        order = numpy.random.permutation(LENGTH).tolist()
        return iter([order[begin : begin + BATCH] for begin in range(0, LENGTH, BATCH)])


def share_of_worker() -> list[int]:
    """Permute the indices, and return those of this worker."""
    info = get_worker_info()
    first, step = (info.id, info.num_workers) if info is not None else (0, 1)
    return torch.randperm(LENGTH).tolist()[first::step]


class Stream(IterableDataset[dict[str, Any]]):
    def __iter__(self) -> Iterator[dict[str, Any]]:
        for index in share_of_worker():
            yield a_sample(index, of_global_streams())


class Buffer(IterableDataset[dict[str, Any]]):
    """A shuffle buffer over it, which draws at each sample."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        held: list[Any] = []
        for sample in Stream():
            held.append(sample)
            if len(held) == 4:
                yield held.pop(random.randrange(4))
        yield from held


class Remembers(IterableDataset[dict[str, Any]]):
    def __init__(self) -> None:
        self.order: list[int] = []

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if not self.order:
            self.order = share_of_worker()
        while self.order:
            yield a_sample(self.order.pop(), of_global_streams())

    def state_dict(self) -> dict[str, Any]:
        return {"order": list(self.order)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order = list(state["order"])


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


WEIGHTS = [1.0 + index for index in range(LENGTH)]
SAMPLERS: dict[str, Callable[[Any], Any]] = {
    "weighted": lambda data: WeightedRandomSampler(WEIGHTS, LENGTH),
    "weighted, generator": lambda data: WeightedRandomSampler(WEIGHTS, LENGTH, generator=seeded()),
    "random": lambda data: RandomSampler(data),
    "random, generator": lambda data: RandomSampler(data, generator=seeded()),
    "subset": lambda data: SubsetRandomSampler(range(LENGTH)),
    "subset, generator": lambda data: SubsetRandomSampler(range(LENGTH), generator=seeded()),
    "distributed": lambda data: DistributedSampler(data, num_replicas=1, rank=0),
    "in place": lambda data: Shuffles(),
    "of NumPy": lambda data: Permutes(),
    "of a generator": lambda data: Permutes(numpy.random.default_rng(5)),
    "batches": lambda data: BatchSampler(RandomSampler(data, generator=seeded()), BATCH, False),
    "batches of NumPy": lambda data: Lists(),
}
DATASETS: dict[str, Callable[[], Any]] = {
    "torch generator": lambda: Rows(Draws(seeded())),
    "NumPy generator": lambda: Rows(Draws(numpy.random.default_rng())),
    "Python generator": lambda: Rows(Draws(random.Random())),
    "lazy generator": lambda: Rows(DrawsLazily()),
    "own state": Counts,
    "stream": Stream,
    "buffer": Buffer,
    "stateful stream": Remembers,
}


class Brought(dl.TorchRunner):
    not_saved = ("micro", "seen")

    def __init__(
        self, config: dict[str, Any], stop_at: int | None = None, fails: bool = False
    ) -> None:
        super().__init__(config)
        self.stop_at, self.fails, self.micro = stop_at, fails, 0
        self.seen: list[tuple[list[int], list[float]]] = []
        self.model, self.criterion = nn.Linear(3, 1), nn.MSELoss()
        case, way = self.config["case.brought"], self.config["case.way"]
        data = DATASETS[case]() if case in DATASETS else Rows()
        if way == "built":
            self.datasets = {"train": data}
            return
        workers = self.config["case.workers"]
        options = (
            {"num_workers": workers, "persistent_workers": self.config["case.persistent"]}
            if workers
            else {}
        )
        self.dataloaders = {"train": LOADERS[way](data, **self.sampling(case, data), **options)}

    @staticmethod
    def sampling(case: str, data: Any) -> dict[str, Any]:
        if case not in SAMPLERS:
            return {"batch_size": BATCH}
        sampler = SAMPLERS[case](data)
        return (
            {"batch_sampler": sampler}
            if "batches" in case
            else {"sampler": sampler, "batch_size": BATCH}
        )

    def build_datasampler(self, split: str, dataset: Any) -> Any:
        case = self.config["case.brought"]
        return SAMPLERS[case](dataset) if case in SAMPLERS else None

    def train_step(self, data: dict[str, Any]) -> tuple[Any, Tensor]:
        self.micro += 1
        if self.fails and self.state.train.global_step == self.stop_at and self.micro % 2 == 0:
            raise RuntimeError("in the middle of a window")
        self.seen.append((data["index"].tolist(), data["noise"].tolist()))
        return super().train_step((data["input"], data["target"]))

    def step(self) -> Any:
        if (
            self.stop_at is not None
            and not self.fails
            and self.state.train.global_step == self.stop_at - 1
        ):
            self.stop()
        self.micro = 0
        return super().step()


UPDATES = 9
"""Three epochs of five batches, of which two make an update and one the last."""
QUICK = [(3, False), (4, True), (8, False)]
"""The end of an epoch, within a window of the next one, and within the last one."""
STOPS = [
    (1, False),
    (2, False),
    (3, False),
    (4, False),
    (4, True),
    (5, False),
    (6, False),
    (7, False),
    (8, False),
]


def settings(
    case: str, way: str, workers: int, persistent: bool, step_mode: bool, root: str
) -> dict[str, Any]:
    budget: dict[str, Any] = {"steps": UPDATES} if step_mode else {"epochs": 3}
    loader: dict[str, Any] = {"batch_size": BATCH, "drop_last": False} if way == "built" else {}
    if way == "built" and workers:
        loader.update(num_workers=workers, persistent_workers=persistent)
    if "batches" in case:
        loader = {
            name: value for name, value in loader.items() if name not in ("batch_size", "drop_last")
        }
    return {
        **budget,
        "seed": 3,
        "accum_steps": 2,
        "case": {"brought": case, "way": way, "workers": workers, "persistent": persistent},
        "dataloader": loader,
        "optim": {"type": "sgd", "lr": 0.1},
        "workspace_root": root,
        "checkpoint.async_enabled": False,
        "log": False,
    }


def train(
    config: dict[str, Any], stop_at: int | None = None, fails: bool = False
) -> dict[str, Any]:
    with Brought(config, stop_at, fails) as runner:
        try:
            runner.train()
        except RuntimeError as error:
            assert str(error) == "in the middle of a window"
        step = runner.state.train.global_step
        return {"seen": list(runner.seen), "step": step, "model": runner.model.state_dict()}


def stop_at_each(
    config: dict[str, Any], root: str, stops: list[tuple[int, bool]]
) -> list[dict[str, Any]]:
    found = []
    for stop, fails in stops:
        place = {**config, "workspace_root": f"{root}/{stop}{fails}"}
        if fails:  # what was trained since the last save is trained again
            train(place, stop)
            place["auto_resume"] = True
        found.append(train(place, stop, fails))
    return found


def resume_each(
    config: dict[str, Any], root: str, stops: list[tuple[int, bool]]
) -> list[dict[str, Any]]:
    return [
        train({**config, "workspace_root": f"{root}/{stop}{fails}", "auto_resume": True})
        for stop, fails in stops
    ]


def check(
    root: Path,
    case: str,
    way: str,
    workers: int,
    persistent: bool,
    step_mode: bool,
    stops: list[Any],
) -> None:
    config = settings(case, way, workers, persistent, step_mode, str(root / "whole"))
    (whole,) = run_processes(train, config, world_size=1, timeout=120)
    (before,) = run_processes(stop_at_each, config, str(root), stops, world_size=1, timeout=300)
    (after,) = run_processes(resume_each, config, str(root), stops, world_size=1, timeout=300)
    assert whole["step"] == UPDATES
    for (stop, fails), first, rest in zip(stops, before, after, strict=True):
        # Nothing of a window that was not closed counts.
        consumed = len(whole["seen"]) - len(rest["seen"])
        assert rest["step"] == UPDATES and 0 < consumed < len(whole["seen"]), (stop, fails)
        if not fails:
            assert first["step"] == stop and first["seen"] == whole["seen"][:consumed], (
                stop,
                fails,
            )
        assert rest["seen"] == whole["seen"][consumed:], (stop, fails)
        assert all(
            torch.equal(rest["model"][name], value) for name, value in whole["model"].items()
        ), (stop, fails)


def matrix() -> list[Any]:
    """Every case in every way: a few of them quick, at fewer stops, the rest slow."""
    quick = [
        ("weighted, generator", "built", 2, False, False),
        ("in place", "built", 0, False, True),
        ("batches", "stateful", 0, False, False),
        ("batches of NumPy", "built", 0, False, True),
        ("random, generator", "torch", 0, False, False),
        ("lazy generator", "built", 0, False, False),
        ("buffer", "torch", 0, False, False),
        ("own state", "built", 0, False, False),
        ("stateful stream", "stateful", 0, False, True),
    ]
    ways, workers = ("built", "torch", "stateful"), ((0, False), (2, False), (2, True))
    every = [(*a, *b, False) for *a, b in product([*SAMPLERS, *DATASETS], ways, workers)]
    every += [(case, way, 0, False, True) for case, way in product([*SAMPLERS, *DATASETS], ways)]
    every = [
        case for case in every if case[0] != "own state" or not case[2]
    ]  # with workers it is refused
    slow = [
        pytest.param(
            *case,
            STOPS[1::2] if case[2] else STOPS,
            marks=pytest.mark.slow,
            id=f"{case} at every update",
        )
        for case in every
    ]
    return [*(pytest.param(*case, QUICK) for case in quick), *slow]


@pytest.mark.timeout(800)
@pytest.mark.parametrize(("case", "way", "workers", "persistent", "step_mode", "stops"), matrix())
def test_objects_of_users_come_back(
    case: str, way: str, workers: int, persistent: bool, step_mode: bool, stops: Any, tmp_path: Path
) -> None:
    check(tmp_path, case, way, workers, persistent, step_mode, stops)
