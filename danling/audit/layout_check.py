"""Whether a user's own program trains on a layout as it does in one process: both make the first updates, and are compared.

The program is started once in one process and once on the layout, with settings imposed on its runs: the same weights to begin from,
the same samples in each update, no dropout, and float64, in which rounding cannot be mistaken for a mistake. The report has the facts:
which tensors differ, by which ratio and along which axis, and the first layer whose output differs.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, product
from pathlib import Path

import torch

from danling.distributed import Domain
from danling.mesh.axes import AXES, axes_with
from danling.prove.differences import (
    Finding,
    NotChecked,
    Part,
    Rounding,
    compare,
    finding_lines,
    norm_of_difference,
)
from danling.prove.program import (
    ProgramEnd,
    announce,
    end_program,
    kill_program,
    rank_variables,
    scratch_settings,
    start_program,
)
from danling.utils.messages import did_you_mean, first_of
from danling.utils.process import held_port

from .layout_record import WEIGHTS, Record, end_file, record_file

_POLL_SECONDS = 0.02
_STACKS = ("ddp", "accelerate")
"""Stacks other than that of a mesh, of which the gradients can be had as they are."""
_COARSE = 1e-6
"""Relative precision of bfloat16 and float16 is larger."""
_NOISE = 10.0
"""Rounding is up to this many times what another order of the samples changes."""


@dataclass(frozen=True)
class Layout:
    """A layout to check."""

    stack: str
    degrees: Mapping[str, int]

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Read a layout such as `shard=2,tensor=2`, or `ddp=2`."""
        known = (*AXES, *_STACKS)
        words = [word.strip().partition("=") for word in text.split(",")]
        degrees = {
            name: int(degree) for name, _, degree in words if name in known and degree.isdigit()
        }
        above = {name: degree for name, degree in degrees.items() if degree > 1}
        stacks = [name for name in degrees if name in _STACKS]
        if (
            len(degrees) < len(words)
            or 0 in degrees.values()
            or not above
            or (stacks and len(words) > 1)
        ):
            unknown = "".join(
                did_you_mean(name, known) for name, _, _ in words if name not in known
            )
            raise ValueError(
                "Expected a layout of several processes: axes and their degrees, each axis once, such as shard=2,tensor=2, of "
                f"{', '.join(AXES)}; or ddp=2, or accelerate=2. Received: {text!r}.{unknown}"
            )
        return cls(stacks[0], {"replicate": above[stacks[0]]}) if stacks else cls("parallel", above)

    def __str__(self) -> str:
        if self.stack != "parallel":
            return f"{self.stack}={self.processes}"
        return ",".join(f"{axis}={degree}" for axis, degree in self.degrees.items())

    @property
    def processes(self) -> int:
        """Number of processes."""
        return math.prod(self.degrees.values())

    @property
    def replicas(self) -> int:
        """Number of ranks that read different samples."""
        return math.prod(
            degree for axis, degree in self.degrees.items() if axis in axes_with(reads_data=True)
        )


@dataclass(frozen=True)
class CheckOptions:
    """How a layout is checked.

    Attributes:
        updates: Updates that are compared.
        dtype: `float64`, or `None` for the program's own precision.
        batch: Samples of an update; `None` takes those of the program in one process, less one where the ranks that read different
            samples would have equally many.
        tolerance: Relative difference of a gradient that is rounding; `None` takes the root of the precision of the dtype.
        timeout: Seconds that each start may take.
    """

    updates: int = 2
    dtype: str | None = "float64"
    batch: int | None = None
    tolerance: float | None = None
    timeout: float = 600.0


