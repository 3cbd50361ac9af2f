from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch
from support.datasets import Augmented, BatchAugmented, drain, ids
from support.patience import until
from support.process_tree import is_alive
from support.warm import interpreter
from torch import Tensor
from torch.utils.data import TensorDataset

from danling.data import BatchSource, DataLoader, Share, open_source, seed_streams

LENGTH = 23


def make(workers: int = 0, **settings: Any) -> DataLoader:
    share = Share(
        **{"seed": 7, **{name: settings.pop(name) for name in Share._fields if name in settings}}
    )
    dataset = settings.pop("dataset") if "dataset" in settings else Augmented(LENGTH)
    return DataLoader(
        dataset,
        share,
        **{"batch_size": 4, "shuffle": True, "num_workers": workers, "pad": True, **settings},
    )


def source_of(loader: Any, rank: int = 0, world_size: int = 1) -> BatchSource:
    return open_source(loader, split="train", rank=rank, world_size=world_size, seed=7)


def passes(source: BatchSource, count: int) -> list[Tensor]:
    taken = []
    for _ in range(count):
        taken += drain(source)
        source.finish_pass()
    return taken


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(
        torch.equal(a, b) for a, b in zip(left, right, strict=True)
    )


@pytest.fixture(scope="module")
def straight() -> list[Tensor]:
    return passes(source_of(make()), 3)


@pytest.mark.parametrize("workers", [0, 2])
def test_resumes_at_every_position_of_three_passes(workers: int, straight: list[Tensor]) -> None:
    """Saved in one loader, resumed in a new one, with the same and with another number of workers."""
    a_pass = len(straight) // 3
    for stop in range(0, 2 * a_pass, 1 if workers == 0 else 4):
        epoch, batches = divmod(stop, a_pass)
        first = source_of(make(0))
        passes(first, epoch)
        drain(first, batches)
        dataset = Augmented(LENGTH)
        second = source_of(make(workers, dataset=dataset))
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        assert second.remaining_batches() == a_pass - batches
        rest = drain(second)
        if workers == 0:
            assert sorted(dataset.reads) == sorted(ids(rest)), "a consumed sample was read again"
        second.finish_pass()
        assert same(rest + passes(second, 1), straight[stop : (epoch + 2) * a_pass])


@pytest.mark.parametrize(
    "settings",
    [
        {"workers": 2},
        {"workers": 3, "prefetch_factor": 4},
        {"workers": 2, "persistent_workers": True},
        # A spawned worker imports torch, which takes seconds: one for all passes.
        {"workers": 1, "multiprocessing_context": "spawn", "persistent_workers": True},
    ],
)
def test_workers_read_the_batches_of_this_process(
    settings: dict[str, Any], straight: list[Tensor]
) -> None:
    loader = make(**settings)
    assert same(passes(source_of(loader), 3), straight)
    loader.close()


def test_persistent_workers_follow_the_position(straight: list[Tensor]) -> None:
    loader = make(2, persistent_workers=True)
    source = source_of(loader)
    assert same(drain(source, 2), straight[:2])
    assert same(drain(source, 2), straight[2:4]), (
        "an abandoned iterator must not spoil the next one"
    )
    source.set_epoch(2)
    assert same(drain(source), straight[12:])
    other = make(seed=8)
    source.load_state_dict({"kind": "position", **other.state_dict(), "consumed": 4})
    expected = source_of(make(seed=8))
    drain(expected, 1)
    assert same(drain(source), drain(expected))
    loader.close()


def test_a_users_loop_begins_a_pass_by_its_number() -> None:
    loader, again = make(), make()
    loader.order.epoch = 2
    next(iter(again))
    again.set_epoch(2)
    assert ids(list(again)) == ids(list(loader)) != ids(list(make()))


def test_prefetched_batches_do_not_count() -> None:
    source = source_of(make(2))
    iterator = source.batches()
    next(iterator)
    batch = next(iterator)
    source.commit([batch])
    assert source.consumed == 4
    assert source.state_dict()["consumed"] == 4


@pytest.mark.parametrize("dataset", [TensorDataset(torch.arange(LENGTH)), BatchAugmented(LENGTH)])
def test_drawing_collate_function_is_the_same_with_workers(dataset: Any) -> None:
    def mixed(samples: list[Any]) -> Tensor:
        rows = [sample[0] if isinstance(sample, tuple) else sample for sample in samples]
        return torch.stack(rows) + torch.rand(())

    here = list(make(dataset=dataset, collate_fn=mixed))
    seed_streams(1)
    there = list(make(2, dataset=dataset, collate_fn=mixed))
    assert same(here, there)


@pytest.mark.parametrize("workers", [0, 2])
def test_without_batch_size_items_are_delivered(workers: int) -> None:
    source = source_of(make(workers, batch_size=None))
    items = drain(source, 5)
    assert [item.shape for item in items] == [(4,)] * 5
    assert source.consumed == 5
    resumed = source_of(make(batch_size=None))
    resumed.load_state_dict(source.state_dict())
    whole = passes(source_of(make(batch_size=None)), 1)
    assert same(items + drain(resumed), whole)
    uneven = source_of(make(batch_size=None, rank=1, world_size=2), 1, 2)
    counted = [(batch.samples, batch.total) for batch in uneven.batches()]
    assert counted == [(None, None)] * 11 + [(0, None)]


def test_evaluation_gives_nothing_to_idle_ranks() -> None:
    loaders = [
        make(dataset=Augmented(2), shuffle=False, pad=False, rank=rank, world_size=4)
        for rank in range(4)
    ]
    assert [len(list(loader)) for loader in loaders] == [1, 1, 0, 0]
    assert not loaders[0].order.is_even()


