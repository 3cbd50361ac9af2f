"""State inside of components: generators are keyed; for plain attributes, a limit of G1, there are mends and a command that finds them."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from support.processes import run_processes
from support.recorded import danling
from support.toys import differences
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.data import TensorDataset

import danling as dl
from danling.utils.tensors import whole

END = 7


class Noise(nn.Module):
    """Adds noise of its own generators of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)
        self.others = [numpy.random.default_rng(2), random.Random(3)]

    def forward(self, inputs: Tensor) -> Tensor:
        drawn = torch.rand(inputs.shape[1:], generator=self.generator, dtype=inputs.dtype)
        return inputs + drawn + float(self.others[0].random()) + self.others[1].random()


class NoisyWeight(nn.Module):
    """A parametrization that draws."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(4)

    def forward(self, weight: Tensor) -> Tensor:
        return weight * (1 + 0.1 * torch.rand((), generator=self.generator))


class NoisyLoss(nn.MSELoss):
    def __init__(self) -> None:
        super().__init__()
        self.generator = numpy.random.RandomState(5)

    def forward(self, pred: Tensor, target: Tensor) -> Tensor:
        return super().forward(pred, target) * float(1 + self.generator.rand())


class Calls:
    def __init__(self) -> None:
        self.count = 0


class Counting(nn.Module):
    """Weighs its input by the number of its calls, in a plain attribute or in a helper object."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.helper = 0, Calls()

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.helper.count += 1
        return inputs * (1 + 0.1 * self.calls + 0.01 * self.helper.count)


class Saved(Counting):
    """With the mend for the plain attribute."""

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


class Components(dl.Runner):
    def __init__(self, config: Any, kind: str) -> None:
        super().__init__(config)
        torch.manual_seed(0)
        part = {"generators": Noise, "mended": Saved}.get(kind, Counting)()
        self.model = nn.Sequential(part, nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        self.criterion = nn.MSELoss()
        if kind == "generators":
            self.criterion = NoisyLoss()
            if self.stack == "ddp":
                parametrize.register_parametrization(self.model[3], "weight", NoisyWeight())
        if kind == "mended":
            self.helper = self.model[0].helper  # the mend for the helper object
        inputs = torch.randn(16, 4)
        self.datasets = {"train": TensorDataset(inputs, inputs.sum(1, keepdim=True))}
        self.datasets["val"] = self.datasets["train"]


def _train(root: str, stops: list[int], kind: str, more: dict[str, Any]) -> dict[str, Tensor]:
    for steps in stops:
        config = {
            "dir": root,
            "seed": 1,
            "log": False,
            "steps": steps,
            "auto_resume": True,
            "accum_steps": 2,
            **more,
        }
        config |= {
            "dataloader": {"batch_size": 2},
            "optim": {"type": "adam", "lr": 0.05},
            "evaluate_interval": 3,
        }
        with Components(config, kind) as runner:
            runner.train()
            found = {
                name: whole(value).detach().clone()
                for name, value in runner.model_state_dict().items()
                if "extra" not in name
            }
    return found


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "ddp": (2, {}),
    "fsdp": (2, {"stack": "parallel", "parallel": {"axes": {"shard": 2}}}),
}


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        ("one", "generators"),
        ("one", "mended"),
        ("ddp", "mended"),
        ("fsdp", "generators"),
        pytest.param("ddp", "generators", marks=pytest.mark.slow),
        pytest.param("fsdp", "mended", marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_draws_and_counts_as_the_uninterrupted_one(
    layout: str, kind: str, tmp_path: Path
) -> None:
    size, more = LAYOUTS[layout]
    ends = [
        run_processes(
            _train, str(tmp_path / name), stops, kind, more, world_size=size, timeout=150
        )[0]
        for name, stops in (("whole", [END]), ("parts", [3, END]))
    ]
    assert differences(ends[1], ends[0]) == []


def test_noise_of_a_module_differs_from_batch_to_batch_and_from_stream_to_stream(
    tmp_path: Path,
) -> None:
    drawn: list[tuple[float, ...]] = []

    class Draws(Components):
        def train_step(self, data: Any) -> Any:
            noise: Any = self.unwrapped_model[0]
            drawn.append(
                (
                    torch.rand(1, generator=noise.generator).item(),
                    noise.others[0].random(),
                    noise.others[1].random(),
                )
            )
            return super().train_step(data)

    config = {
        "dir": str(tmp_path),
        "seed": 1,
        "log": False,
        "steps": 3,
        "dataloader": {"batch_size": 4},
    }
    with Draws({**config, "optim": {"type": "sgd", "lr": 0.1}}, "generators") as runner:
        runner.train()
    assert len({number for numbers in drawn for number in numbers}) == 9


SCRIPT = """
import sys
sys.path[:0] = {path!r}
import torch
torch.set_num_threads(1)
from guarantees.test_components import Components
with Components({{"seed": 1, "steps": 400, "optim": {{"type": "sgd", "lr": 0.05}}, "dataloader": {{"batch_size": 4}}}}, {kind!r}) as runner:
    runner.train()
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("kind", "state"), [("plain", "failed"), ("mended", "ok")])
def test_doctor_finds_unsaved_state_of_a_component(kind: str, state: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        SCRIPT.format(
            path=[str(Path(__file__).parents[1]), str(Path(dl.__file__).parents[1])], kind=kind
        )
    )
    done = danling(
        "doctor",
        "--json",
        "--script",
        "--updates",
        "3",
        "--",
        sys.executable,
        str(script),
        timeout=280,
    )
    checks = json.loads(done.stdout)["checks"]
    assert checks[-1]["state"] == state, done.stdout + done.stderr
    if state == "failed":
        assert (
            checks[-1]["name"] == "resumes after SIGTERM"
            and "get_extra_state" in checks[-1]["detail"]
        )
