"""The configuration: keys, sections, types, command line, files, copies and identity."""

from __future__ import annotations

import copy
import json
import os
import pickle
import re
import subprocess
import sys
import warnings
from argparse import Namespace
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import chanfig
import pytest
import yaml
from support.warm import interpreter

import danling
from danling.config import RunnerConfig
from danling.config.identity import RESUMABLE, canonical, digest
from danling.config.inputs import help_texts
from danling.config.names import BACKENDS
from danling.config.runner_config import continued
from danling.config.schema import CheckpointConfig
from danling.config.sections import ClosedSection, Section, fields_of
from danling.utils.plain import flatten

CONTRACT = """
{stack: auto, seed: null, deterministic: false, steps: null, epochs: null, accum_steps: 1, precision: null, max_grad_norm: null,
max_grad_value: null, skip_nonfinite_grad: false, patience: .inf, min_delta: 0.0, max_skipped_updates: 100, max_time: null,
score_split: null, score_name: loss, score_mode: null, evaluate_interval: null, train_splits: null, evaluate_splits: null,
name: null, lineage: lin, experiment: exp, workspace_root: experiments, dir: null, checkpoint_dir: null, log_file: null,
resume: null, auto_resume: false, pretrained: null, backend: null, init_method: null, secret_keys: null, git_diff: true,
log: true, log_interval: null, tensorboard: false,
wandb: {enabled: false, project: null, entity: null, group: null, name: null, job_type: null, tags: null, dir: null, mode: null},
mlflow: {enabled: false, uri: null, experiment: null, name: null},
trackio: {enabled: false, project: null, group: null, space_id: null, server_url: null},
ema: {enabled: false},
checkpoint: {dir_name: checkpoints, backend: auto, interval: null, before_evaluation: true, trainable_only: false, keep_latest_k: 0,
  load_only: false, verify: full, async_enabled: true, async_mode: null, dedicated_async_process_group: true,
  async_process_group_backend: gloo, wait_timeout: null, exclude_from_loading: null, last_save_model_only: false, export_dtype: null,
  remote: {url: null, required: false, keep_latest_k: 0, interval: 1, part_size: 16777216, timeout_seconds: 120.0, retries: 5},
  enable_ft_dataloader_checkpoints: false, ft_replica_id: null, ft_dataloader_checkpoint_prefix: ft-replica},
parallel: {axes: {replicate: 1, shard: 1, context: 1, pipeline: 1, tensor: 1, expert: 1, expert_tensor: 1}, pipeline_schedule: 1F1B,
  pipeline_microbatch_size: 1, pipeline_n_microbatches: null, module_fqns_per_model_part: null, mesh_device_type: null,
  allow_degree_change: false},
fsdp: {enabled: false, reshard_after_forward: null, mp_policy: null, offload_policy: null},
compile: {enable: false, backend: null, fullgraph: null, dynamic: null, mode: null, options: null, optimize_ddp: ddp_optimizer,
  precompile_artifact_dir: null, memory_policy: null},
comm: {init_timeout_seconds: null, train_timeout_seconds: null},
gc: {interval: null, generation: 1, disable_automatic: true},
profiling: {enabled: false, wait: 1, warmup: 1, active: 3, repeat: null, record_shapes: false, profile_memory: false, with_stack: false,
  with_flops: false, trace_dir: profiles},
heartbeat: {enabled: false, interval_seconds: 60.0, dir_name: heartbeats},
ft: {enabled: false, process_group: gloo, process_group_timeout_ms: 10000, replica_id: 0, group_size: 1, min_replica_size: 1}}
"""
DEFAULTS: dict[str, Any] = flatten(yaml.safe_load(CONTRACT))


class ModelConfig(chanfig.Config):
    width: int = 8
    depth: int = 2


class MyConfig(RunnerConfig):
    width: int = 64
    """Width of the model."""
    rate: float = 0.1
    activation: Literal["relu", "gelu"] = "relu"
    root: Path = Path("data")
    betas: tuple[float, float] = (0.9, 0.99)
    needed: int
    epochs = 7
    checkpoint = {"interval": 2}  # noqa: RUF012 - as a user would write it
    arch: ModelConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.model.dropout = 0.1
        self.model.layers = 4
        self.optim.type = "adamw"


def test_every_key_of_the_contract_has_its_default_and_every_key_has_help() -> None:
    config = RunnerConfig()
    assert isinstance(config, chanfig.Config) and isinstance(config.checkpoint, chanfig.Config)
    assert {key: config[key] for key in DEFAULTS} == DEFAULTS

    def check(cls: type) -> None:
        for field in fields_of(cls).values():
            if field.section:
                check(field.section)
            else:
                assert help_texts(cls)[field.name], (cls, field.name)

    check(RunnerConfig)
    assert {"auto", *BACKENDS} <= set(get_args(get_type_hints(CheckpointConfig)["backend"]))


def test_defaults_are_not_shared_and_reading_is_a_plain_attribute() -> None:
    one, two = RunnerConfig(steps=3), RunnerConfig()
    one.checkpoint.interval = 3
    one.optim.lr = 1
    assert two.checkpoint.interval is None and "lr" not in two.optim
    assert one.__dict__["steps"] == 3 and one.__dict__["checkpoint"] is one["checkpoint"]
    assert "__getattribute__" not in vars(RunnerConfig)


# Keys


def test_a_key_is_set_in_four_ways() -> None:
    by_attribute, by_item = RunnerConfig(), RunnerConfig()
    by_attribute.checkpoint.interval = 5
    by_item["checkpoint.interval"] = 5
    by_dots, by_section = (
        RunnerConfig({"checkpoint.interval": 5}),
        RunnerConfig(checkpoint={"interval": 5}),
    )
    for config in (by_dots, by_section, by_attribute, by_item):
        assert config == by_dots and isinstance(config.checkpoint, ClosedSection)
        assert (
            config.checkpoint.interval
            == config["checkpoint.interval"]
            == config.get("checkpoint.interval")
            == 5
        )
        assert config.checkpoint.dir_name == "checkpoints"


