"""How the command starts and ends: as a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from support.recorded import danling

import danling as package
from danling.cli.main import SUBCOMMANDS, main, parser

HEAVY = ("torch", "chanfig", "numpy", "matplotlib")


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["env"],
        ["runs", "."],
        ["verify", "."],
        ["plot", "--help"],
        ["estimate", "--params", "7B"],
    ],
)
def test_commands_without_tensors_do_not_import_torch(words: list[str]) -> None:
    program = (
        "import sys\nfrom danling.cli.main import main\n"
        f"try:\n    main({words!r})\nexcept SystemExit:\n    pass\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.stderr.splitlines()[-1] == "[]"


def test_env_names_versions_and_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    monkeypatch.setenv("TORCH_TOKEN", "hush")
    done = danling("env", "--json")
    facts = json.loads(done.stdout)
    assert done.returncode == 0 and facts["danling"] == package.__version__
    assert facts["packages"]["torch"] == version("torch") and facts["packages"][
        "pyyaml"
    ] == version("pyyaml")
    assert (
        facts["variables"]["NCCL_DEBUG"] == "INFO"
        and facts["variables"]["NCCL_P2P_DISABLE"] == "1"
        and "hush" not in done.stdout
    )
    assert version("torch") in danling("env").stdout


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["runs", "nowhere"], 3),
        (["verify", "nowhere"], 3),
        (["runs", "."], 3),
        (["plot", ".", "-o", "curves.pdf"], 2),
        (["estimate"], 2),
        (["doctor", "--timeout", "-1"], 2),
        (["bogus"], 2),
        ([], 2),
    ],
)
def test_exit_codes(words: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        ended = main(words)
    except SystemExit as end:
        ended = int(end.code or 0)
    assert ended == code
    assert capsys.readouterr().err.startswith(("danling: Expected", "usage: danling"))


def test_every_subcommand_explains_itself() -> None:
    assert set(SUBCOMMANDS) <= set(parser().format_help().split())
    for name in SUBCOMMANDS:
        with pytest.raises(SystemExit) as end:
            main([name, "--help"])
        assert end.value.code == 0


def test_closed_reader_is_no_error(tmp_path: Path) -> None:
    for index in range(3000):
        (tmp_path / f"run{index}").mkdir()
        (tmp_path / f"run{index}" / "results.json").write_text("{}")
    command = f"{sys.executable} -m danling runs . | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("run") and done.stderr == ""


def test_names_of_the_package_are_found_when_they_are_used() -> None:
    assert all(
        getattr(package, name) is not None and name in dir(package) for name in package.__all__
    )
    with pytest.raises(AttributeError, match="Rnner"):
        package.Rnner  # noqa: B018


def test_rooms_are_attributes_before_anything_imports_them() -> None:
    program = "import danling; print(danling.reporting.trackers.__name__, danling.checkpoints.manifest.__name__)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "danling.reporting.trackers danling.checkpoints.manifest\n", done.stderr
