"""ParallelRunner beyond its guarantees: what it refuses, and what a user's script may do."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.layouts import LayoutRunner, Sentences
from support.processes import run_outcomes, run_processes
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import danling as dl
from danling.checkpoints import CheckpointMismatch
from danling.distributed import Placement
from danling.utils.tensors import is_sharded, local_part, whole


class Points(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Separable points."""

    def __init__(self, count: int) -> None:
        self.inputs = torch.randn(
            count, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64
        )

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.inputs[index, :3].argmax()


class PlainRunner(dl.Runner):
    """A sequential model, as a user has it."""

    def __init__(self, config: Mapping[str, Any], **options: Any) -> None:
        super().__init__(config)
        self.options = options
        with torch.device("meta" if options.get("meta") else "cpu"):
            self.model = self.build().double()
        self.criterion = nn.CrossEntropyLoss(reduction=options.get("reduction", "mean"))
        self.datasets = {
            "train": Points(options.get("samples", 24)),
            "val": Points(options.get("held_out", 7)),
        }
        self.metrics = {"acc": dl.metrics.accuracy}
        if options.get("loader"):
            self.dataloaders["train"] = options.get("loader_class", DataLoader)(
                Points(22), batch_size=4
            )
        if options.get("optimizer"):
            head = {"params": self.model[4].parameters(), "lr": 0.02}
            rest = [p for name, p in self.model.named_parameters() if not name.startswith("4.")]
            self.optimizer = torch.optim.AdamW([{"params": rest}, head], lr=0.01)

    def build(self) -> nn.Sequential:
        norm = nn.BatchNorm1d(8) if self.options.get("batch_norm") else nn.LayerNorm(8)
        between = nn.Dropout(0.3) if self.options.get("dropout") else nn.ReLU()
        return nn.Sequential(nn.Linear(6, 8), norm, between, nn.Linear(8, 8), nn.Linear(8, 3))