def test_user_sections_are_open() -> None:
    config = RunnerConfig(
        {"data.path": "a.txt", "model": {"heads": {"count": 4}}, "dataloader.batch_size": 8}
    )
    config.model.width = 64
    config.text.tokenizer.name = "bpe"
    config.dataloader.val.batch_size = 16
    assert config.data.path == "a.txt" and config["text.tokenizer.name"] == "bpe"
    assert (
        config.model == {"heads": {"count": 4}, "width": 64}
        and config.get("model.heads.count") == 4
    )
    assert "model.heads.count" in config and "model.heads.size" not in config
    assert config.dataloader == {"batch_size": 8, "val": {"batch_size": 16}}
    config["optim.param_groups"] = [{"pattern": "bias", "weight_decay_multiplier": 0.0}]
    assert config.optim.param_groups[0].pattern == "bias"
    assert config.plain()["optim"] == {
        "param_groups": [{"pattern": "bias", "weight_decay_multiplier": 0.0}]
    }
    with pytest.warns(UserWarning, match="name of a method"):
        config.model.items = 3
    assert config.model["items"] == 3


@pytest.mark.parametrize(
    "key",
    [
        "model",
        "data",
        "text",
        "num_blocks",
        "network",
        "dataset",
        "dim",
        "fc",
        "fft",
        "device",
        "tags",
        "x",
    ],
)
def test_own_names_are_fine(key: str) -> None:
    assert RunnerConfig({key: 1})[key] == 1
    assert RunnerConfig({f"{key}.path": 1})[f"{key}.path"] == 1


SLIPS: dict[str, str] = yaml.safe_load("""
{step: steps, epoch: epochs, accum_step: accum_steps, presicion: precision, sed: seed, Steps: steps, auto-resume: auto_resume, logs: log,
checkpoints: checkpoint, optm: optim}
""")
UNKNOWN: dict[str, str] = yaml.safe_load("""
{checkpoint.intervall: interval, parallel.axes.shards: shard, parallel.axis: axes, ema.decy: decay, wandb.projct: project,
gc.intervl.x: interval}
""")


@pytest.mark.parametrize(("key", "meant"), [*SLIPS.items(), *UNKNOWN.items()])
def test_slip_and_unknown_key_of_a_section_are_errors_with_the_nearest_name(
    key: str, meant: str
) -> None:
    with pytest.raises(ValueError, match=f"Did you mean '{meant}'"):
        RunnerConfig({key: 1})
    if "-" not in key:
        with pytest.raises(ValueError, match=f"Did you mean '{meant}'"):
            RunnerConfig().parse([f"--{key}=1"])
    if key in SLIPS:
        with pytest.raises(ValueError, match=f"Did you mean '{meant}'"):
            RunnerConfig()[f"{key}.nested"] = 1
        with pytest.raises(AttributeError, match=f"Did you mean '{meant}'"):
            getattr(RunnerConfig(), key)


def test_a_declared_slip_is_an_error() -> None:
    class Slipped(RunnerConfig):
        epoch: int = 3

    with pytest.raises(ValueError, match="Did you mean 'epochs'"):
        Slipped()


def test_reading_changes_no_value_and_no_id() -> None:
    config = RunnerConfig()
    before = config.plain()
    assert not hasattr(config.checkpoint, "intervall")
    with pytest.raises(KeyError, match="Did you mean 'interval'"):
        config["checkpoint.intervall"]
    assert (config.get("foo"), config.get("foo.bar", 3), config.get("model", 1)) == (None, 3, 1)
    assert (
        config.optim.lr is None
        and config.scheduler.interval is None
        and not config.optim
        and not config.dataloader
    )
    assert config.plain() == before
    config.model.head  # noqa: B018
    assert (config.config_id(), hash(config)) == (RunnerConfig().config_id(), hash(RunnerConfig()))


