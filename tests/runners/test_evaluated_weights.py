"""What was best is what comes out: `pretrained` and `danling export` take the weights that were evaluated, by every road."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_processes
from support.stacks import needs_deepspeed, zero
from support.toys import line_of, settings
from torch import Tensor, nn

import danling as dl
from danling.cli.main import main


class Tied(nn.Module):
    """Has a weight under two names, and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.norm, self.again = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)
        self.last = nn.Linear(3, 1)
        self.again.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(self.again(self.norm(self.first(x)).tanh()))
        return output


class Scored(dl.Runner):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.model, self.criterion = Tied(), nn.MSELoss()
        self.datasets = {"train": line_of(16), "val": line_of(6)}


def loss_by_hand(weights: Mapping[str, Tensor]) -> float:
    """Return the loss on `val` of a model of torch's with these weights."""
    model = Tied().eval()
    model.load_state_dict(dict(weights))
    inputs, targets = line_of(6).tensors
    with torch.no_grad():
        return float(nn.functional.mse_loss(model(inputs), targets))


def train_over_a_stop(config: dict[str, Any]) -> float | None:
    """Train to an update, and in another runner to the end; return the best score."""
    with Scored({**config, "steps": 4}) as runner:
        runner.train()
    with Scored({**config, "auto_resume": True}) as runner:
        runner.train()
        return runner.best_score


def losses_of(root: str, sources: list[Any], more: dict[str, Any]) -> list[tuple[float, float]]:
    """Return the losses of a run that begins at each source: from the averages, and from the trained weights."""
    found = []
    for number, source in enumerate(sources):
        losses = []
        for averages in (True, False):
            config = settings(
                f"{root}/{number}-{averages}",
                pretrained=source,
                pretrained_averages=averages,
                **more,
            )
            with Scored(config) as runner:
                losses.append(runner.evaluate("val")["val"]["loss"])
        found.append((losses[0], losses[1]))
    return found


ROADS: dict[str, tuple[dict[str, Any], int]] = {
    "file": ({"stack": "ddp"}, 1),
    "DCP": ({"stack": "ddp", "checkpoint.backend": "dcp"}, 1),
    "sharded": ({"stack": "parallel", "parallel": {"axes": {"shard": 2}}}, 2),
    "engine": ({"stack": "deepspeed", "deepspeed": zero(0)}, 1),
}


@pytest.mark.timeout(200)
@pytest.mark.parametrize("road", [*list(ROADS)[:3], pytest.param("engine", marks=needs_deepspeed)])
def test_best_weights_are_the_exported_ones(
    road: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    more, ranks = ROADS[road]
    averaging = {"ema": {"enabled": True, "decay": 0.9}, "optim": {"type": "adamw", "lr": 0.1}}
    # The one batch of an evaluation is the whole split.
    more = {**more, "dataloader": {"batch_size": 8}}
    config = settings("run", steps=8, evaluate_interval=1, **{**more, **averaging, "log": True})
    best = run_processes(train_over_a_stop, config, world_size=ranks, timeout=150)[0]
    assert best is not None
    log = next(Path("run").rglob("*.log")).read_text()
    command = shlex.split(
        next(line for line in log.splitlines() if line.startswith("  weights"))[1:]
    )[2:]
    place = command[1]
    # What the run itself prints, and both kinds of weights in every format.
    assert main(command) == 0
    for name in ("both", "both.pth"):
        assert main(["export", place, name, "--ema", "beside"]) == 0
    for name, options in {
        "trained.pth": ["--trained"],
        "averaged": ["--ema"],
        "default.pth": [],
    }.items():
        assert main(["export", place, name, *options]) == 0
    trained = loss_by_hand(torch.load("trained.pth", weights_only=True))
    assert trained != pytest.approx(best, rel=1e-2)
    assert loss_by_hand(torch.load("default.pth", weights_only=True)) == pytest.approx(
        best, rel=1e-6
    )
    ones, others = ["model.safetensors", "averaged", "default.pth"], ["trained.pth"]
    sources = [place, "both", "both.pth", *ones, *others]
    expected = [(best, trained)] * 3 + [(best, best)] * len(ones) + [(trained, trained)]
    world: dict[str, Any] = {"dataloader": {"batch_size": 8}} if road == "engine" else more
    for losses in run_processes(losses_of, "next", sources, world, world_size=ranks, timeout=150):
        for pair, (averaged, plain) in zip(losses, expected):
            assert pair == pytest.approx((averaged, plain), rel=1e-6), (losses, expected)


def test_a_mapping_and_the_files_of_a_model_follow_the_same_rule(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "danling")
    with Scored(settings(tmp_path / "run", steps=3, ema={"enabled": True, "decay": 0.5})) as runner:
        runner.train()
        best = runner.evaluate("val")["val"]["loss"]
        content = {"model": dict(runner.model_state_dict()), "ema": dict(runner.ema.weights)}
        trained = loss_by_hand(content["model"])
        for averages, expected in ((True, best), (False, trained)):
            config = settings(tmp_path / str(averages), pretrained_averages=averages)
            with Scored.from_pretrained(config, content) as other:
                assert other.evaluate("val")["val"]["loss"] == pytest.approx(expected, rel=1e-6)
    assert sum("averaged weights of a mapping" in message for message in caplog.messages) == 1
    source = str(tmp_path / "run")
    for options, kind in (([], "averaged"), (["--trained"], "trained")):
        capsys.readouterr()
        assert main(["export", source, str(tmp_path / f"{kind}.pth"), "--json", *options]) == 0
        assert json.loads(capsys.readouterr().out)["weights"] == kind
    with pytest.raises(SystemExit, match="2"):
        main(["export", source, str(tmp_path / "x.pth"), "--trained", "--ema"])


def test_averages_of_a_model_in_16_bits_are_exported_in_its_dtype_or_in_full(
    tmp_path: Path,
) -> None:
    class Half(Scored):
        def __init__(self, config: Mapping[str, Any]) -> None:
            super().__init__(config)
            self.model = nn.Sequential(nn.Linear(3, 1)).bfloat16()

        def train_step(self, data: Any) -> Any:
            return super().train_step([part.bfloat16() for part in data])

    averaging = {"ema": {"enabled": True, "decay": 0.9}, "evaluate_splits": []}
    with Half(settings(tmp_path / "run", steps=3, **averaging)) as runner:
        runner.train()
        averages = {name: value.clone() for name, value in runner.ema.weights.items()}
    for options, dtype in (([], torch.bfloat16), (["--dtype", "fp32"], torch.float32)):
        path = tmp_path / f"{dtype}.pth"
        assert main(["export", str(tmp_path / "run"), str(path), *options]) == 0
        for name, value in torch.load(path, weights_only=True).items():
            assert value.dtype == dtype and torch.equal(value, averages[name].to(dtype))
