"""Whether a user's own program trains on a layout as it does in one process: both make the first updates, and are compared.

The program is started once in one process and once on the layout, with settings imposed on its runs: the same weights to begin from,
the same samples in each update, no dropout, and float64, in which rounding cannot be mistaken for a mistake.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from danling.mesh.axes import AXES, axes_with
from danling.utils.messages import did_you_mean
from danling.utils.process import held_port
from danling.utils.protocols import ReductionDomain

from .layout_record import WEIGHTS, RankRecord, count_updates, has_recorded, read_ranks
from .layout_report import LayoutReport, NotChecked, compare_records
from .program import ProgramEnd, end_program, kill_program, scratch_settings, start_program

_POLL_SECONDS = 0.02
_STACKS = ("ddp", "accelerate")
"""Stacks other than that of a mesh, of which the gradients can be had as they are."""


@dataclass(frozen=True)
class Layout:
    """A layout to check."""

    stack: str
    degrees: Mapping[str, int]

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Read a layout such as `shard=2,tensor=2`, or `ddp=2`."""
        degrees: dict[str, int] = {}
        known = (*AXES, *_STACKS)
        for word in text.split(","):
            name, sign, degree = word.strip().partition("=")
            if name == "deepspeed":
                raise ValueError(
                    "Expected a layout whose gradients can be had as they are. Received: deepspeed, whose engine keeps shares of flat "
                    "buffers, in float32. Check the model with shard=2 or ddp=2."
                )
            if name not in known or not sign or not degree.isdigit() or int(degree) < 1 or name in degrees:
                raise ValueError(
                    f"Expected a layout of axes and their degrees, such as shard=2,tensor=2, of {', '.join(AXES)}; or ddp=2, "
                    f"accelerate=2. Received: {text!r}.{did_you_mean(name, known)} Write each axis once."
                )
            degrees[name] = int(degree)
        above = {name: degree for name, degree in degrees.items() if degree > 1}
        stacks = [name for name in degrees if name in _STACKS]
        if not above or (stacks and len(degrees) > 1):
            raise ValueError(
                f"Expected a layout of several processes, of axes or of one stack. Received: {text!r}. Write shard=2,tensor=2, or ddp=2."
            )
        return cls(stacks[0], {"replicate": above[stacks[0]]}) if stacks else cls("parallel", above)

    def __str__(self) -> str:
        if self.stack != "parallel":
            return f"{self.stack}={self.processes}"
        return ",".join(f"{axis}={degree}" for axis, degree in self.degrees.items())

    @property
    def processes(self) -> int:
        """Number of processes."""
        return prod(self.degrees.values())

    @property
    def replicas(self) -> int:
        """Number of ranks that read different samples."""
        return prod(degree for axis, degree in self.degrees.items() if axis in axes_with(reads_data=True))

    def settings(self, *, alone: bool) -> dict[str, object]:
        """Return the settings imposed on a program."""
        if self.stack != "parallel":
            return {"stack": "ddp" if alone else self.stack}
        degrees = {} if alone else self.degrees
        axes = {f"parallel.axes.{axis}": degrees.get(axis, 1) for axis in AXES}
        return {"stack": "parallel", "fsdp.enabled": False, **axes}


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


def check_layout(
    command: Sequence[str], layout: Layout, place: Path, options: CheckOptions | None = None
) -> LayoutReport:
    """Have a program make its first updates in one process and on a layout, and compare them."""
    options = options or CheckOptions()
    _refuse_launchers(command)
    place = place.absolute()
    on_devices = torch.cuda.device_count() >= layout.processes
    one = _train(command, layout, place / "one", options, alone=True, on_devices=on_devices, samples=options.batch)
    first = one[0].update(1)
    samples = int(first.samples) if layout.replicas > 1 else options.batch
    weights = place / "one" / "records" / WEIGHTS
    ranks = _train(
        command, layout, place / "layout", options, alone=False, on_devices=on_devices, weights=weights, samples=samples
    )
    return compare_records(one[0], ranks, layout, options.tolerance)


def _refuse_launchers(command: Sequence[str]) -> None:
    words = [os.path.basename(word) for word in command[:3]]
    if words and (words[0] in ("torchrun", "deepspeed", "accelerate") or "torch.distributed.run" in words):
        raise ValueError(
            f"Expected a program as it is started for one process: the processes of the layout are started here. Received: "
            f"{' '.join(command[:3])}. Write `-- python train.py`."
        )


def _train(
    command: Sequence[str],
    layout: Layout,
    place: Path,
    options: CheckOptions,
    *,
    alone: bool,
    on_devices: bool,
    weights: Path | None = None,
    samples: int | None = None,
) -> list[RankRecord]:
    """Have the program record its first updates, and return the records that its ranks have written."""
    number = 1 if alone else layout.processes
    records = place / "records"
    records.mkdir(parents=True)
    settings = recording_settings(layout, place, options, alone=alone, weights=weights, samples=samples)
    with _started(command, settings, place, number, on_devices) as processes:
        end = time.monotonic() + options.timeout
        while not all(has_recorded(records, rank) for rank in range(number)):
            codes = [process.poll() for process in processes]
            # One that has ended well without having recorded all: the others wait for it, and fail later.
            ended = [rank for rank, code in enumerate(codes) if code is not None and not has_recorded(records, rank)]
            if ended:
                rank = next((rank for rank in ended if codes[rank]), ended[0])
                raise _failed(place, rank, f"exit code {codes[rank]}", alone, options, samples)
            if time.monotonic() > end:
                raise _failed(place, 0, f"no end in {options.timeout:g} s", alone, options, samples)
            time.sleep(_POLL_SECONDS)
    return read_ranks(records, number)


