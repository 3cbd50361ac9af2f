"""Each planted fault changes the result that it names, and nothing once its switch is off."""

from __future__ import annotations

import enum
import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from explore.planted import PLANTED
from explore.planted_form import REACHED, VARIABLE, active, noting
from support.processes import run_processes
from support.toys import line_of, settings
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import danling as dl
from danling.mesh.units import UnitOrderError
from danling.training.outcome import NonFiniteError
from danling.utils.tensors import local_part


def trained(make: Callable[[Any], dl.Runner], root: Path, *stops: int, **more: Any) -> Any:
    """Train to each of some updates, in another runner each, and return the last one."""
    for steps in stops:
        with make(settings(root, steps=steps, auto_resume=True, **more)) as runner:
            runner.train()
    return runner


class Line(dl.Runner):
    """A linear model of sums."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        torch.manual_seed(1)
        self.model, self.criterion = nn.Linear(3, 1), nn.MSELoss()
        self.datasets = {"train": line_of(16)}


# Each program returns whether the result is right.


def weightless_micro_batch_adds_nothing(root: Path) -> bool:
    class Classes(Line):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model = nn.Linear(3, 2)
            self.criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 0.0]))
            targets = torch.tensor([0] * 4 + [1] * 4)
            self.datasets = {"train": TensorDataset(line_of(8).tensors[0], targets)}

    options = {"accum_steps": 2, "dataloader": {"batch_size": 4, "shuffle": False}}
    try:
        trained(Classes, root, 2, **options)
    except NonFiniteError:
        return False
    return True


class Spoils(torch.optim.SGD):
    """Makes weights NaN in its step, of a finite gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.param_groups[0]["params"][0].fill_(math.nan)


def weights_with_nan_are_refused(root: Path) -> bool:
    class Spoilt(Line):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.optimizer = Spoils(self.model.parameters(), lr=0.1)

    try:
        trained(Spoilt, root, 1, optim={})
    except NonFiniteError:
        return True
    return False


def micro_batches_have_masks_of_their_own(root: Path) -> bool:
    masks = []

    class Noisy(Line):
        def train_step(self, data: Any) -> Any:
            masks.append(torch.rand(8))
            return super().train_step(data)

    trained(Noisy, root, 1, accum_steps=2)
    return not torch.equal(*masks)


def skipped_updates_are_not_counted(root: Path) -> bool:
    class Counting(Line):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.seen = 0
            inputs, targets = line_of(16).tensors
            inputs[0] = math.nan
            self.datasets = {"train": TensorDataset(inputs, targets)}

        def train_step(self, data: Any) -> Any:
            self.seen += 1
            return super().train_step(data)

    runner = trained(Counting, root, 3, skip_nonfinite_grad=True, **{"dataloader.shuffle": False})
    return bool(runner.seen == 3)


def zero_grad_in_train_step_is_refused(root: Path) -> bool:
    class Dropping(Line):
        def train_step(self, data: Any) -> Any:
            self.optimizer.zero_grad()
            return super().train_step(data)

    return is_refused(lambda: trained(Dropping, root, 2, accum_steps=2), "Remove zero_grad")


def schedule_step_in_train_step_is_refused(root: Path) -> bool:
    class Hurrying(Line):
        def train_step(self, data: Any) -> Any:
            returned = super().train_step(data)
            self.scheduler.step()
            return returned

    return is_refused(
        lambda: trained(Hurrying, root, 2, scheduler={"type": "linear"}), "Remove scheduler.step"
    )


def is_refused(run: Callable[[], object], text: str) -> bool:
    try:
        run()
    except ValueError as error:
        return text in str(error)
    return False


def averages_of(
    model: nn.Module, root: Path
) -> tuple[Mapping[str, Tensor], list[dict[str, Tensor]]]:
    """Return the averages of a run, and the states of its model after each update."""
    states = []

    class Averaging(Line):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model = model

        def step(self) -> Any:
            outcome = super().step()
            states.append(
                {name: value.clone() for name, value in self.unwrapped_model.state_dict().items()}
            )
            return outcome

    return trained(
        Averaging, root, 3, **{"ema.enabled": True, "ema.decay": 0.5}
    ).ema.weights, states


def buffers_are_copied(root: Path) -> bool:
    averages, states = averages_of(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)), root)
    return torch.equal(averages["0.running_mean"], states[-1]["0.running_mean"])


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3, 1), 2 + 1j))

    def forward(self, inputs: Tensor) -> Tensor:
        return (inputs.to(torch.complex64) @ self.weight).real


