"""Which versions of DeepSpeed are taken."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import torch
from support.pages import ROOT
from support.stacks import needs_deepspeed

from danling.deepspeed.engine import LOWEST_VERSION, import_deepspeed


@needs_deepspeed
@pytest.mark.parametrize("version", ["0.9.10", "0.19.3", "0.19.7+cu130"])
def test_version_below_the_tested_one_is_refused(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / f"deepspeed-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: deepspeed\nVersion: {version}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError) as refused:
        import_deepspeed(torch.device("cpu"))
    assert f"Expected deepspeed>={LOWEST_VERSION}" in str(refused.value)
    assert (
        f"Received: deepspeed {version}. Run `pip install 'deepspeed>={LOWEST_VERSION}'`."
        in str(refused.value)
    )


def test_lowest_version_is_the_tested_one() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    assert extras["deepspeed"][0].partition(";")[0] == f"deepspeed>={LOWEST_VERSION}"
    assert f"deepspeed=={LOWEST_VERSION}" in pins
    assert (
        f"torchft-nightly=={extras['torchft'][0].partition(';')[0].removeprefix('torchft-nightly>=')}"
        in pins
    )
    assert f"deepspeed>={LOWEST_VERSION}" in (ROOT / "docs" / "guides" / "deepspeed.md").read_text()
