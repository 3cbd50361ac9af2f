"""The configuration: keys, sections, command line, files, copies and identity."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import pickle
import re
import subprocess
import sys
import warnings
from argparse import Namespace
from pathlib import Path
from typing import Any, Literal

import chanfig
import pytest
import yaml
from support.warm import interpreter

from danling.config import RunnerConfig
from danling.config.checks import idle_mesh_settings
from danling.config.fields import fields_of, help_texts
from danling.config.node import ClosedSection, Section

CONTRACT_DEFAULTS: dict[str, Any] = {
    "stack": "auto",
    "seed": None,
    "deterministic": False,
    "steps": None,
    "epochs": None,
    "accum_steps": 1,
    "precision": None,
    "max_grad_norm": None,
    "max_grad_value": None,
    "skip_nonfinite_grad": False,
    "patience": float("inf"),
    "min_delta": 0.0,
    "max_skipped_updates": 100,
    "max_time": None,
    "score_split": None,
    "score_name": "loss",
    "score_mode": None,
    "evaluate_interval": None,
    "train_splits": None,
    "evaluate_splits": None,
    "name": None,
    "lineage": "lin",
    "experiment": "exp",
    "workspace_root": "experiments",
    "dir": None,
    "checkpoint_dir": None,
    "log_file": None,
    "resume": None,
    "auto_resume": False,
    "pretrained": None,
    "backend": None,
    "init_method": None,
    "secret_keys": None,
    "git_diff": True,
    "log": True,
    "log_interval": None,
    "tensorboard": False,
    "wandb.enabled": False,
    "wandb.project": None,
    "wandb.entity": None,
    "wandb.group": None,
    "wandb.name": None,
    "wandb.job_type": None,
    "wandb.tags": None,
    "wandb.dir": None,
    "wandb.mode": None,
    "mlflow.enabled": False,
    "mlflow.uri": None,
    "mlflow.experiment": None,
    "mlflow.name": None,
    "trackio.enabled": False,
    "trackio.project": None,
    "trackio.group": None,
    "trackio.space_id": None,
    "trackio.server_url": None,
    "ema.enabled": False,
    "checkpoint.dir_name": "checkpoints",
    "checkpoint.backend": "auto",
    "checkpoint.interval": None,
    "checkpoint.before_evaluation": True,
    "checkpoint.trainable_only": False,
    "checkpoint.keep_latest_k": 0,
    "checkpoint.load_only": False,
    "checkpoint.verify": "full",
    "checkpoint.async_enabled": True,
    "checkpoint.async_mode": None,
    "checkpoint.dedicated_async_process_group": True,
    "checkpoint.async_process_group_backend": "gloo",
    "checkpoint.wait_timeout": None,
    "checkpoint.exclude_from_loading": None,
    "checkpoint.last_save_model_only": False,
    "checkpoint.export_dtype": None,
    "checkpoint.remote.url": None,
    "checkpoint.remote.required": False,
    "checkpoint.remote.keep_latest_k": 0,
    "checkpoint.remote.interval": 1,
    "checkpoint.remote.part_size": 16 << 20,
    "checkpoint.remote.timeout_seconds": 120.0,
    "checkpoint.remote.retries": 5,
    "checkpoint.enable_ft_dataloader_checkpoints": False,
    "checkpoint.ft_replica_id": None,
    "checkpoint.ft_dataloader_checkpoint_prefix": "ft-replica",
    **{
        f"parallel.axes.{axis}": 1
        for axis in ("replicate", "shard", "context", "pipeline", "tensor", "expert", "expert_tensor")
    },
    "parallel.pipeline_schedule": "1F1B",
    "parallel.pipeline_microbatch_size": 1,
    "parallel.pipeline_n_microbatches": None,
    "parallel.module_fqns_per_model_part": None,
    "parallel.mesh_device_type": None,
    "parallel.allow_degree_change": False,
    "fsdp.enabled": False,
    "fsdp.reshard_after_forward": None,
    "fsdp.mp_policy": None,
    "fsdp.offload_policy": None,
    "compile.enable": False,
    "compile.backend": None,
    "compile.fullgraph": None,
    "compile.dynamic": None,
    "compile.mode": None,
    "compile.options": None,
    "compile.optimize_ddp": "ddp_optimizer",
    "compile.precompile_artifact_dir": None,
    "compile.memory_policy": None,
    "comm.init_timeout_seconds": None,
    "comm.train_timeout_seconds": None,
    "gc.interval": None,
    "gc.generation": 1,
    "gc.disable_automatic": True,
    "profiling.enabled": False,
    "profiling.wait": 1,
    "profiling.warmup": 1,
    "profiling.active": 3,
    "profiling.repeat": None,
    "profiling.record_shapes": False,
    "profiling.profile_memory": False,
    "profiling.with_stack": False,
    "profiling.with_flops": False,
    "profiling.trace_dir": "profiles",
    "heartbeat.enabled": False,
    "heartbeat.interval_seconds": 60.0,
    "heartbeat.dir_name": "heartbeats",
    "ft.enabled": False,
    "ft.process_group": "gloo",
    "ft.process_group_timeout_ms": 10000,
    "ft.replica_id": 0,
    "ft.group_size": 1,
    "ft.min_replica_size": 1,
}


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


class TestDefaults:
    def test_every_key_of_the_contract(self) -> None:
        config = RunnerConfig()
        assert {key: config[key] for key in CONTRACT_DEFAULTS} == CONTRACT_DEFAULTS

    def test_every_library_key_has_help(self) -> None:
        def check(cls: type) -> None:
            for field in fields_of(cls).values():
                if field.section:
                    check(field.section)
                else:
                    assert help_texts(cls)[field.name], (cls, field.name)

        check(RunnerConfig)

    def test_is_chanfig(self) -> None:
        config = RunnerConfig()
        assert isinstance(config, chanfig.Config)
        assert isinstance(config.checkpoint, chanfig.Config)

    def test_defaults_are_not_shared(self) -> None:
        one, two = RunnerConfig(), RunnerConfig()
        one.checkpoint.interval = 3
        one.optim.lr = 1
        assert two.checkpoint.interval is None
        assert "lr" not in two.optim

    def test_reading_is_a_plain_attribute(self) -> None:
        config = RunnerConfig(steps=3)
        assert config.__dict__["steps"] == 3
        assert config.__dict__["checkpoint"] is config["checkpoint"]
        assert "__getattribute__" not in vars(RunnerConfig)


class TestSetting:
    def test_all_spellings(self) -> None:
        by_dots = RunnerConfig({"checkpoint.interval": 5})
        by_section = RunnerConfig(checkpoint={"interval": 5})
        by_attribute = RunnerConfig()
        by_attribute.checkpoint.interval = 5
        by_item = RunnerConfig()
        by_item["checkpoint.interval"] = 5
        for config in (by_dots, by_section, by_attribute, by_item):
            assert config == by_dots
            assert config.checkpoint.interval == config["checkpoint.interval"] == config.get("checkpoint.interval") == 5
            assert config.checkpoint.dir_name == "checkpoints"
            assert isinstance(config.checkpoint, ClosedSection)

    def test_user_sections_are_open(self) -> None:
        config = RunnerConfig({"data.path": "a.txt", "model": {"heads": {"count": 4}}})
        config.model.width = 64
        config.text.tokenizer.name = "bpe"
        config["dataset.root"] = "x"
        assert config.data.path == "a.txt"
        assert config.model == {"heads": {"count": 4}, "width": 64}
        assert config["text.tokenizer.name"] == "bpe"
        assert config.get("model.heads.count") == 4
        assert "model.heads.count" in config
        assert "model.heads.size" not in config

    @pytest.mark.parametrize(
        "key",
        ["model", "data", "text", "num_blocks", "network", "dataset", "dim", "fc", "fft", "device", "tags", "x"],
    )
    def test_own_names_are_fine(self, key: str) -> None:
        assert RunnerConfig({key: 1})[key] == 1
        assert RunnerConfig({f"{key}.path": 1})[f"{key}.path"] == 1

    @pytest.mark.parametrize(
        ("key", "meant"),
        [
            ("step", "steps"),
            ("epoch", "epochs"),
            ("accum_step", "accum_steps"),
            ("presicion", "precision"),
            ("sed", "seed"),
            ("Steps", "steps"),
            ("auto-resume", "auto_resume"),
            ("logs", "log"),
            ("checkpoints", "checkpoint"),
            ("optm", "optim"),
        ],
    )
    def test_a_slip_is_an_error(self, key: str, meant: str) -> None:
        with pytest.raises(ValueError, match=f"Did you mean '{meant}'"):
            RunnerConfig({key: 1})
        with pytest.raises(ValueError, match=f"Did you mean '{meant}'"):
            RunnerConfig()[f"{key}.nested"] = 1
        with pytest.raises(AttributeError, match=f"Did you mean '{meant}'"):
            getattr(RunnerConfig(), key)
        with pytest.raises(ValueError, match=f"Did you mean '{meant}'"):
            RunnerConfig().parse([f"--{key}=1"]) if "-" not in key else RunnerConfig({key: 1})

    def test_deepspeed_from_a_file_of_its_own(self, tmp_path: Path) -> None:
        file = tmp_path / "zero.json"
        file.write_text('{"zero_optimization": {"stage": 2}, "gradient_clipping": "auto"}')
        config = RunnerConfig({"deepspeed": str(file)})
        assert config.deepspeed.plain() == {"zero_optimization": {"stage": 2}, "gradient_clipping": "auto"}
        assert RunnerConfig().parse(["--deepspeed", str(file)]).deepspeed.zero_optimization.stage == 2

    def test_accelerate_from_a_file_that_its_command_writes(self, tmp_path: Path) -> None:
        file = tmp_path / "accelerate.yaml"
        file.write_text("mixed_precision: bf16\nnum_processes: 2\n")
        assert RunnerConfig({"accelerate": str(file)}).accelerate.plain() == {
            "mixed_precision": "bf16",
            "num_processes": 2,
        }
        assert RunnerConfig().parse(["--accelerate", str(file)]).accelerate.num_processes == 2

    def test_of_accelerate_only_fp8_makes_another_run(self) -> None:
        plain = RunnerConfig(seed=1)
        for section, same in (
            ({"use_cpu": True, "mixed_precision": "bf16"}, True),
            ({"mixed_precision": "fp8"}, False),
        ):
            assert (RunnerConfig(seed=1, accelerate=section).canonical() == plain.canonical()) is same

    @pytest.mark.parametrize(
        ("key", "meant"),
        [
            ("checkpoint.intervall", "interval"),
            ("parallel.axes.shards", "shard"),
            ("parallel.axis", "axes"),
            ("ema.decy", "decay"),
            ("wandb.projct", "project"),
            ("gc.intervl.x", "interval"),
        ],
    )
    def test_closed_sections_name_the_nearest(self, key: str, meant: str) -> None:
        with pytest.raises(ValueError, match=f"Did you mean '{meant}'"):
            RunnerConfig({key: 1})
        with pytest.raises(ValueError, match=f"Did you mean '{meant}'"):
            RunnerConfig().parse([f"--{key}", "1"])

    def test_closed_sections_create_nothing_on_read(self) -> None:
        config = RunnerConfig()
        before = config.plain()
        assert not hasattr(config.checkpoint, "intervall")
        with pytest.raises(AttributeError, match="Did you mean 'interval'"):
            config.checkpoint.intervall  # noqa: B018
        with pytest.raises(KeyError):
            config["checkpoint.intervall"]
        assert config.plain() == before

    def test_reading_with_a_default_creates_nothing(self) -> None:
        config = RunnerConfig()
        assert config.get("foo") is None
        assert config.get("foo.bar", 3) == 3
        assert config.get("model", 1) == 1
        assert "foo" not in config
        assert "model" not in config

    def test_reading_a_user_section_changes_no_identity(self) -> None:
        config = RunnerConfig()
        before = config.config_id(), hash(config)
        config.model.head  # noqa: B018
        hasattr(config, "whatever")
        assert (config.config_id(), hash(config)) == before

    def test_documented_names_of_open_sections_read_as_none(self) -> None:
        config = RunnerConfig()
        assert config.optim.lr is None
        assert config.scheduler.interval is None
        assert not config.optim
        assert not config.scheduler
        assert not config.dataloader

    def test_splits(self) -> None:
        config = RunnerConfig({"dataloader.batch_size": 8})
        config.dataloader.val.batch_size = 16
        config["dataloader.train.shuffle"] = False
        assert config.dataloader == {"batch_size": 8, "val": {"batch_size": 16}, "train": {"shuffle": False}}

    def test_sections_must_be_mappings(self) -> None:
        with pytest.raises(TypeError, match="'checkpoint' to be a section"):
            RunnerConfig(checkpoint=5)
        with pytest.raises(ValueError, match="'model' to be a section"):
            RunnerConfig({"model": 3, "model.width": 4})

    def test_a_key_named_like_a_method_warns(self) -> None:
        config = RunnerConfig()
        with pytest.warns(UserWarning, match="name of a method"):
            config.model.items = 3
        assert config.model["items"] == 3
        assert dict(config.model) == {"items": 3}

    def test_lists_of_mappings(self) -> None:
        config = RunnerConfig({"optim.param_groups": [{"pattern": "bias", "weight_decay_multiplier": 0.0}]})
        assert config.optim.param_groups[0].pattern == "bias"
        assert config.plain()["optim"] == {"param_groups": [{"pattern": "bias", "weight_decay_multiplier": 0.0}]}

    def test_compile_options_keep_their_dots(self) -> None:
        config = RunnerConfig(compile={"options": {"triton.cudagraphs": True}})
        config["compile.options.max_autotune"] = True
        config.merge({"compile": {"options": {"trace.enabled": False}}})
        assert type(config.compile.options) is dict
        assert config.compile.options == {"trace.enabled": False}
        other = RunnerConfig({"compile.options.triton.cudagraphs": True})
        assert other.compile.options == {"triton.cudagraphs": True}

    def test_frozen(self) -> None:
        config = RunnerConfig({"model.width": 3})
        config.freeze()
        for change in ("steps", "checkpoint.interval", "model.width", "new.key"):
            with pytest.raises(ValueError, match="frozen"):
                config[change] = 1
        with pytest.raises(AttributeError):
            config.nothing  # noqa: B018
        assert copy.deepcopy(config).getattr("frozen")
        clone = config.clone()
        clone.seed = 4
        clone.model.width = 5
        assert config.seed is None
        assert config.model.width == 3
        assert pickle.loads(pickle.dumps(config)) == config

    def test_update_setdefault_and_or(self) -> None:
        config = RunnerConfig()
        config.update({"checkpoint.interval": 3}, steps=4)
        config |= {"seed": 1}
        assert config.setdefault("model.width", 8) == 8
        assert config.setdefault("seed", 2) == 1
        assert (config.checkpoint.interval, config.steps, config.seed, config.__dict__["seed"]) == (3, 4, 1, 1)
        with pytest.raises(ValueError, match="Did you mean"):
            config.update({"checkpoint": {"intervall": 3}})


def test_two_mappings_joined_are_a_configuration_of_their_own() -> None:
    config = RunnerConfig(epochs=2, optim={"type": "sgd", "lr": 0.1})
    joined = config | {"optim": {"lr": 0.2}, "checkpoint.interval": 3}
    assert type(joined) is RunnerConfig
    assert (joined.optim.type, joined.optim.lr, joined.checkpoint.interval) == ("sgd", 0.2, 3)
    assert (config.optim.lr, config.checkpoint.interval) == (0.1, None)
    with pytest.raises(ValueError, match="Did you mean 'epochs'"):
        config | {"epoch": 3}


class TestTypes:
    @pytest.mark.parametrize(
        ("key", "value", "kept"),
        [
            ("steps", 1e3, 1000),
            ("steps", "none", None),
            ("patience", 3, 3.0),
            ("patience", "inf", float("inf")),
            ("max_grad_norm", "1e-3", 1e-3),
            ("workspace_root", Path("a/b"), "a/b"),
            ("train_splits", "train", ["train"]),
            ("train_splits", ("a", "b"), ["a", "b"]),
            ("checkpoint.exclude_from_loading", "optimizer", ["optimizer"]),
            ("checkpoint.backend", "DCP", "dcp"),
            ("checkpoint.verify", None, "none"),
            ("precision", "bfloat16", "bf16"),
            ("precision", "none", None),
            ("precision", "torch.float16", "fp16"),
            ("fsdp.reshard_after_forward", 8, 8),
            ("fsdp.reshard_after_forward", True, True),
            ("compile.optimize_ddp", False, False),
            ("parallel.module_fqns_per_model_part", (("a",), ["b", "c"]), [["a"], ["b", "c"]]),
        ],
    )
    def test_converted_without_loss(self, key: str, value: Any, kept: Any) -> None:
        got = RunnerConfig({key: value})[key]
        assert got == kept
        assert type(got) is type(kept)

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("steps", 1.5),
            ("steps", "many"),
            ("steps", True),
            ("steps", float("inf")),
            ("tensorboard", "yes please"),
            ("tensorboard", 1),
            ("accum_steps", None),
            ("lineage", 3),
            ("max_grad_norm", "a lot"),
            ("checkpoint.interval", [1]),
            ("wandb.tags", 3),
            ("compile.options", 4),
        ],
    )
    def test_wrong_types_name_the_key(self, key: str, value: Any) -> None:
        with pytest.raises(TypeError, match=f"Expected {key} to be .* Received: {key}="):
            RunnerConfig({key: value})

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("precision", "fp8"),
            ("score_mode", "best"),
            ("checkpoint.async_mode", "maybe"),
            ("checkpoint.verify", "some"),
            ("checkpoint.backend", "zip"),
            ("ft.process_group", "mpi"),
            ("scheduler.interval", "never"),
            ("steps", -1),
            ("accum_steps", 0),
            ("dataloader.global_batch_size", 0),
            ("dataloader.global_batch_size", 1.5),
            ("dataloader.global_batch_size", True),
            ("dataloader.global_batch_size", "auto"),
            ("dataloader.micro_batch_size", -1),
            ("dataloader.train.micro_batch_size", "fast"),
            ("checkpoint.interval", 0),
            ("checkpoint.keep_latest_k", -1),
            ("max_grad_norm", 0.0),
            ("ema.decay", 1.0),
            ("gc.generation", 3),
            ("parallel.axes.shard", 0),
            ("seed", -3),
            ("heartbeat.interval_seconds", 0),
            ("max_time", "soon"),
            ("max_time", -1),
            ("ft.min_replica_size", 2),
        ],
    )
    def test_values_out_of_bounds(self, key: str, value: Any) -> None:
        with pytest.raises(ValueError, match=rf"Expected .* Received: .*{key.split('.')[-1]}="):
            RunnerConfig({key: value})
        config = RunnerConfig()
        config[key] = value
        with pytest.raises(ValueError, match="Received: "):
            config.validate()

    @pytest.mark.parametrize("place", ["dataloader", "dataloader.train"])
    def test_both_batch_sizes(self, place: str) -> None:
        expected = (
            rf"Expected dataloader.batch_size .* not both\. Received: .*=4.*=16 in {place}\. Set one of them to none"
        )
        with pytest.raises(ValueError, match=expected):
            RunnerConfig({f"{place}.batch_size": 4, f"{place}.global_batch_size": 16})

    def test_steps_and_epochs(self) -> None:
        with pytest.raises(ValueError, match="steps or epochs, not both"):
            RunnerConfig(steps=1, epochs=1)
        RunnerConfig(steps=1)
        RunnerConfig(epochs=1)

    def test_one_axis_may_be_filled(self) -> None:
        RunnerConfig({"parallel.axes.shard": -1})
        with pytest.raises(ValueError, match="at most one"):
            RunnerConfig({"parallel.axes.shard": -1, "parallel.axes.tensor": -1})

    @pytest.mark.parametrize(
        ("stack", "name"),
        [
            ("auto", "ddp"),
            ("DDP", "ddp"),
            ("torch", "ddp"),
            ("Deep-Speed", "deepspeed"),
            ("ds", "deepspeed"),
            ("_Parallel", "parallel"),
            ("Accelerate", "accelerate"),
        ],
    )
    def test_stacks(self, stack: str, name: str) -> None:
        assert RunnerConfig(stack=stack).stack_name() == name

    def test_unknown_stack_lists_the_valid_ones(self) -> None:
        with pytest.raises(
            ValueError,
            match="'ddp', 'auto', 'torch', 'parallel', 'deepspeed', 'ds', 'accelerate', 'graph'.*stack='ddpp'.*Did you mean 'ddp'",
        ):
            RunnerConfig(stack="ddpp")

    @pytest.mark.parametrize(
        ("given", "seconds"),
        [(None, None), (90, 90.0), ("90", 90.0), ("1:30", 90.0), ("01:00:30", 3630.0), ("100:00:00", 360000.0)],
    )
    def test_max_time(self, given: Any, seconds: float | None) -> None:
        assert RunnerConfig(max_time=given).max_time_seconds() == seconds


class TestOlderKeys:
    @pytest.mark.parametrize(
        ("older", "value", "key", "kept"),
        [
            ("platform", "deepspeed", "stack", "deepspeed"),
            ("platform", "torch", "stack", "torch"),
            ("platform", "accelerate", "stack", "accelerate"),
            ("checkpoint_async", False, "checkpoint.async_enabled", False),
            ("checkpoint_interval", 7, "checkpoint.interval", 7),
        ],
    )
    def test_read_with_a_warning(self, older: str, value: Any, key: str, kept: Any) -> None:
        with pytest.warns(DeprecationWarning, match=f"'{older}' is an older key: use '{key}'"):
            config = RunnerConfig({older: value})
        assert config[key] == kept
        assert older not in config
        with pytest.warns(DeprecationWarning):
            assert getattr(config, older) == kept

    def test_the_warning_is_seen_in_a_script(self, tmp_path: Path) -> None:
        """Python shows it in `__main__` only, so it must be attributed to the line there."""
        lines = [
            "import danling as dl",
            "dl.RunnerConfig({'platform': 'torch'})",
            "dl.RunnerConfig().parse(['--checkpoint_interval', '3'])",
            "config = dl.RunnerConfig()",
            "config.checkpoint_async = False",
            "assert config.checkpoint_async is False",
        ]
        script = tmp_path / "script.py"
        script.write_text("\n".join(lines))
        done = subprocess.run([interpreter(), str(script)], capture_output=True, text=True, timeout=60, check=True)
        for line, key in (
            (2, "platform"),
            (3, "checkpoint_interval"),
            (5, "checkpoint_async"),
            (6, "checkpoint_async"),
        ):
            assert f"script.py:{line}: DeprecationWarning: '{key}' is an older key" in done.stderr


class TestSubclasses:
    def test_declared_keys(self) -> None:
        config = MyConfig()
        assert (config.width, config.rate, config.epochs) == (64, 0.1, 7)
        assert config.checkpoint.interval == 2
        assert config.checkpoint.dir_name == "checkpoints"
        assert config.model == {"dropout": 0.1, "layers": 4}
        assert isinstance(config.arch, ModelConfig)
        assert config.arch.width == 8
        assert {"width", "rate", "activation", "root", "betas", "arch"} <= set(config)

    def test_what_is_passed_wins(self) -> None:
        config = MyConfig({"model.dropout": 0.5, "checkpoint": {"keep_latest_k": 3}}, width=32, arch={"depth": 9})
        assert config.model == {"dropout": 0.5, "layers": 4}
        assert (config.width, config.arch.depth, config.arch.width) == (32, 9, 8)
        assert (config.checkpoint.keep_latest_k, config.checkpoint.interval) == (3, 2)

    def test_declared_types(self) -> None:
        config = MyConfig(root="elsewhere", betas=[0.1, 0.2])
        assert config.root == Path("elsewhere")
        assert config.betas == (0.1, 0.2)
        with pytest.raises(TypeError, match="Expected width to be an integer"):
            MyConfig(width="wide")
        with pytest.raises(ValueError, match="Expected activation to be one of 'relu', 'gelu'"):
            MyConfig(activation="tanh")
        with pytest.raises(AttributeError, match="must be set"):
            config.needed  # noqa: B018

    def test_parse(self) -> None:
        words = "--width 32 --rate 1 --activation GELU --root /tmp --betas 0.8 0.9 --model.layers 6 --arch.depth 5 --needed 3"
        config = MyConfig().parse(words.split())
        assert (config.width, config.rate, config.activation, config.root) == (32, 1.0, "gelu", Path("/tmp"))
        assert (config.betas, config.model.layers, config.arch.depth, config.needed) == ((0.8, 0.9), 6, 5, 3)

    def test_a_plain_config_reads_what_a_subclass_stored(self) -> None:
        mine = MyConfig()
        plain = RunnerConfig(Namespace(**mine.plain()))
        assert plain.config_id() == mine.config_id()
        assert mine.differences(plain.plain()) == []

    def test_local_class_with_names_that_only_it_knows(self) -> None:
        class Local:
            pass

        class LocalConfig(RunnerConfig):
            thing: Local | None = None
            size: int = 3

        assert LocalConfig(size=4).size == 4

    def test_a_declared_slip_is_an_error(self) -> None:
        class Slipped(RunnerConfig):
            epoch: int = 3

        with pytest.raises(ValueError, match="Did you mean 'epochs'"):
            Slipped()

    def test_post_is_called(self) -> None:
        class Derived(RunnerConfig):
            width: int = 2

            def post(self) -> None:
                self.model.width = self.width * 2

        assert Derived().parse(["--width", "5"]).model.width == 10


class TestParse:
    def test_words(self) -> None:
        words = (
            "--steps 1e3 --optim.lr 1e-3 --optim.betas 0.9 0.99 --patience inf --dataloader.num_workers 2 --tensorboard true "
            "--deterministic --log false --data.path /x --checkpoint.verify none --precision bf16 --seed none --model.width 3 "
            "--dataloader.train.batch_size 4 --dataloader.val.drop_last false "
            "--data.flag --data.sizes [1,2] --train_splits a b --checkpoint.interval=7 --scheduler.interval epoch --min_delta -0 "
            "--checkpoint.exclude_from_loading optimizer --fsdp.reshard_after_forward 4 --parallel.axes.shard -1 --max_time 1:00:00"
        )
        config = RunnerConfig().parse(words.split())
        assert (config.steps, config.patience, config.tensorboard, config.deterministic, config.log) == (
            1000,
            float("inf"),
            True,
            True,
            False,
        )
        assert config.optim == {"lr": 1e-3, "betas": [0.9, 0.99]}
        assert config.dataloader == {"num_workers": 2, "train": {"batch_size": 4}, "val": {"drop_last": False}}
        assert (config.data.path, config.model.width, config.data.flag, config.data.sizes) == (
            "/x",
            3,
            True,
            [1, 2],
        )
        assert (config.checkpoint.verify, config.checkpoint.interval, config.precision) == ("none", 7, "bf16")
        assert config.train_splits == ["a", "b"]
        assert config.checkpoint.exclude_from_loading == ["optimizer"]
        assert config.fsdp.reshard_after_forward == 4
        assert config.parallel.axes.shard == -1
        assert config.max_time_seconds() == 3600

    def test_a_split_has_the_types_of_the_loader(self) -> None:
        with pytest.raises(TypeError, match="Expected --dataloader.train.batch_size to be an integer"):
            RunnerConfig().parse(["--dataloader.train.batch_size", "big"])

    @pytest.mark.parametrize("words", [["[0.9, 0.99]"], ["[0.9,", "0.99]"], ["0.9", "0.99"], ["(0.9, 0.99)"]])
    def test_lists(self, words: list[str]) -> None:
        assert RunnerConfig().parse(["--optim.betas", *words]).optim.betas == [0.9, 0.99]

    @pytest.mark.parametrize(
        ("words", "value"),
        [
            (["3"], 3),
            (["-3"], -3),
            (["1e-3"], 1e-3),
            (["-.5"], -0.5),
            (["inf"], float("inf")),
            (["none"], None),
            (["True"], True),
            (["'3'"], "3"),
            (["007"], "007"),
            (["1.2.3"], "1.2.3"),
            (["a", "1"], ["a", 1]),
            (['{"a": 1e-3}'], {"a": 1e-3}),
            (["a=b"], "a=b"),
            ([], True),
        ],
    )
    def test_undeclared_keys_by_their_looks(self, words: list[str], value: Any) -> None:
        got = RunnerConfig().parse(["--own.mine", *words]).own.mine
        assert got == value
        assert not isinstance(value, (int, float, str)) or type(got) is type(value)

    def test_undeclared_keys_by_their_value(self) -> None:
        config = RunnerConfig({"a.word": "x", "a.flag": False, "a.number": 3, "a.items": [1]})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config.parse(["--a.word", "5", "--a.flag", "yes", "--a.number", "0.5", "--a.items", "7"])
        assert dict(config.a) == {"word": "5", "flag": True, "number": 0.5, "items": [7]}
        with pytest.raises(TypeError, match="Expected --a.number to be a number"):
            config.parse(["--a.number", "many"])
        with pytest.raises(TypeError, match="Expected --a.flag to be true or false"):
            config.parse(["--a.flag", "perhaps"])

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            ("--steps many", "Expected --steps to be an integer or none. Received: many"),
            ("--steps", "Expected --steps to be an integer or none. Received: no value"),
            ("--steps 1 2", "Expected --steps to be an integer or none. Received: 1 2"),
            ("--tensorboard perhaps", "Expected --tensorboard to be true or false. Received: perhaps"),
            ("--optim.lr fast", "Expected --optim.lr to be a number. Received: fast"),
        ],
    )
    def test_type_errors_name_the_key(self, words: str, message: str) -> None:
        with pytest.raises(TypeError, match=message):
            RunnerConfig().parse(words.split())

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            ("--checkpoint 5", "--checkpoint.*VALUE"),
            ("--ema true", "--ema.enabled true"),
            ("train.yaml", "--config train.yaml"),
            ("-steps 5", "Did you mean '--steps'"),
            ("--seed 1 -steps 5", "Did you mean '--steps'"),
            ("--precision fp8", "one of 'fp16', 'bf16'"),
            ("--accum-stps 3", "Did you mean 'accum_steps'"),
            ("--steps 1 --epochs 1", "not both"),
        ],
    )
    def test_other_errors(self, words: str, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            RunnerConfig().parse(words.split())

    def test_dashes_stand_for_underscores(self) -> None:
        assert RunnerConfig().parse(["--accum-steps", "4"]).accum_steps == 4

    def test_a_mapping_for_a_section(self) -> None:
        config = RunnerConfig().parse(["--checkpoint", '{"interval": 5}', "--checkpoint.keep_latest_k", "2"])
        assert (config.checkpoint.interval, config.checkpoint.keep_latest_k) == (5, 2)

    def test_files_come_first(self, tmp_path: Path) -> None:
        (tmp_path / "a.yaml").write_text("steps: 5\noptim: {lr: 1e-3, type: sgd}\nscheduler:\n  total: ${steps}\n")
        (tmp_path / "b.json").write_text('{"optim": {"lr": 0.5}}')
        files = [str(tmp_path / "a.yaml"), str(tmp_path / "b.json")]
        config = RunnerConfig().parse(["--steps", "9", "--config", *files])
        assert (config.steps, config.optim.lr, config.optim.type, config.scheduler.total) == (9, 0.5, "sgd", 9)
        other = RunnerConfig().parse(["--settings", files[0]], default_config="settings")
        assert other.steps == 5
        with pytest.raises(ValueError, match="--settings FILE"):
            RunnerConfig().parse([], default_config="settings")
        assert RunnerConfig().parse([], default_config="settings", no_default_config_action="ignore").steps is None

    def test_missing_or_bad_files(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match="does not exist"):
            RunnerConfig().parse(["--config", str(tmp_path / "no.yaml")])
        (tmp_path / "list.yaml").write_text("- 1\n")
        with pytest.raises(ValueError, match="a mapping of keys"):
            RunnerConfig().parse(["--config", str(tmp_path / "list.yaml")])
        (tmp_path / "bad.json").write_text("{")
        with pytest.raises(ValueError, match="Expected JSON"):
            RunnerConfig.from_file(tmp_path / "bad.json")
        with pytest.raises(ValueError, match=r"ends in \.yaml"):
            RunnerConfig.from_file(tmp_path / "bad.txt")

    def test_strict(self) -> None:
        config = RunnerConfig({"model.width": 3})
        assert config.parse(["--model.width", "4", "--optim.lr", "1"], strict=True).model.width == 4
        with pytest.raises(ValueError, match="a key that the configuration has.*Did you mean 'model.width'"):
            RunnerConfig({"model.width": 3}).parse(["--model.widht", "4"], strict=True)

    def test_after_parse_absent_names_are_errors(self) -> None:
        config = RunnerConfig().parse([])
        with pytest.raises(AttributeError):
            config.model  # noqa: B018
        config["model.width"] = 3
        assert config.model.width == 3
        assert pickle.loads(pickle.dumps(config)) == config.clone() == config

    def test_sys_argv(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "argv", ["train.py", "--steps", "3"])
        assert RunnerConfig().parse().steps == 3

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            ("--epoch 3", "Did you mean 'epochs'?"),
            ("--epochs abc", "Expected --epochs to be an integer or none. Received: abc."),
            ("--config gone.yaml", "Received: 'gone.yaml', which does not exist."),
            ("--lr 1e-3", "Received: --lr 1e-3. Its place is optim.lr."),
            ("--steps 3 --epochs 4", "Expected steps or epochs, not both."),
        ],
    )
    def test_a_wrong_command_line_ends_with_usage_and_exit_code_2(
        self, words: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(sys, "argv", ["train.py", *words.split()])
        with pytest.raises(SystemExit) as left:
            RunnerConfig().parse()
        usage, error = capsys.readouterr().err.splitlines()
        assert left.value.code == 2
        assert usage == "usage: train.py [--config FILE ...] [--KEY VALUE ...]   (--help lists the keys)"
        assert error.startswith("train.py: error: ") and said in error

    def test_help(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as left:
            MyConfig().parse(["--help", "all"])
        assert left.value.code == 0
        text = capsys.readouterr().out
        for key in CONTRACT_DEFAULTS:
            assert f"--{key} " in text
        for line in ("--width  (an integer; default: 64)", "Width of the model.", "--model.layers  (default: 4)"):
            assert line in text
        for line in ("--optim.lr  (a number; not set)", "--optim.type  (a string; default: adamw)", "--arch.depth"):
            assert line in text
        assert "--epochs  (an integer or none; default: 7)" in text

    def test_help_lists_sections_by_name_and_their_keys_on_demand(self, capsys: pytest.CaptureFixture[str]) -> None:
        shown = []
        for words in (["--help"], ["--help", "checkpoint"], ["--width", "3", "-h", "optim", "checkpoint"]):
            with pytest.raises(SystemExit) as left:
                MyConfig().parse(words)
            assert left.value.code == 0
            shown.append(capsys.readouterr().out)
        short, section, two = shown
        assert "--width " in short and "--model.layers " in short and "--epochs " in short
        assert "\n  checkpoint: Checkpoint policy.\n" in short and "--checkpoint.interval " not in short
        assert len(short.splitlines()) < 160
        assert "--checkpoint.interval " in section and "--width " not in section and "--optim.lr  (" not in section
        assert "--checkpoint.interval " in two and "--optim.lr  (" in two
        with pytest.raises(ValueError, match="'checkpoit'. Did you mean 'checkpoint'"):
            MyConfig().parse(["--help", "checkpoit"])

    def test_references(self) -> None:
        config = RunnerConfig(
            {"model.width": 8, "model.name": "w${model.width}", "head.width": "${model.width}"}
        ).parse([])
        assert config.head.width == 8
        assert config.model.name == "w8"
        with pytest.raises(ValueError, match="a key that exists"):
            RunnerConfig({"a.b": "${nothing}"}).parse([])
        with pytest.raises(ValueError, match="no circle"):
            RunnerConfig({"a.b": "${a.c}", "a.c": "${a.b}"}).parse([])


class TestFiles:
    def test_yaml_reads_numbers_as_people_write_them(self, tmp_path: Path) -> None:
        path = tmp_path / "c.yaml"
        path.write_text(
            "optim: {lr: 1e-3, eps: 1E8, decay: -5e-4, name: e5}\npatience: inf\nsteps: none\nmodel: {nan: info}\n"
            "checkpoint: {verify: none, interval: 3}\n"
        )
        config = RunnerConfig.load(path)
        assert config.optim == {"lr": 1e-3, "eps": 1e8, "decay": -5e-4, "name": "e5"}
        assert (config.patience, config.steps, config.model["nan"]) == (float("inf"), None, "info")
        assert (config.checkpoint.verify, config.checkpoint.interval) == ("none", 3)
        assert RunnerConfig(path) == RunnerConfig.from_file(str(path)) == config

    @pytest.mark.parametrize("suffix", ["yaml", "yml", "json"])
    def test_round_trip(self, tmp_path: Path, suffix: str) -> None:
        config = MyConfig({"dataloader.train.batch_size": 3, "compile.options": {"a.b": 1}}, seed=3, rate=1e-9)
        path = tmp_path / f"c.{suffix}"
        config.save(path)
        again = MyConfig.load(path)
        assert type(again) is MyConfig
        assert again == config
        assert again.patience == float("inf")
        assert again.config_id() == config.config_id()

    def test_files_are_standard(self, tmp_path: Path) -> None:
        config = RunnerConfig({"model.width": 3})
        config.save(tmp_path / "c.json")
        config.save(tmp_path / "c.yaml")

        def refuse(text: str) -> None:
            raise AssertionError(text)

        stored = json.loads((tmp_path / "c.json").read_text(), parse_constant=refuse)
        assert stored["model"] == {"width": 3}
        assert yaml.safe_load((tmp_path / "c.yaml").read_text()) == config.plain()

    def test_loaded_sections_are_closed_and_defaults_stay(self, tmp_path: Path) -> None:
        (tmp_path / "c.yaml").write_text("checkpoint: {interval: 9}\nextra: {a: {b: 1}}\n")
        config = MyConfig.load(tmp_path / "c.yaml")
        assert (config.checkpoint.interval, config.checkpoint.dir_name, config.width) == (9, "checkpoints", 64)
        assert type(config.extra) is Section
        assert type(config.extra.a) is Section
        (tmp_path / "d.yaml").write_text("checkpoint: {intervall: 9}\n")
        with pytest.raises(ValueError, match="Did you mean 'interval'"):
            MyConfig.load(tmp_path / "d.yaml")

    def test_merge_from_file_touches_only_what_it_names(self, tmp_path: Path) -> None:
        (tmp_path / "c.yaml").write_text("seed: 4\n")
        config = RunnerConfig(steps=9)
        config.merge_from_file(tmp_path / "c.yaml")
        assert (config.steps, config.seed) == (9, 4)


class TestCopies:
    @pytest.mark.parametrize(
        "duplicate",
        [
            copy.copy,
            copy.deepcopy,
            lambda config: config.copy(),
            lambda config: config.clone(),
            lambda config: config.deepcopy(),
            lambda config: pickle.loads(pickle.dumps(config)),
        ],
    )
    def test_nothing_is_shared(self, duplicate: Any) -> None:
        config = MyConfig({"optim.param_groups": [{"pattern": "a"}], "compile.options": {"a": 1}})
        twin = duplicate(config)
        assert type(twin) is MyConfig
        assert twin == config
        assert list(twin) == list(config)
        twin.checkpoint.interval = 99
        twin.model.layers = 99
        twin.arch.depth = 99
        twin.optim.param_groups[0].pattern = "b"
        twin.compile.options["a"] = 2
        assert (config.checkpoint.interval, config.model.layers, config.arch.depth) == (2, 4, 2)
        assert config.optim.param_groups[0].pattern == "a"
        assert config.compile.options == {"a": 1}

    def test_construction_from_another_shares_nothing(self) -> None:
        source = RunnerConfig({"model.width": 3, "mine": [{"a": [1]}]})
        twin = RunnerConfig(source)
        twin.model.width = 4
        twin.checkpoint.interval = 4
        twin.mine[0].a.append(2)
        given = {"model": {"sizes": [1]}}
        RunnerConfig(given).model.sizes.append(2)
        assert (source.model.width, source.checkpoint.interval, source.mine) == (3, None, [{"a": [1]}])
        assert given == {"model": {"sizes": [1]}}

    def test_a_copy_keeps_what_was_changed_since(self) -> None:
        config = MyConfig(width=3)
        config.model.layers = 7
        config.width = 5
        assert copy.deepcopy(config).model.layers == 7
        assert copy.deepcopy(config).width == 5


NOT_SEMANTIC: dict[str, Any] = {
    "stack": "parallel",
    "steps": 4,
    "max_time": 60,
    "patience": 3,
    "name": "n",
    "lineage": "l",
    "experiment": "e",
    "workspace_root": "w",
    "dir": "d",
    "checkpoint_dir": "c",
    "log_file": "f",
    "resume": "r",
    "auto_resume": True,
    "backend": "gloo",
    "init_method": "i",
    "log": False,
    "log_interval": 3,
    "tensorboard": True,
    "evaluate_interval": 4,
    "wandb.enabled": True,
    "mlflow.enabled": True,
    "trackio.enabled": True,
    "checkpoint.interval": 3,
    "checkpoint.backend": "dcp",
    "checkpoint.wait_timeout": 3,
    "comm.train_timeout_seconds": 3,
    "gc.interval": 3,
    "profiling.enabled": True,
    "heartbeat.enabled": True,
    "parallel.axes.shard": 2,
    "fsdp.enabled": True,
    "compile.enable": True,
    "ft.enabled": True,
    "deepspeed.zero_optimization.stage": 2,
    "dataloader.num_workers": 2,
    "dataloader.pin_memory": True,
    "dataloader.prefetch_factor": 4,
    "dataloader.persistent_workers": True,
    "dataloader.val.num_workers": 4,
    "dataloader.timeout": 4,
}
SEMANTIC: dict[str, Any] = {
    "seed": 1,
    "deterministic": True,
    "accum_steps": 2,
    "precision": "bf16",
    "max_grad_norm": 1.0,
    "score_name": "accuracy",
    "optim.lr": 0.1,
    "scheduler.type": "cosine",
    "ema.enabled": True,
    "dataloader.batch_size": 4,
    "dataloader.train.shuffle": False,
    "model.width": 3,
    "data.path": "x",
    "pretrained": "p",
}


class TestIdentity:
    @pytest.mark.parametrize("key", NOT_SEMANTIC)
    def test_not_semantic(self, key: str) -> None:
        config = RunnerConfig({key: NOT_SEMANTIC[key]})
        assert config.config_id() == RunnerConfig().config_id()
        assert hash(config) == hash(RunnerConfig())
        assert config.differences(RunnerConfig().plain()) == []

    @pytest.mark.parametrize("key", SEMANTIC)
    def test_semantic(self, key: str) -> None:
        assert RunnerConfig({key: SEMANTIC[key]}).config_id() != RunnerConfig().config_id()

    def test_a_copy_of_what_was_set_apart_is_set_apart(self) -> None:
        config = RunnerConfig({"epochs": 1})
        usual = config.config_id()
        config.set_apart("produce")
        copies = [copy.copy(config), copy.deepcopy(config), pickle.loads(pickle.dumps(config)), config | {"epochs": 2}]
        assert {twin.config_id() for twin in copies} == {config.config_id()} != {usual}

    def test_form(self) -> None:
        config = RunnerConfig({"optim.lr": 1e-3})
        assert len(config.config_id()) == 16
        int(config.config_id(), 16)
        assert yaml.safe_load(yaml.safe_dump(config.canonical())) == config.canonical()
        assert list(config.canonical()) == sorted(config.canonical())

    def test_equal_configurations_have_equal_hashes(self) -> None:
        one = RunnerConfig({"optim.lr": 1, "model": {"a": 1, "b": (1, 2)}})
        two = RunnerConfig({"model": {"b": (1, 2), "a": 1.0}, "optim.lr": 1.0})
        assert one == two
        assert hash(one) == hash(two)
        assert one.config_id() == two.config_id()

    def test_the_same_in_every_process(self) -> None:
        script = (
            "from danling.config import RunnerConfig as C\n"
            "c = C({'optim': {'lr': 1e-3, 'betas': (0.9, 0.99)}, 'tags': {'b', 'a', 'c'}, 'model.width': 3}, epochs=3)\n"
            "print(c.config_id(), hash(c), hash(c.model))"
        )
        root = str(Path(__file__).parents[2])
        # Strings hash otherwise there than here.
        seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
        there = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": root},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(script, {})
        assert there == printed.getvalue()

    def test_plain(self) -> None:
        class Kind:
            pass

        config = RunnerConfig({"model.kind": Kind, "model.root": Path("x"), "model.set": {2, 1}, "model.f": (1, 2)})
        plain = config.plain()
        assert plain["model"] == {
            "kind": f"{__name__}.{Kind.__qualname__}",
            "root": "x",
            "set": [1, 2],
            "f": [1, 2],
        }
        assert type(plain["checkpoint"]) is dict
        with pytest.raises(TypeError, match=r"Expected model\.thing to be a plain value"):
            RunnerConfig({"model.thing": Kind()}).plain()

    def test_dict(self) -> None:
        config = RunnerConfig({"model.width": 3})
        assert config.dict() == config.plain()
        assert config.dict(flatten=True)["model.width"] == 3
        assert dict(config.optim) == {}


def test_a_stored_configuration_that_is_completed_leaves_the_defaults_alone() -> None:
    whole = RunnerConfig.completed({"optim": {"lr": 5.0}, "checkpoint": {"interval": 7}, "mine": [1]})
    whole["checkpoint"]["keep_latest_k"] = 99
    assert RunnerConfig.completed({}) == RunnerConfig().plain() != whole
    assert RunnerConfig().changed() == {} and RunnerConfig(**{"optim.lr": 5.0}).changed() == {"optim": {"lr": 5.0}}


class TestDifferences:
    def test_named(self) -> None:
        stored = RunnerConfig({"optim.lr": 0.1, "model.width": 3}).plain()
        lines = RunnerConfig({"optim.lr": 0.2, "data.path": "x"}).differences(stored)
        assert lines == [
            "data.path: stored absent, now 'x'",
            "model.width: stored 3, now absent",
            "optim.lr: stored 0.1, now 0.2",
        ]

    def test_budgets_may_change_but_not_the_mode(self) -> None:
        assert RunnerConfig(steps=9).differences(RunnerConfig(steps=5).plain()) == []
        assert RunnerConfig(epochs=3).differences(RunnerConfig(epochs=5).plain()) == []
        assert RunnerConfig().differences(RunnerConfig(epochs=5).plain()) == []
        assert RunnerConfig(epochs=2).differences(RunnerConfig(steps=5).plain()) == [
            "mode: stored steps (steps=5), now epochs (epochs=2)"
        ]

    def test_a_drawn_seed_is_none(self) -> None:
        assert RunnerConfig().differences(RunnerConfig(seed=5).plain()) == []
        assert RunnerConfig(seed=6).differences(RunnerConfig(seed=5).plain()) == ["seed: stored 5, now 6"]

    def test_batches_may_be_traded(self) -> None:
        stored = RunnerConfig({"dataloader.batch_size": 8, "accum_steps": 1}).plain()
        traded = RunnerConfig({"dataloader.batch_size": 4, "accum_steps": 2})
        assert traded.differences(stored) == []
        halved = RunnerConfig({"dataloader.batch_size": 4})
        assert halved.differences(stored) == [
            "dataloader.batch_size: stored 8 samples an update (batch_size=8 x accum_steps=1 x 1 rank), "
            "now 4 samples an update (batch_size=4 x accum_steps=1 x 1 rank)"
        ]
        assert halved.differences(stored, stored_replicas=1, replicas=2) == []

    def test_the_same_settings_on_other_ranks_are_other_updates(self) -> None:
        config = RunnerConfig({"dataloader.batch_size": 4, "accum_steps": 3})
        assert config.differences(config.plain(), stored_replicas=2, replicas=2) == []
        (line,) = config.differences(config.plain(), stored_replicas=2, replicas=1)
        assert line == (
            "dataloader.batch_size: stored 24 samples an update (batch_size=4 x accum_steps=3 x 2 ranks), "
            "now 12 samples an update (batch_size=4 x accum_steps=3 x 1 rank)"
        )

    def test_an_update_is_what_it_is_however_it_is_written(self) -> None:
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
        ids = {RunnerConfig(settings).config_id(replicas=replicas) for settings, replicas in ways}
        assert len(ids) == 1
        for settings, replicas in ways:
            stored = RunnerConfig(whole).plain()
            assert RunnerConfig(settings).differences(stored, stored_replicas=2, replicas=replicas) == []
        other = RunnerConfig({"dataloader.global_batch_size": 25})
        assert other.config_id() not in ids
        assert other.differences(RunnerConfig(whole).plain()) == [
            "dataloader.global_batch_size: stored 24 samples an update (global_batch_size=24), "
            "now 25 samples an update (global_batch_size=25)"
        ]

    def test_updates_of_the_splits_that_are_trained_on(self) -> None:
        named = {"train_splits": ["text"], "dataloader.batch_size": 32, "dataloader.text.batch_size": 12}
        stored = RunnerConfig(named).plain()
        assert RunnerConfig({**named, "dataloader.batch_size": 64}).differences(stored) == []
        (line,) = RunnerConfig({**named, "dataloader.text.batch_size": 6}).differences(stored)
        assert line.startswith("dataloader.text.batch_size: stored 12 samples an update")

    def test_updates_of_a_loader_of_ones_own_are_not_known(self) -> None:
        plain = RunnerConfig(accum_steps=2)
        assert plain.config_id(replicas=2) == plain.config_id()
        assert plain.differences(plain.plain(), stored_replicas=2, replicas=1) == []
        assert RunnerConfig(accum_steps=3).differences(plain.plain()) == ["accum_steps: stored 2, now 3"]

    def test_a_resumed_run_needs_no_pretrained(self) -> None:
        assert RunnerConfig().differences(RunnerConfig(pretrained="x").plain()) == []

    def test_what_an_older_version_did_not_store_has_its_default(self) -> None:
        stored = RunnerConfig().plain()
        del stored["score_name"]
        del stored["ema"]["decay"]
        assert RunnerConfig().differences(stored) == []

    def test_stored_is_not_changed(self) -> None:
        stored = RunnerConfig({"model.width": 3}).plain()
        before = copy.deepcopy(stored)
        RunnerConfig().differences(stored)
        assert stored == before


def test_only_settings_of_the_sections_themselves_are_idle_on_a_mesh() -> None:
    degrees = {"shard": 1, "pipeline": 1}
    config = RunnerConfig({"fsdp": {"reshard_after_forward": True}, "fsdp_notes": {"by": "me"}})
    assert [line.partition(" ")[0] for line in idle_mesh_settings(config, degrees)] == ["fsdp.reshard_after_forward"]
    assert idle_mesh_settings(config, {"shard": 2, "pipeline": 1}) == []
    blocks = RunnerConfig({"fsdp": {"blocks": ["Layer"]}, "compile": {"enable": True}})
    assert idle_mesh_settings(blocks, degrees) == []


class TestWithoutEffect:
    @pytest.mark.parametrize(
        ("key", "value", "stack"),
        [
            ("parallel.axes.shard", 2, "ddp"),
            ("fsdp.enabled", True, "ddp"),
            ("deepspeed.zero_optimization.stage", 2, "ddp"),
            ("deepspeed.zero_optimization.stage", 2, "parallel"),
            ("checkpoint.dedicated_async_process_group", False, "ddp"),
            ("checkpoint.backend", "dcp", "deepspeed"),
            ("checkpoint.dedicated_async_process_group", False, "deepspeed"),
            ("accelerate.use_cpu", True, "ddp"),
            ("fsdp.enabled", True, "accelerate"),
            ("compile.memory_policy", "recompute", "parallel"),
        ],
    )
    def test_warns(self, key: str, value: Any, stack: str) -> None:
        with pytest.warns(UserWarning, match=f"no effect on the stack '{stack}': {key}"):
            assert RunnerConfig({key: value}).warn_without_effect(stack) == [key]

    def test_silent(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for stack in ("ddp", "parallel", "deepspeed", "accelerate", "base"):
                assert RunnerConfig({"optim.lr": 1}).warn_without_effect(stack) == []
            RunnerConfig({"parallel.axes.shard": 2}).warn_without_effect("parallel")
            RunnerConfig({"checkpoint.dedicated_async_process_group": False}).warn_without_effect("parallel")

    def test_settings_of_a_backend_go_by_the_backend_and_not_by_the_stack(self) -> None:
        key = "checkpoint.dedicated_async_process_group"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert RunnerConfig({key: False, "checkpoint.backend": "dcp"}).warn_without_effect("ddp") == []
        with pytest.warns(UserWarning, match=key):
            assert RunnerConfig({key: False, "checkpoint.backend": "file"}).warn_without_effect("parallel") == [key]


def test_import_brings_no_torch_of_its_own() -> None:
    directory = Path(sys.modules["danling.config"].__file__ or "").parent
    sources = {path.name: path.read_text() for path in directory.glob("*.py")}
    assert "runner_config.py" in sources
    assert [name for name, text in sources.items() if re.search(r"^\s*(import|from) torch\b", text, re.MULTILINE)] == []
