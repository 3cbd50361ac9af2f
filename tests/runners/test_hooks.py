"""Every hook of a runner: overridden with a call of `super()` alone, with nothing, and then, hook by hook, as users override it."""

from __future__ import annotations

import json
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_processes
from support.stacks import needs_deepspeed, zero
from support.toys import Chain, Line, differences, in_parts, line_of, settings, whole_state
from torch import Tensor, nn
from torch.nn import functional as F

import danling as dl
from danling.runners import RunnerState
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


def config_of(root: Path, **more: Any) -> dict[str, Any]:
    base = {
        "steps": 4,
        "evaluate_interval": 2,
        "scheduler": {"type": "cosine"},
        "ema": {"enabled": True},
    }
    return settings(root, **{**base, "checkpoint": {"async_enabled": False, "interval": 2}, **more})


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


def use(
    kind: type, config: dict[str, Any], *, resumes: bool = True
) -> tuple[dict[str, torch.Tensor], Any]:
    """Train, resume and train on, evaluate and predict; return the weights and the results."""
    length = "steps" if config.get("steps") else "epochs"
    for part in (1, 2) if resumes else (2,):
        with kind(
            {**config, length: config[length] * part // 2, "auto_resume": resumes and part == 2}
        ) as runner:
            runner.train()
            runner.evaluate()
            runner.infer("val")
            weights = {
                name: whole(value).detach().clone()
                for name, value in runner.model_state_dict().items()
            }
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


RIDDLES = (
    "AttributeError",
    "TypeError",
    "AssertionError",
    "KeyError",
    "UnboundLocalError",
    "NameError",
)


def is_plain(hook: str, error: str | None) -> bool:
    """Whether there is no error, or one that names the hook in one line and is none of Python's own."""
    message = (error or "").splitlines()[:1]
    return error is None or (not message[0].startswith(RIDDLES) and f"`{hook}" in message[0])


@pytest.mark.parametrize("mode", ["steps", "epochs"])
def test_overrides_with_a_call_of_super_change_nothing(mode: str, tmp_path: Path) -> None:
    config = config_of(tmp_path) if mode == "steps" else of_epochs(config_of(tmp_path))
    weights, results = use(Chain, {**config, "dir": str(tmp_path / "plain")})
    found, figures = use(
        overriding(HOOKS, calls_super=True), {**config, "dir": str(tmp_path / "super")}
    )
    assert figures == results and all(
        torch.equal(found[name], weight) for name, weight in weights.items()
    )


@pytest.mark.parametrize("hook", HOOKS)
def test_empty_override_acts_as_nothing_or_is_named(hook: str, tmp_path: Path) -> None:
    config = config_of(tmp_path)
    error = outcome(hook, of_epochs(config) if "epoch" in hook else config)
    assert is_plain(hook, error), error


AXES: dict[str, dict[str, int]] = {hook: {"pipeline": 2} for hook in PARALLEL if "pipeline" in hook}


def on_mesh(root: Path, hook: str) -> dict[str, Any]:
    axes = AXES.get(hook, {"tensor": 2} if hook == "parallelize_model" else {"shard": 2})
    mesh = {
        "stack": "parallel",
        "parallel": {"axes": axes, "pipeline_microbatch_size": 2},
        "ema": {"enabled": False},
    }
    return config_of(root / hook, **mesh)


def outcomes(cases: list[tuple[str, dict[str, Any]]]) -> list[tuple[str, str | None]]:
    return [(hook, outcome(hook, config)) for hook, config in cases]


@pytest.mark.timeout(300)
def test_empty_hooks_of_several_ranks_act_as_nothing_or_are_named(tmp_path: Path) -> None:
    cases = [(hook, on_mesh(tmp_path, hook)) for hook in (*PARALLEL, "init_distributed")]
    cases += [
        (hook, config_of(tmp_path / f"ddp-{hook}"))
        for hook in ("init_distributed", "materialize_model", "train_context")
    ]
    for rank in run_processes(outcomes, cases, world_size=2, timeout=120):
        for hook, error in rank:
            assert is_plain(hook, error), f"{hook}: {error}"


def use_both(config: dict[str, Any], hooks: list[str]) -> tuple[Any, Any]:
    plain = use(Chain, {**config, "dir": config["dir"] + "-plain"})
    return plain, use(
        overriding(hooks, calls_super=True), {**config, "dir": config["dir"] + "-super"}
    )


@pytest.mark.parametrize("axis", ["shard", "pipeline"])
def test_overrides_with_a_call_of_super_change_nothing_on_a_mesh(axis: str, tmp_path: Path) -> None:
    config = on_mesh(tmp_path, "build_pipeline_schedule" if axis == "pipeline" else "fsdp_kwargs")
    hooks = [hook for hook in (*HOOKS, *PARALLEL) if hook not in ("load_ema",)]
    for (weights, results), (found, figures) in run_processes(
        use_both, config, hooks, world_size=2, timeout=120
    ):
        assert figures == results and all(
            torch.equal(found[name], weight) for name, weight in weights.items()
        )


@needs_deepspeed
@pytest.mark.timeout(200)
def test_overrides_on_an_engine(tmp_path: Path) -> None:
    config = config_of(
        tmp_path / "engine", stack="deepspeed", deepspeed=zero(1), ema={"enabled": False}
    )
    (((weights, results), (found, figures)),) = run_processes(
        use_both, config, HOOKS, world_size=1, timeout=150
    )
    assert figures == results and all(
        torch.equal(found[name], weight) for name, weight in weights.items()
    )
    cases = [
        (hook, {**config, "dir": str(tmp_path / hook)})
        for hook in ("init_distributed", "init_checkpoint_manager", "state_dict")
    ]
    (found_outcomes,) = run_processes(outcomes, cases, world_size=1, timeout=150)
    for hook, error in found_outcomes:
        assert is_plain(hook, error), f"{hook}: {error}"


def test_every_name_of_the_contract_is_there() -> None:
    missing = [
        name for name in [*HOOKS, *OF_A_STACK, *OF_EVERY_RUNNER] if not hasattr(dl.BaseRunner, name)
    ]
    assert not missing
    with dl.BaseRunner({"dir": "run"}) as runner:
        for name in (*EXECUTION, *OF_A_STACK):
            with pytest.raises(
                NotImplementedError, match=f"Expected BaseRunner to implement `{name}`"
            ):
                getattr(runner, name)()
        for name in ("model", "ema", "criterion", "optimizer", "scheduler", "metrics"):
            assert getattr(runner, name) is None
        for (
            name
        ) in "datasets dataloaders meters results config workspace id config_id timestamp".split():  # noqa: SIM905
            assert getattr(runner, name) is not None
        state = runner.state.state_dict()
        assert state.keys() == {"train", "elastic", "rng"}
        runner.state.load_state_dict({**state, "train": {**state["train"], "global_step": 7}})
        assert (runner.state.train.global_step, runner.state.elastic.attempts) == (7, 2)


# criterion and compute_loss


class OwnLoss(Line):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.criterion = None

    def compute_loss(self, pred: Any, target: Any) -> Tensor:
        return 2 * F.mse_loss(pred, target)


def test_overridden_loss_is_used_in_evaluation_too(tmp_path: Path) -> None:
    with OwnLoss(settings(tmp_path, epochs=2)) as runner:
        runner.train()
        inputs, targets = runner.datasets["val"].tensors
        with torch.no_grad():
            expected = float(2 * F.mse_loss(runner.unwrapped_model(inputs), targets))
        assert runner.latest_score == pytest.approx(expected, rel=1e-5)


def test_bare_inputs_have_a_loss_in_evaluation_too_and_missing_targets_have_none(
    tmp_path: Path,
) -> None:
    class Bare(Line):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.datasets = {split: data.tensors[0] for split, data in self.datasets.items()}
            self.criterion = lambda pred, _: 2 * pred.square().mean()

    with Bare(settings(tmp_path / "bare", epochs=1)) as runner:
        runner.train()
        with torch.no_grad():
            expected = float(2 * runner.unwrapped_model(runner.datasets["val"]).square().mean())
        assert runner.evaluate("val")["val"]["loss"] == pytest.approx(expected, rel=1e-5)
    with Line(settings(tmp_path / "line", epochs=1)) as runner:
        runner.datasets["test"] = line_of(5).tensors[0]
        assert runner.evaluate("test") == {"test": {}}


def test_a_loss_may_be_a_method(tmp_path: Path) -> None:
    class Method(dl.Runner):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model, self.datasets = nn.Linear(3, 1), {"train": line_of(8), "val": line_of(8)}

        def criterion(self, pred: Tensor, target: Tensor) -> Tensor:
            return (pred - target).abs().mean()

    with Method(settings(tmp_path, steps=2)) as runner:
        runner.train()
        inputs, targets = runner.datasets["val"].tensors
        expected = (runner.model(inputs) - targets).abs().mean().item()
        assert runner.evaluate("val")["val"]["loss"] == pytest.approx(expected, rel=1e-6)


# build_optimizer and build_scheduler


def test_overridden_builders_need_no_section(tmp_path: Path) -> None:
    class Built(Line):
        def build_optimizer(self) -> Any:
            return torch.optim.Adagrad(self.model.parameters(), lr=0.01)

        def build_scheduler(self) -> Any:
            return torch.optim.lr_scheduler.StepLR(self.optimizer, 1)

    config = settings(tmp_path, steps=6)
    del config["optim"]
    with Built(config) as runner:
        runner.train()
        assert isinstance(runner.optimizer, torch.optim.Adagrad)
        assert runner.optimizer.param_groups[0]["lr"] == pytest.approx(0.01 * 0.1**6)


def test_overridden_builders_may_assign_what_they_make(tmp_path: Path) -> None:
    class Assigned(Line):
        def build_optimizer(self) -> Any:
            self.optimizer = torch.optim.Adagrad(self.model.parameters(), lr=0.01)

        def build_scheduler(self) -> Any:
            self.scheduler = torch.optim.lr_scheduler.LambdaLR(
                self.optimizer, lambda step: 1 / (step + 1)
            )

    config = settings(tmp_path, steps=6)
    del config["optim"]
    with Assigned(config) as runner:
        runner.train()
        assert runner.optimizer.param_groups[0]["lr"] == pytest.approx(0.01 / 7)
        runner.config.steps = 9
        runner.train()
        assert runner.optimizer.param_groups[0]["lr"] == pytest.approx(0.01 / 10)


class Halving:
    """A schedule without a state."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        self.optimizer.param_groups[0]["lr"] /= 2


@pytest.mark.parametrize(
    ("hook", "made", "said"),
    [
        (
            "build_scheduler",
            lambda self: Halving(self.optimizer),
            "a Halving without state_dict and load_state_dict",
        ),
        (
            "build_optimizer",
            lambda self: [torch.optim.SGD(self.model.parameters())],
            "Received: a list of 1.",
        ),
    ],
)
def test_what_an_overridden_builder_makes_is_checked_as_what_init_makes(
    hook: str, made: Any, said: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=said):
        type("Built", (Line,), {hook: made})(settings(tmp_path, steps=6))


def test_a_schedule_without_a_state_trains_where_nothing_is_saved(tmp_path: Path) -> None:
    hook = {"build_scheduler": lambda self: Halving(self.optimizer)}
    with type("Built", (Line,), hook)(
        settings(tmp_path, steps=2, checkpoint={"load_only": True})
    ) as runner:
        rate = runner.optimizer.param_groups[0]["lr"]
        runner.train()
        assert runner.optimizer.param_groups[0]["lr"] == rate / 4


@pytest.mark.parametrize(
    ("needs", "is_told"),
    [
        (lambda runner: torch.optim.lr_scheduler.StepLR(runner.optimizer, 3), True),
        (lambda runner: runner.optimizer.param_groups, True),
        (lambda runner: runner.criterion.weight, False),
    ],
)
def test_an_error_of_init_that_needs_the_optimizer_says_where_it_is_made(
    needs: Any, is_told: bool, tmp_path: Path
) -> None:
    class Early(Line):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.criterion = None
            needs(self)

    with pytest.raises((TypeError, AttributeError), match="NoneType") as caught:
        Early(settings(tmp_path, steps=6))
    assert ("`build_scheduler`" in "".join(getattr(caught.value, "__notes__", ()))) == is_told


# step and optimizer_step


class Closing(Line):
    """Trains with LBFGS, whose step takes a closure, with the hooks overridden that its error names."""

    not_saved = ("batch",)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.optimizer = torch.optim.LBFGS(self.model.parameters(), lr=0.1)

    def train_step(self, data: Any) -> Any:
        self.batch = data
        return super().train_step(data)

    def step(self) -> Any:
        return super().step()

    def optimizer_step(self) -> None:
        def closure() -> Tensor:
            self.optimizer.zero_grad()
            loss: Tensor = self.criterion(self.model(self.batch[0]), self.batch[1])
            loss.backward()
            return loss

        self.optimizer.step(closure)


def test_lbfgs_with_a_closure_trains_and_resumes(tmp_path: Path) -> None:
    whole, parts = in_parts(Closing, tmp_path, (3, 6))
    assert torch.equal(whole.unwrapped_model.weight, parts.unwrapped_model.weight)
    (group,) = parts.optimizer.state.values()
    assert group["n_iter"] > 6


class TwoOptimizers(Chain):
    """Steps a second optimizer, an attribute of the user's, which needs the state of both."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.optimizer = torch.optim.SGD(self.model[0].parameters(), lr=0.1, momentum=0.9)
        self.second = torch.optim.Adam(self.model[2].parameters(), lr=0.01)

    def optimizer_step(self) -> None:
        super().optimizer_step()
        self.second.step()
        self.second.zero_grad()


def test_optimizer_step_with_two_optimizers_resumes_bitwise(tmp_path: Path) -> None:
    whole, parts = in_parts(TwoOptimizers, tmp_path, (2, 3, 7))
    assert not differences(whole_state(parts)["model"], whole_state(whole)["model"])
    assert not differences(parts.second.state_dict(), whole.second.state_dict())
    assert parts.second.state[parts.unwrapped_model[2].weight]["step"] == 7


# accum_steps


def test_accumulation_may_change_in_a_pass(tmp_path: Path) -> None:
    windows: list[float] = []

    class Changing(Line):
        @property
        def accum_steps(self) -> int:
            return 1 if self.state.train.global_step < 2 else 2

        def step(self) -> Any:
            outcome = super().step()
            windows.append(outcome.weight)
            return outcome

    with Changing(settings(tmp_path, epochs=1)) as runner:
        runner.train()
    assert windows == [4, 4, 8]


# scores and best_index


class ThirdIsBest(Line):
    """Scores an epoch by how near it is to the third, and has no figure of the name that the configuration gives."""

    @property
    def scores(self) -> dict[int, float]:
        return {index: float(abs(index - 3)) for index in self.results}


def test_overridden_scores_decide_everything(tmp_path: Path) -> None:
    schedule = {"type": "reducelronplateau", "patience": 0, "factor": 0.5}
    config = settings(
        tmp_path, epochs=9, patience=2, score_name="own", score_mode="min", scheduler=schedule
    )
    with ThirdIsBest(config) as runner:
        runner.train()
        assert list(runner.results) == [1, 2, 3, 4, 5]
        assert (runner.best_index, runner.best_score, runner.latest_score) == (3, 0.0, 2.0)
        assert runner.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**2)
        assert runner.read_checkpoint("best")["state"]["train"]["epoch"] == 3
    written = json.loads((tmp_path / "best.json").read_text())
    assert (written["index"], written["score"], written["weights"]) == (3, 0.0, "trained")


