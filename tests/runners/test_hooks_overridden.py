"""Every verb and hook of the contract, overridden with nothing but a call of `super()`, and with nothing at all."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_processes
from support.stacks import needs_deepspeed, zero
from support.toys import Chain
from support.toys import settings as toy_settings

import danling as dl
from danling.utils.tensors import whole

# fmt: off
EXECUTION = [
    "train", "train_epochs", "train_epoch", "train_steps", "train_step", "backward", "step", "optimizer_step",
    "evaluate", "evaluate_epoch", "evaluate_steps", "evaluate_step", "infer", "infer_step",
]
CONSTRUCTION = [
    "init_distributed", "init_checkpoint_manager", "init_fault_tolerance", "init_tensorboard", "init_wandb",
    "init_signal_handlers", "init_heartbeat", "init_garbage_collection", "set_seed", "set_deterministic",
    "materialize_model", "build_optimizer", "build_scheduler", "build_datasampler", "build_dataloaders",
    "train_context", "forward_context",
]
CHECKPOINTS = [
    "state_dict", "load_state_dict", "save_checkpoint", "load_checkpoint", "load_pretrained", "read_checkpoint",
    "load_model", "load_ema", "load_optimizer", "load_scheduler", "load_dataloaders", "scores", "best_index",
    "is_best",
]
PARALLEL = [
    "build_topology", "init_model_parallel_groups", "parallelize_model", "build_pipeline_model_parts",
    "build_pipeline_model_part", "build_pipeline_schedule", "bind_pipeline_modules",
    "apply_activation_checkpointing", "fsdp_kwargs", "build_mixed_precision_policy", "build_offload_policy",
]
# fmt: on
HOOKS = [*EXECUTION, *CONSTRUCTION, *CHECKPOINTS]
FACTS = ("scores", "best_index", "is_best")
OF_A_STACK = """
    summarize compute_loss batch_weight train_context forward_context materialize_model build_optimizer build_scheduler
    load_pretrained load_model load_ema load_optimizer load_scheduler
""".split()  # noqa: SIM905
OF_EVERY_RUNNER = """
    read_config best_score latest_score latest_result best_result rank world_size local_rank distributed is_main_process
    is_local_main_process steps epochs is_step_mode accum_steps batch_size progress train_splits evaluate_splits
    checkpoint_interval log_interval checkpoint_manager name close add_tracker
""".split()  # noqa: SIM905


def settings(root: Path, **more: Any) -> dict[str, Any]:
    base = {"steps": 4, "evaluate_interval": 2, "scheduler": {"type": "cosine"}, "ema": {"enabled": True}}
    return toy_settings(root, **{**base, "checkpoint": {"async_enabled": False, "interval": 2}, **more})


def overriding(hooks: list[str], *, calls_super: bool) -> type:
    """Return a runner that overrides hooks, all of them either calling `super()` or doing nothing."""

    def override(hook: str) -> Any:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not calls_super:
                return None
            inherited = getattr(super(kind, self), hook)
            return inherited if hook in FACTS else inherited(*args, **kwargs)

        return property(method) if hook in FACTS else method

    kind: type = type("Overriding", (Chain,), {hook: override(hook) for hook in hooks})
    return kind


def use(kind: type, config: dict[str, Any], *, resumes: bool = True) -> tuple[dict[str, torch.Tensor], Any]:
    """Train, resume and train on, evaluate and predict; return the weights and the results."""
    length = "steps" if config.get("steps") else "epochs"
    for part in (1, 2) if resumes else (2,):
        with kind({**config, length: config[length] * part // 2, "auto_resume": resumes and part == 2}) as runner:
            runner.train()
            runner.evaluate()
            runner.infer("val")
            weights = {name: whole(value).detach().clone() for name, value in runner.model_state_dict().items()}
            results = dict(runner.results)
    return weights, results


def of_epochs(config: dict[str, Any]) -> dict[str, Any]:
    """Return the same settings in epoch mode, where the hooks of epochs are called."""
    return {**config, "steps": None, "evaluate_interval": None, "epochs": 2}


def outcome(hook: str, config: dict[str, Any]) -> str | None:
    """Return what a hook that does nothing leads to: an error with its trace, or `None`."""
    try:
        use(overriding([hook], calls_super=False), config, resumes=hook in CHECKPOINTS)
    except Exception as error:
        return f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
    return None


RIDDLES = ("AttributeError", "TypeError", "AssertionError", "KeyError", "UnboundLocalError", "NameError")


def is_plain(hook: str, error: str | None) -> bool:
    """Whether there is no error, or one that names the hook in one line and is none of Python's own."""
    message = (error or "").splitlines()[:1]
    return error is None or (not message[0].startswith(RIDDLES) and f"`{hook}" in message[0])