def recording_settings(
    layout: Layout,
    place: Path,
    options: CheckOptions,
    *,
    alone: bool,
    weights: Path | None = None,
    samples: int | None = None,
) -> dict[str, object]:
    """Return the settings imposed on a program that records its first updates."""
    settings = {
        **scratch_settings(place / "run"),
        **layout.settings(alone=alone),
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
        "audit.gradients.dir": os.fspath(place.absolute() / "records"),
        "audit.gradients.updates": options.updates,
        "audit.gradients.weights": None if weights is None else os.fspath(weights),
        "audit.gradients.dtype": options.dtype,
        "audit.gradients.samples": samples,
        # The micro-batches of a pipeline have to be of one size.
        "audit.gradients.replicas": 1 if "pipeline" in layout.degrees else layout.replicas,
    }
    return settings if options.dtype is None else {**settings, "precision": None, "fsdp.mp_policy": None}


@contextmanager
def _started(
    command: Sequence[str], settings: Mapping[str, object], place: Path, number: int, on_devices: bool
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start the processes of a layout; on exit those that still run are ended."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        with held_port() as port:
            for rank in range(number):
                environment = _environment(rank, number, str(port), on_devices)
                processes.append(
                    start_program(command, settings, log=place / f"output-{rank}.log", environment=environment)
                )
            yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                kill_program(process)
            end_program(process)


def _environment(rank: int, number: int, port: str, on_devices: bool) -> dict[str, str]:
    ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(number), "LOCAL_WORLD_SIZE": str(number)}
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // number))
    # Of a launcher that this process may have been started by.
    launcher = {"TORCHELASTIC_RUN_ID": "", "TORCHELASTIC_ERROR_FILE": "", "TORCHELASTIC_RESTART_COUNT": "0"}
    places = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": threads, **launcher}
    if sys.platform == "linux":
        places["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    return {**ranks, **places, **({} if on_devices else {"CUDA_VISIBLE_DEVICES": ""})}


def _failed(place: Path, rank: int, how: str, alone: bool, options: CheckOptions, samples: int | None) -> NotChecked:
    done = count_updates(place / "records", rank)
    where = "in one process" if alone else "on the layout"
    tail = ProgramEnd(None, place / f"output-{rank}.log").tail.strip()
    standing = _standing(place / "run")
    stood = f"\nBefore, no update came to its end:\n{standing}" if standing else ""
    return NotChecked(
        f"Expected a program that makes {options.updates} updates of a runner {where}. Received: {how} of rank {rank} after {done} "
        f"updates; the end of what it printed:\n{tail}{stood}\n{_hint(how, done, alone, options, samples)}"
    )


def _hint(how: str, done: int, alone: bool, options: CheckOptions, samples: int | None) -> str:
    """Return what to do about a program that failed."""
    if how == "exit code 0":
        if not alone:
            return "It ended well there, but too early, and not so in one process: look for what it does by the number of its processes."
        fewer = f", or compare fewer with --updates {done}" if done else ""
        return f"It ended well, but too early: have it train a runner for {options.updates} updates at least{fewer}."
    own = "" if options.dtype is None else " If it insists on its own dtype, add --dtype own."
    if alone:
        return f"It has to train in one process: take a smaller model, or fewer layers, by its own arguments.{own}"
    few = f" Its ranks share {samples} samples in an update; --batch gives them more." if samples is not None else ""
    return f"Mend that first.{own}{few}"


def _standing(run: Path) -> str:
    """Return where the ranks stood that waited for each other, a line for each; the empty text where none did."""
    files = sorted((run / "hangs").glob("*.txt"))
    return "\n".join(file.read_text(errors="replace").partition("\n")[0] for file in files)


# From within the program


def check_this_program(layout: str, options: CheckOptions, domain: ReductionDomain) -> LayoutReport:
    """Check the program that is running, as it was started. Called on all ranks; the first one starts the programs to compare."""
    chosen = Layout.parse(layout)
    told: tuple[LayoutReport | None, str] = None, ""
    if domain.rank == 0:
        try:
            with tempfile.TemporaryDirectory(prefix="danling-layout-") as place:
                told = check_layout(_own_command(), chosen, Path(place), options), ""
        except ValueError as error:
            told = None, str(error)
    found, error_text = domain.broadcast_object(told)
    if found is None:
        raise NotChecked(error_text)
    return found


def _own_command() -> list[str]:
    """Return the command by which this program was started."""
    main = sys.modules.get("__main__")
    if (
        getattr(main, "__spec__", None) is None
        and getattr(main, "__file__", None) is None
        and "-c" not in sys.orig_argv
    ):
        raise ValueError(
            "Expected a program that can be started again in other processes. Received: an interactive one, such as a notebook. Write it "
            "as a script, and call `danling check-layout LAYOUT -- python script.py`."
        )
    return [sys.executable, *sys.orig_argv[1:]]
