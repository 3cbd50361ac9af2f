"""Whether a compiler is there, and what is said where none is."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.toys import Line, settings

from danling.graph.compiler import check_compiler, cxx_command, cxx_version


def test_the_compiler_of_the_environment_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "c++"
    script.write_text("#!/bin/sh\necho 'mine 1.2'\necho more\n")
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    assert cxx_command() == str(script) and cxx_version() == "mine 1.2"
    check_compiler(None, "cpu", setting="compile.enable", otherwise="compile.enable=false")


@pytest.mark.parametrize("kind", ["missing", "failing"])
def test_construction_refuses_a_machine_without_a_compiler(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "c++"
    if kind == "failing":
        script.write_text("#!/bin/sh\nexit 1\n")
        script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    assert cxx_version() is None
    for backend in (None, "inductor"):
        for stack, setting in (("ddp", "compile.enable"), ("graph", "stack='graph'")):
            with pytest.raises(
                ValueError, match=rf"{setting}.* does not run\. Install one.*aot_eager"
            ):
                made(tmp_path, stack, backend)
    for disabled in ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"):
        with monkeypatch.context() as context:
            context.setenv(disabled, "1")
            check_compiler(None, "cpu", setting="compile.enable", otherwise="compile.enable=false")
    made(tmp_path, "ddp", "aot_eager").close()
    made(tmp_path, "graph", "aot_eager").close()


def made(root: Path, stack: str, backend: str | None) -> Line:
    compile = {"enable": True, "backend": backend}
    return Line(settings(root / "run", stack=stack, steps=1, auto_resume=True, compile=compile))