@pytest.mark.parametrize("key", ["deepspeed", "accelerate"])
def test_the_section_of_another_library_is_given_as_its_file(key: str, tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("zero_optimization: {stage: 2}\nmixed_precision: bf16\n")
    config = RunnerConfig({key: str(file)})
    assert config[key].plain() == {"zero_optimization": {"stage": 2}, "mixed_precision": "bf16"}
    assert RunnerConfig().parse([f"--{key}", str(file)])[key].zero_optimization.stage == 2


def test_compile_options_keep_their_dots() -> None:
    config = RunnerConfig(compile={"options": {"triton.cudagraphs": True}})
    config["compile.options.max_autotune"] = True
    config.merge({"compile": {"options": {"trace.enabled": False}}})
    assert type(config.compile.options) is dict and config.compile.options == {
        "trace.enabled": False
    }
    assert RunnerConfig({"compile.options.triton.cudagraphs": True}).compile.options == {
        "triton.cudagraphs": True
    }


def test_pairs_that_name_a_section_twice_are_merged_with_each_other() -> None:
    config = RunnerConfig()
    config.merge([("optim", {"lr": 0.5}), ("optim", {"weight_decay": 0.25})])
    assert config.optim.plain() == {"lr": 0.5, "weight_decay": 0.25}


def test_frozen() -> None:
    config = RunnerConfig({"model.width": 3})
    config.freeze()
    for change in ("steps", "checkpoint.interval", "model.width", "new.key"):
        with pytest.raises(ValueError, match="frozen"):
            config[change] = 1
    with pytest.raises(AttributeError):
        config.nothing  # noqa: B018
    clone = config.clone()
    clone.model.width = 5
    assert config.model.width == 3 and copy.deepcopy(config).getattr("frozen")
    assert pickle.loads(pickle.dumps(config)) == config


def test_update_setdefault_and_or() -> None:
    config = RunnerConfig(epochs=2, optim={"type": "sgd", "lr": 0.1})
    joined = config | {"optim": {"lr": 0.2}, "checkpoint.interval": 3}
    assert type(joined) is RunnerConfig and (joined.optim.type, joined.optim.lr) == ("sgd", 0.2)
    assert (joined.checkpoint.interval, config.optim.lr, config.checkpoint.interval) == (
        3,
        0.1,
        None,
    )
    config.update({"checkpoint.interval": 3}, accum_steps=4)
    config |= {"seed": 1}
    assert config.setdefault("model.width", 8) == 8 and config.setdefault("seed", 2) == 1
    assert (config.checkpoint.interval, config.accum_steps, config.__dict__["seed"]) == (3, 4, 1)
    with pytest.raises(ValueError, match="Did you mean 'epochs'"):
        config | {"epoch": 3}


# Types


CONVERTED: dict[str, list[tuple[Any, Any]]] = {
    "steps": [(1e3, 1000), ("none", None)],
    "patience": [(3, 3.0), ("inf", float("inf"))],
    "max_grad_norm": [("1e-3", 1e-3)],
    "workspace_root": [(Path("a/b"), "a/b")],
    "train_splits": [("train", ["train"]), (("a", "b"), ["a", "b"])],
    "checkpoint.backend": [("DCP", "dcp")],
    "checkpoint.verify": [(None, "none")],
    "precision": [("bfloat16", "bf16"), ("none", None), ("torch.float16", "fp16")],
    "fsdp.reshard_after_forward": [(8, 8), (True, True)],
    "compile.optimize_ddp": [(False, False)],
    "optim.lr": [("1e-3", 1e-3), (None, None)],
    "parallel.module_fqns_per_model_part": [((("a",), ["b", "c"]), [["a"], ["b", "c"]])],
}


@pytest.mark.parametrize(("key", "pairs"), CONVERTED.items())
def test_converted_without_loss(key: str, pairs: list[tuple[Any, Any]]) -> None:
    for value, kept in pairs:
        got = RunnerConfig({key: value})[key]
        assert got == kept and type(got) is type(kept)


WRONG_TYPES: dict[str, list[Any]] = yaml.safe_load("""
{steps: [1.5, many, true, .inf], tensorboard: [yes please, 1], accum_steps: [null], lineage: [3], max_grad_norm: [a lot],
checkpoint.interval: [[1]], wandb.tags: [3], compile.options: [4], dataloader.global_batch_size: [1.5, true, auto], optim.lr: [fast]}
""")
OUT_OF_BOUNDS: dict[str, Any] = yaml.safe_load("""
{precision: fp8, score_mode: best, checkpoint.async_mode: maybe, checkpoint.verify: some, checkpoint.backend: zip,
ft.process_group: mpi, scheduler.interval: never, steps: -1, accum_steps: 0, dataloader.global_batch_size: 0,
dataloader.micro_batch_size: -1, dataloader.train.micro_batch_size: fast, checkpoint.interval: 0, checkpoint.keep_latest_k: -1,
checkpoint.remote.part_size: 1000, max_grad_norm: 0.0, ema.decay: 1.0, gc.generation: 3, seed: -3, heartbeat.interval_seconds: 0}
""")
COMBINATIONS = {
    "parallel axes to be >= 1": {"parallel.axes.shard": 0},
    "at most one": {"parallel.axes.shard": -1, "parallel.axes.tensor": -1},
    "max_time to be seconds or 'HH:MM:SS'. Received: max_time='soon'": {"max_time": "soon"},
    "Received: max_time='1:2:3:4'": {"max_time": "1:2:3:4"},
    "Received: max_time=-1": {"max_time": -1},
    "ft.min_replica_size=2": {"ft.min_replica_size": 2},
    "steps or epochs, not both": {"steps": 1, "epochs": 1},
    "not both. Received: batch_size=4, global_batch_size=16 in dataloader. Set one of them to none": {
        "dataloader": {"batch_size": 4, "global_batch_size": 16}
    },
    "global_batch_size=16 in dataloader.train": {
        "dataloader.train": {"batch_size": 4, "global_batch_size": 16}
    },
    "'ddp', 'auto', 'torch', 'parallel', 'deepspeed', 'ds', 'accelerate', 'graph'. Received: stack='ddpp'. Did you mean 'ddp'": {
        "stack": "ddpp"
    },
}


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in WRONG_TYPES.items() for value in values]
)
def test_wrong_types_name_the_key(key: str, value: Any) -> None:
    with pytest.raises(
        TypeError, match=f"Expected {key.rpartition('.')[0]}.*to be .* Received: {key}="
    ):
        RunnerConfig({key: value})


@pytest.mark.parametrize(("key", "value"), OUT_OF_BOUNDS.items())
def test_values_out_of_bounds_name_the_key(key: str, value: Any) -> None:
    leaf = key.rpartition(".")[2]
    with pytest.raises(
        ValueError, match=rf"Expected \S*{leaf} to be (a number|one of) .* Received: \S*{leaf}="
    ):
        RunnerConfig({key: value})
    with pytest.raises(ValueError, match="Received: "):
        RunnerConfig()[key] = value