@dataclass(frozen=True)
class LayoutReport:
    """The result of a check.

    Attributes:
        layout: The layout.
        updates: Updates that were compared.
        samples: Samples of an update.
        parameters: Number of parameters that were compared.
        tolerance: Relative difference that counts as rounding.
        step: The update that differs, the first being 1; `None` where none does.
        losses: The losses of that update, or of the last one: in one process, and on the layout.
        summary: A sentence on what differs; `None` where nothing does.
        undecided: Whether the loss differs because the forward draws random numbers, so that nothing can be said of the layout.
        moved: Parameters whose weights `parallelize` has changed.
        layer: The first module, in the order of the calls, whose output differs; `None` where none does.
        gradients: Parameters whose gradients differ, in the order of the model.
        weights: Parameters whose weights differ after the update, though no gradient does.
    """

    layout: Layout
    updates: int
    samples: int
    parameters: int
    tolerance: float
    step: int | None
    losses: tuple[float, float]
    summary: str | None
    undecided: bool
    moved: Sequence[str]
    layer: str | None
    gradients: Sequence[Finding]
    weights: Sequence[Finding]

    @property
    def is_same(self) -> bool:
        """Whether the layout trains as one process does."""
        return self.summary is None

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        if self.is_same:
            yield (
                f"{self.layout}: the first {self.updates} updates are those of one process, in losses, weights, and gradients of "
                f"{self.parameters} parameters; {self.samples} samples each"
            )
        elif self.step is None:
            yield f"{self.layout}: the weights are not those of the model"
        else:
            undecided = f"not checked, since the losses of update {self.step} cannot be the same"
            yield f"{self.layout}: {undecided if self.undecided else f'update {self.step} is not that of one process'}"
            one, layout = self.losses
            yield f"loss {one:.10g} in one process, {layout:.10g} on the layout; {self.samples} samples"
        if self.summary is not None:
            yield self.summary
        if not self.undecided:
            yield from finding_lines("gradients", self.gradients, self.parameters)
            yield from finding_lines("weights", self.weights, self.parameters)
        yield (
            "note: The model ran in evaluation mode: without dropout, and with the running statistics of batch normalization. Differences "
            f"up to {self.tolerance:.1g} count as rounding."
        )


# Starting the program


def check_layout(
    command: Sequence[str], layout: Layout, root: Path, options: CheckOptions | None = None
) -> LayoutReport:
    """Have a program make its first updates in one process and on a layout, and compare them."""
    options = options or CheckOptions()
    words = [os.path.basename(word) for word in command[:3]]
    if words and (
        words[0] in ("torchrun", "deepspeed", "accelerate") or "torch.distributed.run" in words
    ):
        raise ValueError(
            f"Expected a program as it is started for one process: the processes of the layout are started here. Received: "
            f"{' '.join(command[:3])}. Write `-- python train.py`."
        )
    root = root.absolute()
    _train(command, layout, root, options, alone=True)
    _train(command, layout, root, options, alone=False)
    report = compare_records(root, layout, options.tolerance)
    if options.dtype is None and not report.is_same and not report.undecided:
        # Only then does it matter what is rounding: another order of the samples shows it.
        _train(command, layout, root, options, alone=True, is_reversed=True)
        report = compare_records(root, layout, options.tolerance)
    return report


def directory_of(root: Path, *, alone: bool, is_reversed: bool = False) -> Path:
    """Return where the run in one process, or that on the layout, has its records, output and run directory."""
    if is_reversed:
        return root / "reversed"
    return root / ("one" if alone else "layout")


def recording_settings(
    layout: Layout, root: Path, options: CheckOptions, *, alone: bool, is_reversed: bool = False
) -> dict[str, object]:
    """Return the settings imposed on a program that records its first updates."""
    directory = directory_of(root, alone=alone, is_reversed=is_reversed)
    samples = options.batch
    stack: dict[str, object] = {"stack": layout.stack}
    degrees = layout.degrees
    weights: str | None = os.fspath(directory_of(root, alone=True) / WEIGHTS)
    if alone:
        # One process makes the weights that the layout begins with.
        stack, degrees, weights = {"stack": "ddp"}, {}, None
    if layout.stack == "parallel":
        axes = {f"parallel.axes.{axis}": degrees.get(axis, 1) for axis in AXES}
        stack = {"stack": "parallel", "fsdp.enabled": False, **axes}
    if not alone and layout.replicas > 1:
        samples = int(Record.read(directory_of(root, alone=True), 0, 1).samples)
    settings = {
        **scratch_settings(directory / "run"),
        **stack,
        "checkpoint.load_only": True,
        "compile.enable": False,
        "ft.enabled": False,
        "try_evaluation": False,
        "evaluate_interval": 10**9,
        # Before the time is over it shall be known which rank the others wait for.
        "comm.init_timeout_seconds": options.timeout / 2,
        "comm.train_timeout_seconds": options.timeout / 2,
        "audit.digest_interval": None,
        "audit.replay_interval": None,
        "audit.gradients.dir": os.fspath(directory),
        "audit.gradients.updates": options.updates,
        "audit.gradients.weights": weights,
        "audit.gradients.dtype": options.dtype,
        "audit.gradients.samples": samples,
        "audit.gradients.reversed": is_reversed,
        # The micro-batches of a pipeline have to be of one size.
        "audit.gradients.replicas": 1 if "pipeline" in layout.degrees else layout.replicas,
    }
    if options.dtype is not None:
        # The program's own precision would round what is computed in that dtype.
        settings |= {"precision": None, "fsdp.mp_policy": None}
    return settings


