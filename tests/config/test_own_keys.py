"""Top-level keys of a program's own: declared, set in code, or refused with their place in the library's configuration."""

from __future__ import annotations

import copy
import pickle
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support.toys import Line, settings
from torch.utils.data import DataLoader, default_collate

import danling as dl
from danling.config.names import place_of
from danling.config.runner_config import continued

# What was tried on a runner and passed without a word, and the key that each of them meant.
PLACES = """
optim.lr: lr learning_rate
optim.weight_decay: weight_decay
optim.momentum: momentum
optim.betas: betas
optim.type: optimizer
dataloader.batch_size: batch_size per_device_train_batch_size
dataloader.num_workers: num_workers
dataloader.shuffle: shuffle
dataloader.pin_memory: pin_memory
epochs: max_epochs num_train_epochs
steps: max_steps
accum_steps: accumulate_grad_batches gradient_accumulation_steps
precision: bf16 fp16 mixed_precision
max_grad_norm: gradient_clip_val grad_clip
workspace_root or dir: output_dir default_root_dir
evaluate_interval: eval_steps
checkpoint.interval: save_steps
checkpoint.keep_latest_k: save_total_limit
log_interval: logging_steps log_every_n_steps
scheduler.warmup_steps: warmup_steps warmup_ratio
scheduler.type: lr_scheduler_type
ema.decay: ema_decay
auto_resume: resume_from_checkpoint
score_name: metric_for_best_model
checkpoint.keep_latest_k or checkpoint.remote.keep_latest_k: keep_latest_k
parallel.axes.shard: shard
"""
TRIED = {name: place for place, names in yaml.safe_load(PLACES).items() for name in names.split()}


# The command line and files


