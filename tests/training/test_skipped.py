"""A skipped update changes nothing, wherever its micro-batches have left something."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_processes
from support.toys import differences, whole_state
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import TensorDataset
from torchmetrics.classification import MulticlassAUROC

import danling as dl
from danling.utils.tensors import whole

UPDATES, BATCH, ACCUM = 8, 4, 2
SPOILT = (1, 4)
"""Updates of which one sample is not a number: one while attributes are compared, and one later."""


class Tracking(nn.CrossEntropyLoss):
    """Follows its loss by a moving mean in a buffer."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        loss = super().forward(input, target)
        self.mean.mul_(0.9).add_(0.1 * loss.detach())
        return loss


def build(dtype: torch.dtype) -> tuple[nn.Module, Tracking]:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)).to(
        dtype
    ), Tracking().to(dtype)


def data_of(world_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    size = UPDATES * ACCUM * BATCH * world_size
    inputs = torch.randn(size, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    targets = inputs[:, :3].argmax(1)
    for update in SPOILT:
        # On the last rank alone.
        inputs[((update * ACCUM + 1) * world_size - 1) * BATCH] = float("nan")
    return inputs.to(dtype), targets


class Counting(dl.Runner):
    """Leaves something everywhere in each micro-batch."""

    not_saved = ("read",)

    def __init__(
        self, config: dict[str, Any], dtype: torch.dtype, stop_at: int | None = None
    ) -> None:
        super().__init__(config)
        self.stop_at = stop_at
        self.model, self.criterion = build(dtype)
        inputs, targets = data_of(self.world_size, dtype)
        self.datasets = {
            "train": [
                {"input": x, "target": y, "index": n}
                for n, (x, y) in enumerate(zip(inputs, targets))
            ]
        }
        self.metrics = {"acc": dl.metrics.accuracy, "auroc": MulticlassAUROC(3)}
        self.count, self.history, self.peak = 0, [0.0], torch.zeros(4, dtype=dtype)
        self.skips = self.norms = 0
        self.read: list[list[int]] = []

    def train_step(self, data: Any) -> Any:
        inputs, ids = data["input"], data["index"]
        pred, loss = super().train_step((inputs, data["target"]))
        self.read.append(ids.tolist())
        self.count += 1
        self.history.append(float(loss.detach()))
        torch.maximum(self.peak, inputs.abs().amax(0), out=self.peak)
        self.carry = inputs.sum() + (0.0 if self.carry is None else self.carry)
        self.log_metric("largest", inputs.abs().max())
        return pred, loss

    def gradient_norm(self, gradients: list[Tensor]) -> Tensor:
        self.norms += 1
        return super().gradient_norm(gradients)

    def step(self) -> Any:
        if self.state.train.attempted + 1 == self.stop_at:
            self.stop()
        outcome = super().step()
        self.skips += not outcome.committed
        return outcome


def train(config: dict[str, Any], dtype: torch.dtype, stop_at: int | None = None) -> dict[str, Any]:
    with Counting(config, dtype, stop_at) as runner:
        runner.train()
        assert (runner.skips, runner.norms) == (
            runner.train_state.skipped_updates,
            runner.train_state.attempted,
        )
        with runner.whole_weights():
            weights = {
                name: value.detach().clone()
                for name, value in runner.unwrapped_model.state_dict().items()
            }
        return {
            "model": weights,
            "criterion": runner.criterion.mean.clone(),
            "own": (runner.count, list(runner.history), runner.peak.clone(), runner.carry),
            "results": copy.deepcopy(runner.results.get(1)),
            "skipped": runner.train_state.skipped_updates,
            "read": runner.read,
            "state": tree_map_only(
                Tensor, lambda tensor: whole(tensor).clone(), whole_state(runner)
            ),
        }


def by_hand(read: list[list[list[int]]], dtype: torch.dtype) -> dict[str, Any]:
    """Train without the spoilt updates, on what the ranks have read; buffers are those of the first rank."""
    inputs, targets = data_of(len(read), dtype)
    (model, criterion), ranks, seen = build(dtype), range(len(read)), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own: list[Any] = [
        [0, [0.0], torch.zeros(4, dtype=dtype), torch.zeros((), dtype=dtype)] for _ in ranks
    ]
    for update in range(UPDATES):
        windows = [of_rank[update * ACCUM : (update + 1) * ACCUM] for of_rank in read]
        if any(inputs[ids].isnan().any() for window in windows for ids in window):
            continue
        optimizer.zero_grad()
        for rank, window in enumerate(windows):
            buffers = copy.deepcopy([*model.buffers(), *criterion.buffers()])
            for ids in window:
                pred = model(inputs[ids])
                loss = criterion(pred, targets[ids])
                (loss / (ACCUM * len(read))).backward()
                kept = own[rank]
                kept[0] += 1
                kept[1].append(float(loss.detach()))
                kept[2] = torch.maximum(kept[2], inputs[ids].abs().amax(0))
                kept[3] = kept[3] + inputs[ids].sum()
                seen.append(
                    (
                        pred.detach(),
                        targets[ids],
                        float(loss.detach()),
                        inputs[ids].abs().max().item(),
                    )
                )
            if rank:
                for buffer, before in zip([*model.buffers(), *criterion.buffers()], buffers):
                    buffer.copy_(before)
        optimizer.step()
    auroc = MulticlassAUROC(3)
    auroc.update(torch.cat([each[0] for each in seen]), torch.cat([each[1] for each in seen]))
    hits = torch.cat([(each[0].argmax(1) == each[1]).double() for each in seen])
    results = {
        "loss": sum(each[2] for each in seen) / len(seen),
        "acc": hits.mean().item(),
        "auroc": auroc.compute().item(),
        "largest": sum(each[3] for each in seen) / len(seen),
    }
    return {
        "model": model.state_dict(),
        "criterion": criterion.mean,
        "own": own,
        "results": results,
    }


STACKS: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (1, {}),
    "ddp, 2 ranks": (2, {}),
    "fsdp, 2 ranks": (2, {"stack": "parallel", "parallel": {"axes": {"shard": 2}}}),
    "accelerate, 2 ranks": (2, {"stack": "accelerate"}),
    "graph": (1, {"stack": "graph", "compile": {"backend": "eager"}}),
    "deepspeed": (1, {"stack": "deepspeed", "deepspeed": {"zero_optimization": {"stage": 1}}}),
}
QUICK = ("ddp", "fsdp, 2 ranks", "deepspeed")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "stack",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in STACKS],
)
def test_a_skipped_update_changes_nothing_also_with_a_stop_behind_it(
    tmp_path: Path, stack: str
) -> None:
    if stack == "deepspeed":
        pytest.importorskip("deepspeed")
    world_size, more = STACKS[stack]
    dtype, tolerance = (torch.float32, 1e-5) if stack == "deepspeed" else (torch.float64, 1e-12)
    config: dict[str, Any] = {
        "seed": 1,
        "log": False,
        "epochs": 1,
        "accum_steps": ACCUM,
        "skip_nonfinite_grad": True,
    }
    config |= {
        "dataloader": {"batch_size": BATCH, "shuffle": False},
        "train_metrics": True,
        "auto_resume": True,
    }
    config |= {"optim": {"type": "sgd", "lr": 0.1}, **more}
    undisturbed = run_processes(
        train, {**config, "dir": str(tmp_path / "whole")}, dtype, world_size=world_size
    )
    expected = by_hand([rank["read"] for rank in undisturbed], dtype)
    for rank, found in enumerate(undisturbed):
        assert found["skipped"] == len(SPOILT)
        buffers = ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
        names = [name for name in expected["model"] if rank == 0 or name not in buffers]
        for name in names:
            torch.testing.assert_close(
                found["model"][name], expected["model"][name], rtol=0, atol=tolerance
            )
        if rank == 0:
            torch.testing.assert_close(
                found["criterion"], expected["criterion"], rtol=0, atol=tolerance
            )
        torch.testing.assert_close(
            list(found["own"]), expected["own"][rank], rtol=0, atol=tolerance
        )
        for name, value in expected["results"].items():
            assert found["results"]["train"][name] == pytest.approx(value, abs=10 * tolerance), name
    stopped = {**config, "dir": str(tmp_path / "stopped")}
    run_processes(train, stopped, dtype, SPOILT[1] + 1, world_size=world_size)
    again = run_processes(train, stopped, dtype, world_size=world_size)
    for rank, (one, other) in enumerate(zip(undisturbed, again)):
        # Figures of several ranks are added in another order where a stop divides the pass.
        changed = differences(one["state"], other["state"])
        assert [
            each for each in changed if not (world_size > 1 and each.startswith("/state/results/"))
        ] == [], rank
        assert other["results"]["train"] == pytest.approx(
            one["results"]["train"], abs=10 * tolerance
        )