@pytest.mark.parametrize("mode", ["steps", "epochs"])
def test_overrides_with_a_call_of_super_change_nothing(mode: str, tmp_path: Path) -> None:
    config = settings(tmp_path) if mode == "steps" else of_epochs(settings(tmp_path))
    weights, results = use(Chain, {**config, "dir": str(tmp_path / "plain")})
    found, figures = use(overriding(HOOKS, calls_super=True), {**config, "dir": str(tmp_path / "super")})
    assert figures == results and all(torch.equal(found[name], weight) for name, weight in weights.items())


@pytest.mark.parametrize("hook", HOOKS)
def test_empty_override_acts_as_nothing_or_is_named(hook: str, tmp_path: Path) -> None:
    config = settings(tmp_path)
    error = outcome(hook, of_epochs(config) if "epoch" in hook else config)
    assert is_plain(hook, error), error


AXES: dict[str, dict[str, int]] = {hook: {"pipeline": 2} for hook in PARALLEL if "pipeline" in hook}


def on_mesh(root: Path, hook: str) -> dict[str, Any]:
    axes = AXES.get(hook, {"tensor": 2} if hook == "parallelize_model" else {"shard": 2})
    mesh = {"stack": "parallel", "parallel": {"axes": axes, "pipeline_microbatch_size": 2}, "ema": {"enabled": False}}
    return settings(root / hook, **mesh)


def outcomes(cases: list[tuple[str, dict[str, Any]]]) -> list[tuple[str, str | None]]:
    return [(hook, outcome(hook, config)) for hook, config in cases]


@pytest.mark.timeout(300)
def test_empty_hooks_of_several_ranks_act_as_nothing_or_are_named(tmp_path: Path) -> None:
    cases = [(hook, on_mesh(tmp_path, hook)) for hook in (*PARALLEL, "init_distributed")]
    cases += [
        (hook, settings(tmp_path / f"ddp-{hook}"))
        for hook in ("init_distributed", "materialize_model", "train_context")
    ]
    for rank in run_processes(outcomes, cases, world_size=2, timeout=120):
        for hook, error in rank:
            assert is_plain(hook, error), f"{hook}: {error}"


def use_both(config: dict[str, Any], hooks: list[str]) -> tuple[Any, Any]:
    plain = use(Chain, {**config, "dir": config["dir"] + "-plain"})
    return plain, use(overriding(hooks, calls_super=True), {**config, "dir": config["dir"] + "-super"})


@pytest.mark.parametrize("axis", ["shard", "pipeline"])
def test_overrides_with_a_call_of_super_change_nothing_on_a_mesh(axis: str, tmp_path: Path) -> None:
    config = on_mesh(tmp_path, "build_pipeline_schedule" if axis == "pipeline" else "fsdp_kwargs")
    hooks = [hook for hook in (*HOOKS, *PARALLEL) if hook not in ("load_ema",)]
    for (weights, results), (found, figures) in run_processes(use_both, config, hooks, world_size=2, timeout=120):
        assert figures == results and all(torch.equal(found[name], weight) for name, weight in weights.items())


@needs_deepspeed
@pytest.mark.timeout(200)
def test_overrides_on_an_engine(tmp_path: Path) -> None:
    config = settings(tmp_path / "engine", stack="deepspeed", deepspeed=zero(1), ema={"enabled": False})
    (((weights, results), (found, figures)),) = run_processes(use_both, config, HOOKS, world_size=1, timeout=150)
    assert figures == results and all(torch.equal(found[name], weight) for name, weight in weights.items())
    cases = [
        (hook, {**config, "dir": str(tmp_path / hook)})
        for hook in ("init_distributed", "init_checkpoint_manager", "state_dict")
    ]
    (found_outcomes,) = run_processes(outcomes, cases, world_size=1, timeout=150)
    for hook, error in found_outcomes:
        assert is_plain(hook, error), f"{hook}: {error}"


def test_every_name_of_the_contract_is_there() -> None:
    missing = [name for name in [*HOOKS, *OF_A_STACK, *OF_EVERY_RUNNER] if not hasattr(dl.BaseRunner, name)]
    assert not missing
    with dl.BaseRunner({"dir": "run"}) as runner:
        for name in (*EXECUTION, *OF_A_STACK):
            with pytest.raises(NotImplementedError, match=f"Expected BaseRunner to implement `{name}`"):
                getattr(runner, name)()
        for name in ("model", "ema", "criterion", "optimizer", "scheduler", "metrics"):
            assert getattr(runner, name) is None
        for name in "datasets dataloaders meters results config workspace id config_id timestamp".split():  # noqa: SIM905
            assert getattr(runner, name) is not None
        state = runner.state.state_dict()
        assert state.keys() == {"train", "elastic", "rng"}
        runner.state.load_state_dict({**state, "train": {**state["train"], "global_step": 7}})
        assert (runner.state.train.global_step, runner.state.elastic.attempts) == (7, 2)