@pytest.mark.parametrize(("message", "settings"), COMBINATIONS.items())
def test_impossible_combinations_are_refused(message: str, settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        RunnerConfig(settings)
    config = RunnerConfig()
    config.merge(settings)
    with pytest.raises(ValueError, match=re.escape(message)):
        config.validate()


def test_sections_must_be_mappings() -> None:
    with pytest.raises(TypeError, match="'checkpoint' to be a section"):
        RunnerConfig(checkpoint=5)
    with pytest.raises(ValueError, match="'model' to be a section"):
        RunnerConfig({"model": 3, "model.width": 4})
    with pytest.raises(TypeError, match="Expected a mapping or the path of a file. Received: 3 "):
        RunnerConfig(3)


STACK_NAMES = "auto=ddp D-D_P=ddp torch=ddp Deep-Speed=deepspeed ds=deepspeed _Parallel=parallel Accelerate=accelerate"
SECONDS = {None: None, 90: 90.0, "90": 90.0, "1:30": 90.0, "01:00:30": 3630.0, "0:00.5": 0.5}


def test_stacks_have_aliases_and_a_time_has_several_forms() -> None:
    for stack, name in (pair.split("=") for pair in STACK_NAMES.split()):
        assert RunnerConfig(stack=stack).stack_name() == name
    for given, seconds in SECONDS.items():
        assert RunnerConfig(max_time=given).max_time_seconds() == seconds


@pytest.mark.parametrize(
    ("older", "value", "key"),
    [
        ("platform", "deepspeed", "stack"),
        ("checkpoint_async", False, "checkpoint.async_enabled"),
        ("checkpoint_interval", 7, "checkpoint.interval"),
    ],
)
def test_older_keys_are_read_with_a_warning(older: str, value: Any, key: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"'{older}' is an older key: use '{key}'"):
        config = RunnerConfig({older: value})
    assert config[key] == value and older not in config
    with pytest.warns(DeprecationWarning):
        assert getattr(config, older) == value


def test_the_warning_is_seen_in_a_script(tmp_path: Path) -> None:
    """Python shows it in `__main__` only, so it must be attributed to the line there."""
    script = tmp_path / "script.py"
    script.write_text(
        "import danling as dl\ndl.RunnerConfig({'platform': 'torch'})\n"
        "dl.RunnerConfig().parse(['--checkpoint_interval', '3'])\nconfig = dl.RunnerConfig()\n"
        "config.checkpoint_async = False\nassert config.checkpoint_async is False\n"
    )
    done = subprocess.run(
        [interpreter(), str(script)], capture_output=True, text=True, timeout=60, check=True
    )
    for line, key in (
        (2, "platform"),
        (3, "checkpoint_interval"),
        (5, "checkpoint_async"),
        (6, "checkpoint_async"),
    ):
        assert f"script.py:{line}: DeprecationWarning: '{key}' is an older key" in done.stderr


# Classes of a program


def test_passed_value_wins_over_a_declared_one() -> None:
    config = MyConfig()
    assert (config.width, config.rate, config.epochs, config.arch.width) == (64, 0.1, 7, 8)
    assert (config.checkpoint.interval, config.checkpoint.dir_name) == (2, "checkpoints")
    assert config.model == {"dropout": 0.1, "layers": 4} and isinstance(config.arch, ModelConfig)
    config = MyConfig(
        {"model.dropout": 0.5, "checkpoint": {"keep_latest_k": 3}}, width=32, arch={"depth": 9}
    )
    assert config.model == {"dropout": 0.5, "layers": 4}
    assert (config.width, config.arch.depth, config.arch.width) == (32, 9, 8)
    assert (config.checkpoint.keep_latest_k, config.checkpoint.interval) == (3, 2)


def test_declared_types() -> None:
    config = MyConfig(root="elsewhere", betas=[0.1, 0.2])
    assert config.root == Path("elsewhere") and config.betas == (0.1, 0.2)
    with pytest.raises(TypeError, match="Expected width to be an integer"):
        MyConfig(width="wide")
    with pytest.raises(ValueError, match="Expected activation to be one of 'relu', 'gelu'"):
        MyConfig(activation="tanh")
    with pytest.raises(AttributeError, match="must be set"):
        config.needed  # noqa: B018

    class Local:
        pass

    class LocalConfig(RunnerConfig):
        thing: Local | None = None  # a name that only this function knows
        size: int = 3
        level: Literal[1, 2, "all"] = 1

        def post(self) -> None:
            self.model.width = self.size * 2

    assert LocalConfig(size=4).size == 4 and LocalConfig().parse(["--size", "5"]).model.width == 10
    assert (LocalConfig(level=2).level, LocalConfig().parse(["--level", "2"]).level) == (2, 2)
    with pytest.raises(TypeError, match="Expected level to be 1 or 2 or 'all'. Received: level=3"):
        LocalConfig(level=3)


def test_plain_config_reads_a_stored_subclass() -> None:
    mine = MyConfig()
    plain = RunnerConfig(Namespace(**mine.plain()))
    assert plain.config_id() == mine.config_id() and mine.differences(plain.plain()) == []


# The command line


def test_words_of_a_command_line() -> None:
    words = (
        "--steps 1e3 --optim.lr 1e-3 --optim.betas 0.9 0.99 --patience inf --dataloader.num_workers 2 --tensorboard true "
        "--deterministic --log false --data.path /x --checkpoint.verify none --precision bfloat16 --seed none --model.width 3 "
        "--dataloader.train.batch_size 4 --dataloader.val.drop_last false --accum-steps 4 --checkpoint {} "
        "--data.flag --data.sizes [1,2] --train_splits a b --checkpoint.interval=7 --scheduler.interval epoch --min_delta -0 "
        "--checkpoint.exclude_from_loading optimizer --fsdp.reshard_after_forward 4 --parallel.axes.shard -1 --max_time 1:00:00"
    )
    config = RunnerConfig().parse(
        [{"{}": '{"keep_latest_k": 2}'}.get(word, word) for word in words.split()]
    )
    assert (config.steps, config.patience, config.tensorboard, config.deterministic) == (
        1000,
        float("inf"),
        True,
        True,
    )
    assert (config.log, config.seed, config.accum_steps, config.train_splits) == (
        False,
        None,
        4,
        ["a", "b"],
    )
    assert config.optim == {"lr": 1e-3, "betas": [0.9, 0.99]}
    assert config.dataloader == {
        "num_workers": 2,
        "train": {"batch_size": 4},
        "val": {"drop_last": False},
    }
    assert (config.data.path, config.model.width, config.data.flag, config.data.sizes) == (
        "/x",
        3,
        True,
        [1, 2],
    )
    assert (config.checkpoint.verify, config.checkpoint.interval, config.precision) == (
        "none",
        7,
        "bf16",
    )
    assert (
        config.checkpoint.exclude_from_loading == ["optimizer"]
        and config.checkpoint.keep_latest_k == 2
    )
    assert (
        config.fsdp.reshard_after_forward,
        config.parallel.axes.shard,
        config.max_time_seconds(),
    ) == (4, -1, 3600)


def test_words_for_the_keys_of_a_class() -> None:
    words = "--width 32 --rate 1 --activation GELU --root /tmp --betas 0.8 0.9 --model.layers 6 --arch.depth 5 --needed 3"
    config = MyConfig().parse(words.split())
    assert (config.width, config.rate, config.activation, config.root) == (
        32,
        1.0,
        "gelu",
        Path("/tmp"),
    )
    assert (config.betas, config.model.layers, config.arch.depth, config.needed) == (
        (0.8, 0.9),
        6,
        5,
        3,
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["3,4"], [3, 4]),
        (["3", "4.5"], [3, 4.5]),
        (["[3, 4]"], [3, 4]),
        (["1e-3,"], [0.001]),
        (["none"], None),
        (["a,b"], TypeError),
    ],
)
@pytest.mark.parametrize("kind", [list, tuple])
def test_own_list_of_numbers_is_divided_at_commas(
    words: list[str], expected: Any, kind: type
) -> None:
    config = RunnerConfig()
    config.model = {"widths": kind([64, 32]), "names": kind(["a"])}
    if expected is TypeError:
        with pytest.raises(TypeError, match="--model.widths to be"):
            config.parse(["--model.widths", *words])
        return
    config.parse(["--model.widths", *words, "--model.names", "a,b"])
    assert config.model.widths == (expected if expected is None else kind(expected))
    assert config.model.names == kind(["a,b"])