def test_overridden_best_index_has_its_own_score(tmp_path: Path) -> None:
    class First(Line):
        @property
        def best_index(self) -> int | None:
            return next(iter(self.scores), None)

    with First(settings(tmp_path, epochs=5, patience=2, ema={"enabled": True})) as runner:
        results = runner.train()
        assert list(results) == [1, 2, 3]
        assert (
            runner.best_score == results[1]["val"]["loss"]
            and runner.latest_score == results[3]["val"]["loss"]
        )
        assert runner.read_checkpoint("best")["state"]["train"]["epoch"] == 1
    assert json.loads((tmp_path / "best.json").read_text())["weights"] == "averaged"


# model_state_dict, load_model, component_states and state


@pytest.mark.parametrize("stack", ["ddp", "parallel"])
def test_weights_added_by_an_override_come_back(stack: str, tmp_path: Path) -> None:
    class Adding(Line):
        not_saved = ("table",)

        table = torch.zeros(3)

        def model_state_dict(self) -> dict[str, Any]:
            return {**super().model_state_dict(), "table": self.table}

        def load_model(self, state: Mapping[str, Any], *, partial: bool = False) -> None:
            own = dict(state)
            self.table = own.pop("table")
            super().load_model(own, partial=partial)

    with Adding(settings(tmp_path, steps=1, stack=stack)) as runner:
        runner.table = torch.full((3,), 7.0)
        runner.train()
    with Adding(settings(tmp_path, steps=2, stack=stack, auto_resume=True)) as runner:
        assert runner.table.tolist() == [7.0, 7.0, 7.0]