def test_an_overflow_of_float16_leaves_the_buffers_as_they_were(tmp_path: Path) -> None:
    """Against a loop with torch's own scaler, which puts nothing back by itself."""

    class Scaled(Counting):
        def compute_loss(self, pred: Any, target: Any) -> Tensor:
            return 30 * super().compute_loss(pred, target)

    config: dict[str, Any] = {
        "seed": 1,
        "log": False,
        "steps": 5,
        "precision": "fp16",
        "dir": str(tmp_path),
    }
    config |= {
        "dataloader": {"batch_size": BATCH, "shuffle": False},
        "optim": {"type": "sgd", "lr": 1e-3},
    }
    with Scaled(config, torch.float32) as runner:
        runner.datasets["train"][:] = [
            {**item, "input": item["input"].nan_to_num(0)} for item in runner.datasets["train"]
        ]
        runner.train()
        attempted, read = runner.train_state.attempted, runner.read
        assert runner.train_state.skipped_updates > 0 and runner.count == 5
        found = {**runner.model.state_dict(), "mean": runner.criterion.mean}
    inputs, targets = (tensor.nan_to_num(0) for tensor in data_of(1, torch.float32))
    model, criterion = build(torch.float32)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1e-3), torch.amp.GradScaler("cpu")
    for ids in read[:attempted]:
        before = copy.deepcopy((model.state_dict(), criterion.state_dict()))
        with torch.autocast("cpu", dtype=torch.float16):
            loss = 30 * criterion(model(inputs[ids]), targets[ids])
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        finite = all(parameter.grad.isfinite().all() for parameter in model.parameters())
        scaler.step(optimizer)
        scaler.update()
        if not finite:
            model.load_state_dict(before[0])
            criterion.load_state_dict(before[1])
    for name, value in {**model.state_dict(), "mean": criterion.mean}.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-5)