def test_dataset_hears_of_the_epoch_also_in_persistent_workers() -> None:
    class Curriculum(Augmented):
        epoch = -1

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __getitem__(self, index: int) -> Tensor:
            return torch.tensor(self.epoch)

    source = source_of(make(1, dataset=Curriculum(4), persistent_workers=True))
    assert [int(batch[0]) for batch in passes(source, 3)] == [0, 1, 2]
    source.close()


def test_mismatched_states_are_refused() -> None:
    state = {**make().state_dict(), "consumed": 8}
    for settings, wrong, message in (
        (
            {"dataset": Augmented(24), "split": "val"},
            state,
            r"split 'val' to have 23 samples.*Received: 24 samples",
        ),
        ({"shuffle": False}, state, "Expected shuffle=True for split 'train'"),
        ({}, {**state, "consumed": 24}, "between 0 and 23"),
        ({}, {"_num_yielded": 3}, "without consumed, epoch"),
    ):
        with pytest.raises(ValueError, match=message):
            make(**settings).load_state_dict(wrong)  # type: ignore[arg-type]
    make(shuffle=False).load_state_dict({**state, "consumed": 0})
    for consumed, left in (
        (0, 6),
        (23, 0),
    ):  # between two passes, the dataset may have another length
        other = make(dataset=Augmented(24))
        other.load_state_dict({**state, "consumed": consumed})
        assert other.order.remaining_batches() == left


class Exhausted(Augmented):
    """A user's dataset whose items come from an iterator that ends before the length that it names."""

    draws_random: bool

    def __getitem__(self, index: int) -> Any:
        return next(iter(())) if index == 5 else super().__getitem__(index)


@pytest.mark.parametrize(("draws", "workers"), [(True, 0), (False, 0), (None, 0), (None, 2)])
def test_stop_iteration_of_an_item_does_not_end_the_pass_silently(
    draws: bool | None, workers: int
) -> None:
    dataset = Exhausted(8)
    if draws is not None:
        dataset.draws_random = draws
    loader = DataLoader(dataset, Share(), batch_size=2, num_workers=workers)
    with pytest.raises(RuntimeError, match=r"StopIteration"):
        list(loader)
    loader.close()


class SaidHello(Augmented):
    def __getitem__(self, index: int) -> Tensor:
        return (
            super().__getitem__(index)
            if os.environ.get("WORKER_SAID") == "hello"
            else torch.zeros(4)
        )


def _say_hello(_: int) -> None:
    os.environ["WORKER_SAID"] = "hello"


def test_workers_survive_a_signal_to_the_group_and_call_the_users_function(
    straight: list[Tensor],
) -> None:
    loader = make(2, dataset=SaidHello(LENGTH), worker_init_fn=_say_hello)
    iterator = iter(loader)
    taken = [next(iterator)]
    for worker in iterator._workers:
        os.kill(worker.pid, signal.SIGTERM)
        os.kill(worker.pid, signal.SIGINT)
    assert same(taken + list(iterator), straight[:6]) and "WORKER_SAID" not in os.environ


SCRIPT = """
import os, sys, time, torch
from danling.data import DataLoader, Share
# Idle workers of torch look every five seconds whether they have been left behind.
torch.utils.data._utils.worker.MP_STATUS_CHECK_INTERVAL = 0.5
class Numbers(torch.utils.data.Dataset):
    def __len__(self): return 64
    def __getitem__(self, index):
        {body}
        return torch.tensor(index)
main = os.getpid()
def begin(number):
    # The second worker begins when the process that started it is gone.
    while {killed} and number == 1 and os.getppid() == main: time.sleep(0.01)
if __name__ == "__main__":
    options = dict(num_workers=2, persistent_workers={persistent}, worker_init_fn=begin, multiprocessing_context={method!r})
    loader = DataLoader(Numbers(), Share(), batch_size=2, **options)
    iterator = iter(loader)
    next(iterator)
    print(*(worker.pid for worker in iterator._workers), flush=True)
    {end}
"""


@pytest.mark.parametrize(
    ("end", "persistent", "body", "method"),
    [
        ("pass", True, "pass", None),
        ("raise SystemExit(3)", False, "pass", None),
        ("os.kill(os.getpid(), 9)", True, "pass", None),
        ("os.kill(os.getpid(), 9)", True, "pass", "forkserver"),
        pytest.param("pass", False, "pass", None, marks=pytest.mark.slow),
        pytest.param(
            "pass", False, "time.sleep(100 if index > 3 else 0)", None, marks=pytest.mark.slow
        ),  # is stuck
    ],
)
def test_process_ends_and_leaves_no_worker(
    tmp_path: Any, end: str, persistent: bool, body: str, method: str | None
) -> None:
    script = tmp_path / "job.py"
    killed = "kill" in end
    script.write_text(
        textwrap.dedent(SCRIPT).format(
            persistent=persistent, end=end, body=body, killed=killed, method=method
        )
    )
    # One that is killed does nothing at its end; the others end as the interpreter does.
    python = interpreter() if killed and method is None else sys.executable
    environment = {**os.environ, "PYTHONPATH": ":".join(path for path in sys.path if path)}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    result = subprocess.run(
        [python, str(script)], env=environment, timeout=120, check=False, **pipes
    )
    assert result.returncode in (0, 3, -9)
    pids = [int(word) for word in result.stdout.split()]
    assert len(pids) == 2
    until(lambda: not any(is_alive(pid) for pid in pids))
