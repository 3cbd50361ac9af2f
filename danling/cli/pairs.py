"""Packages that are built for another torch or numpy than the one beside them: found by importing them in a process of their own.

The wheel of torchvision on the package index is built for CUDA. Beside a torch for the CPU its import fails, and with it that of
transformers, timm and torchmetrics, whose errors name something else.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version

from .environment import cuda_of_build, installed, module_of

BUILT_FOR = {
    "torchvision": "torch",
    "torchaudio": "torch",
    "torchao": "torch",
    "torchtext": "torch",
    "xformers": "torch",
    "flash-attn": "torch",
    "bitsandbytes": "torch",
    "torch-scatter": "torch",
    "torch-sparse": "torch",
    "scipy": "numpy",
    "pandas": "numpy",
    "pyarrow": "numpy",
    "scikit-learn": "numpy",
    "numba": "numpy",
    "opencv-python": "numpy",
    "opencv-python-headless": "numpy",
}
"""Packages with compiled code that fits some versions of another package only."""

_OF_TORCH = ("torchvision", "torchaudio")
"""Packages of which there is a build for each device beside those of torch."""
_OLD_NUMPY = re.compile(r"compiled using NumPy 1\.x|_ARRAY_API not found|numpy\.core\.multiarray failed to import")
_COMPLAINT = re.compile(r"(?i)^.*(incompatib|not compatible|skipping import|undefined symbol).*$", re.MULTILINE)

_TOO_LONG = b"Timeout ("
"""How the traceback of an import that took too long begins."""

_IMPORTER = """
import contextlib, faulthandler, importlib, io, json, os, sys, time
out = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what a module prints must not be taken for an answer
limit = float(sys.argv[1])
for name in sys.argv[2:]:
    print(json.dumps({"begun": name}), file=out, flush=True)
    said, error, start = io.StringIO(), None, time.monotonic()
    faulthandler.dump_traceback_later(limit, exit=True, file=sys.__stderr__)  # ends code without an end that is not Python too
    try:
        with contextlib.redirect_stderr(said):
            importlib.import_module(name)
    except BaseException as failure:
        error = f"{type(failure).__name__}: {failure}"
    faulthandler.cancel_dump_traceback_later()
    answer = {"module": name, "error": error, "said": said.getvalue()[-4000:], "seconds": time.monotonic() - start}
    print(json.dumps(answer), file=out, flush=True)