def test_weightless_window_changes_no_buffer_with_and_without_skipping(tmp_path: Path) -> None:
    class Ignoring(dl.TorchRunner):
        def __init__(self) -> None:
            config = {"dir": str(tmp_path), "log": False, "seed": 1, "epochs": 1, "accum_steps": 2}
            super().__init__(
                config
                | {
                    "dataloader": {"batch_size": 4, "shuffle": False},
                    "optim": {"type": "sgd", "lr": 0.1},
                }
            )
            self.model, self.criterion = build(torch.float64)[0], nn.CrossEntropyLoss()
            inputs, targets = (tensor[:24].nan_to_num(0) for tensor in data_of(1, torch.float64))
            targets[8:16] = -100
            self.datasets = {"train": TensorDataset(inputs, targets)}
            self.count = 0

        def train_step(self, data: Any) -> Any:
            self.count += 1
            return super().train_step(data)

    with Ignoring() as runner:
        runner.train()
        assert (
            runner.train_state.global_step,
            runner.train_state.skipped_updates,
            runner.count,
        ) == (2, 1, 4)
        found = runner.model[1].state_dict()
    model = build(torch.float64)[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, targets = (tensor[:24].nan_to_num(0) for tensor in data_of(1, torch.float64))
    for start in (0, 16):
        optimizer.zero_grad()
        for first in (start, start + 4):
            (
                nn.functional.cross_entropy(
                    model(inputs[first : first + 4]), targets[first : first + 4]
                )
                / 2
            ).backward()
        optimizer.step()
    for name, value in model[1].state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)


def test_skipped_optimizer_of_several_leaves_the_statistics_of_its_model(tmp_path: Path) -> None:
    def nets() -> nn.ModuleDict:
        torch.manual_seed(4)
        return nn.ModuleDict(
            {name: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1)) for name in "ab"}
        ).double()

    inputs = data_of(1, torch.float64)[0][: 6 * BATCH]

    class Two(dl.TorchRunner):
        saved = ("teachers",)

        def __init__(self) -> None:
            config = {"dir": str(tmp_path), "log": False, "epochs": 1, "skip_nonfinite_grad": True}
            super().__init__(config | {"dataloader": {"batch_size": BATCH, "shuffle": False}})
            self.model = nets()
            self.teachers = {"of a": nets()["a"].requires_grad_(False)}
            self.optimizer = {
                name: torch.optim.SGD(self.model[name].parameters(), lr=0.1) for name in "ab"
            }
            self.datasets = {"train": inputs}

        def train_step(self, data: Any) -> Any:
            if not data.isnan().any():
                self.teachers = copy.deepcopy(self.teachers)  # other modules than at the beginning
            for name, given in (("a", data), ("b", data.nan_to_num(0))):
                with self.optimizing(name):
                    wanted = self.teachers["of a"](given) if name == "a" else 0.0
                    self.backward((self.model[name](given) - wanted).square().mean())
            return None, None

    with Two() as runner:
        runner.train()
        found = {**runner.model.state_dict(), **runner.teachers["of a"].state_dict()}
    model, teacher, skipped = nets(), nets()["a"].requires_grad_(False), 0
    optimizers = {name: torch.optim.SGD(model[name].parameters(), lr=0.1) for name in "ab"}
    for batch in inputs.split(BATCH):
        for name, given in (("a", batch), ("b", batch.nan_to_num(0))):
            if given.isnan().any():
                skipped += 1
                continue
            optimizers[name].zero_grad()
            wanted = teacher(given) if name == "a" else 0.0
            (model[name](given) - wanted).square().mean().backward()
            optimizers[name].step()
    assert skipped
    for name, value in {**model.state_dict(), **teacher.state_dict()}.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)


