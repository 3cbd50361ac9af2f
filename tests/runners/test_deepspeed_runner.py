"""The DeepSpeed stack: whose optimizer it is, what is skipped, what its checkpoints hold and who can read them."""

from __future__ import annotations

import logging
import logging.handlers
import os
import queue
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support import hostile
from support.processes import run_processes
from support.stacks import (
    UNSAVED,
    AnyStackRunner,
    needs_deepspeed,
    settings,
    train,
    train_each,
    zero,
)
from support.toys import differences
from torch import Tensor, nn

from danling.checkpoints import CheckpointDamaged, CheckpointError, read_config
from danling.cli.main import main
from danling.deepspeed.checkpoints import export_deepspeed_checkpoint


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("danling.deepspeed.engine.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install deepspeed"):
        AnyStackRunner(settings(tmp_path))


@needs_deepspeed
@pytest.mark.timeout(200)
def test_engine_uses_the_optimizer_of_the_runner_or_its_own(tmp_path: Path) -> None:
    """The user's, that of `optim`, or DeepSpeed's, with its schedule: the same updates when they are the same optimizer."""
    none: dict[str, Any] = {"optim": None, "scheduler": None}
    adam = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
    warmup = {
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3, "warmup_max_lr": 1e-2}}
    }
    plain = {
        key: value
        for key, value in settings(tmp_path / "0", "ddp", **UNSAVED).items()
        if key not in none
    }
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({**plain, "workspace_root": str(tmp_path / "own-ddp")}, {"own": True}),
        (
            {
                **plain,
                "stack": "deepspeed",
                "workspace_root": str(tmp_path / "own"),
                "deepspeed": zero(2),
            },
            {"own": True},
        ),
        (
            {
                **plain,
                "workspace_root": str(tmp_path / "ddp"),
                "optim": {"type": "adamw", "lr": 1e-2},
            },
            {},
        ),
        (
            {
                **plain,
                "stack": "ds",
                "workspace_root": str(tmp_path / "ds"),
                "deepspeed": {**adam, **zero(1)},
            },
            {},
        ),
        (
            {
                **plain,
                "stack": "ds",
                "workspace_root": str(tmp_path / "w"),
                "deepspeed": {**adam, **warmup, **zero(1)},
            },
            {},
        ),
    ]
    own_ddp, own, ddp, theirs, warmed = run_processes(train_each, cases, world_size=1, timeout=150)[
        0
    ]
    for reference, found in ((own_ddp, own), (ddp, theirs)):
        for name, weight in reference["state"]["model"].items():
            torch.testing.assert_close(found["state"]["model"][name], weight, rtol=1e-5, atol=1e-6)
    assert (
        own["state"]["optimizer"]["param_groups"][0]["lr"]
        == own_ddp["state"]["optimizer"]["param_groups"][0]["lr"]
    )
    assert warmed["state"]["scheduler"]["last_batch_iteration"] >= len(warmed["trace"]) - 1
    assert warmed["state"]["optimizer"]["param_groups"][0]["lr"] == pytest.approx(1e-2)


