"""No run is overwritten, and none is written by two at once."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.patience import until
from support.process_tree import descendants, kill_all
from support.processes import child, hold, run_processes
from support.programs import python, run_python
from support.toys import Small
from support.toys import settings as toy_settings

from danling.checkpoints import CheckpointError
from danling.utils.locks import WRITING, FileLock
from danling.workspace.run_directory import RunInUseError


def settings(**more: Any) -> dict[str, Any]:
    return {**toy_settings("unused", epochs=1), "dir": None, **more}


def trained(**more: Any) -> Path:
    with Small(settings(**more)) as runner:
        runner.train()
        return runner.dir


def contents(run: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(run)): path.read_bytes()
        for path in sorted(run.rglob("*"))
        if path.is_file()
    }


def test_a_second_start_from_scratch_leaves_the_first_run_as_it_is_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = trained()
    before = contents(first)
    caplog.clear()
    second, third = trained(), trained()
    assert contents(first) == before
    assert [second.name, third.name] == [f"{first.name}-2", f"{first.name}-3"]
    assert (
        sum(
            f"{first} holds an earlier run" in line and str(second) in line
            for line in caplog.messages
        )
        == 1
    )
    # It was said before training began.
    said, begun = (
        next(i for i, m in enumerate(caplog.messages) if text in m)
        for text in ("holds an earlier", "Training from")
    )
    assert said < begun


def test_auto_resume_goes_on_in_the_newest() -> None:
    first, second = trained(), trained()
    before = contents(first)
    with Small(settings(epochs=2, auto_resume=True)) as runner:
        assert runner.dir == second
        assert runner.state.train.epoch == 1
        runner.train()
    assert contents(first) == before


def test_directory_of_an_untrained_attempt_is_taken_over() -> None:
    with Small(settings()) as runner:
        first = runner.dir
    assert trained() == first


def test_failed_start_leaves_no_directory() -> None:
    class Broken(Small):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            assert self.workspace.dir.is_dir()  # claimed already
            self.model = None

    with pytest.raises(ValueError, match="model"):
        Broken(settings())
    assert not Path("experiments").exists()


def start_together(root: str) -> str:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    return str(trained(workspace_root=root))


def test_ten_simultaneous_starts_have_a_directory_each(tmp_path: Path) -> None:
    directories = run_processes(start_together, str(tmp_path / "root"), world_size=10)
    names = {Path(directory).name for directory in directories}
    first = min(names, key=len)
    assert names == {first, *(f"{first}-{number}" for number in range(2, 11))}


def place_of_rank(config: dict[str, Any]) -> str:
    with Small(config) as runner:
        runner.train()
        return str(runner.dir)


def test_all_ranks_of_a_job_share_the_directory_of_rank_0() -> None:
    first = trained(
        dataloader={"batch_size": 8}
    )  # as many samples of an update as two ranks with four
    assert set(run_processes(place_of_rank, settings(), world_size=2)) == {
        str(first.resolve()) + "-2"
    }


def test_named_directory_with_a_run_is_refused_and_nothing_is_written() -> None:
    run = trained(dir="mine")
    before = contents(run)
    with pytest.raises(
        ValueError,
        match=r"(?s)dir='.*mine', which holds one.*auto_resume.*resume.*another directory",
    ):
        Small(settings(dir="mine"))
    with pytest.raises(ValueError, match="which holds one"):
        Small(settings(dir="mine", pretrained="mine/checkpoints/latest.pth"))
    assert contents(run) == before
    assert trained(dir="mine", epochs=2, auto_resume=True) == run
    assert trained(dir="mine", epochs=3, resume="latest") == run


def test_resume_from_elsewhere_does_not_overwrite_a_named_directory() -> None:
    trained(dir="first")
    second = trained(dir="second")
    before = contents(second)
    for more in ({}, {"auto_resume": True}):
        with pytest.raises(
            ValueError, match=r"resume='first/checkpoints/latest.pth', which is elsewhere"
        ):
            Small(settings(dir="second", epochs=2, resume="first/checkpoints/latest.pth", **more))
    assert contents(second) == before


def test_looking_needs_no_right_and_training_there_is_refused() -> None:
    run = trained(dir="mine")
    before = contents(run)
    with Small(
        settings(dir="mine") | {"checkpoint": {"load_only": True}, "auto_resume": True}
    ) as looker:
        assert looker.state.train.epoch == 1
    with Small(settings(dir="mine") | {"checkpoint": {"load_only": True}}) as looker:
        looker.load_checkpoint("latest")
    looker = Small(settings(dir="mine") | {"checkpoint": {"load_only": True}})
    with looker, pytest.raises(ValueError, match="holds one, and checkpoint.load_only"):
        looker.train()
    assert contents(run) == before


def test_a_second_runner_of_one_process_is_refused_and_a_reader_is_not() -> None:
    with Small(settings(dir="mine")) as runner:
        runner.train()
        with pytest.raises(
            RunInUseError, match=rf"process {os.getpid()} on .* since .* this process"
        ):
            Small(settings(dir="mine", auto_resume=True))
        with Small(
            settings(dir="mine", auto_resume=True, checkpoint={"load_only": True})
        ) as reader:
            assert reader.state.train.epoch == 1
        runner.config.epochs = 2
        runner.train()
    assert trained(dir="mine", epochs=3, auto_resume=True).name == "mine"
    assert not list(Path("mine").rglob(".lock"))


PROGRAM = """
import os, sys, time
import torch
from torch import nn
from torch.utils.data import TensorDataset
import danling as dl
from danling.workspace import run_directory

