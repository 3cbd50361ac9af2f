"""Training in a notebook: a bar below the cell, and a cell that is run a second time, with a real kernel."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbclient
import nbformat
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import KernelManager
from support.pages import ROOT
from support.warm import interpreter

from danling.reporting import Progress

DEFINE = """\
import torch
from torch import nn
from torch.utils.data import TensorDataset
import danling as dl

class Toy(dl.Runner):
    def __init__(self, config):
        super().__init__(config)
        data = TensorDataset(torch.randn(32, 4), torch.randint(2, (32,)))
        self.datasets = {"train": data, "val": data}
        self.model = nn.Linear(4, 2)
        self.criterion = nn.CrossEntropyLoss()

def settings(**more):
    return dl.RunnerConfig(seed=1, epochs=2, dataloader={"batch_size": 8}, optim={"type": "sgd", "lr": 0.1}, **more)
"""
TRAIN = """\
runner = Toy(settings())
runner.train()
print("place", runner.workspace.dir.name, runner.train_state.epoch)
"""
NAMED = """\
runner = Toy(settings(dir="named"))
runner.train();
print("place", runner.workspace.dir.name, runner.train_state.epoch)
"""
GO_ON = """\
runner = Toy(settings(dir="named", auto_resume=True) | {"epochs": EPOCHS})
runner.train();
print("place", runner.workspace.dir.name, runner.train_state.epoch)
"""


class Manager(KernelManager):
    """Starts a kernel of this Python, whatever kernels are installed for others."""

    @property
    def kernel_spec(self) -> KernelSpec:
        """The kernel."""
        return KernelSpec(
            argv=[interpreter(), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        )


def run_cells(*cells: str) -> list[dict[str, str]]:
    """Run cells in one kernel, in the working directory, and return what each shows, by kind."""
    home = Path.cwd() / "home"
    home.mkdir()
    names = {
        name: str(home / name) for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR")
    }
    search = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    kernel = Manager()
    client = nbclient.NotebookClient(notebook, timeout=120, km=kernel)
    try:
        client.execute(env={**os.environ, **names, "PYTHONPATH": search})
    finally:
        kernel.shutdown_kernel(now=True)
        # The client logs a warning when it is collected, which is to happen here and not in a test that reads the log.
        client.kc.stop_channels()
        client.kc = None
        gc.collect()
    return [shown(cell.outputs) for cell in notebook.cells]


def shown(outputs: list[Any]) -> dict[str, str]:
    found: dict[str, str] = {"stdout": "", "stderr": "", "html": ""}
    for output in outputs:
        if output.output_type == "stream":
            found[output.name] += output.text
        elif output.output_type == "display_data":
            found["html"] += output.data.get("text/html", "")
    return found


def test_cells_show_a_bar_and_may_be_run_again() -> None:
    cells = run_cells(
        DEFINE,
        TRAIN,
        TRAIN,
        NAMED,
        NAMED,
        GO_ON.replace("EPOCHS", "3"),
        GO_ON.replace("EPOCHS", "4"),
    )
    first, second, named, again, on, further = cells[1:]
    html = first["html"]
    assert html.count("<progress") == 1 and 'max="8" value="8"' in html and "epoch 2/2" in html
    assert (
        "Finished: 8 updates" in first["stderr"]
        and "resume   Toy.from_checkpoint(" in first["stderr"]
    )
    assert "|" not in first["stdout"], "no bar of a terminal"
    # From scratch, a cell that is run again makes a run of its own, and says so; none of them fails.
    place = first["stdout"].split()[1]
    assert second["stdout"].split()[1:] == [f"{place}-2", "2"]
    assert "holds an earlier run with the same id, which stays as it is" in second["stderr"]
    assert named["stdout"].split()[1:] == ["named", "2"]
    assert again["stdout"].split()[1:] == ["named-2", "2"]
    assert "has an earlier run, which stays as it is: this one, from scratch, is" in again["stderr"]
    # With auto_resume it goes on, although the runner of the cell before is still there.
    assert (
        on["stdout"].split()[1:] == ["named", "3"]
        and "Resumed from latest at step 8" in on["stderr"]
    )
    assert (
        further["stdout"].split()[1:] == ["named", "4"]
        and "Resumed from latest at step 12" in further["stderr"]
    )


def drawn(total: int | None, **settings: Any) -> tuple[Progress, list[str]]:
    pages: list[str] = []

    def show(html: str) -> Callable[[str], object]:
        pages.append(html)
        return pages.append

    return Progress(total, display=show, **settings), pages


def test_the_words_of_the_kernel_are_no_settings() -> None:
    parsed = "config = dl.RunnerConfig(epochs=3).parse()\nprint(config.epochs, config.parse(['--epochs', '4']).epochs)"
    (cell,) = run_cells(f"import sys\nimport danling as dl\nassert '-f' in sys.argv\n{parsed}")
    assert cell == {"stdout": "3 4\n", "stderr": "", "html": ""}


def test_it_is_drawn_now_and_then_and_at_the_end() -> None:
    now = [0.0]
    bar, pages = drawn(100, clock=lambda: now[0])
    for step in range(100):
        now[0] += 0.01
        bar.update(step + 1)
    assert 3 <= len(pages) <= 6
    bar.close()
    assert 'value="100"' in pages[-1] and " left" not in pages[-1]
    assert ":00 left" in pages[2] or ":01 left" in pages[2]
    bar, pages = drawn(None)
    bar.set_epoch("epoch <1>")
    assert "epoch &lt;1&gt;" in pages[-1] and "<progress" not in pages[-1]
