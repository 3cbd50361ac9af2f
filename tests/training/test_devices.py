"""Runs on a device that is not the CPU end with the bits of those on the CPU, and the device is what a CUDA device is to the host."""

from __future__ import annotations

import logging
import logging.handlers
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gan import GAN
from models.gpt import GPT
from support import device
from support.device import run_processes
from support.toys import differences, whole_state
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.utils._pytree import tree_map_only
from torch.utils.data import TensorDataset

import danling as dl
from danling.training.outcome import NonFiniteError

pytestmark = device.needed


def _draws(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(4))


class Stopped(dl.Runner):
    """Stops after an update, as for a signal."""

    not_saved = ("stops_after",)

    def __init__(self, config: Any, stops_after: int | None = None) -> None:
        super().__init__(config)
        self.stops_after = stops_after

    def step(self) -> Any:
        outcome = super().step()
        if self.state.train.global_step == self.stops_after:
            self.stop()
        return outcome


class Digits(Stopped):
    def __init__(self, config: Any, **more: Any) -> None:
        super().__init__(config, **more)
        images = _draws(24, 16)
        samples = TensorDataset(images, images[:, :4].argmax(1))
        self.datasets = {"train": samples, "val": samples}
        self.model = nn.Sequential(
            nn.Linear(16, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.2), nn.Linear(24, 4)
        )
        self.criterion = nn.CrossEntropyLoss()
        self.metrics = {"acc": dl.metrics.accuracy}