def _train(
    command: Sequence[str],
    layout: Layout,
    root: Path,
    options: CheckOptions,
    *,
    alone: bool,
    is_reversed: bool = False,
) -> None:
    """Have the program record its first updates."""
    directory = directory_of(root, alone=alone, is_reversed=is_reversed)
    directory.mkdir(parents=True)
    number, where = layout.processes, f"2 of 2: it makes them on {layout}"
    if alone:
        number, where = 1, "1 of 2: the program makes its first updates in one process"
    if is_reversed:
        where = "since they differ: it makes them again in one process, with the samples in reverse order"
    announce(f"{where}, within {options.timeout:g} s")
    settings = recording_settings(layout, root, options, alone=alone, is_reversed=is_reversed)
    on_devices = torch.cuda.device_count() >= layout.processes
    with _started(command, settings, directory, number, on_devices) as processes:
        end = time.monotonic() + options.timeout
        while not all(end_file(directory, rank).exists() for rank in range(number)):
            codes = [process.poll() for process in processes]
            # One that has ended well without having recorded all: the others wait for it, and fail later.
            ended = [
                r
                for r, code in enumerate(codes)
                if code is not None and not end_file(directory, r).exists()
            ]
            if ended:
                rank = next((rank for rank in ended if codes[rank]), ended[0])
                raise _failed(directory, rank, f"exit code {codes[rank]}", alone, options)
            if time.monotonic() > end:
                raise _failed(directory, 0, f"no end in {options.timeout:g} s", alone, options)
            time.sleep(_POLL_SECONDS)