"""


@dataclass(frozen=True)
class Import:
    """What came of importing a module.

    Attributes:
        error: Why it failed, `None` if it did not.
        said: What it wrote to stderr.
        seconds: How long it took.
    """

    error: str | None = None
    said: str = ""
    seconds: float = 0.0


def examine_pairs(timeout: float) -> Iterator[tuple[str, str, str, float]]:
    """Yield name, state (`ok` or `failed`), detail and seconds of each package that is installed beside what it is built for.

    Args:
        timeout: Seconds that one import may take.
    """
    here = {package: other for package, other in BUILT_FOR.items() if installed(package) and installed(other)}
    imports = import_apart([module_of(package) for package in here], timeout)
    for package, other in here.items():
        found = imports[module_of(package)]
        try:
            state, detail = judge(package, other, found)
        except Exception as error:  # metadata may be anything
            state, detail = "failed", f"what is installed of it cannot be read: {type(error).__name__}: {error}"
        yield f"{package} with {other}", state, detail, round(found.seconds, 2)


def import_apart(modules: Sequence[str], timeout: float) -> dict[str, Import]:
    """Return what comes of importing modules, one after the other, in a process that may crash or hang without harm.

    Args:
        modules: Their names.
        timeout: Seconds that one may take.
    """
    results: dict[str, Import] = {}
    waiting = list(dict.fromkeys(modules))
    while waiting:
        said, end = _run_importer(waiting, timeout)
        begun = None
        # A crash may have cut the last line.
        for answer in map(json.loads, (line for line in said.splitlines(keepends=True) if line.endswith("\n"))):
            if "begun" in answer:
                begun = str(answer["begun"])
            else:
                results[str(answer["module"])] = Import(answer["error"], answer["said"], answer["seconds"])
        if begun is None or begun in results:
            # The process ended between two imports, or where the interpreter exits: no single module is to blame.
            for name in waiting:
                results.setdefault(name, Import(end))
        else:
            results[begun] = Import(end)
        waiting = [name for name in waiting if name not in results]
    return results


def _run_importer(modules: Sequence[str], timeout: float) -> tuple[str, str]:
    """Return the answers, and how the process ended."""
    command = [sys.executable, "-c", _IMPORTER, str(timeout), *modules]
    # The program ends an import that takes too long; this limit is for one that hangs behind the last import, as it exits.
    most = timeout * (len(modules) + 1)
    try:
        done = subprocess.run(command, capture_output=True, timeout=most, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired as late:
        return (late.stdout or b"").decode(errors="replace"), f"no end in {late.timeout:g} s"
    if done.returncode == 1 and _TOO_LONG in done.stderr:
        how = f"no end in {timeout:g} s"
    elif done.returncode < 0:
        how = f"the import ended by signal {-done.returncode}"
    else:
        how = f"the import ended with exit code {done.returncode}"
    return done.stdout.decode(errors="replace"), how


def judge(package: str, other: str, found: Import) -> tuple[str, str]:
    """Return state and detail of a package beside the one that it is built for.

    Args:
        package: Its name.
        other: `torch` or `numpy`.
        found: What came of importing it.
    """
    facts = list(filter(None, (asks_for(package, other), _other_cuda(package) if other == "torch" else None)))
    if _OLD_NUMPY.search(f"{found.error}\n{found.said}"):
        facts.append(f"built for numpy 1, and {installed('numpy')} is here")
    because = "; ".join(facts)
    if found.error is not None or "built for numpy 1" in because:
        cause = " ".join((found.error or "imports, but not all of it works").split())
        return "failed", f"{cause[:200]} ({because or f'version {version(package)}'}). {_mend(package, other)}"
    complaint = _COMPLAINT.search(found.said)
    if complaint is not None:
        facts.append(" ".join(complaint.group().split())[:200])
    return "ok", "; ".join([f"{version(package)}, imports", *facts])


def asks_for(package: str, other: str) -> str | None:
    """Return what a package asks for of another one that is not the case, `None` where it is, or where that cannot be told.

    Args:
        package: Its name.
        other: The other one.
    """
    try:
        from packaging.requirements import InvalidRequirement, Requirement
    except ImportError:
        return None
    try:
        here, lines = version(other), requires(package) or []
    except PackageNotFoundError:
        return None
    for line in lines:
        try:
            asked = Requirement(line)
        except InvalidRequirement:
            continue
        applies = asked.name.lower() == other and (asked.marker is None or asked.marker.evaluate({"extra": ""}))
        if applies and not asked.specifier.contains(here, prereleases=True):
            return f"it asks for {other}{asked.specifier}, and {here} is here"
    return None


def _other_cuda(package: str) -> str | None:
    wanted, has = cuda_of_build("torch"), cuda_of_build(module_of(package))
    if wanted is None or has is None or wanted == has:
        return None
    return f"it is built for {_device(has)}, torch for {_device(wanted)}"


def _device(cuda: str) -> str:
    return f"CUDA {cuda}" if cuda else "the CPU"


def _mend(package: str, other: str) -> str:
    if other == "numpy":
        return f"Run `pip install --upgrade {package}`, or install numpy below 2."
    cuda = cuda_of_build("torch")
    index = f"cu{cuda.replace('.', '')}" if cuda else "cpu"
    known = package in _OF_TORCH and cuda is not None
    place = f" --index-url https://download.pytorch.org/whl/{index}" if known else ""
    return f"Run `pip install --force-reinstall --no-deps{place} {package}` in the version for torch {installed('torch')}, or uninstall it."