def test_lists_groups_of_digits_and_quotation_marks() -> None:
    for words in (["[0.9, 0.99]"], ["[0.9,", "0.99]"], ["0.9", "0.99"], ["(0.9, 0.99)"]):
        assert RunnerConfig().parse(["--optim.betas", *words]).optim.betas == [0.9, 0.99]
    config = RunnerConfig({"data": {"size": 1}}).parse(
        ["--steps", "100_000", "--data.size", "1_0", "--name", '"a"']
    )
    assert (config.steps, config.data.size, config.name) == (100_000, 10, '"a"')


FORMS: dict[str, Any] = yaml.safe_load("""
{"3": 3, "-3": -3, "1e-3": 0.001, "-.5": -0.5, "inf": .inf, "none": null, "True": true, "'3'": "3", "007": "007", "1_0": "1_0",
"1.2.3": "1.2.3", "a=b": "a=b", "a 1": [a, 1], '{"a": 1e-3}': {a: 0.001}, "": true}
""")


@pytest.mark.parametrize(("text", "value"), FORMS.items())
def test_undeclared_keys_by_their_form(text: str, value: Any) -> None:
    got = RunnerConfig().parse(["--own.mine", *text.split()]).own.mine
    assert got == value
    assert not isinstance(value, (int, float, str)) or type(got) is type(value)


def test_undeclared_keys_by_their_value() -> None:
    config = RunnerConfig({"a.word": "x", "a.flag": False, "a.number": 3, "a.list": [1]})
    config.parse(["--a.word", "5", "--a.flag", "yes", "--a.number", "0.5", "--a.list", "7"])
    assert dict(config.a) == {"word": "5", "flag": True, "number": 0.5, "list": [7]}
    with pytest.raises(TypeError, match="Expected --a.number to be a number"):
        config.parse(["--a.number", "many"])
    with pytest.raises(TypeError, match="Expected --a.flag to be true or false"):
        config.parse(["--a.flag", "perhaps"])


MISTAKES = {
    "--steps many": (TypeError, "Expected --steps to be an integer or none. Received: many"),
    "--tensorboard perhaps": (
        TypeError,
        "Expected --tensorboard to be true or false. Received: perhaps",
    ),
    "--optim.lr fast": (TypeError, "Expected --optim.lr to be a number. Received: fast"),
    "--dataloader.train.batch_size big": (
        TypeError,
        "Expected --dataloader.train.batch_size to be an integer",
    ),
    "--seed 1 -steps 5": (ValueError, "Did you mean '--steps'"),
    "--no-optim.fused": (ValueError, r"Received: --no-optim.fused. Write --optim.fused false."),
    "--no_tensorboard": (ValueError, "Write --tensorboard false."),
    "--accum-stps 3": (ValueError, "Did you mean 'accum_steps'"),
}


@pytest.mark.parametrize("words", MISTAKES)
def test_mistakes_on_the_command_line(words: str) -> None:
    kind, message = MISTAKES[words]
    with pytest.raises(kind, match=message):
        RunnerConfig().parse(words.split())


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for words in ("--help", "--help checkpoint", "--width 3 -h optim checkpoint", "--help all"):
        with pytest.raises(SystemExit) as left:
            MyConfig().parse(words.split())
        assert left.value.code == 0
        shown.append(capsys.readouterr().out)
    short, section, two, text = shown
    assert "--width " in short and "--model.layers " in short and "--epochs " in short
    assert "\n  checkpoint: Checkpoint policy.\n" in short and "--checkpoint.interval " not in short
    assert len(short.splitlines()) < 160
    assert (
        "--checkpoint.interval " in section
        and "--width " not in section
        and "--optim.lr  (" not in section
    )
    assert "--checkpoint.interval " in two and "--optim.lr  (" in two
    assert all(f"--{key} " in text for key in DEFAULTS)
    for line in (
        "--width  (an integer; default: 64)",
        "Width of the model.",
        "--model.layers  (default: 4)",
        "--optim.lr  (a number; not set)",
        "--optim.type  (a string; default: adamw)",
        "--arch.depth",
        "--epochs  (an integer or none; default: 7)",
    ):
        assert line in text
    with pytest.raises(ValueError, match="'checkpoit'. Did you mean 'checkpoint'"):
        MyConfig().parse(["--help", "checkpoit"])


def test_after_parse_absent_names_are_errors_and_references_are_filled_in() -> None:
    config = RunnerConfig(
        {"net.width": 8, "net.name": "w${net.width}", "optim.lr": "${net.width}"}
    ).parse([])
    assert (config.net.name, config.optim.lr) == ("w8", 8.0)
    with pytest.raises(AttributeError):
        config.model  # noqa: B018
    config["model.width"] = 3
    assert pickle.loads(pickle.dumps(config)) == config.clone() == config
    with pytest.raises(ValueError, match="a key that exists"):
        RunnerConfig({"a.b": "${nothing}"}).parse([])
    with pytest.raises(ValueError, match="no circle"):
        RunnerConfig({"a.b": "${a.c}", "a.c": "${a.b}"}).parse([])


# Files