def train_filling(cases: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[dict[str, Any]]:
    """Train with NaN in memory that nobody has written."""
    torch.use_deterministic_algorithms(True)
    return train_each(cases)


@needs_deepspeed
@pytest.mark.timeout(200)
def test_what_fills_up_the_shares_of_weights_is_not_looked_at(tmp_path: Path) -> None:
    """The shares of ZeRO 3 are equally long: the second one of seven elements ends in memory that DeepSpeed has not written."""
    cases = [(settings(tmp_path / str(count), deepspeed=zero(3)), {}) for count in range(2)]
    plain = run_processes(train_each, cases[:1], world_size=2, timeout=90)
    filled = run_processes(train_filling, cases[1:], world_size=2, timeout=90)
    assert differences(filled, plain) == []


@needs_deepspeed
@pytest.mark.timeout(200)
def test_an_overflow_of_float16_is_left_out_and_forgotten(tmp_path: Path) -> None:
    """With an offloaded optimizer the engine keeps the shares of the gradient, padding included, from one update to the next."""
    changes: dict[str, Any] = {**UNSAVED, "precision": "fp16", "skip_nonfinite_grad": True}
    offloaded = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
    sections = [zero(1), zero(3), zero(1, **offloaded), zero(2, **offloaded)]
    how = {"spoiled": (2,), "norm": False}
    cases = [(settings(tmp_path / "ddp", "ddp", **changes), how)]
    cases += [
        (settings(tmp_path / str(i), deepspeed=section, **changes), how)
        for i, section in enumerate(sections)
    ]
    for ranks in run_processes(train_each, cases, world_size=2, timeout=150):
        reference = ranks[0]["state"]
        assert reference["state"]["train"]["skipped_updates"] == 1
        for found in ranks[1:]:
            assert found["state"]["state"]["train"] == reference["state"]["train"]
            for name, weight in reference["model"].items():
                torch.testing.assert_close(
                    found["state"]["model"][name], weight, rtol=1e-5, atol=1e-6
                )


@needs_deepspeed
@pytest.mark.timeout(200)
def test_groups_of_parameters_train_and_their_state_is_told(tmp_path: Path) -> None:
    optim = {"type": "adamw", "lr": 1e-2, "param_groups": [{"pattern": "^0", "lr_multiplier": 0.1}]}
    changes: dict[str, Any] = {**UNSAVED, "optim": optim}
    cases = [(settings(tmp_path / "ddp", "ddp", **changes), {"norm": False})]
    cases += [
        (settings(tmp_path / str(s), deepspeed=zero(s), **changes), {"norm": False})
        for s in (1, 2, 3)
    ]
    for ranks in run_processes(train_each, cases, world_size=2, timeout=150):
        reference = ranks[0]["state"]
        for found in ranks[1:]:
            for name, weight in reference["model"].items():
                torch.testing.assert_close(
                    found["state"]["model"][name], weight, rtol=1e-5, atol=1e-6
                )
            for name, entry in reference["optimizer"]["state"].items():
                moment = found["state"]["optimizer"]["state"][name]["exp_avg"]
                torch.testing.assert_close(moment, entry["exp_avg"], rtol=1e-4, atol=1e-6)


def finetuned(config: dict[str, Any], source: str) -> dict[str, torch.Tensor]:
    with AnyStackRunner.from_pretrained(config, source) as runner:
        return {name: weight.clone() for name, weight in runner.model_state_dict().items()}


def needs_trust(action: Callable[..., Any], *arguments: Any) -> None:
    with pytest.raises(CheckpointError, match=r"checkpoint\.trust=true .*danling export --trust"):
        action(*arguments)


def finetune_each(cases: list[tuple[dict[str, Any], str]]) -> list[dict[str, torch.Tensor]]:
    return [finetuned(config, source) for config, source in cases]


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_checkpoint_of_two_processes_goes_everywhere(tmp_path: Path) -> None:
    cases = [
        (
            settings(
                tmp_path / f"s{stage}", deepspeed=zero(stage), **{"checkpoint.keep_latest_k": 1}
            ),
            {"frozen": True},
        )
        for stage in (0, 1, 3)
    ]
    trained = run_processes(train_each, cases, world_size=2, timeout=150)[0]
    loads: list[tuple[dict[str, Any], str]] = []
    for (config, _), found in zip(cases, trained):
        (latest,) = Path(config["workspace_root"]).rglob("checkpoints/latest")
        assert read_config(latest)["deepspeed"] == config["deepspeed"]
        history = {path.read_text() for path in latest.parent.glob("ckpt-*")}
        assert history == {
            latest.read_text(),
            (latest.parent / "best").read_text(),
        }  # one, and the best is protected
        out = tmp_path / f"{Path(config['workspace_root']).name}.pth"
        if config["deepspeed"]["zero_optimization"]["stage"] > 0:
            needs_trust(export_deepspeed_checkpoint, latest.parent, out)
            needs_trust(AnyStackRunner, settings(tmp_path / "ddp", "ddp", pretrained=str(latest)))
            assert main(["export", str(latest), str(out)]) == 1
        (file,) = export_deepspeed_checkpoint(latest.parent, out, trust=True)
        exported = torch.load(file, weights_only=True)
        assert differences(exported, found["state"]["model"]) == []
        assert "state" in torch.load(
            latest.parent / "targets" / latest.read_text().strip() / "runner.pth", weights_only=True
        )
        loads.append((settings(tmp_path / "ddp", "ddp"), str(file)))
        loads.append(
            (
                settings(tmp_path / "again", deepspeed=zero(3), **{"checkpoint.trust": True}),
                str(latest),
            )
        )
    for index, weights in enumerate(
        run_processes(finetune_each, loads, world_size=1, timeout=100)[0]
    ):
        assert differences(weights, trained[index // 2]["state"]["model"]) == []


@needs_deepspeed
@pytest.mark.timeout(200)
def test_a_run_goes_on_at_another_stage_number_of_processes_and_stack(tmp_path: Path) -> None:
    first = [
        (settings(tmp_path / str(stage), deepspeed=zero(stage)), {"stop_at": 3})
        for stage in (0, 1, 3)
    ]
    theirs = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}, **zero(1)}
    plain = {key: value for key, value in first[1][0].items() if key not in ("optim", "scheduler")}
    first[1] = ({**plain, "deepspeed": theirs}, {"stop_at": 3})
    run_processes(train_each, first, world_size=2, timeout=100)
    targets: list[dict[str, Any]] = [
        {"deepspeed": zero(3)},
        {"dataloader": {"batch_size": 8, "drop_last": False}},
        {"stack": "ddp"},
    ]
    trusting = {"auto_resume": True, "checkpoint.trust": True}
    second = [
        ({**config, **changes, **trusting}, {}) for (config, _), changes in zip(first, targets)
    ]
    two = run_processes(train_each, second[::2], world_size=2, timeout=100)[0]
    one = run_processes(train_each, second[1:2], world_size=1, timeout=100)[0]
    reference = run_processes(train, settings(tmp_path / "ddp", "ddp"), world_size=2)[0]["state"]
    for found in two:
        for name, weight in reference["model"].items():
            torch.testing.assert_close(found["state"]["model"][name], weight, rtol=1e-5, atol=1e-6)
        for name, entry in reference["optimizer"]["state"].items():
            for key, value in entry.items():
                torch.testing.assert_close(
                    found["state"]["optimizer"]["state"][name][key], value, rtol=1e-4, atol=1e-6
                )
    assert (
        one[0]["state"]["state"]["train"]["global_step"]
        == reference["state"]["train"]["global_step"]
    )


def resume_message(config: dict[str, Any]) -> str:
    try:
        AnyStackRunner(config).close()
    except CheckpointDamaged as error:
        return str(error)
    return ""


@needs_deepspeed
def test_a_cut_file_is_named(tmp_path: Path) -> None:
    config = settings(tmp_path, deepspeed=zero(1))
    run_processes(train, config, world_size=1)
    (latest,) = tmp_path.rglob("checkpoints/latest")
    file = next((latest.parent / "targets" / latest.read_text().strip()).glob("*optim_states.pt"))
    os.truncate(file, file.stat().st_size // 2)
    message = run_processes(resume_message, {**config, "resume": str(latest)}, world_size=1)[0]
    assert file.name in message


def resume_with_a_pickle(root: Path) -> str:
    config = settings(root, deepspeed=zero(1))
    train(config, stop_at=2)
    # The engine's own files of the same layout need no trust.
    with AnyStackRunner({**config, "auto_resume": True}) as runner:
        assert runner.state.train.global_step == 2
    (file,) = root.rglob("*_optim_states.pt")
    hostile.plant_in_file(file, hostile.harm("os.system", root / "mark", protocol=2))
    hostile.reseal(root)
    try:
        AnyStackRunner({**config, "auto_resume": True}).close()
    except CheckpointError as error:
        return str(error)
    return ""


class OneTask(AnyStackRunner):
    """Has a head for each of two tasks, of which an update uses one from an epoch on, and may train the second head from the next epoch."""

    def __init__(self, config: Mapping[str, Any], *, begins_in: int, thaws: bool) -> None:
        super().__init__(config)
        self.begins_in, self.thaws = begins_in, thaws
        self.model = Heads(self.model)
        self.model.heads[1].requires_grad_(not thaws)
        self.hooks: list[int] = []

    def on_pass_start(self, split: str) -> None:
        self.unwrapped_model.heads[1].requires_grad_(not self.thaws or self.train_state.epoch > 0)

    def train_step(self, data: Any) -> Any:
        has_begun = self.train_state.epoch >= self.begins_in
        # The first head first.
        self.unwrapped_model.number = (
            (self.train_state.global_step + self.begins_in) % 2 if has_begun else None
        )
        self.hooks.append(hooks_of(self.unwrapped_model))
        return super().train_step(data)


def hooks_of(model: nn.Module) -> int:
    return sum(len(parameter._post_accumulate_grad_hooks or ()) for parameter in model.parameters())


class Heads(nn.Module):
    number: int | None = None

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.heads = nn.ParameterList([torch.zeros(1), torch.zeros(1)])

    def forward(self, x: Tensor) -> Tensor:
        used = list(self.heads) if self.number is None else [self.heads[self.number]]
        found: Tensor = self.body(x)
        for head in used:
            found = found + head
        return found


def lines_of_tasks(configs: list[dict[str, Any]]) -> list[list[str]]:
    """Return the lines about missing gradients of runs whose two heads are used in turn, both, in turn at last, and one only at last."""
    found = []
    cases = [(0, False), (2, False), (1, False), (2, True)]
    for config, (begins_in, thaws) in zip(configs, cases):
        records: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
        handler = logging.handlers.QueueHandler(records)
        logging.getLogger("danling").addHandler(handler)
        with OneTask(config, begins_in=begins_in, thaws=thaws) as runner:
            runner.train()
            if begins_in < 2:
                # What is named is not watched any more.
                assert runner.hooks[0] - hooks_of(runner.unwrapped_model) == len(
                    [*runner.model.parameters()]
                )
        logging.getLogger("danling").removeHandler(handler)
        messages = [records.get().getMessage() for _ in range(records.qsize())]
        found.append(
            [message for message in messages if "Expected a gradient for every" in message]
        )
    return found


@needs_deepspeed
@pytest.mark.timeout(200)
def test_parameters_that_an_update_leaves_out_are_named_once(tmp_path: Path) -> None:
    """DeepSpeed takes zeros, with which momentum and weight decay go on."""
    sections = [zero(0), zero(0), zero(2), zero(0)]
    configs = [
        settings(tmp_path / str(n), deepspeed=each, **UNSAVED) for n, each in enumerate(sections)
    ]
    for rank, lines in enumerate(run_processes(lines_of_tasks, configs, world_size=2, timeout=150)):
        assert [len(each) for each in lines] == ([1, 0, 1, 0] if rank == 0 else [0, 0, 0, 0])
        assert all(
            "heads.1" in each[0] and "DeepSpeed takes zeros" in each[0] for each in lines if each
        )


@needs_deepspeed
def test_an_engines_file_runs_nothing_unless_it_is_trusted(tmp_path: Path) -> None:
    message = run_processes(resume_with_a_pickle, tmp_path, world_size=1)[0]
    assert "checkpoint.trust=true" in message and "optim_states.pt" in message
    assert not (tmp_path / "mark").exists()


def without_launcher(root: Path) -> dict[str, Any]:
    """What a process that was started without a launcher runs into."""
    for name in (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    ):
        os.environ.pop(name, None)
    found: dict[str, Any] = {}
    cases: dict[str, dict[str, Any]] = {
        "schedules": {"deepspeed": {"scheduler": {"type": "WarmupLR"}}},
        "criterion": {"deepspeed": zero(0)},
    }
    for name, changes in cases.items():
        with pytest.raises(ValueError) as caught:
            AnyStackRunner(settings(root / name, **changes), scaled=name == "criterion")
        found[name] = str(caught.value)
    waits = {"checkpoint.async_mode": "async_with_pinned_mem"}
    with AnyStackRunner(settings(root / "thaw", deepspeed=zero(1), **waits), frozen=True) as runner:
        found["idle"] = runner.idle_settings()
        runner.unwrapped_model[0].requires_grad_(True)
        with pytest.raises(ValueError) as caught:
            runner.train()
        found["thaw"] = str(caught.value)
    first = settings(root / "first", deepspeed=zero(1))
    trained = train(first, stop_at=3)["state"]
    again = {
        **first,
        "auto_resume": True,
        "checkpoint.exclude_from_loading": ["model"],
        "checkpoint.trust": True,
    }
    with AnyStackRunner(again) as runner:
        found["optimizer"] = differences(
            runner.optimizer_state_dict()["state"], trained["optimizer"]["state"]
        )
        found["model"] = differences(runner.model_state_dict(), trained["model"])
    return {**found, "left": sorted({"LOCAL_RANK"} & os.environ.keys())}


@needs_deepspeed
@pytest.mark.timeout(120)
def test_start_without_a_launcher_and_refused_settings(tmp_path: Path) -> None:
    (found,) = run_processes(without_launcher, tmp_path, world_size=1, timeout=100)
    assert "scheduler.type='cosine'" in found["schedules"]
    assert "CrossEntropyLoss" in found["criterion"]
    assert "0.weight" in found["thaw"]
    assert any(line.startswith("checkpoint.async_mode=") for line in found["idle"])
    assert found["optimizer"] == []
    assert found["model"] != []
    assert found["left"] == []


def leaving_out(root: Path) -> dict[str, Any]:
    """Resume without parts of what an engine has written, named by dotted paths."""
    found: dict[str, Any] = {}
    for stage in (0, 2):
        first = settings(root / str(stage), deepspeed=zero(stage))
        trained = train(first, stop_at=3)["state"]
        for entry in ("optimizer.state", "optimizer.param_groups", "model.0.weight", "state.train"):
            again = {**first, "auto_resume": True, "checkpoint.exclude_from_loading": [entry]}
            if stage and entry in ("optimizer.param_groups", "model.0.weight"):
                with pytest.raises(CheckpointError, match=r"checkpoint\.trust=true"):
                    AnyStackRunner(again)
                again["checkpoint.trust"] = True
            with AnyStackRunner(again) as runner:
                state = runner.state_dict()
                found[f"{stage} {entry}"] = (
                    differences(state["model"], trained["model"]),
                    differences(state["optimizer"]["state"], trained["optimizer"]["state"]) == [],
                    state["state"]["train"]["global_step"],
                )
    return found


@needs_deepspeed
@pytest.mark.timeout(120)
def test_parts_of_an_engines_checkpoint_can_be_left_out(tmp_path: Path) -> None:
    (found,) = run_processes(leaving_out, tmp_path, world_size=1, timeout=100)
    for stage in (0, 2):
        assert found[f"{stage} optimizer.state"] == ([], False, 3)
        assert found[f"{stage} optimizer.param_groups"] == ([], True, 3)
        (changed,), *rest = found[f"{stage} model.0.weight"]
        assert "0.weight" in changed and rest == [True, 3]
        assert found[f"{stage} state.train"] == ([], True, 0)