def settings(root: Path, axes: Mapping[str, int] | None, **more: Any) -> dict[str, Any]:
    replicas = (axes or {}).get("shard", 1) * (axes or {}).get("replicate", 1)
    config = {
        "workspace_root": str(root),
        "seed": 2,
        "steps": 4,
        "evaluate_interval": 4,
        "log": False,
        # Not Adam, which divides by the size of a gradient and would hide one that is too large.
        "optim": {"type": "sgd", "lr": 0.1, "momentum": 0.9},
        "dataloader": {"batch_size": 4 // replicas},
        "checkpoint": {"interval": 100},
    }
    if axes is not None:
        config |= {"stack": "parallel", "parallel": {"axes": dict(axes)}}
    for name, value in more.items():
        held = config.get(name)
        config[name] = {**held, **value} if isinstance(held, dict) else value
    return config


def train(config: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    with PlainRunner(config, **options) as runner:
        results = runner.train()
        weights = {name: whole(value).clone() for name, value in runner.model_state_dict().items()}
        predictions = runner.infer("val")
        return {
            "weights": weights,
            "results": results,
            "predictions": predictions,
            "rates": rates(runner),
        }


def rates(runner: Any) -> list[float]:
    return [group["lr"] for group in runner.optimizer.param_groups]


def both(
    root: Path, axes: Mapping[str, int], options: Mapping[str, Any], **more: Any
) -> tuple[Any, list[Any]]:
    world = 1
    for degree in axes.values():
        world *= degree
    more = {"checkpoint": {"load_only": True}, **more}
    (one,) = run_processes(
        train, settings(root / "one", None, **more), options, world_size=1, timeout=60
    )
    return one, run_processes(
        train, settings(root / "mesh", axes, **more), options, world_size=world, timeout=60
    )


def check_equal(one: Any, ranks: list[Any], tolerance: float = 1e-9) -> None:
    weights = {name: value for rank in ranks for name, value in rank["weights"].items()}
    assert weights.keys() == one["weights"].keys()
    for rank in ranks:
        for name, value in rank["weights"].items():
            torch.testing.assert_close(value, one["weights"][name], rtol=0, atol=tolerance)
        assert rank["results"][4]["val"] == pytest.approx(one["results"][4]["val"], abs=tolerance)
        assert len(rank["predictions"]) == len(one["predictions"])
        for mine, theirs in zip(rank["predictions"], one["predictions"]):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=tolerance)


FSDP, PIPELINE = {"shard": 2}, {"pipeline": 2}


BOTH = {"pipeline": 2, "shard": 2}


@pytest.mark.parametrize(
    ("options", "axes"),
    [
        ({}, BOTH),
        pytest.param({"reduction": "sum"}, BOTH, marks=pytest.mark.slow),
        ({"optimizer": True}, PIPELINE),
        ({"optimizer": True}, FSDP),
        ({"held_out": 1}, FSDP),
        ({"held_out": 1}, {"pipeline": 3}),
    ],
    ids=str,
)
def test_a_script_of_one_process_runs_unchanged(
    options: dict[str, Any], axes: dict[str, int], tmp_path: Path
) -> None:
    """Evaluation and inference have uneven, and with one held-out sample empty, shards."""
    one, ranks = both(tmp_path, axes, options)
    check_equal(one, ranks)
    assert all(rank["rates"] == one["rates"] for rank in ranks)


def test_a_loader_of_the_users_own_feeds_a_pipeline(tmp_path: Path) -> None:
    """The middle stage reads nothing and hears from the others that the pass has ended, inside of a window too."""
    one, ranks = both(tmp_path, {"pipeline": 3}, {"loader": True}, accum_steps=4)
    check_equal(one, ranks)


def test_parameter_groups_are_those_of_the_whole_model(tmp_path: Path) -> None:
    groups = [
        {"pattern": "bias", "weight_decay_multiplier": 0.0},
        {"pattern": r"^4\.", "lr_multiplier": 3.0},
    ]
    more = {"optim": {"weight_decay": 0.1, "param_groups": groups}}
    one, ranks = both(tmp_path, PIPELINE, {}, **more)
    check_equal(one, ranks)
    assert all(rank["rates"] == one["rates"] for rank in ranks)


def batch_norm(config: Mapping[str, Any]) -> dict[str, Any]:
    with PlainRunner(config, batch_norm=True) as runner:
        runner.train()
        return {name: whole(value).clone() for name, value in runner.model_state_dict().items()}


def test_batch_norm_keeps_the_statistics_of_the_first_replica(tmp_path: Path) -> None:
    """As under DDP: the batches are those of each replica, and the buffers of the first are saved and evaluated."""
    ddp = settings(tmp_path / "ddp", None, dataloader={"batch_size": 2})
    theirs = run_processes(batch_norm, ddp, world_size=2, timeout=60)[0]
    for rank in run_processes(
        batch_norm, settings(tmp_path / "fsdp", FSDP), world_size=2, timeout=60
    ):
        for name, value in rank.items():
            torch.testing.assert_close(value, theirs[name], rtol=0, atol=1e-9)


def resumed_batch_norm(config: Mapping[str, Any]) -> dict[str, Any]:
    with PlainRunner({**config, "steps": 2}, batch_norm=True) as runner:
        runner.train()
        source = str(runner.workspace.checkpoints / "latest")
    with PlainRunner({**config, "resume": source}, batch_norm=True) as runner:
        runner.train()
        return {name: whole(value).clone() for name, value in runner.model_state_dict().items()}


def test_a_pipeline_leaves_statistics_alone(tmp_path: Path) -> None:
    """1F1B wants two micro-batches, and each batch is one; each forward is computed twice; a resumed run looks for shapes once more."""
    one = batch_norm(settings(tmp_path / "one", None))
    again = {"activation_checkpointing": True, "pipeline_microbatch_size": 4}
    for function in (batch_norm, resumed_batch_norm):
        root = tmp_path / function.__name__
        config = settings(
            root, PIPELINE, parallel=again, fsdp={"blocks": ["Linear", "BatchNorm1d"]}
        )
        for rank in run_processes(function, config, world_size=2, timeout=60):
            for name, value in rank.items():
                torch.testing.assert_close(value, one[name], rtol=0, atol=1e-9)


def meta(config: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    with PlainRunner(config, meta=True) as runner:
        sharded = any(is_sharded(p) for p in runner.model.parameters())
        weights = {name: whole(value).clone() for name, value in runner.model_state_dict().items()}
        runner.train()
        return weights, sharded


def test_a_model_on_the_meta_device_is_initialised_shard_by_shard(tmp_path: Path) -> None:
    config = settings(tmp_path, {"shard": 2, "replicate": 2}, dataloader={"batch_size": 1})
    ranks = run_processes(meta, config, world_size=4, timeout=60)
    for weights, sharded in ranks:
        assert sharded
        assert all(torch.equal(value, ranks[0][0][name]) for name, value in weights.items())
        assert 0.05 < weights["0.weight"].std().item() < 0.5
        assert torch.equal(weights["1.weight"], torch.ones(8, dtype=torch.float64))
        assert not torch.equal(weights["3.weight"][:4], weights["3.weight"][4:]), (
            "each shard draws from its own stream"
        )


class PartlyMeta(PlainRunner):
    """A body without values under a head that has some."""

    def build(self) -> nn.Sequential:
        with torch.device("meta"):
            body = nn.Linear(6, 8)
        return nn.Sequential(body, nn.ReLU(), nn.Linear(8, 3))


def test_weights_of_a_model_partly_on_the_meta_device_are_not_overwritten(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"(?s)0\.\w+ on it, and 2\.\w+ with values"):
        PartlyMeta(settings(tmp_path, {}))


def test_nothing_to_compute_again_is_said(tmp_path: Path) -> None:
    parallel = {"activation_checkpointing": True}
    with PlainRunner(settings(tmp_path / "none", {}, parallel=parallel)) as runner:
        assert [
            line
            for line in runner.idle_settings()
            if "activation_checkpointing" in line and "fsdp.blocks" in line
        ]
    with PlainRunner(
        settings(tmp_path / "named", {}, parallel=parallel, fsdp={"blocks": ["Linear"]})
    ) as runner:
        assert runner.idle_settings() == []


class HalfRunner(PlainRunner):
    """Trains in float32 under float16 autocast, and makes one update overflow on one rank."""

    not_saved = ("committed",)

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.model.float()
        del self.datasets["val"]
        self.committed: list[str | None] = []

    def train_step(self, data: Any) -> tuple[Any, Tensor]:
        return super().train_step((data[0].float(), data[1]))

    def compute_loss(self, pred: Any, target: Any) -> Tensor:
        loss: Tensor = super().compute_loss(pred, target)
        last = self.data_domain.rank == self.data_domain.size - 1
        overflows = (
            last and self.state.train.global_step == 1 and not self.state.train.skipped_updates
        )
        return loss * float("inf") if overflows and self.mode == "train" else loss

    def step(self) -> Any:
        outcome = super().step()
        self.committed.append(outcome.reason)
        return outcome


def half(config: Mapping[str, Any]) -> tuple[list[str | None], float, dict[str, Any]]:
    with HalfRunner(config) as runner:
        runner.train()
        weights = {name: whole(value).clone() for name, value in runner.model_state_dict().items()}
        return runner.committed, runner.precision.scaler.get_scale(), weights


@pytest.mark.parametrize(
    "axes",
    [FSDP, PIPELINE, pytest.param({"pipeline": 2, "shard": 2}, marks=pytest.mark.slow)],
    ids=str,
)
def test_an_overflow_on_one_rank_halves_the_scale_of_all(
    axes: dict[str, int], tmp_path: Path
) -> None:
    world = 2 * len(axes)
    ranks = run_processes(
        half, settings(tmp_path, axes, precision="fp16"), world_size=world, timeout=60
    )
    for reasons, scale, weights in ranks:
        assert reasons == [None, "overflow", None, None, None]
        assert scale == 2.0**15
        assert all(bool(torch.isfinite(value).all()) for value in weights.values())


def not_finite(config: Mapping[str, Any]) -> None:
    with HalfRunner(config) as runner:
        runner.train()


def test_nonfinite_update_of_one_stage_is_raised_on_all(tmp_path: Path) -> None:
    outcomes = run_outcomes(not_finite, settings(tmp_path, PIPELINE), world_size=2, timeout=60)
    assert all(
        "step 2" in str(outcome.error) and "on ranks [1]" in str(outcome.error)
        for outcome in outcomes
    )


def policy(config: Mapping[str, Any]) -> tuple[torch.dtype, torch.dtype]:
    seen: list[torch.dtype] = []
    with PlainRunner(config) as runner:
        runner.model[3].register_forward_hook(
            lambda module, args, output: seen.append(output.dtype)
        )
        runner.train()
        return seen[0], local_part(next(runner.model.parameters())).dtype


def test_a_mixed_precision_policy_is_given_by_name(tmp_path: Path) -> None:
    fsdp = {"mp_policy": {"param_dtype": "bf16", "output_dtype": "float64"}}
    for seen, kept in run_processes(
        policy, settings(tmp_path, FSDP, fsdp=fsdp), world_size=2, timeout=60
    ):
        assert seen is torch.bfloat16 and kept is torch.float64


# What is refused, before the first collective or on all ranks


def construct(config: Mapping[str, Any], kind: type[PlainRunner] = PlainRunner) -> None:
    with kind(config):
        pass


class Tied(PlainRunner):
    """The first and the last layer share their weights."""

    def build(self) -> nn.Sequential:
        model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
        model[2].weight = model[0].weight
        return model


class Lost(PlainRunner):
    """Its optimizer was made before the model was complete."""

    def __init__(self, config: Mapping[str, Any], **options: Any) -> None:
        super().__init__(config, **options)
        self.optimizer = torch.optim.SGD(self.build().parameters(), lr=0.1)


class Branched(PlainRunner):
    """A model that is no chain."""

    def build(self) -> Any:
        return nn.ModuleDict({"first": nn.Linear(6, 6), "second": nn.Linear(6, 3)})


class Undivided(LayoutRunner):
    """Says that it can be divided, and does nothing."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config, model={})
        self.model.parallelize = lambda context: None


class DividedByHand(LayoutRunner):
    """Asks for the mesh, and does nothing with it."""

    def parallelize_model(self, model: nn.Module) -> None:
        assert (
            self.parallel_context.mesh("tensor").size()
            == self.parallel_context.degree("tensor")
            == 2
        )


class Misplaced(PlainRunner):
    """Takes all ranks for alike, without a mesh."""

    def build_placement(self) -> Placement:
        return Placement.alike(self.world)


class Averages(nn.Module):
    """Loses the samples' dimension."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.mean(0)


class Stubborn(nn.Module):
    """Raises an error of the user's own."""

    def forward(self, inputs: Tensor) -> Tensor:
        raise RuntimeError("the third layer is not to be called")


class BrokenStage(PlainRunner):
    """A chain with one module that a pipeline cannot run, or batches that go into it by keyword."""

    def __init__(self, config: Mapping[str, Any], **options: Any) -> None:
        super().__init__(config, **options)
        if self.options["broken"] == "keywords":
            self.datasets["train"] = [({"input": torch.ones(6)}, 1)] * 8

    def build(self) -> nn.Sequential:
        broken = {"averages": Averages, "stubborn": Stubborn}.get(
            self.options["broken"], nn.Identity
        )
        at = self.options["at"]
        layers = [nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 3)]
        return nn.Sequential(*layers[:at], broken(), *layers[at:])


def train_broken(config: Mapping[str, Any], broken: str, at: int) -> None:
    with BrokenStage(config, broken=broken, at=at) as runner:
        runner.train()


def refused(function: Any, config: Mapping[str, Any], *args: Any, world_size: int = 2) -> list[str]:
    outcomes = run_outcomes(function, config, *args, world_size=world_size, timeout=40)
    assert all(isinstance(outcome.error, ValueError) for outcome in outcomes), outcomes
    return [str(outcome.error) for outcome in outcomes]


@pytest.mark.parametrize(
    ("axes", "more", "words"),
    [
        ({"tensor": 2}, {}, ["parallelize(topology)", "tensor=2"]),
        ({"expert": 2}, {}, ["expert=2"]),
        (
            {"pipeline": 2},
            {"parallel": {"module_fqns_per_model_part": [["0", "1"], ["3", "4"]]}},
            ["2 in none"],
        ),
        (
            {"pipeline": 2},
            {"parallel": {"module_fqns_per_model_part": [["0", "1"], ["1", "2", "3", "4"]]}},
            ["listed twice"],
        ),
        (
            {"pipeline": 2},
            {"parallel": {"module_fqns_per_model_part": [["0", "1", "2"], ["3", "5"]]}},
            ["unknown=['5']"],
        ),
        ({"shard": 2}, {"parallel": {"module_fqns_per_model_part": [["0"]]}}, ["pipeline > 1"]),
        (
            {"pipeline": 2},
            {"parallel": {"pipeline_n_microbatches": 8}},
            ["pipeline_n_microbatches=8", "batch_size=4"],
        ),
        (
            {"pipeline": 2},
            {"parallel": {"pipeline_microbatch_size": 8}},
            ["pipeline_microbatch_size=8", "batch_size=4"],
        ),
        (
            {"pipeline": 1, "shard": 2},
            {"fsdp": {"mp_policy": {"param_dtype": "bf17"}}},
            ["fsdp.mp_policy.param_dtype='bf17'"],
        ),
        (
            {"pipeline": 2},
            {"dataloader": {"batch_size": None, "global_batch_size": 10, "micro_batch_size": 4}},
            ["global_batch_size=10 over 1 data replicas x 3 micro-batches", "multiple of 3"],
        ),
        ({"shard": 2}, {"checkpoint": {"backend": "file"}}, ["checkpoint.backend='dcp'"]),
        ({"shard": 2}, {"fsdp": {"blocks": ["Nothing"]}}, ["Nothing", "Linear"]),
    ],
    ids=str,
)
def test_bad_settings_are_refused_on_all_ranks(
    axes: dict[str, int], more: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    config = settings(tmp_path, None, **more)
    config["stack"] = "parallel"
    config["parallel"] = {**more.get("parallel", {}), "axes": axes}
    for message in refused(construct, config):
        assert message.startswith("Expected") and "Received" in message
        assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("kind", "axes", "words"),
    [
        (Tied, PIPELINE, ["tied", "0.weight"]),
        (Branched, PIPELINE, ["module_fqns_per_model_part"]),
        (Undivided, {"tensor": 2}, ["divide parameters over tensor"]),
        (
            partial(DividedByHand, model={}),
            {"tensor": 2},
            ["`parallelize_model` to divide parameters over tensor"],
        ),
        (Misplaced, FSDP, ["Call super().build_placement()"]),
        (Lost, FSDP, ["train nothing"]),
    ],
)
def test_indivisible_models_are_refused(
    kind: Any, axes: Any, words: list[str], tmp_path: Path
) -> None:
    for message in refused(construct, settings(tmp_path, axes), kind):
        assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("broken", "at", "words"),
    [
        ("keywords", 1, ["by position", "keywords"]),
        ("averages", 1, ["stage 0 of 2", "samples in dimension 0"]),
        ("averages", 4, ["stage 1 of 2", "samples in dimension 0"]),
    ],
)
def test_output_unfit_for_a_pipeline_is_refused_on_every_rank(
    broken: str, at: int, words: list[str], tmp_path: Path
) -> None:
    for message in refused(train_broken, settings(tmp_path, PIPELINE), broken, at):
        assert all(word in message for word in words), message