def complex_weights_are_averaged(root: Path) -> bool:
    averages, states = averages_of(Complex(), root)
    mean = torch.full((3, 1), 2 + 1j)
    for state in states:
        mean = 0.5 * mean + 0.5 * state["weight"]
    return torch.allclose(averages["weight"], mean)


def pretrained_takes_what_was_evaluated(root: Path) -> bool:
    before = trained(Line, root / "before", 3, **{"ema.enabled": True, "ema.decay": 0.9})
    config = settings(
        root / "after", steps=1, pretrained=str(root / "before/checkpoints/latest.pth")
    )
    with Line(config) as after:
        return torch.equal(after.model.weight.detach(), before.ema.weights["weight"])


def rate_falls_to_the_new_end(root: Path) -> bool:
    with Line(settings(root, steps=2, scheduler={"type": "linear"})) as runner:
        runner.train()
        runner.config.steps = 4
        runner.train_epoch = runner.train_epoch  # type: ignore[method-assign]
        rate = runner.optimizer.param_groups[0]["lr"]
    return math.isclose(rate, 0.05, rel_tol=1e-6)


class Blocks(nn.Module):
    """Blocks of one shape, of which a forward uses one."""

    used = 0

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(3, 3) for _ in range(2)])

    def forward(self, inputs: Tensor) -> Tensor:
        return self.blocks[self.used](inputs)  # type: ignore[no-any-return]


def train_blocks(root: str, axes: dict[str, int], plan: list[list[int]]) -> tuple[bool, float]:
    """Return whether the run was refused, and the norm of the gradient of the block that the first micro-batch used.

    The plan has the number of the block by micro-batch and rank.
    """
    norms = []

    class Chosen(dl.Runner):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            inputs = line_of(32).tensors[0]
            self.model, self.criterion = Blocks(), nn.MSELoss()
            self.datasets = {"train": TensorDataset(inputs, inputs)}

        def train_step(self, data: Any) -> Any:
            self.model.used = plan[self.window.count - 1][self.rank]
            return super().train_step(data)

        def clip_gradients(self, grad_norm: Tensor) -> None:
            gradient = self.model.blocks[plan[0][0]].weight.grad
            norms.append(0.0 if gradient is None else float(local_part(gradient).norm()))

    more = {
        "stack": "parallel",
        "parallel": {"axes": axes},
        "accum_steps": len(plan),
        "fsdp": {"blocks": ["Linear"]},
    }
    with active():
        try:
            with Chosen(settings(root, steps=1, checkpoint={"load_only": True}, **more)) as runner:
                runner.train()
        except UnitOrderError:
            return True, 0.0
    return False, norms[0]


def first_block_has_a_gradient(root: Path) -> bool:
    arguments = (str(root), {"replicate": 2, "shard": 2}, [[0] * 4, [1] * 4])
    return all(norm > 0 for _, norm in run_processes(train_blocks, *arguments, world_size=4))


def different_blocks_are_refused(root: Path) -> bool:
    return all(
        refused for refused, _ in run_processes(train_blocks, str(root), {"shard": 2}, [[0, 1]])
    )