def test_files_come_before_single_keys(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(
        "steps: 5\noptim: {lr: 1e-3, type: sgd}\nscheduler:\n  total: ${steps}\n"
    )
    (tmp_path / "b.json").write_text('{"optim": {"lr": 0.5}}')
    files = [str(tmp_path / "a.yaml"), str(tmp_path / "b.json")]
    config = RunnerConfig(seed=4).parse(["--steps", "9", "--config", *files])
    assert (config.steps, config.optim.lr, config.optim.type, config.scheduler.total) == (
        9,
        0.5,
        "sgd",
        9,
    )
    assert config.seed == 4  # what a file does not name stays


@pytest.mark.parametrize(
    ("name", "text", "error", "message"),
    [
        ("list.yaml", "- 1\n", ValueError, "a mapping of keys"),
        ("bad.json", "{", ValueError, "Expected JSON"),
        ("bad.txt", "", ValueError, r"ends in \.yaml"),
        ("gone.yaml", None, FileNotFoundError, "does not exist"),
        (
            "slip.yaml",
            "checkpoint: {intervall: 9}\n",
            ValueError,
            r"Did you mean 'interval'\? It is in .*slip.yaml",
        ),
        (
            "many.yaml",
            "steps: many\n",
            TypeError,
            r"Received: steps='many' \(str\)\. It is in .*many.yaml",
        ),
    ],
)
def test_bad_files(
    name: str, text: str | None, error: type[Exception], message: str, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(error, match=message):
        RunnerConfig.from_file(tmp_path / name)
    with pytest.raises(error, match=message):
        RunnerConfig().parse(["--setup", str(tmp_path / name)], default_config="setup")


def test_yaml_reads_numbers_as_people_write_them(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        "optim: {lr: 1e-3, eps: 1E8, decay: -5e-4, name: e5}\npatience: inf\nsteps: none\nmodel: {nan: info}\n"
        "checkpoint: {verify: none, interval: 3}\n"
    )
    config = RunnerConfig.load(path)
    assert config.optim == {"lr": 1e-3, "eps": 1e8, "decay": -5e-4, "name": "e5"}
    assert (config.patience, config.steps, config.model["nan"]) == (float("inf"), None, "info")
    assert (config.checkpoint.verify, config.checkpoint.interval) == ("none", 3)
    assert type(config.model) is Section and config.checkpoint.dir_name == "checkpoints"
    assert RunnerConfig(path) == RunnerConfig.from_file(str(path)) == config


class NetConfig(Section):
    width: int = 4


class UnsetConfig(RunnerConfig):
    net: NetConfig = None  # type: ignore[assignment]


def test_section_declared_as_none_has_its_defaults() -> None:
    assert (UnsetConfig().net.width, UnsetConfig(net={"width": 5}).net.width) == (4, 5)


class WidthConfig(RunnerConfig):
    def __init__(self, width: int = 5, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.width = width


def test_a_class_with_arguments_of_its_own_is_read_from_files(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("{epochs: 3, width: 9}")
    read = [
        WidthConfig.from_file(path),
        WidthConfig.load(path),
        WidthConfig.from_dict({"epochs": 3, "width": 9}),
    ]
    with path.open() as stream:
        read.append(WidthConfig.load(stream, method="yaml"))
    assert [(config.epochs, config.width) for config in read] == [(3, 9)] * 4


@pytest.mark.parametrize("suffix", ["yaml", "yml", "json"])
def test_round_trip_in_standard_files(tmp_path: Path, suffix: str) -> None:
    config = MyConfig(
        {"dataloader.train.batch_size": 3, "compile.options": {"a.b": 1}}, seed=3, rate=1e-9
    )
    path = tmp_path / f"c.{suffix}"
    config.save(path)
    again = MyConfig.load(path)
    assert type(again) is MyConfig and again == config and again.config_id() == config.config_id()
    assert again.patience == float("inf")
    if suffix == "json":
        assert json.loads(path.read_text(), parse_constant=pytest.fail)["model"]["layers"] == 4
    else:
        assert yaml.safe_load(path.read_text()) == config.plain()


# Copies and plain values


@pytest.mark.parametrize(
    "duplicate",
    [
        copy.copy,
        copy.deepcopy,
        lambda config: config.copy(),
        lambda config: config.clone(),
        lambda config: config.deepcopy(),
        lambda config: pickle.loads(pickle.dumps(config)),
        MyConfig,
    ],
)
def test_copies_share_nothing(duplicate: Any) -> None:
    config = MyConfig(
        {
            "optim.param_groups": [{"pattern": "a"}],
            "compile.options": {"a": 1},
            "mine": [{"a": [1]}],
        }
    )
    config.model.layers = 7
    twin = duplicate(config)
    assert type(twin) is MyConfig and twin == config
    twin.checkpoint.interval = twin.model.layers = twin.arch.depth = 99
    twin.optim.param_groups[0].pattern = "b"
    twin.compile.options["a"] = 2
    twin.mine[0].a.append(2)
    assert (config.checkpoint.interval, config.model.layers, config.arch.depth) == (2, 7, 2)
    assert config.optim.param_groups[0].pattern == "a" and config.compile.options == {"a": 1}
    assert config.mine == [{"a": [1]}]


def test_plain() -> None:
    class Kind:
        pass

    given = {"sizes": [1]}
    RunnerConfig(model=given).model.sizes.append(2)
    assert given == {"sizes": [1]}
    settings = {"model.kind": Kind, "model.root": Path("x"), "model.of": {2, 1}, "model.f": (1, 2)}
    config = RunnerConfig(settings)
    kind = f"{__name__}.{Kind.__qualname__}"
    assert config.plain()["model"] == {"kind": kind, "root": "x", "of": [1, 2], "f": [1, 2]}
    assert type(config.plain()["checkpoint"]) is dict and config.dict() == config.plain()
    assert config.dict(flatten=True)["model.root"] == "x"
    with pytest.raises(TypeError, match=r"Expected model\.thing to be a plain value"):
        RunnerConfig({"model.thing": Kind()}).plain()


# Identity

NOT_SEMANTIC: dict[str, Any] = yaml.safe_load("""
{stack: parallel, steps: 4, max_time: 60, patience: 3, name: n, lineage: l, experiment: e, workspace_root: w, dir: d, checkpoint_dir: c,
log_file: f, resume: r, auto_resume: true, backend: gloo, init_method: i, log: false, log_interval: 3, tensorboard: true,
evaluate_interval: 4, wandb.enabled: true, mlflow.enabled: true, trackio.enabled: true, checkpoint.interval: 3,
checkpoint.backend: dcp, checkpoint.wait_timeout: 3, comm.train_timeout_seconds: 3, gc.interval: 3, profiling.enabled: true,
heartbeat.enabled: true, parallel.axes.shard: 2, fsdp.enabled: true, compile.enable: true, ft.enabled: true,
deepspeed.zero_optimization.stage: 2, dataloader.num_workers: 2, dataloader.pin_memory: true, dataloader.prefetch_factor: 4,
dataloader.persistent_workers: true, dataloader.val.num_workers: 4, dataloader.timeout: 4,
accelerate: {use_cpu: true, mixed_precision: bf16}}
""")
SEMANTIC: dict[str, Any] = yaml.safe_load("""
{seed: 1, deterministic: true, accum_steps: 2, precision: bf16, max_grad_norm: 1.0, score_name: accuracy, optim.lr: 0.1,
scheduler.type: cosine, ema.enabled: true, dataloader.batch_size: 4, dataloader.train.shuffle: false, model.width: 3, data.path: x,
pretrained: p, accelerate.mixed_precision: fp8}
""")


@pytest.mark.parametrize("key", [*NOT_SEMANTIC, *SEMANTIC])
def test_only_settings_of_the_result_change_the_id(key: str) -> None:
    usual, config = RunnerConfig(), RunnerConfig({key: {**NOT_SEMANTIC, **SEMANTIC}[key]})
    assert (
        (config.config_id() != usual.config_id())
        == (hash(config) != hash(usual))
        == (key in SEMANTIC)
    )
    if key in NOT_SEMANTIC:
        assert config.differences(usual.plain()) == []


def test_copy_of_a_config_set_apart_has_its_id() -> None:
    config = RunnerConfig({"epochs": 1})
    usual = config.config_id()
    config.set_apart("produce")
    copies = [
        copy.copy(config),
        copy.deepcopy(config),
        pickle.loads(pickle.dumps(config)),
        config | {"epochs": 2},
    ]
    assert {twin.config_id() for twin in copies} == {config.config_id()} != {usual}


def test_equal_configurations_have_equal_hashes() -> None:
    one = RunnerConfig({"optim.lr": 1, "model": {"a": 1, "b": (1, 2)}})
    two = RunnerConfig({"model": {"b": (1, 2), "a": 1.0}, "optim.lr": 1.0})
    assert one == two and hash(one) == hash(two) and one.config_id() == two.config_id()
    assert len(one.config_id()) == 16 and int(one.config_id(), 16)
    assert list(one.canonical()) == sorted(one.canonical())


def test_the_id_is_the_same_in_every_process(capsys: pytest.CaptureFixture[str]) -> None:
    script = (
        "from danling.config import RunnerConfig as C\n"
        "c = C({'optim': {'lr': 1e-3, 'betas': (0.9, 0.99)}, 'tags': {'b', 'a', 'c'}, 'model.width': 3}, epochs=3)\n"
        "print(c.config_id(), hash(c))"
    )
    # Strings hash otherwise there than here.
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    environment = {
        **os.environ,
        "PYTHONHASHSEED": seed,
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    there = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    exec(script, {})
    assert there.stdout == capsys.readouterr().out


def test_completed_stored_configuration_leaves_the_defaults_alone() -> None:
    whole = RunnerConfig.completed(
        {"optim": {"lr": 5.0}, "checkpoint": {"interval": 7}, "mine": [1]}
    )
    assert (whole["checkpoint"]["interval"], whole["checkpoint"]["dir_name"], whole["mine"]) == (
        7,
        "checkpoints",
        [1],
    )
    whole["checkpoint"]["keep_latest_k"] = 99
    assert RunnerConfig.completed({}) == RunnerConfig().plain() != whole
    assert RunnerConfig().changed() == {} and RunnerConfig(**{"optim.lr": 5.0}).changed() == {
        "optim": {"lr": 5.0}
    }


SIZED = {"dataloader.batch_size": 8, "accum_steps": 1}
NAMED = {"train_splits": ["text"], "dataloader.batch_size": 32, "dataloader.text.batch_size": 12}
DIFFERENCES: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "keys": (
        {"optim.lr": 0.1, "model.width": 3},
        {"optim.lr": 0.2, "data.path": "x"},
        [
            "data.path: stored absent, now 'x'",
            "model.width: stored 3, now absent",
            "optim.lr: stored 0.1, now 0.2",
        ],
    ),
    "budget": ({"steps": 5}, {"steps": 9}, []),
    "mode": ({"steps": 5}, {"epochs": 2}, ["mode: stored steps (steps=5), now epochs (epochs=2)"]),
    "no mode": ({"epochs": 5}, {}, []),
    "drawn seed": ({"seed": 5}, {}, []),
    "seed": ({"seed": 5}, {"seed": 6}, ["seed: stored 5, now 6"]),
    "traded": (SIZED, {"dataloader.batch_size": 4, "accum_steps": 2}, []),
    "halved": (
        SIZED,
        {"dataloader.batch_size": 4},
        [
            "dataloader.batch_size: stored 8 samples an update (batch_size=8 x accum_steps=1 x 1 rank), "
            "now 4 samples an update (batch_size=4 x accum_steps=1 x 1 rank)"
        ],
    ),
    "a split that is not trained on": (NAMED, {**NAMED, "dataloader.batch_size": 64}, []),
    "accumulation of own loaders": (
        {"accum_steps": 2},
        {"accum_steps": 3},
        ["accum_steps: stored 2, now 3"],
    ),
    "pretrained": ({"pretrained": "x"}, {}, []),
}


@pytest.mark.parametrize("case", DIFFERENCES)
def test_differences(case: str) -> None:
    before, now, lines = DIFFERENCES[case]
    stored = RunnerConfig(before).plain()
    kept = copy.deepcopy(stored)
    assert RunnerConfig(now).differences(stored) == lines
    assert stored == kept
    del stored["score_name"], stored["ema"]["decay"]  # what was not stored has its default
    assert RunnerConfig(now).differences(stored) == lines


@pytest.mark.parametrize(
    ("key", "other"), [("ema.buffers", "average"), ("pretrained_averages", False)]
)
def test_later_key_changes_the_id_only_with_a_value_other_than_its_default(
    key: str, other: object
) -> None:
    section, _, name = key.rpartition(".")
    stored = RunnerConfig().plain()
    del (stored[section] if section else stored)[name]
    assert (
        digest(canonical(stored))
        == RunnerConfig().config_id()
        != RunnerConfig({key: other}).config_id()
    )
    assert RunnerConfig().differences(stored) == []
    assert len(RunnerConfig({key: other}).differences(stored)) == (key not in RESUMABLE)


def test_the_same_settings_on_other_ranks_are_other_updates() -> None:
    config = RunnerConfig({"dataloader.batch_size": 4, "accum_steps": 3})
    assert config.differences(config.plain(), stored_replicas=2, replicas=2) == []
    assert config.differences(config.plain(), stored_replicas=2, replicas=1) == [
        "dataloader.batch_size: stored 24 samples an update (batch_size=4 x accum_steps=3 x 2 ranks), "
        "now 12 samples an update (batch_size=4 x accum_steps=3 x 1 rank)"
    ]
    own = RunnerConfig(accum_steps=2)  # of a loader of one's own nothing is known
    assert own.config_id(replicas=2) == own.config_id()
    assert own.differences(own.plain(), stored_replicas=2, replicas=1) == []


def test_update_is_the_same_in_every_notation() -> None:
    whole = {"dataloader.global_batch_size": 24}
    ways: list[tuple[dict[str, Any], int]] = [
        (whole, 1),
        (whole, 5),
        ({**whole, "accum_steps": 2}, 3),
        ({**whole, "dataloader.micro_batch_size": "auto"}, 2),
        ({**whole, "dataloader.micro_batch_size": 3, "dataloader.val.batch_size": 7}, 4),
        ({"dataloader.batch_size": 24}, 1),
        ({"dataloader.batch_size": 4, "accum_steps": 3}, 2),
        ({"dataloader.train.batch_size": 4, "accum_steps": 6}, 1),
        ({"dataloader.batch_size": 32, "dataloader.train.global_batch_size": 24}, 2),
    ]
    stored = RunnerConfig(whole).plain()
    ids = {RunnerConfig(settings).config_id(replicas=replicas) for settings, replicas in ways}
    assert len(ids) == 1
    for settings, replicas in ways:
        assert (
            RunnerConfig(settings).differences(stored, stored_replicas=2, replicas=replicas) == []
        )
    other = RunnerConfig({"dataloader.global_batch_size": 25})
    assert other.config_id() not in ids
    assert other.differences(stored) == [
        "dataloader.global_batch_size: stored 24 samples an update (global_batch_size=24), "
        "now 25 samples an update (global_batch_size=25)"
    ]


# Runs that continue from a stored configuration

STORED = {
    "steps": 10,
    "lineage": "stored",
    "width": 8,
    "wandb": {"api_key": "theirs"},
    "mine": {"depth": 2},
}


class Own(RunnerConfig):
    width: int = 4


def test_given_values_go_over_stored_ones() -> None:
    config = continued(STORED, {"steps": 20}, Own)
    assert isinstance(config, Own)
    assert (config.steps, config.lineage, config.width, config.mine.depth) == (20, "stored", 8, 2)
    given = Own({"lineage": "given"})
    config = continued(STORED, given, RunnerConfig)
    # A configuration gives its class, whose defaults count among what it changes.
    assert isinstance(config, Own) and (config.steps, config.lineage, config.width) == (
        10,
        "given",
        4,
    )
    assert given.steps is None
    assert "theirs" not in str(
        continued({**STORED, "token": "theirs"}, {"other": 4}, RunnerConfig).plain()
    )


# Settings without effect


_GROUP = "checkpoint.dedicated_async_process_group"
# Settings of a backend go by the backend and not by the stack.
IDLE: dict[str, list[dict[str, Any]]] = {
    "ddp": [
        {"parallel.axes.shard": 2},
        {"fsdp.enabled": True},
        {"accelerate.use_cpu": True},
        {_GROUP: False},
    ],
    "accelerate": [{"fsdp.enabled": True}],
    "parallel": [
        {"deepspeed.zero_optimization.stage": 2},
        {"compile.memory_policy": "recompute"},
        {_GROUP: False, "checkpoint.backend": "file"},
    ],
    "deepspeed": [{"checkpoint.backend": "dcp"}, {_GROUP: False}],
}
READ: dict[str, list[dict[str, Any]]] = {
    "ddp": [{_GROUP: False, "checkpoint.backend": "dcp"}],
    "parallel": [{"parallel.axes.shard": 2}, {_GROUP: False}],
    "base": [{"optim.lr": 1}],
}


@pytest.mark.parametrize(
    ("settings", "stack", "idle"),
    [
        (each, stack, table is IDLE)
        for table in (IDLE, READ)
        for stack, rows in table.items()
        for each in rows
    ],
)
def test_settings_without_effect_on_a_stack_are_named(
    settings: dict[str, Any], stack: str, idle: bool
) -> None:
    key = next(iter(settings))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert RunnerConfig(settings).warn_of_idle_settings(stack) == ([key] if idle else [])
    assert [f"no effect on the stack '{stack}': {key}" in str(one.message) for one in said] == [
        True
    ] * idle


def test_one_module_imports_chanfig_and_none_torch_when_it_is_imported() -> None:
    package = Path(danling.__file__).parent
    sources = {str(path.relative_to(package)): path.read_text() for path in package.rglob("*.py")}
    chanfig_from = [
        name
        for name, text in sources.items()
        if re.search(r"^\s*(from|import) chanfig", text, re.M)
    ]
    assert chanfig_from == ["config/sections.py"]
    own = [text for name, text in sources.items() if name.startswith("config/")]
    assert not any(re.search(r"^\s*(import|from) torch\b", text, re.M) for text in own)