@pytest.mark.parametrize(("name", "place"), TRIED.items())
def test_undeclared_name_is_refused_with_its_place(name: str, place: str, tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(f"{name}: 3\n")
    with pytest.raises(ValueError, match=f"Received: --{name} 3. Its place is {place}"):
        dl.RunnerConfig().parse([f"--{name}", "3"])
    for read in (
        dl.RunnerConfig,
        dl.RunnerConfig.from_file,
        lambda path: dl.RunnerConfig().parse(["--config", str(path)]),
    ):
        with pytest.raises(ValueError, match=f"Received: {name}=3 in {file}. Its place is {place}"):
            read(file)
    assert place_of(name, dl.RunnerConfig) == place


def test_other_names_are_refused_with_the_nearest_and_the_mend() -> None:
    with pytest.raises(
        ValueError, match=r"--width 3, which neither.*For your own key, declare it in a class"
    ):
        dl.RunnerConfig().parse(["--width", "3"])
    with pytest.raises(ValueError, match="Use torchrun --nproc-per-node N"):
        dl.RunnerConfig().parse(["--gpus", "2"])
    with pytest.raises(ValueError, match=r"--modle.width 3. Did you mean 'model'"):
        dl.RunnerConfig({"model.width": 4}).parse(["--modle.width", "3"])


def test_declared_keys_belong_to_the_program(tmp_path: Path) -> None:
    class Declared(dl.RunnerConfig):
        width: int = 3

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.depth, self.lr = 2, 0.1
            self.optimizer = {"kind": "x"}

    file = tmp_path / "settings.yaml"
    file.write_text("depth: 7\nwidth: 5\nlr: 0.2\nmodel:\n  layers: 2\noptimizer:\n  kind: y\n")
    read = Declared(file)
    assert (read.depth, read.width, read.lr, read.model.layers, read.optimizer.kind) == (
        7,
        5,
        0.2,
        2,
        "y",
    )
    parsed = Declared().parse(
        ["--width", "4", "--depth", "5", "--lr", "0.4", "--net.kind", "b", "--net.size", "3"]
    )
    assert (parsed.width, parsed.depth, parsed.lr, parsed.net.kind) == (4, 5, 0.4, "b")
    before = dl.RunnerConfig()
    before.rate = 0.1
    assert before.parse(["--rate", "0.2"]).rate == 0.2
    assert (Declared({"depth": 9, "lr": 0.5}).depth, Declared(lr=0.3).lr, Declared().lr) == (
        9,
        0.3,
        0.1,
    )


class Rate(dl.RunnerConfig):
    lr: float = 0.1


SET: dict[str, Callable[[], Any]] = {
    "attribute": lambda: setattr(dl.RunnerConfig(), "lr", 0.5),
    "item": lambda: dl.RunnerConfig().set("lr", 0.5),
    "nested": lambda: dl.RunnerConfig().set("lr.first", 0.5),
    "read as a section": lambda: dl.RunnerConfig().lr,
    "mapping": lambda: dl.RunnerConfig({"lr": 0.5}),
    "nested mapping": lambda: dl.RunnerConfig({"lr.first": 0.5}),
    "argument": lambda: dl.RunnerConfig(lr=0.5),
    "merge": lambda: dl.RunnerConfig().merge({"lr": 0.5}),
    "another class": lambda: Rate(momentum=0.5, lr=0.1),
    "runner": lambda: dl.Runner({"lr": 0.5}),
}


@pytest.mark.parametrize("way", SET.values(), ids=SET)
def test_a_name_of_other_trainers_is_refused_in_code_too(way: Callable[[], Any]) -> None:
    with pytest.raises((ValueError, AttributeError), match=r"Its place is optim\.(lr|momentum)"):
        way()


def test_a_dotted_option_of_a_parser_reaches_into_its_section() -> None:
    config = dl.RunnerConfig(Namespace(**{"optim.lr": 0.5, "model.width": 3, "data.path": "x"}))
    assert config.changed() == {"optim": {"lr": 0.5}, "model": {"width": 3}, "data": {"path": "x"}}


def test_names_declared_by_a_class_or_a_parser_belong_to_the_program() -> None:
    assert Rate().parse(["--lr", "0.2"]).lr == 0.2
    parsed = dl.RunnerConfig(Namespace(lr=0.5))
    for config in (
        parsed,
        copy.deepcopy(parsed),
        pickle.loads(pickle.dumps(parsed)),
        dl.RunnerConfig(parsed),
    ):
        assert config.lr == 0.5
        config.lr = 0.25
        assert config.lr == 0.25
    assert continued({"lr": 0.5}, None, dl.RunnerConfig).lr == 0.5, (
        "a run that goes on keeps its keys"
    )
    assert continued({"lr": 0.5}, dl.RunnerConfig(seed=1), dl.RunnerConfig).lr == 0.5


def test_other_names_in_code_are_the_users() -> None:
    config = dl.RunnerConfig({"width": 3, "net.depth": 2})
    config.note = "x"
    config.model.layers = 4
    assert (config.width, config.net.depth, config.note, config.model.layers) == (3, 2, "x", 4)


def test_a_decimal_with_leading_zeros_is_a_number_and_a_word_is_none() -> None:
    config = dl.RunnerConfig().parse(
        ["--model.rate", "00.5", "--model.code", "05", "--model.name", "infinity"]
    )
    assert config.model == {"rate": 0.5, "code": "05", "name": "infinity"}


ELSEWHERE = {
    "device": "the variable CUDA_VISIBLE_DEVICES",
    "devices": "torchrun --nproc-per-node N",
    "gpus": "torchrun --nproc-per-node N",
    "accelerator": "the variable CUDA_VISIBLE_DEVICES",
    "strategy": "stack and parallel.axes",
    "fast_dev_run": "steps",
    "limit_train_batches": "steps",
    "label_smoothing_factor": "the criterion, such as nn.CrossEntropyLoss(label_smoothing=0.1)",
    "load_best_model_at_end": "the checkpoint `best`",
    "sync_batchnorm": "nn.SyncBatchNorm.convert_sync_batchnorm",
    "callbacks": "methods that a subclass overrides, and runner.observers",
    "run_name": "name",
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_name_of_another_trainer_in_code_is_warned_of_once(name: str, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=f"does not read the key {name!r}") as caught:
        runner = Line(settings(tmp_path, **{name: 1}))
    runner.close()
    assert len(caught) == 1 and f"Use {ELSEWHERE[name]}" in str(caught[0].message)
    assert runner.config[name] == 1


def test_a_declared_name_is_not_warned_of(recwarn: pytest.WarningsRecorder) -> None:
    class Declares(dl.RunnerConfig):
        device: str = "cuda"

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.callbacks = 3

    assert Declares(device="cpu").device == "cpu"
    assert dl.RunnerConfig(Namespace(strategy="mine", local_rank=0)).strategy == "mine"
    assert dl.RunnerConfig(local_rank=1).local_rank == 1
    assert not recwarn.list


@pytest.mark.parametrize(
    ("name", "meant"),
    [("configure_optimizers", "build_optimizer"), ("compute_metrics", "self.metrics")],
)
def test_a_method_of_another_trainer_is_named_unless_the_program_may_call_it(
    name: str, meant: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Ignored(Line):
        pass

    class Called(Line):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.optimizer, self.metrics = (
                torch.optim.SGD(self.model.parameters(), lr=0.1),
                {"mine": lambda p, t: p.mean()},
            )

    for kind in (Called, Ignored):
        setattr(kind, name, lambda self: None)
        kind(settings(tmp_path / kind.__name__)).close()
        assert (f"does not call the method {name!r}: did you mean `{meant}`?" in caplog.text) == (
            kind is Ignored
        )


READS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "own": (lambda config: config.net.encoder.wdith, "no key 'wdith'. Did you mean 'width'?"),
    "section": (lambda config: config.net.decoder.width, "no key 'decoder'"),
    "top": (lambda config: config.nett, "no key 'nett'. Did you mean 'net'?"),
    "set late": (lambda config: config.late.mixture.alhpa, "no key 'alhpa'. Did you mean 'alpha'?"),
    "open": (
        lambda config: config.optim.momentun,
        "no key 'optim.momentun'. Did you mean 'momentum'?",
    ),
    "split": (lambda config: config.dataloader.val, "no key 'dataloader.val'"),
    "list": (lambda config: config.net.heads[0].wdith, "no key 'wdith'. Did you mean 'width'?"),
}


@pytest.mark.parametrize("place", READS)
def test_an_absent_key_is_an_error_once_a_runner_has_the_configuration(
    place: str, tmp_path: Path
) -> None:
    read, message = READS[place]
    seen: list[str] = []

    class Reads(Line):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.config.late = {"mixture": {"alpha": 1}}
            before = self.config.plain()
            with pytest.raises(AttributeError) as caught:
                read(self.config)
            seen.append(str(caught.value))
            assert self.config.plain() == before, "reading has set a key"

    config = dl.RunnerConfig(settings(tmp_path))
    config.net.encoder.width = 3  # before, sections are made by assignment
    config.net.heads = [{"width": 3}]
    config.optim.momentum = 0.9
    Reads(config).close()
    assert message in seen[0] and "reads a key that may be absent" in seen[0]


def test_optional_key_may_be_absent(tmp_path: Path) -> None:
    config = dl.RunnerConfig(settings(tmp_path))
    config.net.encoder.width = 3
    with Line(config) as runner:
        own = runner.config
        assert (
            own.net.get("depth") is None
            and own.get("net.depth", 4) == 4
            and getattr(own.net, "depth", 5) == 5
        )
        assert not hasattr(own, "nothing") and "nothing" not in own
        own.set("new.section.key", 1)
        own.net.encoder.depth = 2
        assert own.new.section.key == 1 and copy.deepcopy(own).net.encoder.depth == 2
    # The caller's object still makes sections.
    config.net.decoder.width = 4
    assert config.net.decoder.width == 4


@pytest.mark.parametrize("where", ["method", "attribute"])
@pytest.mark.parametrize("declared", ["", "in a setting", "in a loader"])
def test_how_samples_are_collated_is_named_where_no_setting_says_it(
    where: str, declared: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kind = type(
        "Collating",
        (Line,),
        {"collate_fn": lambda self, samples: samples} if where == "method" else {},
    )

    def init(self: Any, config: Any) -> None:
        super(kind, self).__init__(config)
        if where == "attribute":
            self.collate_fn = default_collate
        self.datasets["val"] = self.datasets["train"]
        if declared == "in a loader":
            self.dataloaders["test"] = DataLoader(
                self.datasets["train"], collate_fn=self.collate_fn
            )

    kind.__init__ = init  # type: ignore[misc]
    more = (
        {"dataloader": {"batch_size": 2, "val": {"collate_fn": default_collate}}}
        if declared == "in a setting"
        else {}
    )
    kind(settings(tmp_path, **more)).close()
    assert ("did you mean `dataloader.collate_fn`" in caplog.text) == (not declared)


def test_hook_of_another_trainer_is_named_unless_the_hook_here_is_overridden_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hook = {"on_epoch_end": lambda self: None}
    own = {"train_epoch": lambda self, split: Line.train_epoch(self, split)}
    for methods in (hook, {**hook, **own}):
        caplog.clear()
        type("Hooked", (Line,), methods)(settings(tmp_path / str(len(methods)))).close()
        said = "does not call the method 'on_epoch_end': did you mean `train_epoch`?"
        assert (said in caplog.text) == (methods is hook)