class Lines(logging.Handler):
    """Keeps the lines of the library's log."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def __enter__(self) -> list[str]:
        logging.getLogger("danling").addHandler(self)
        return self.texts

    def __exit__(self, *_: object) -> None:
        logging.getLogger("danling").removeHandler(self)


def attribute_of_the_loss_is_named(root: Path) -> bool:
    class Counting(Line):
        seen = 0

        def train_step(self, data: Any) -> Any:
            self.seen += 1
            return super().train_step(data)

    with Lines() as lines:
        trained(
            Counting,
            root,
            1,
            gradient_sum="canonical",
            dataloader={"global_batch_size": 4, "micro_batch_size": 2},
        )
    return any("changed within the first update" in line for line in lines)


class Colour(enum.Enum):
    RED = 0
    GREEN = 1
    BLUE = 2


def is_restored(root: Path, begin: Any, change: Callable[[Any], Any]) -> bool:
    """Whether an attribute that each update changes is after a resume what it was in the run that was left alone."""

    class Keeping(Line):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.kept = begin

        def train_step(self, data: Any) -> Any:
            self.kept = change(self.kept)
            return super().train_step(data)

    whole_run, parts = trained(Keeping, root / "whole", 3), trained(Keeping, root / "parts", 2, 3)
    return bool(whole_run.kept == parts.kept)


def dictionary_by_objects_is_named(root: Path) -> bool:
    class Keeping(Line):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.kept = {Lines(): 0}

    with Lines() as lines:
        trained(Keeping, root, 1)
    return any("self.kept" in line for line in lines)


class Drawing(nn.Linear):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__(3, 1)
        self.generator = torch.Generator().manual_seed(7)

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs + torch.randn(inputs.shape, generator=self.generator))


def generators_of_modules_come_back(root: Path) -> bool:
    class Held(Line):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model = Drawing()

    whole_run, parts = trained(Held, root / "whole", 3), trained(Held, root / "parts", 2, 3)
    return torch.equal(whole_run.model.weight, parts.model.weight)


class Counted(Dataset[tuple[Tensor, Tensor]]):
    """Points with a count that training writes."""

    def __init__(self) -> None:
        self.count = 0

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = line_of(16).tensors
        return inputs[index], targets[index]


class Stateful(Counted):
    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.count = state["count"]


def counting_runner(dataset: type[Counted]) -> type[Line]:
    class Writing(Line):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.datasets = {"train": dataset()}

        def train_step(self, data: Any) -> Any:
            self.datasets["train"].count += 1
            return super().train_step(data)

    return Writing


def state_of_a_dataset_comes_back(root: Path) -> bool:
    return bool(trained(counting_runner(Stateful), root, 2, 3).datasets["train"].count == 3)


def changed_dataset_is_named(root: Path) -> bool:
    with Lines() as lines:
        trained(counting_runner(Counted), root, 1)
    return any("has changed since its pass began: count" in line for line in lines)


PROGRAMS: dict[str, Callable[[Path], bool]] = {
    "weightless_micro_batch_is_nan": weightless_micro_batch_adds_nothing,
    "weights_with_nan_are_saved": weights_with_nan_are_refused,
    "micro_batches_draw_alike": micro_batches_have_masks_of_their_own,
    "skipped_update_keeps_attributes": skipped_updates_are_not_counted,
    "zero_grad_in_train_step_is_unseen": zero_grad_in_train_step_is_refused,
    "schedule_advances_twice": schedule_step_in_train_step_is_refused,
    "buffers_are_averaged": buffers_are_copied,
    "averages_of_complex_weights_are_copies": complex_weights_are_averaged,
    "pretrained_takes_trained_weights": pretrained_takes_what_was_evaluated,
    "larger_budget_keeps_the_curve": rate_falls_to_the_new_end,
    "changed_attribute_is_not_named": attribute_of_the_loss_is_named,
    "enumerations_are_not_saved": lambda root: is_restored(
        root, Colour.RED, lambda now: Colour((now.value + 1) % 3)
    ),
    "numbers_of_numpy_are_not_saved": lambda root: is_restored(
        root, numpy.int64(0), lambda now: now + numpy.int64(1)
    ),
    "bytes_are_not_saved": lambda root: is_restored(root, b"", lambda now: now + b"x"),
    "values_without_encoding_are_not_named": dictionary_by_objects_is_named,
    "generators_of_modules_are_not_seeded": generators_of_modules_come_back,
    "state_of_a_dataset_is_not_saved": state_of_a_dataset_comes_back,
    "changed_dataset_is_not_named": changed_dataset_is_named,
}
PROGRAMS_ON_RANKS: dict[str, Callable[[Path], bool]] = {
    "gradient_of_hsdp_comes_late": first_block_has_a_gradient,
    "blocks_are_mixed_up": different_blocks_are_refused,
}


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.name)
def test_switch_changes_its_result(
    planted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a run of the right library notes that the switch is reached."""
    if planted.name in PROGRAMS_ON_RANKS:
        on_ranks = PROGRAMS_ON_RANKS[planted.name]
        monkeypatch.setenv(VARIABLE, planted.name)
        assert not on_ranks(tmp_path / "fault")
        monkeypatch.setenv(VARIABLE, "")
        monkeypatch.setenv(REACHED, str(tmp_path / "reached"))
        assert on_ranks(tmp_path / "right")
        assert planted.name in (tmp_path / "reached").read_text().split()
        return
    program = PROGRAMS[planted.name]
    with planted.switch():
        assert not program(tmp_path / "fault")
    with noting([planted], tmp_path / "reached"):
        assert program(tmp_path / "right")
    assert (tmp_path / "reached").read_text().split() == [planted.name]
