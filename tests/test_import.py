"""What the import of a runner loads: a second of modules was once added here by one line, which no other test saw."""

import ast
import json
import subprocess
import sys
from pathlib import Path

from danling.runners.extensions import EXTENSIONS, STACKS

OURS = {"danling", "chanfig", "lazy_imports", "yaml", "_yaml"}
EXTENSIONS_OF_THE_LIBRARY = {
    "audit",
    "remote",
    "stream",
    "torchft",
    "elastic",
    "mesh",
    "deepspeed",
    "accelerate",
    "graph",
    "cli",
    "prove",
}
STACK_RUNNERS = {"parallel_runner", "deepspeed_runner", "accelerate_runner", "graph_runner"}
ROOT = Path(__file__).parents[1] / "danling"


def imported(path: Path) -> set[str]:
    """Return the modules of the library that run when a module runs: imports outside of TYPE_CHECKING, also within functions."""
    tree, package = ast.parse(path.read_text()), ["danling", *path.relative_to(ROOT).parts[:-1]]
    checked = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    ]
    skipped = {
        id(below) for node in checked for statement in node.body for below in ast.walk(statement)
    }
    found = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            found |= {str(value.value) for value in node.args if isinstance(value, ast.Constant)}
    return found


def test_no_module_of_the_core_imports_an_extension():
    wrong, seen = [], 0
    for path in sorted(ROOT.rglob("*.py")):
        room, *_ = path.relative_to(ROOT).parts
        if (
            room in EXTENSIONS_OF_THE_LIBRARY
            or path.stem in STACK_RUNNERS
            or path.name == "__main__.py"
        ):
            continue
        seen += 1
        named = {name.split(".")[1] for name in imported(path) if name.startswith("danling.")}
        wrong += [
            f"{path.relative_to(ROOT)} imports {name}"
            for name in sorted(named & EXTENSIONS_OF_THE_LIBRARY)
        ]
    assert seen > 100 and not wrong
    assert {"danling.torchft.member", "danling.mesh.axes"} <= imported(
        ROOT / "torchft" / "attach.py"
    )


def test_collaborators_of_a_runner_are_passed_as_arguments_outside_of_runners():
    reaches = []
    for path in sorted(ROOT.rglob("*.py")):
        if path.relative_to(ROOT).parts[0] == "runners":
            continue
        found = [
            node
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Attribute)
        ]
        reaches += [
            f"{path.relative_to(ROOT)}:{node.lineno}"
            for node in found
            if node.attr == "_parts" and ast.unparse(node.value).endswith("runner")
        ]
    assert not reaches


def test_table_names_existing_rooms_only():
    assert EXTENSIONS.keys() | STACKS.keys() | {
        "mesh",
        "stream",
        "cli",
        "prove",
    } == EXTENSIONS_OF_THE_LIBRARY | {
        "ddp",
        "parallel",
    }
    modules = [module for module, _ in EXTENSIONS.values()] + [
        module for module, _ in STACKS.values()
    ]
    assert all((ROOT.parent / f"{module.replace('.', '/')}.py").exists() for module in modules)


PROGRAM = """
import json, sys
import torch
before = set(sys.modules)
from danling import Runner, RunnerConfig, TorchRunner
imported = sorted(set(sys.modules) - before)

class Program(TorchRunner):
    def __init__(self, config):
        super().__init__(config)
        self.model, self.criterion = torch.nn.Linear(2, 1), torch.nn.MSELoss()
        data = [(torch.ones(2), torch.ones(1))] * 8
        self.datasets = {"train": data, "val": data}

common = {"dataloader": {"batch_size": 4}, "optim": {"type": "adamw"}, "ema": {"enabled": True}, "log": False}
with Program({**common, "dir": sys.argv[1], "epochs": 1}) as runner:
    runner.train()
again = {"epochs": 2, "resume": f"{sys.argv[1]}/checkpoints/latest.pth", "dir": sys.argv[1] + "-again"}
with Program({**common, **again}) as runner:
    assert runner.state.train.epoch == 1
    runner.train()
    runner.evaluate()
    runner.load_checkpoint("best")
loaded = {name.split(".")[1] for name in sys.modules if name.startswith("danling.")}
print(json.dumps([imported, sorted(loaded)]))
"""


def test_runner_imports_no_more_of_torch_than_torch_and_a_run_loads_no_extension(tmp_path):
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    imported, loaded = json.loads(done.stdout.splitlines()[-1])
    assert "danling.runners.torch_runner" in imported
    others = [
        name for name in imported if name.partition(".")[0] not in OURS | sys.stdlib_module_names
    ]
    assert not [name for name in others if "cython" not in name]
    assert {"runners", "training", "checkpoints"} <= set(
        loaded
    ) and not EXTENSIONS_OF_THE_LIBRARY & set(loaded)


def test_managers_are_importable_from_their_place_in_the_contract() -> None:
    from danling.runners import checkpoints

    names = (
        "FileCheckpointManager",
        "TorchDistributedCheckpointManager",
        "DeepSpeedCheckpointManager",
    )
    assert all(
        issubclass(getattr(checkpoints, name), checkpoints.CheckpointManager) for name in names
    )