run_directory._WAIT_SECONDS = float(sys.argv.pop(1))

class Slow(dl.Runner):
    def __init__(self, config):
        super().__init__(config)
        self.datasets = {"train": TensorDataset(torch.randn(64, 4), torch.randint(2, (64,)))}
        self.model = nn.Linear(4, 2)
        self.criterion = nn.CrossEntropyLoss()

    def train_step(self, data):
        time.sleep(0.05)
        return super().train_step(data)

config = dl.RunnerConfig(seed=1, epochs=2, dataloader={"batch_size": 4, "num_workers": 1}, optim={"type": "sgd", "lr": 0.1})
config.parse()
print("process", os.getpid(), flush=True)
with Slow(config) as runner:
    runner.train()
    print("at epoch", runner.state.train.epoch)
"""


def test_two_processes_in_one_directory_and_the_directory_of_a_killed_one(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    latest = tmp_path / "mine" / "checkpoints" / "latest.pth"
    with python(script, "0", "--dir", "mine", "--epochs", "5000", warm=True) as first:
        first.wait_until(latest.exists)
        pid = int(first.output.split()[1])
        exit_code, output = run_python(
            script, "0.5", "--dir", "mine", "--auto_resume", "true", warm=True
        )
        assert exit_code == 1
        assert f"in use by process {pid} on " in output and "RunInUseError" in output
        assert "waiting up to" in output
        assert first.running
        # One that comes while the first is dying waits for it, and a kill gives the directory back at once: loader workers that are
        # left do not keep it.
        with python(
            script, "60", "--dir", "mine", "--auto_resume", "true", "--epochs", "1", warm=True
        ) as second:
            second.wait_for_output("waiting up to 60 seconds")
            workers = descendants(pid)
            os.kill(pid, 9)
            assert second.wait().exit_code == 0, second.output
        kill_all(workers)


def test_background_writer_outliving_its_run_is_waited_for(tmp_path: Path) -> None:
    run = trained(dir="mine", checkpoint={"backend": "dcp"})
    file = run / "checkpoints" / f"{WRITING}here-1"
    with child(lambda: hold(file, tmp_path / "held")) as pid:
        until((tmp_path / "held").exists)
        config = {**settings(dir="mine", auto_resume=True), "comm": {"init_timeout_seconds": 1.0}}
        with pytest.raises(RunInUseError, match=rf"in the background by process {pid} "):
            Small(config)
    with Small(config) as runner:
        assert runner.state.train.epoch == 1
    assert not file.exists()


def test_program_copying_its_run_directory_stays_its_writer_or_is_warned(tmp_path: Path) -> None:
    with Small(settings(dir="mine", checkpoint={"async_enabled": False})) as runner:
        runner.train()
        shutil.copytree("mine", "copy")  # which closes the file of the lock, and so gives it up
        runner.save_checkpoint()
        with child(lambda: _report_taken(tmp_path / "asked")):
            until((tmp_path / "asked").exists)
        assert (tmp_path / "asked").read_text() == "True"
        shutil.copytree("mine", "again")
        with child(lambda: hold(Path("mine/.lock"), tmp_path / "held")) as pid:
            until((tmp_path / "held").exists)
            with pytest.raises(
                CheckpointError,
                match=f"process {pid} on .* has taken since .lock there was removed, or opened and closed",
            ):
                runner.save_checkpoint()


def _report_taken(marker: Path) -> None:
    marker.with_suffix(".part").write_text(str(FileLock(Path("mine/.lock")).is_taken()))
    marker.with_suffix(".part").rename(marker)