class Text(Stopped):
    def __init__(self, config: Any, **more: Any) -> None:
        super().__init__(config, **more)
        tokens = torch.randint(11, (24, 9), generator=torch.Generator().manual_seed(4))
        targets = tokens[:, 1:].clone()
        targets[::3, 2:] = -100
        samples = TensorDataset(tokens[:, :-1], targets)
        self.datasets = {"train": samples, "val": samples}
        self.model = GPT(11, context=8, width=16, depth=2, heads=2, dropout=0.1)

    def criterion(self, logits: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Pictures(Stopped):
    def __init__(self, config: Any, **more: Any) -> None:
        super().__init__(config, **more)
        self.datasets = {
            "train": TensorDataset(_draws(24, 64)),
            "val": TensorDataset(_draws(6, 64)),
        }
        self.model = GAN(noise=4, width=16)
        self.optimizer = {
            name: torch.optim.Adam(self.model.get_submodule(name).parameters(), lr=1e-3, fused=True)
            for name in ("discriminator", "generator")
        }

    def train_step(self, data: Any) -> tuple[Tensor, None]:
        (real,) = data
        gan: Any = self.model
        with self.optimizing("discriminator"):
            fake = gan.generator(torch.randn(len(real), gan.noise, device=real.device))
            loss = (
                softplus(-gan.discriminator(real)).mean()
                + softplus(gan.discriminator(fake.detach())).mean()
            )
            self.backward(loss)
        with self.optimizing("generator"):
            self.backward(softplus(-gan.discriminator(fake)).mean())
        return fake, None

    def evaluate_step(self, data: Any) -> tuple[Tensor, Tensor]:
        gan: Any = self.model
        return data[0], softplus(gan.discriminator(data[0])).mean()


_KINDS = {"digits": Digits, "text": Text, "pictures": Pictures}


def _settings(kind: str, root: Path, **more: Any) -> dict[str, Any]:
    base = {"dir": str(root), "seed": 1, "log": False, "accum_steps": 2, "max_grad_norm": 0.5}
    base |= {"dataloader": {"batch_size": 3, "drop_last": False}, "checkpoint": {"interval": 3}}
    if kind != "pictures":
        # The same kernel everywhere: the one that the library takes by itself on the CPU and on CUDA.
        base |= {
            "optim": {"type": "adamw", "lr": 1e-2, "fused": True},
            "scheduler": {"type": "cosine"},
        }
    if kind == "digits":
        base |= {"ema": {"enabled": True, "decay": 0.9}, "train_metrics": True}
    return {**base, **more}


def _run(kind: str, on_device: bool, root: Path) -> dict[str, Any]:
    """Train, save, resume, evaluate and predict; return all that is left."""
    if on_device:
        device.use()
        device.shares_noise()
    found: dict[str, Any] = {}
    for name, stops in (("whole", (None,)), ("parts", (3, None))):
        for stop in stops:
            with _KINDS[kind](
                _settings(kind, root / name, steps=7, auto_resume=True), stops_after=stop
            ) as runner:
                assert runner.device.type == (device.NAME if on_device else "cpu")
                runner.train()
                found[f"scores of {name}"] = runner.evaluate()
                found[name] = whole_state(runner)
                found[f"results of {name}"] = dict(runner.results)
                if kind == "digits":
                    found["predictions"] = runner.infer("val")
    return tree_map_only(Tensor, lambda tensor: tensor.cpu(), found)


@pytest.mark.parametrize(
    ("kind", "world_size"),
    [
        pytest.param("digits", 1, marks=pytest.mark.slow),
        ("text", 1),
        pytest.param("pictures", 1, marks=pytest.mark.slow),
        ("digits", 2),
        pytest.param("text", 2, marks=pytest.mark.slow),
        pytest.param("pictures", 2, marks=pytest.mark.slow),
    ],
)
def test_runs_have_the_bits_of_the_cpu(tmp_path: Path, kind: str, world_size: int) -> None:
    on_cpu = run_processes(_run, kind, False, tmp_path / "cpu", world_size=world_size)
    found = run_processes(_run, kind, True, tmp_path / "device", world_size=world_size)
    for there, here in zip(found, on_cpu):
        assert there["whole"]["state"]["train"]["global_step"] == 7
        assert differences(there, here) == []
        assert differences(there["whole"], there["parts"]) == []


class Broken(Digits):
    """Has a loss of infinity in its fourth update, on the last rank; writes down what was evaluated and saved after which update."""

    not_saved = ("events",)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.events: list[tuple[str, int]] = []

    def train_step(self, data: Any) -> Any:
        self.breaks = self.state.train.global_step == 3 and self.rank == self.world_size - 1
        return super().train_step(data)

    def compute_loss(self, pred: Any, target: Any) -> Tensor:
        loss = super().compute_loss(pred, target)
        return loss * math.inf if self.breaks and self.model.training else loss

    def evaluate_epoch(self, split: str) -> Any:
        self.events.append(("evaluation", self.state.train.global_step))
        return super().evaluate_epoch(split)

    def evaluate_steps(self, split: str, steps: int | None = None) -> Any:
        self.events.append(("evaluation", self.state.train.global_step))
        return super().evaluate_steps(split, steps)


def _breaks(root: Path, more: dict[str, Any]) -> tuple[str, Any]:
    device.use()
    settings = _settings("digits", root, steps=9, try_evaluation=False, **more)
    runner = Broken(settings)
    with pytest.raises(NonFiniteError) as error, runner:
        runner.train()
    saved = root / "checkpoints" / "latest.pth"
    stored = torch.load(saved, weights_only=True)
    return str(error.value), runner.events, stored["state"]["train"]["global_step"]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("interval", [2, 3])
def test_nonfinite_update_is_neither_saved_nor_evaluated(
    tmp_path: Path, interval: int, world_size: int
) -> None:
    more = {"checkpoint": {"interval": interval}}
    for message, events, saved in run_processes(_breaks, tmp_path, more, world_size=world_size):
        assert "at step 4" in message
        assert f"not finite on ranks [{world_size - 1}]" in message
        assert events == [("evaluation", step) for step in range(interval, 4, interval)]
        assert saved == 3 // interval * interval


def _ends_by_hand(root: Path, verb: str) -> tuple[str, list[str]]:
    """Make updates by hand, the last of which is not finite, and use the model or close; return the error, and what was logged."""
    device.use()
    handler, error = logging.handlers.BufferingHandler(1000), ""
    logging.getLogger("danling").addHandler(handler)
    with Digits(_settings("digits", root, steps=9)) as runner:
        images = _draws(3, 16).to(runner.device)
        targets = images[:, :4].argmax(1)
        for factor in (1.0, math.inf):
            runner.train_step((images * factor, targets))
            runner.step()
        if verb:
            with pytest.raises(NonFiniteError) as raised:
                list(runner.infer("val", stream=True)) if verb == "stream" else getattr(
                    runner, verb
                )("val")
            error = str(raised.value)
    return error, [
        record.getMessage() for record in handler.buffer if record.levelno == logging.ERROR
    ]


@pytest.mark.parametrize("verb", ["evaluate", "infer", "stream"])
def test_model_of_an_update_that_is_not_finite_is_not_used(verb: str, tmp_path: Path) -> None:
    [(error, logged)] = run_processes(_ends_by_hand, tmp_path, verb, world_size=1)
    assert "Expected a finite loss and gradient at step 2" in error
    assert logged == []


def test_last_update_that_is_not_finite_is_named_when_the_runner_is_closed(tmp_path: Path) -> None:
    [(_, logged)] = run_processes(_ends_by_hand, tmp_path, "", world_size=1)
    assert len(logged) == 1
    assert logged[0].startswith(
        "The loss or the gradient of update 2 was not finite. It was made, and nothing has been saved"
    )


class Weightless(Digits):
    """Has no target in its second update and its third."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        images = _draws(24, 16)
        targets = images[:, :4].argmax(1)
        targets[6:18] = -100
        self.datasets = {"train": TensorDataset(images, targets)}
        self.metrics = None


def _trains_on_nothing(root: Path, on_device: bool, more: dict[str, Any]) -> dict[str, Any]:
    """Train without a target in some updates; return the counters, the weights and what was logged."""
    if on_device:
        device.use()
        device.shares_noise()
    handler = logging.handlers.BufferingHandler(1000)
    logging.getLogger("danling").addHandler(handler)
    loader = {"batch_size": 3, "shuffle": False}
    with Weightless(
        _settings("digits", root, epochs=1, dataloader=loader, train_metrics=False, **more)
    ) as runner:
        runner.train()
        counters = {
            name: getattr(runner.train_state, name)
            for name in ("global_step", "skipped_updates", "samples")
        }
        weights = {name: value.cpu() for name, value in runner.unwrapped_model.state_dict().items()}
    said = [record.getMessage() for record in handler.buffer]
    named = [line for line in said if "weighs nothing" in line]
    return {
        **counters,
        "weights": weights,
        "named": named,
        "weightless": sum("(weightless)" in line for line in said),
    }


@pytest.mark.parametrize(
    "more", [{"skip_nonfinite_grad": True}, {"precision": "fp16"}], ids=["skips", "fp16"]
)
def test_weightless_update_is_left_out_as_on_the_cpu(tmp_path: Path, more: dict[str, Any]) -> None:
    (on_cpu,) = run_processes(_trains_on_nothing, tmp_path / "cpu", False, more, world_size=1)
    (found,) = run_processes(_trains_on_nothing, tmp_path / "device", True, more, world_size=1)
    assert found["weightless"] == 2
    assert found["global_step"] > 0
    if "precision" in more:  # the lists of operations that autocast widens are not those of the CPU
        found, on_cpu = ({"weightless": each["weightless"]} for each in (found, on_cpu))
    assert differences(found, on_cpu) == []


def test_weightless_update_is_named_once_if_none_is_skipped(tmp_path: Path) -> None:
    (found,) = run_processes(_trains_on_nothing, tmp_path, True, {}, world_size=1)
    assert found["global_step"] == 4
    assert len(found["named"]) == 1
    assert found["named"][0].startswith("Update 2 weighs nothing")


def _looks_at_host() -> dict[str, Any]:
    """Do what programs do with a device, and return the waits of each step."""
    device.use()
    where = torch.device(device.NAME, 0)
    x, pinned = torch.arange(4.0, device=where), torch.ones(4, pin_memory=True)
    target = torch.empty(4, pin_memory=True)
    event = torch.Event(device=where)
    late = torch.Event(device=where)
    late.record()
    steps: dict[str, Callable[[], object]] = {
        "kernels": lambda: (x * 2.0 + torch.full((), 1.0, device=where)).sum().sqrt(),
        "where": lambda: torch.where(x > 0, x, 0.0).masked_fill(x > 1, 0.0),
        "from pinned": lambda: pinned.to(where, non_blocking=True),
        "to pinned": lambda: (target.copy_(x, non_blocking=True), event.record()),
        "late event": late.synchronize,
        "a number": lambda: torch.as_tensor(1.0, device=where),
        "from the host": lambda: torch.ones(4).to(where, non_blocking=True),
        "blocking": lambda: pinned.to(where),
        "to the host": lambda: x.tolist(),
        "item": lambda: bool(x[0]),
        "mask": lambda: x[x > 1],
        "index": lambda: x[torch.tensor([0, 1])],
        "equal": lambda: torch.equal(x, x),
        "event": event.synchronize,
        "device": torch.accelerator.synchronize,
    }
    with device.watched() as watch:
        watch.mark()
        for name, step in steps.items():
            if name == "event":
                event.record()
            step()
            watch.mark()
    found: dict[str, Any] = {
        name: watch.marks[i + 1] - watch.marks[i] for i, name in enumerate(steps)
    }
    return {**found, "lines": [wait.line for wait in watch.waits]}


def test_device_makes_the_host_wait_as_cuda_does() -> None:
    (found,) = run_processes(_looks_at_host, world_size=1)
    lines = found.pop("lines")
    free = {"kernels", "where", "from pinned", "to pinned", "late event"}
    assert {name for name, waits in found.items() if not waits} == free
    assert all(line.startswith("tests/training/test_devices.py:") for line in lines), lines


def _arrives() -> list[Any]:
    device.use()
    x = torch.arange(3.0, device=device.NAME)
    target = torch.empty(3, pin_memory=True)
    target.copy_(x, non_blocking=True)
    event = torch.Event(device=device.NAME)
    event.record()
    before = target.tolist()
    event.synchronize()
    torch.sim.manual_seed(3)  # type: ignore[attr-defined]
    drawn = torch.rand(2, device=device.NAME).tolist()
    state = torch.default_generator.get_state()
    torch.default_generator.manual_seed(3)
    alike = torch.rand(2).tolist()
    torch.default_generator.set_state(state)
    try:
        mixed = str(x + torch.ones(3))
    except RuntimeError as error:
        mixed = str(error)
    return [before, target.tolist(), drawn == alike, mixed]


def test_copy_to_the_host_arrives_with_its_event() -> None:
    (found,) = run_processes(_arrives, world_size=1)
    before, after, has_own_stream, mixed = found
    assert all(value != value for value in before)
    assert after == [0.0, 1.0, 2.0]
    assert has_own_stream
    assert "Expected all tensors to be on the same device" in mixed


class Hungry(Digits):
    """Takes more memory than the device has for more than three samples at once."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = nn.Sequential(
            nn.Linear(16, 24), nn.ReLU(), nn.Dropout(0.2), nn.Linear(24, 4)
        ).double()
        images = _draws(24, 16).double()
        self.datasets = {"train": TensorDataset(images, images[:, :4].argmax(1))}
        self.metrics = None

    def train_step(self, data: Any) -> Any:
        if self.device.type == device.NAME:
            torch.empty(len(data[0]) * 1_000_000, device=self.device)
        return super().train_step(data)


def _retries(root: Path, on_device: bool) -> dict[str, Any]:
    if on_device:
        device.use().set_limit(4_000_000 * 5)
        device.shares_noise()
    loader = {
        "global_batch_size": 12,
        "micro_batch_size": "auto" if on_device else 3,
        "shuffle": False,
    }
    settings = _settings(
        "digits", root, epochs=2, dataloader=loader, accum_steps=1, train_metrics=False
    )
    with Hungry(settings) as runner:
        runner.train()
        found = whole_state(runner)
    return {
        name: tree_map_only(Tensor, lambda tensor: tensor.cpu(), found[name])
        for name in ("model", "optimizer", "ema")
    }


def test_update_out_of_memory_is_repeated(tmp_path: Path) -> None:
    (on_cpu,) = run_processes(_retries, tmp_path / "cpu", False, world_size=1)
    (found,) = run_processes(_retries, tmp_path / "device", True, world_size=1)
    assert differences(found, on_cpu) == []
