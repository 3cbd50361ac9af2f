"""Whether a compiler is there, and what is said where none is."""

from __future__ import annotations

from pathlib import Path

import pytest

from danling.graph.compiler import check_compiler, cxx_command, cxx_version


def test_the_compiler_of_the_environment_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "c++"
    script.write_text("#!/bin/sh\necho 'mine 1.2'\necho more\n")
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    assert cxx_command() == str(script) and cxx_version() == "mine 1.2"
    check_compiler(None, "cpu")


@pytest.mark.parametrize("kind", ["missing", "failing"])
def test_none_that_runs_is_refused_with_the_mend(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "c++"
    if kind == "failing":
        script.write_text("#!/bin/sh\nexit 1\n")
        script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    assert cxx_version() is None
    for backend in (None, "inductor"):
        with pytest.raises(ValueError, match=r"does not run\. Install one"):
            check_compiler(backend, "cpu")
    check_compiler("aot_eager", "cpu")
