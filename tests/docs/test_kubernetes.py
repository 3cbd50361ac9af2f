"""The Job of the page about Kubernetes: its YAML, its arguments, and its probes, which are run on files of real runs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.pages import ROOT
from support.toys import Small, settings

import danling as dl
from danling.supervision.signals import EXIT_CODES

PAGE = (ROOT / "docs" / "guides" / "kubernetes.md").read_text()
(JOB,) = (yaml.safe_load(block) for block in re.findall(r"```yaml.*?\n(.*?)```", PAGE, re.DOTALL))
SPEC = JOB["spec"]["template"]["spec"]
(CONTAINER,) = SPEC["containers"]


def test_job_replaces_a_stopped_pod() -> None:
    assert (JOB["apiVersion"], JOB["kind"], SPEC["restartPolicy"]) == ("batch/v1", "Job", "Never")
    evicted, stopped = JOB["spec"]["podFailurePolicy"]["rules"]
    assert evicted == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}
    assert stopped["onExitCodes"] == {
        "containerName": CONTAINER["name"],
        "operator": "In",
        "values": [EXIT_CODES["terminate"]],
    }
    assert SPEC["terminationGracePeriodSeconds"] > 30
    assert {mount["name"] for mount in CONTAINER["volumeMounts"]} == {
        volume["name"] for volume in SPEC["volumes"]
    }


def test_the_arguments_of_the_container_are_settings() -> None:
    assert CONTAINER["command"] == ["python", "digits.py"]
    config = dl.RunnerConfig(epochs=1)
    config.parse(CONTAINER["args"])
    assert config.auto_resume is True and config.dir == "/storage/run"
    assert (
        str(config.checkpoint.remote.url).startswith("s3://")
        and config.checkpoint.remote.required is True
    )


def probe(file: Path) -> int:
    """Run the liveness probe on a file."""
    python, *rest = CONTAINER["livenessProbe"]["exec"]["command"]
    assert python == "python" and str(rest).count("/storage/run/progress.json") == 1
    command = [
        sys.executable,
        *(word.replace("/storage/run/progress.json", str(file)) for word in rest),
    ]
    return subprocess.run(command, capture_output=True).returncode


@pytest.mark.parametrize(
    "state",
    ["starting", "running", "evaluating", "saving", "stopping", "stopped", "done", "failed"],
)
def test_probe_fails_without_progress(tmp_path: Path, state: str) -> None:
    with Small(settings(tmp_path, epochs=1)) as runner:
        runner.train()
    file = tmp_path / "progress.json"
    found = json.loads(file.read_text())
    assert f"| `{state}`" in PAGE or f", `{state}`" in PAGE
    file.write_text(json.dumps({**found, "state": state}))
    assert probe(file) == 0
    file.write_text(json.dumps({**found, "state": state, "time": time.time() - 3000}))
    assert probe(file) == (state in ("running", "evaluating", "saving", "stopping"))


def test_the_page_lists_the_keys_of_the_file(tmp_path: Path) -> None:
    with Small(settings(tmp_path, epochs=1)) as runner:
        runner.train()
    written: dict[str, Any] = json.loads((tmp_path / "progress.json").read_text())
    (example,) = (json.loads(block) for block in re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL))
    assert list(example) == list(written)
    rows = re.findall(
        r"^\| (`.*?) \|", PAGE.partition("| key |")[2].partition("| state |")[0], re.MULTILINE
    )
    assert [name for row in rows for name in re.findall(r"`(\w+)`", row)] == list(written)