@contextmanager
def _started(
    command: Sequence[str],
    settings: Mapping[str, object],
    directory: Path,
    number: int,
    on_devices: bool,
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start the processes of a layout; on exit those that still run are ended."""
    environment: dict[str, str] = {}
    # All processes are on this machine, whose name may lead to an address that is not reached.
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    if not on_devices:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        with held_port() as port:
            environment |= rank_variables(number, port)
            for rank in range(number):
                own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                log = directory / f"output-{rank}.log"
                processes.append(start_program(command, settings, log=log, environment=own))
            yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                kill_program(process)
            end_program(process)


def _failed(directory: Path, rank: int, how: str, alone: bool, options: CheckOptions) -> NotChecked:
    done = next(
        number - 1 for number in count(1) if not record_file(directory, rank, number).exists()
    )
    tail = ProgramEnd(None, directory / f"output-{rank}.log").tail.strip()
    # Where the ranks were that waited for each other, a line for each.
    hangs = [
        f.read_text(errors="replace").partition("\n")[0]
        for f in sorted((directory / "run/hangs").glob("*.txt"))
    ]
    waited = "\n".join(["\nBefore, no update came to its end:", *hangs]) if hangs else ""
    where = "on the layout"
    fix = "In one process it makes them. Fix that first; --batch gives its ranks more samples."
    if alone:
        where = "in one process"
        fix = "It has to train in one process for so many updates: take a smaller model by its own arguments, or fewer --updates."
    return NotChecked(
        f"Expected a program that makes {options.updates} updates of a runner {where}. Received: "
        f"{how} of rank {rank} after {done} updates; the end of what it printed:\n{tail}{waited}\n{fix} If it insists on its own dtype, "
        "add --dtype own."
    )


def check_this_program(layout: str, options: CheckOptions, domain: Domain) -> LayoutReport:
    """Check the program that is running, as it was started. Called on all ranks; the first one starts the programs to compare."""
    chosen = Layout.parse(layout)

    def check() -> LayoutReport:
        main = sys.modules.get("__main__")
        is_script = any(getattr(main, name, None) is not None for name in ("__spec__", "__file__"))
        if not is_script and "-c" not in sys.orig_argv:
            raise ValueError(
                "Expected a program that can be started again in other processes. Received: an interactive one, such as a notebook. "
                "Write it as a script, and call `danling check-layout LAYOUT -- python script.py`."
            )
        with tempfile.TemporaryDirectory(prefix="danling-layout-") as root:
            return check_layout([sys.executable, *sys.orig_argv[1:]], chosen, Path(root), options)

    try:
        return domain.on_first(check)
    except ValueError as error:
        raise NotChecked(str(error)) from None


# Comparing the records


def compare_records(root: Path, layout: Layout, tolerance: float | None = None) -> LayoutReport:
    """Compare what the ranks of a layout recorded with what one process recorded, up to the first update that differs."""
    one, several = directory_of(root, alone=True), directory_of(root, alone=False)
    reverse = directory_of(root, alone=True, is_reversed=True)
    for number in count(1):
        wanted = Record.read(one, 0, number)
        made = [Record.read(several, rank, number) for rank in range(layout.processes)]
        has_other = record_file(reverse, 0, number).exists()
        other = Record.read(reverse, 0, number) if has_other else None
        report = compare_update(number, wanted, made, layout, tolerance, other)
        following = [record_file(one, 0, number + 1)]
        following += [record_file(several, rank, number + 1) for rank in range(layout.processes)]
        if not report.is_same or not all(file.exists() for file in following):
            return report
    raise AssertionError("there is no last update")


def compare_update(
    number: int,
    wanted: Record,
    made: Sequence[Record],
    layout: Layout,
    tolerance: float | None = None,
    other: Record | None = None,
) -> LayoutReport:
    """Compare an update of the ranks of a layout with that of one process; `other` is that with its samples in another order."""
    if not math.isfinite(wanted.norm) or not wanted.weights:
        raise NotChecked(
            f"Expected updates that are finite in one process. Received: update {number} with loss {wanted.loss:.6g} and gradient norm "
            f"{wanted.norm:.6g}. Fix that first; a precision of fp16 skips its first updates, which --dtype float64 does not."
        )
    eps = max(record.eps for record in (wanted, *made))
    # In float32 and float64, at most half of the digits are rounding. In 16 bits that would be several
    # percent: there, a few units of the last place are.
    relative, floor = eps**0.5, 32 * eps
    if eps > _COARSE:
        relative, floor = 4 * eps, 32 * torch.finfo(torch.float32).eps
    # `floor` is small: a share of the whole norm would hide a parameter that gets no gradient.
    if tolerance is not None:
        relative = tolerance
    names = list(
        dict.fromkeys([*wanted.gradients, *(name for record in made for name in record.gradients)])
    )
    rounding = _roundings(
        relative, floor * wanted.norm, wanted.gradients, other.gradients if other else {}
    )
    parts = [(record.coordinate, record.gradients) for record in made]
    gradients = _findings(names, wanted.gradients, parts, layout.degrees, rounding)
    weights: list[Finding] = []
    if not gradients:
        there = [name for name in wanted.weights if any(name in record.weights for record in made)]
        parts = [(record.coordinate, record.weights) for record in made]
        rounding = _roundings(relative, floor, wanted.weights, other.weights if other else {})
        weights = _findings(there, wanted.weights, parts, layout.degrees, rounding)
    same_loss = abs(made[0].loss - wanted.loss) <= max(relative * abs(wanted.loss), floor)
    # Ranks that all read the same samples come to the same mean.
    same_weight = abs(made[0].weight - wanted.weight) <= 1e-9 * abs(wanted.weight)
    differs = bool(gradients or weights) or not (same_loss and same_weight)
    # Of other samples everything differs, which says nothing of the layout.
    if differs and (sum(record.digest for record in made) - wanted.digest) % (1 << 64):
        raise NotChecked(
            f"Expected update {number} to be made of the same samples in one process and on the layout. Received: {wanted.samples:g} "
            f"samples and {made[0].samples:g}, whose contents are not the same. Look for a batch size that depends on the number of "
            "processes, your own loader that does not divide its data over the ranks, data that is drawn before `super().__init__`, "
            "and padding to the longest sample of a batch: pad to one length."
        )
    # Weights that all ranks began with alike.
    moved = [
        name
        for name in dict.fromkeys(name for record in made for name in record.moved)
        if len({record.before[name] for record in made if name in record.before}) == 1
    ]
    layer = _first_layer(wanted, made, layout, relative) if differs else None
    undecided = (
        differs
        and same_weight
        and not same_loss
        and any(record.draws for record in (wanted, *made))
    )
    summary = None
    if moved:
        shown = first_of(moved, 3)
        summary = (
            f"`parallelize` has changed the weights of {len(moved)} parameters ({shown}): what is saved on this layout under a name is not "
            "what the model has under that name"
        )
    elif not same_weight:
        ratio = made[0].weight / wanted.weight if wanted.weight else math.inf
        summary = f"the weights of the batches add up to {ratio:.6g} times those of one process"
    elif undecided:
        summary = "the forward pass draws random numbers also in evaluation mode; switch that off for the check"
    elif layer is not None:
        summary = f"the first layer whose output differs is {layer}"
    elif not same_loss:
        summary = "the outputs of all layers are those of one process, and the loss is not"
    elif gradients:
        last = gradients[-1].name
        summary = f"the forward pass is that of one process, the backward pass is not; nearest to the loss is {last}"
    elif weights:
        summary = "the gradients are those of one process, the step of the optimizer or the clipping is not"
    return LayoutReport(
        layout=layout,
        updates=number,
        samples=int(wanted.samples),
        parameters=len(names),
        tolerance=relative,
        step=number if differs else None,
        losses=(wanted.loss, made[0].loss),
        summary=summary,
        undecided=undecided,
        moved=moved,
        layer=layer,
        gradients=gradients,
        weights=weights,
    )


def _first_layer(
    wanted: Record, made: Sequence[Record], layout: Layout, relative: float
) -> str | None:
    """Return the first module whose output differs by its sums over the ranks; along an axis that reads the same samples, ranks may
    have parts of it or copies.
    """
    others = [axis for axis in layout.degrees if axis not in axes_with(reads_data=True)]
    for name, (total, squares) in wanted.outputs.items():
        held = [
            (record.coordinate, record.outputs[name]) for record in made if name in record.outputs
        ]
        near = max(relative, 1e-7) * max(math.sqrt(squares), abs(total), 1e-30)
        # A layer that no rank has, since a plan has replaced it, is not compared.
        matches = not held
        for way in product((False, True), repeat=len(others)):
            copied = [axis for axis, has_copies in zip(others, way) if has_copies]
            firsts = [
                sums
                for coordinate, sums in held
                if all(coordinate.get(axis, 0) == 0 for axis in copied)
            ]
            found, found_squares = (math.fsum(sums[index] for sums in firsts) for index in (0, 1))
            matches |= (
                abs(found - total) <= near
                and abs(math.sqrt(found_squares) - math.sqrt(squares)) <= near
            )
        if not matches:
            return name or "the model itself"
    return None


def _roundings(
    relative: float, absolute: float, wanted: Mapping[str, Part], other: Mapping[str, Part]
) -> Callable[[str], Rounding]:
    """Return how far rounding reaches in each tensor: several times what another order of the samples changes in it, where it is known."""

    def of(name: str) -> Rounding:
        if name not in wanted or name not in other:
            return Rounding(relative, absolute)
        noise = norm_of_difference(wanted[name].tensor.double(), other[name].tensor.double())
        return Rounding(
            relative, max(absolute, _NOISE * noise) if math.isfinite(noise) else absolute
        )

    return of


def _findings(
    names: Iterable[str],
    wanted: Mapping[str, Part],
    made: Sequence[tuple[Mapping[str, int], Mapping[str, Part]]],
    degrees: Mapping[str, int],
    rounding: Callable[[str], Rounding],
) -> list[Finding]:
    """Return which of the named tensors are not those of one process."""
    found = []
    for name in names:
        held = [(coordinate, parts[name]) for coordinate, parts in made if name in parts]
        found.append(
            compare(
                name, wanted[name].tensor if name in wanted else None, held, degrees, rounding(name)
            )
        )
    return [each for each in found if each is not None]