def test_too_large_attribute_to_restore_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Large(dl.TorchRunner):
        def __init__(self) -> None:
            config = {
                "dir": str(tmp_path),
                "log": False,
                "seed": 1,
                "steps": 4,
                "skip_nonfinite_grad": True,
            }
            super().__init__(
                config | {"optim": {"type": "sgd", "lr": 0.1}, "checkpoint": {"load_only": True}}
            )
            self.model, self.criterion = nn.Linear(4, 3), nn.CrossEntropyLoss()
            self.datasets = {"train": TensorDataset(torch.randn(16, 4), torch.arange(16) % 3)}
            self.bank, self.count, self.idle = torch.zeros(2**24 + 1), 0, [1.0]

        def train_step(self, data: Any) -> Any:
            self.count += 1
            self.bank[0] += 1
            return super().train_step(data)

    with Large() as runner, caplog.at_level("INFO", logger="danling"):
        runner.train()
    assert caplog.messages.count("A skipped update puts back self.count.") == 1
    (warned,) = [
        message
        for message in caplog.messages
        if message.startswith("Not put back after a skipped update")
    ]
    assert "self.bank: they take more than 64 MiB" in warned and "self.idle" not in warned


class _Taught(dl.Runner):
    """A frozen teacher with statistics, which follows the model, and is declared in `saved`."""

    saved = ("teacher",)

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        inputs, targets = data_of(1, torch.float64)
        self.datasets = {
            "train": TensorDataset(inputs, targets),
            "val": TensorDataset(inputs[-8:], targets[-8:]),
        }
        self.model, self.criterion = build(torch.float64)[0], nn.CrossEntropyLoss()
        self.teacher = copy.deepcopy(self.model).requires_grad_(False)

    def train_step(self, data: Any) -> Any:
        inputs, targets = data
        pred = self.model(inputs)
        loss = self.criterion(pred, targets) + (pred - self.teacher(inputs)).square().mean()
        self.backward(loss)
        return pred, loss

    def evaluate_step(self, data: Any) -> Any:
        # In training mode: an evaluation moves the statistics too.
        pred = self.teacher(data[0])
        return pred, self.criterion(pred, data[1])

    def optimizer_step(self) -> None:
        super().optimizer_step()
        with torch.no_grad():
            for own, of_model in zip(self.teacher.parameters(), self.model.parameters()):
                own.lerp_(of_model, 0.1)


def test_declared_module_is_put_back_after_a_skipped_update_and_a_trial(tmp_path: Path) -> None:
    config = {"dir": str(tmp_path), "seed": 1, "log": False, "epochs": 1, "accum_steps": ACCUM}
    config |= {"dataloader": {"batch_size": BATCH, "shuffle": False}, "skip_nonfinite_grad": True}
    with _Taught(config | {"optim": {"type": "sgd", "lr": 0.1}}) as runner:
        runner.train()
    assert runner.train_state.skipped_updates == len(SPOILT)
    inputs, targets = data_of(1, torch.float64)
    model = build(torch.float64)[0]
    teacher, criterion = copy.deepcopy(model).requires_grad_(False), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for update in range(UPDATES):
        window = slice(update * ACCUM * BATCH, (update + 1) * ACCUM * BATCH)
        if inputs[window].isnan().any():
            continue
        optimizer.zero_grad()
        for begin in range(window.start, window.stop, BATCH):
            ids = slice(begin, begin + BATCH)
            pred = model(inputs[ids])
            loss = criterion(pred, targets[ids]) + (pred - teacher(inputs[ids])).square().mean()
            (loss / ACCUM).backward()
        optimizer.step()
        with torch.no_grad():
            for own, of_model in zip(teacher.parameters(), model.parameters()):
                own.lerp_(of_model, 0.1)
    teacher(inputs[-8:-4])
    teacher(inputs[-4:])
    torch.testing.assert_close(runner.model.state_dict(), model.state_dict(), rtol=0, atol=1e-12)
    torch.testing.assert_close(
        runner.teacher.state_dict(), teacher.state_dict(), rtol=0, atol=1e-12
    )


