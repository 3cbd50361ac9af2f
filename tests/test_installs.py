"""An installed danling is found from a directory that contains a folder of that name, such as a clone of the repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from importlib.util import find_spec
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PROGRAM = """
from importlib.metadata import version
from importlib.resources import files
import torch
import danling as dl

class Toy(dl.TorchRunner):
    def __init__(self, config):
        super().__init__(config)
        self.model, self.criterion = torch.nn.Linear(4, 2), torch.nn.CrossEntropyLoss()
        self.datasets["train"] = [(torch.ones(4), 1)] * 4

with Toy({"epochs": 1, "optim": {"type": "sgd", "lr": 0.1}, "dataloader": {"batch_size": 2}}) as runner:
    runner.train()
print(dl.__file__, version("danling"), files("danling").joinpath("py.typed").is_file(), runner.train_state.global_step)
"""


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command as in a shell of the user's: without what the tests set for Python."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTHON")
    }
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def modules(place: Path) -> set[Path]:
    return {path.relative_to(place) for path in place.joinpath("danling").rglob("*.py")}


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A commit of what the working tree contains, in a folder called `danling`."""
    folder = tmp_path_factory.mktemp("sources") / "danling"
    shutil.copytree(
        REPOSITORY / "danling", folder / "danling", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", ".gitignore"):
        shutil.copy(REPOSITORY / name, folder)
    for words in ("init -q", "add .", "-c user.name=A -c user.email=a@b.c commit -q -m Everything"):
        run("git", *words.split(), cwd=folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["editable", "url", "wheel"])
def test_a_folder_called_danling_does_not_hide_it(kind: str, clone: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "fresh", with_pip=False)
    python = tmp_path / "fresh" / "bin" / "python"
    packages = Path(
        run(
            python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path
        ).strip()
    )
    # torch and the other requirements come from the environment of the tests; path files of that one are not read.
    (packages / "requirements.pth").write_text(sysconfig.get_path("purelib"))
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    options = ["--no-deps", *(["--no-build-isolation"] if find_spec("hatchling") else [])]
    source = {
        "editable": ["-e", str(clone)],
        "url": [f"git+file://{clone}"],
        "wheel": [str(clone)],
    }[kind]
    run(*pip, "--python", python, "install", "--ignore-installed", *options, *source, cwd=tmp_path)

    place = clone.parent if kind == "editable" else tmp_path
    (place / "danling").mkdir(exist_ok=True)
    (place / "train.py").write_text(PROGRAM)
    where, version, typed, steps = run(python, "train.py", cwd=place).split()[-4:]
    installed = clone if kind == "editable" else packages
    assert Path(where) == installed / "danling" / "__init__.py"
    assert (version, typed, steps) == ("0.2.0", "True", "2")
    assert modules(installed) == modules(clone)
    assert "usage: danling" in run(python.with_name("danling"), "--help", cwd=place)
