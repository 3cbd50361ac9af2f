"""Packages that do not fit the torch or numpy beside them: told with the cause and the mend, whatever their import does."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import pytest

from danling.cli import environment, pairs
from danling.cli.pairs import Import, examine_pairs, import_apart, judge


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of packages, for this process and for those that it starts."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    return tmp_path


def make(place: Path, name: str, code: str, *, built: str = "", asks: str = "", version: str = "1.0") -> None:
    (place / name).mkdir()
    (place / name / "__init__.py").write_text(code)
    if built:
        (place / name / "version.py").write_text(built)
    about = place / f"{name}-{version}.dist-info"
    about.mkdir()
    requires = f"Requires-Dist: {asks}\n" if asks else ""
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}")


def test_a_crash_and_an_error_end_nothing_but_their_own_import(place: Path) -> None:
    make(place, "fine", "import sys; print('{}'); print('as it should', file=sys.stderr)")
    make(place, "crashing", f"import os; os.kill(os.getpid(), {int(signal.SIGSEGV)})")
    make(place, "leaving", "import os; os._exit(0)")
    make(place, "raising", "import sys; sys.exit('no')")
    found = import_apart(["fine", "crashing", "raising", "leaving", "missing", "fine"], 60)
    assert found["fine"].error is None and "as it should" in found["fine"].said
    assert found["crashing"].error == "the import ended by signal 11"
    assert found["leaving"].error == "the import ended with exit code 0"
    assert found["raising"].error == "SystemExit: no"
    assert found["missing"].error == "ModuleNotFoundError: No module named 'missing'"
    assert import_apart([], 60) == {}


def test_an_import_without_end_is_ended_in_its_own_time_and_those_behind_it_have_theirs(place: Path) -> None:
    make(place, "waiting", "import threading; threading.Event().wait()")
    make(place, "fine", "")
    begin = time.monotonic()
    found = import_apart(["waiting", *(f"missing_{number}" for number in range(300)), "fine"], 0.5)
    assert time.monotonic() - begin < 60, "it had the time of all 300"
    assert found["waiting"].error == "no end in 0.5 s" and found["fine"].error is None


def test_a_package_for_another_device_is_told_with_the_mend(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = "__version__ = '0.29.2+cu132'\nfrom torchvision.extension import _check_cuda_version\n"
    code = "raise RuntimeError('operator torchvision::nms does not exist')"
    make(place, "torchvision", code, built=built, asks="torch==2.1.0", version="0.29.2")
    make(place, "torch", "", built="__version__ = '2.13.0+cpu'\ncuda: str | None = None\n", version="2.13.0")
    monkeypatch.delitem(
        sys.modules, "torch", raising=False
    )  # its place is looked up, as it would be in a process of the doctor's
    monkeypatch.setattr(pairs, "BUILT_FOR", {"torchvision": "torch", "torchaudio": "torch", "torchtext": "torch"})
    ((name, state, detail, _),) = examine_pairs(60)
    assert (name, state) == ("torchvision with torch", "failed")
    for part in (
        "RuntimeError: operator torchvision::nms does not exist",
        "it asks for torch==2.1.0, and 2.13.0 is here",
        "it is built for CUDA 13.2, torch for the CPU",
        "--index-url https://download.pytorch.org/whl/cpu torchvision` in the version for torch 2.13.0",
    ):
        assert part in detail


@pytest.mark.parametrize(
    ("text", "cuda"),
    [
        ("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n", ""),
        ("__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\n", "13.0"),
        ('__version__ = "0.29.2+cu126"\n', "12.6"),
        ("__version__ = '0.29.2'\n", None),
        ("__version__ = '2.13.0+rocm7.0'\ncuda: Optional[str] = None\nhip: Optional[str] = '7.0.51831'\n", None),
        (
            "__version__ = '2.13.0+xpu'\ncuda: Optional[str] = None\nhip: Optional[str] = None\nxpu: Optional[str] = '20260000'\n",
            None,
        ),
    ],
)
def test_the_device_that_a_package_was_built_for(text: str, cuda: str | None, place: Path) -> None:
    make(place, "built_for_it", "raise RuntimeError", built=text)
    assert environment.cuda_of_build("built_for_it") == cuda
    assert environment.cuda_of_build("no_such_package") is None


def test_no_build_for_the_cpu_is_advised_beside_a_torch_for_another_device(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(place, "torchaudio", "raise OSError('libtorchaudio.so')", version="2.12.0")
    make(place, "torch", "", built="cuda: str | None = None\nhip: str | None = '7.0'\n", version="2.13.0")
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    state, detail = judge("torchaudio", "torch", Import("OSError: libtorchaudio.so"))
    assert state == "failed" and "--no-deps torchaudio` in the version for torch 2.13.0" in detail


def test_old_numpy_and_complaints_of_an_import_that_works(place: Path) -> None:
    make(place, "pandas", "", asks="numpy<2", version="2.0.0")
    old = Import(None, "A module that was compiled using NumPy 1.x cannot be run in\nNumPy 2.4.6 as it may crash.")
    state, detail = judge("pandas", "numpy", old)
    assert state == "failed" and "it asks for numpy<2" in detail and "built for numpy 1" in detail
    assert "Run `pip install --upgrade pandas`" in detail
    make(place, "torchao", "", version="0.9")
    state, detail = judge(
        "torchao", "torch", Import(None, "W\nSkipping import of cpp extensions: incompatible torch\n")
    )
    assert (state, detail) == ("ok", "0.9, imports; Skipping import of cpp extensions: incompatible torch")
    assert judge("torchao", "torch", Import())[1] == "0.9, imports"


def test_what_cannot_be_read_of_a_package_is_told(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(place, "pandas", "", asks="numpy (((", version="2.0.0")
    monkeypatch.setattr(pairs, "BUILT_FOR", {"pandas": "numpy"})
    ((_, state, detail, _),) = examine_pairs(60)
    assert (state, detail) == ("ok", "2.0.0, imports")
    (place / "pandas-2.0.0.dist-info" / "METADATA").write_bytes(b"Version: 2.0.0\nRequires-Dist: numpy\n\xff\xfe")
    ((_, state, detail, _),) = examine_pairs(60)
    assert state == "failed" and "what is installed of it cannot be read: UnicodeDecodeError" in detail
    assert environment.installed("pandas") == "unknown"