class _StopsWhereItSkips(dl.Runner):
    """Skips its fourth update, at whose number it stops: one that comes again if the end of it was not saved."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        inputs = torch.arange(1.0, 13.0).reshape(6, 2)
        inputs[3] = float("nan")
        self.datasets = {"train": TensorDataset(inputs, inputs[:, :1].nan_to_num())}
        self.model, self.criterion = nn.Linear(2, 1), nn.MSELoss()

    def train_step(self, data: Any) -> Any:
        if self.train_state.global_step == 3 and self.config.stopping:
            self.stop()
        return super().train_step(data)


@pytest.mark.parametrize("backend", ["file", "dcp"])
def test_run_stopped_at_a_skipped_update_is_saved_past_it(backend: str, tmp_path: Path) -> None:
    def trained(name: str, **more: Any) -> dl.Runner:
        config = {
            "steps": 5,
            "seed": 1,
            "log": False,
            "skip_nonfinite_grad": True,
            "dir": str(tmp_path / name),
        }
        loader = {"batch_size": 1, "shuffle": False}
        # A checkpoint after each update, the one before the skipped one among them.
        checkpoint = {"backend": backend, "interval": 1}
        config |= {
            "dataloader": loader,
            "checkpoint": checkpoint,
            "optim": {"type": "sgd", "lr": 1e-3},
        }
        with _StopsWhereItSkips({**config, **more}) as runner:
            runner.train()
        return runner

    stopped = trained("parts", stopping=True)
    assert (stopped.train_state.global_step, stopped.train_state.skipped_updates) == (3, 1)
    resumed = trained("parts", stopping=True, auto_resume=True)
    assert resumed.train_state.skipped_updates == 1, "the skipped update was made again"
    last = trained("parts", stopping=True, auto_resume=True)
    states = [whole_state(runner) for runner in (last, trained("whole", stopping=False))]
    compared = [(state["model"], state["optimizer"], state["state"]["train"]) for state in states]
    assert not differences(*compared)


class _Interrupted:
    """A state of the program, in the reading of which Ctrl+C arrives once."""

    is_due = False

    def state_dict(self) -> dict[str, int]:
        if self.is_due:
            self.is_due = False
            raise KeyboardInterrupt
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


class _InterruptedRunner(dl.Runner):
    saved = ("mine",)

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.mine = _Interrupted()
        self.left = 1
        torch.manual_seed(0)
        self.model, self.criterion = nn.Linear(2, 1), nn.MSELoss()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(1)
        self.datasets = {"train": TensorDataset(torch.randn(8, 3, generator=generator))}

    def train_step(self, data: Any) -> Any:
        (rows,) = data
        loss = self.criterion(self.model(rows[:, :2]), rows[:, 2:])
        self.backward(loss)
        return None, loss

    def to_device(self, data: Any) -> Any:
        # Before the update is remembered, and after it has begun.
        self.mine.is_due = self.state.train.global_step == 1 and self.left > 0
        self.left -= self.mine.is_due
        return super().to_device(data)


def test_update_interrupted_where_it_is_remembered_is_made_again(tmp_path: Path) -> None:
    settings = {"batch_size": 2, "shuffle": False}
    runner = _InterruptedRunner(
        {
            "steps": 4,
            "skip_nonfinite_grad": True,
            "dataloader": settings,
            "workspace_root": str(tmp_path),
        }
    )
    by_hand = copy.deepcopy(runner.model)
    with pytest.raises(KeyboardInterrupt):
        runner.train()
    runner.train()
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.1)
    for rows in runner.datasets["train"].tensors[0].split(2):
        optimizer.zero_grad()
        nn.functional.mse_loss(by_hand(rows[:, :2]), rows[:, 2:]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert runner.state.train.global_step == 4
    torch.testing.assert_close(runner.model.state_dict(), by_hand.state_dict(), rtol=0, atol=1e-6)