def test_an_error_in_a_stage_reaches_every_rank(tmp_path: Path) -> None:
    ended = run_outcomes(
        train_broken, settings(tmp_path, PIPELINE), "stubborn", 4, world_size=2, timeout=40
    )
    outcomes = sorted(ended, key=lambda outcome: outcome.rank)
    assert isinstance(outcomes[1].error, RuntimeError), "the user's own error, where it was raised"
    assert isinstance(outcomes[0].error, ValueError)
    assert all("the third layer is not to be called" in str(outcome.error) for outcome in outcomes)
    assert "stage 1 of 2" in str(outcomes[0].error)


def test_indivisible_sequence_is_refused(tmp_path: Path) -> None:
    messages = refused(odd_lengths, settings(tmp_path, {"context": 2}))
    assert all(
        "the sequence length to be a multiple of context = 2" in message for message in messages
    )


def odd_lengths(config: Mapping[str, Any]) -> None:
    with LayoutRunner(config, model={}) as runner:
        tokens = Sentences(8)[0][0][:7].repeat(2, 1)
        runner.train_step(runner.to_device((tokens, tokens)))


def save_each(cases: list[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> list[str]:
    found = []
    for config, options in cases:
        with PlainRunner(config, **options) as runner:
            runner.train()
            found.append(str(runner.workspace.checkpoints / "latest"))
    return found


def test_inexact_resume_at_other_degrees_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The states of a user's own loaders belong to the ranks that saved them; without any a run goes on, whether it draws or not."""
    options = [{}, {"dropout": True}, {"loader": True, "loader_class": StatefulDataLoader}]
    cases = [
        (settings(tmp_path / str(place), FSDP), option) for place, option in enumerate(options)
    ]
    plain, drawn, loaded = run_processes(save_each, cases, world_size=2, timeout=60)[0]

    def resume(source: str, option: Mapping[str, Any], **more: Any) -> int:
        allow = {"allow_degree_change": more.pop("allow", False)}
        config = settings(tmp_path / "again", {"shard": 1}, resume=source, parallel=allow, **more)
        with PlainRunner(config, **option) as runner:
            return int(runner.state.train.global_step)

    assert resume(plain, options[0]) == 4
    assert resume(drawn, options[1]) == 4
    with pytest.raises(CheckpointMismatch, match="cannot be redivided"):
        resume(loaded, options[2])
    assert resume(loaded, options[2], allow=True) == 4
    assert "starts from its beginning" in caplog.text


def save_export(config: Mapping[str, Any]) -> tuple[str, dict[str, Tensor]]:
    with PlainRunner(config) as runner:
        runner.train()
        weights = {name: whole(value).clone() for name, value in runner.model_state_dict().items()}
        return str(runner.workspace.checkpoints / "model"), weights


def finetune(config: Mapping[str, Any], source: str) -> dict[str, Tensor]:
    with PlainRunner.from_pretrained(config, source) as runner:
        assert runner.state.train.global_step == 0
        return {name: whole(value).clone() for name, value in runner.model_state_dict().items()}


@pytest.mark.parametrize("axes", [FSDP, PIPELINE], ids=str)
def test_weights_go_from_a_mesh_to_one_process_and_back(
    axes: dict[str, int], tmp_path: Path
) -> None:
    export = {"checkpoint": {"last_save_model_only": True}}
    ranks = run_processes(
        save_export, settings(tmp_path / "mesh", axes, **export), world_size=2, timeout=60
    )
    source, weights = ranks[0][0], {name: value for _, own in ranks for name, value in own.items()}
    (alone,) = run_processes(
        finetune, settings(tmp_path / "one", None), source, world_size=1, timeout=60
    )
    assert alone.keys() == weights.keys()
    assert all(torch.equal(value, weights[name]) for name, value in alone.items())
    plain = tmp_path / "plain.pth"
    torch.save(alone, plain)
    for back in run_processes(
        finetune, settings(tmp_path / "back", axes), str(plain), world_size=2, timeout=60
    ):
        assert all(torch.equal(value, weights[name]) for name, value in back.items())


@pytest.mark.parametrize("axes", [FSDP, pytest.param(PIPELINE, marks=pytest.mark.slow)], ids=str)
def test_a_compiled_model_trains_as_an_eager_one(axes: dict[str, int], tmp_path: Path) -> None:
    (one,) = run_processes(train, settings(tmp_path / "one", None), {}, world_size=1, timeout=60)
    config = settings(tmp_path / "mesh", axes, compile={"enable": True, "backend": "aot_eager"})
    check_equal(one, run_processes(train, config, {}, world_size=2, timeout=90))


class SingleRunner(PlainRunner):
    """Trains in float32 under autocast."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.model.float()

    def to_device(self, data: Any) -> Any:
        data = super().to_device(data)
        return (data[0].float(), data[1]) if isinstance(data, (tuple, list)) else data


def single(config: Mapping[str, Any]) -> float:
    with SingleRunner(config) as runner:
        return float(runner.train()[4]["train"]["loss"])


def test_autocast_passes_between_stages(tmp_path: Path) -> None:
    one = single(settings(tmp_path / "one", None, precision="bf16"))
    ranks = run_processes(
        single, settings(tmp_path / "mesh", PIPELINE, precision="bf16"), world_size=2, timeout=60
    )
    assert ranks == pytest.approx([one, one], abs=2e-2)
    assert one == pytest.approx(1.0, abs=0.3)