class Noting(RunnerState):
    noted = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "noted": self.noted}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.noted = state["noted"]


class Partly(Line):
    """Has a state of another class, and names some components only."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.state = Noting(self.state.train, self.state.elastic, self.state.rng)

    def component_states(self) -> dict[str, Any]:
        return {"model": self.model_state_dict(), "optimizer": self.optimizer_state_dict()}


def test_another_state_comes_back_and_components_left_out_by_an_override_are_saved(
    tmp_path: Path,
) -> None:
    config = settings(tmp_path, ema={"enabled": True}, scheduler={"type": "cosine"})
    with Partly({**config, "steps": 1}) as runner:
        runner.state.noted = 7
        runner.train()
        assert {"model", "optimizer", "ema", "scheduler"} <= runner.read_checkpoint("latest").keys()
    with Partly({**config, "steps": 2, "auto_resume": True}) as runner:
        assert (runner.state.noted, runner.state.train.global_step) == (7, 1)


# save_checkpoint


def test_requested_checkpoint_survives_a_boundary_by_hand(tmp_path: Path) -> None:
    saved: list[int] = []

    class Saving(Line):
        def save_checkpoint(self, **how: Any) -> None:
            saved.append(self.state.train.global_step)
            super().save_checkpoint(**how)

    with Saving(settings(tmp_path, epochs=3)) as runner:
        runner.request_checkpoint()
        assert not runner.boundary()
        runner.train_epoch()
        assert saved and saved[0] == 1


# Hooks that a program sets on its runner while it trains


@pytest.mark.parametrize("hook", ["to_device", "train_context", "forward_context"])
def test_hook_that_is_set_within_a_pass_counts_from_the_next_micro_batch(
    hook: str, tmp_path: Path
) -> None:
    called: list[int] = []

    class Setting(Line):
        def step(self) -> Any:
            outcome = super().step()
            if self.state.train.global_step == 2:
                own = getattr(self, hook)

                def noting(*data: Any) -> Any:
                    if self.mode == "train":
                        called.append(self.state.train.global_step)
                    return own(*data)

                setattr(self, hook, noting)
            return outcome

    with Setting(settings(tmp_path, steps=4)) as runner:
        runner.train()
    assert called == [2, 3]


def test_hook_of_a_pass_that_is_set_within_the_training_may_freeze_parameters(
    tmp_path: Path,
) -> None:
    reductions: list[Any] = []

    class Setting(Line):
        def train_step(self, data: Any) -> Any:
            if self.state.train.global_step == 2 and not reductions:
                self.on_pass_start = lambda split: reductions.append(self.reduction)  # type: ignore[method-assign]
            elif self.state.train.global_step == 4:
                reductions.append(self.reduction)
            return super().train_step(data)

    with Setting(settings(tmp_path, steps=5)) as runner:
        runner.train()
    before, after = reductions
    # It is made again after the hook, for the parameters that are trained then.
    assert after is not before
