"""Every function that opens, writes, renames or removes a file, and through which parser a name from a file comes to it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import danling
from danling.utils.files import is_plain_path, plain_name, plain_path

ROOT = Path(danling.__file__).parent
_OF_OS = {
    "open",
    "unlink",
    "remove",
    "rename",
    "replace",
    "link",
    "symlink",
    "rmdir",
    "mkdir",
    "makedirs",
    "truncate",
}
_OF_PATHS = {
    "unlink",
    "rmdir",
    "rename",
    "mkdir",
    "touch",
    "write_text",
    "write_bytes",
    "symlink_to",
    "hardlink_to",
}
_BY_NAME = {
    "open",
    "open_file",
    "open_new",
    "open_regular",
    "replacing",
    "write_atomically",
    "safe_open",
}
_OF_TREES = {"rmtree", "copyfile", "copy", "copy2", "copytree", "move"}

FUNCTIONS = {
    "audit/digests": ["read_digests"],
    "audit/layout_check": ["_train"],
    "audit/layout_record": ["LayoutRecorder._write"],
    "prove/program": ["ProgramEnd.tail", "start_program"],
    "audit/rerun": ["audit_runner"],
    "checkpoints/dcp_target": [
        "HashingFileSystem.create_stream",
        "HashingFileSystem.rename",
        "TargetWriter._take_over",
        "TargetWriter.finish",
    ],
    "checkpoints/exchange": [
        "_put",
        "_read_safetensors",
        "_remove_unfinished",
        "_write_safetensors",
        "export_weights",
        "write_description",
    ],
    "checkpoints/manifest": ["archive_complaints", "is_archive", "is_legacy"],
    "checkpoints/storage": [
        "Pinned.__init__",
        "chunks",
        "link",
        "make_directory",
        "open_new",
        "open_regular",
        "opened",
        "remove",
        "remove_tree",
        "replace",
        "sampled_digest",
        "sync_directory",
        "write_file",
        "write_mark",
    ],
    "checkpoints/file_store": [
        "FileStore._make_way",
        "FileStore._settle",
        "FileStore.delete",
        "FileStore.publishing",
    ],
    "checkpoints/target_store": ["TargetStore.delete", "TargetStore.publish", "TargetStore.sweep"],
    "cli/inspect": ["read_safetensors"],
    "cli/main": ["_main"],
    "cli/plot": ["run"],
    "data/packing": ["document_lengths"],
    "deepspeed/checkpoints": ["DeepSpeedCheckpointManager._save.publish"],
    "demo": ["compare"],
    "elastic/agent": ["_show_error", "_state"],
    "elastic/metrics_file": ["without_later"],
    "elastic/spare": ["wait_and_run"],
    "graph/artifacts": [
        "Artifacts._add_files",
        "Artifacts._make_folder",
        "Artifacts._open_directory",
        "Artifacts._unpack",
        "Artifacts._write",
        "Artifacts.close",
        "_locked",
        "_remove_left",
        "_user_key",
    ],
    "remote/mirror": [
        "RunMirror._copy_files",
        "RunMirror._file",
        "RunMirror._written",
        "RunMirror.open",
    ],
    "remote/sources": ["RemoteCheckpoints._bring_target", "bring_object", "runs_below"],
    "reporting/jsonl": ["JsonLines._open", "_cut_back", "_steps", "read_jsonl"],
    "reporting/logging": ["RunLog._opened"],
    "reporting/trackers": ["WandbTracker.__init__"],
    "stream/channel": ["RefChannel._take"],
    "stream/directory_store": [
        "DirectoryStore.__init__",
        "DirectoryStore._load",
        "DirectoryStore._note",
        "DirectoryStore._publish",
        "DirectoryStore._remove_left",
        "DirectoryStore._write",
        "DirectoryStore.discard",
        "_write_synced",
    ],
    "stream/file_channel": [
        "FileChannel.__init__",
        "FileChannel._absorb",
        "FileChannel._lines",
        "FileChannel._move_watermark",
        "FileChannel._opened_to_write",
    ],
    "prove/guard": ["marked"],
    "prove/inside/tape": [
        "Tape._claim",
        "Tape._end",
        "Tape._mark",
        "Tape._write_digests",
    ],
    "prove/starts": ["Script.start", "copy_directory", "private_directory"],
    "stream/sqlite_channel": ["SQLiteChannel.__init__"],
    "supervision/failures": ["_write_error_file", "write_memory_snapshot"],
    "supervision/heartbeat": ["Heartbeat.__init__", "Heartbeat._write"],
    "supervision/profiler": ["Profiler.__init__", "Profiler._export"],
    "supervision/rank_watch": ["RankWatch._dump"],
    "supervision/stacks": ["WatchedThread.__init__"],
    "training/live_state": ["LiveState.load"],
    "training/progress_file": ["ProgressFile._write"],
    "utils/files": [
        "clear_places",
        "open_file",
        "read_bytes",
        "replacing",
        "sync_directory",
        "write_atomically",
    ],
    "utils/locks": ["FileLock.is_taken", "_give_back", "_made", "_opened"],
    "utils/process": ["first_failure"],
    "workspace/run_directory": [
        "RunDirectory.make",
        "RunDirectory.release",
        "has_line",
        "make_directory",
    ],
    "workspace/workspace": [
        "Workspace._make_metadata_dir",
        "Workspace.write_metadata",
        "Workspace.write_record",
        "Workspace.write_results",
        "Workspace.write_streams",
        "remove_litter",
    ],
    "checkpoints/torch_files": ["_check_depth", "read_file"],
}
"""By module: the functions. A new one is entered here, and in `PARSERS` if it takes a name from a file."""

PARSERS = {
    "checkpoints/exchange": "plain_name",  # index of safetensors
    "checkpoints/directory": "read_manifest",
    "checkpoints/file_store": "read_manifest",
    "checkpoints/target_store": "read_manifest",
    "checkpoints/manifest": "plain_name",
    "checkpoints/dcp_index": "plain_name",
    "remote/sources": "is_plain_path",
    "graph/artifacts": "plain_path",
    "stream/directory_store": "quote",  # ids of objects are quoted, so that any text is a name
}
"""By module that takes names from files: what it parses them by, which comes to `plain_path` (or, of streams, quotes them)."""

HOSTILE = [
    "",
    ".",
    "..",
    "/etc/passwd",
    "../a",
    "a/../../b",
    "a//b",
    "a\0b",
    "a\nb",
    "C:a",
    "a\\b",
    "a/",
    "./a",
    "a" * 300,
    5,
    None,
    "\ud800",
]


def functions_of(path: Path) -> set[str]:
    found: set[str] = set()

    def visit(node: ast.AST, inside: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = inside
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                name = f"{inside}.{child.name}".lstrip(".")
            if isinstance(child, ast.Call) and touches_a_file(child.func):
                found.add(name)
            visit(child, name)

    visit(ast.parse(path.read_text()), "")
    return found


def touches_a_file(function: ast.expr) -> bool:
    if isinstance(function, ast.Name):
        return function.id in _BY_NAME | _OF_TREES
    if not isinstance(function, ast.Attribute):
        return False
    base, name = ast.unparse(function.value), function.attr
    if base == "os":
        return name in _OF_OS
    if base in ("shutil", "storage"):
        return name in _OF_TREES | _BY_NAME | _OF_PATHS | {"remove", "replace", "link"}
    return name in _OF_PATHS or (name == "open" and base in ("path", "file", "self._log"))


def test_the_list_of_functions_is_complete() -> None:
    found = {
        path.relative_to(ROOT).with_suffix("").as_posix(): sorted(functions)
        for path in sorted(ROOT.rglob("*.py"))
        if (functions := functions_of(path))
    }
    assert found == FUNCTIONS


@pytest.mark.parametrize("module", PARSERS)
def test_names_from_files_come_through_the_parser(module: str) -> None:
    tree = ast.parse((ROOT / f"{module}.py").read_text())
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    used |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert PARSERS[module] in used


@pytest.mark.parametrize("name", HOSTILE)
def test_parser_refuses_names_outside_the_directory(name: object) -> None:
    for parse in (plain_path, plain_name):
        with pytest.raises(ValueError, match="no plain relative name"):
            parse(name)
    assert not isinstance(name, str) or not is_plain_path(name)


def test_the_parser_takes_plain_names() -> None:
    for name in ("a", "a.b", "..a", "a b", "naïve", "-rf", "model-00001-of-00002.safetensors"):
        assert plain_path(name) == plain_name(name) == name
    assert plain_path("a/b/c") == "a/b/c"
    with pytest.raises(ValueError, match="in the directory itself"):
        plain_name("a/b")


WRITERS = {
    "audit/layout_record": ["LayoutRecorder._write: touch"],  # in a scratch directory
    "prove/program": ["start_program: open"],  # what a program prints, in a scratch directory
    "checkpoints/storage": ["open_new: os.open", "opened: os.open", "write_mark: os.open"],
    "cli/main": ["_main: os.open"],  # /dev/null
    "config/runner_config": ["RunnerConfig.json: open"],  # named by the user
    "graph/artifacts": [
        "Artifacts._add_files: os.open",
        "Artifacts._open_directory: os.open",
        "Artifacts._write: os.open",
        "_user_key: os.open",
    ],
    # In a scratch directory, which is new or private.
    "prove/inside/tape": [
        "Tape._claim: open",
        "Tape._end: write_bytes",
        "Tape._end: write_text",
        "Tape._mark: write_text",
        "Tape._write_digests: open",
    ],
    "remote/mirror": ["RunMirror._written: touch"],  # under a random name
    "remote/sources": ["runs_below: touch"],  # in a temporary directory
    "demo": ["start: open"],  # of a directory that the demo has made
    "reporting/jsonl": ["JsonLines._open: os.open"],
    "reporting/logging": [
        "RunLog._opened: FileHandler"
    ],  # named by the user, or after the instant of the start
    "stream/directory_store": ["DirectoryStore._note: os.open", "_write_synced: os.open"],
    "stream/file_channel": [
        "FileChannel.__init__: os.open",
        "FileChannel._opened_to_write: os.open",
    ],
    "utils/files": ["replacing: os.open"],
    "utils/locks": ["_opened: os.open"],
    "utils/process": ["first_failure: os.open"],
}
"""By module: every call that opens or makes a file to write. Other modules write by the functions of these."""

SAFE = ("NEW_FILE", "O_NOFOLLOW", "_FLAGS", "os.devnull")
"""One of them is in every `os.open` that writes."""


def writing_calls(path: Path) -> list[tuple[str, ast.Call]]:
    """Return the calls that open a file for writing, each with the name of its function and the kind of the call."""
    found: list[tuple[str, ast.Call]] = []

    def visit(node: ast.AST, inside: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = inside
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                name = f"{inside}.{child.name}".lstrip(".")
            if isinstance(child, ast.Call) and (kind := kind_of_write(child)):
                found.append((f"{name}: {kind}", child))
            visit(child, name)

    visit(ast.parse(path.read_text()), "")
    return found


def kind_of_write(call: ast.Call) -> str:
    """Return how a call opens a file for writing; nothing where it does not."""
    called, text = ast.unparse(call.func), ast.unparse(call)
    if called == "os.open":
        return (
            "os.open"
            if any(flag in text for flag in ("O_WRONLY", "O_RDWR", "O_CREAT", "NEW_FILE", "flags"))
            else ""
        )
    modes = [
        each.value
        for each in [*call.args[:2], *(k.value for k in call.keywords)]
        if isinstance(each, ast.Constant)
    ]
    writes = any(
        isinstance(mode, str) and mode[:1] in ("w", "a", "x") and len(mode) <= 2 for mode in modes
    )
    if called == "open" or (
        called.endswith(".open") and not called.startswith(("os.", "archive."))
    ):
        return "open" if writes else ""
    name = called.rpartition(".")[2]
    return (
        name
        if name in ("write_text", "write_bytes", "touch", "FileHandler")
        and "storage." not in called
        else ""
    )


def test_every_written_file_is_new_or_no_link() -> None:
    found: dict[str, list[str]] = {}
    unsafe = []
    for path in sorted(ROOT.rglob("*.py")):
        module = path.relative_to(ROOT).with_suffix("").as_posix()
        for name, call in writing_calls(path):
            reads = "O_RDONLY" in (text := ast.unparse(call)) or "flags, dir_fd=directory" in text
            if not reads:
                found.setdefault(module, []).append(name)
                if (
                    name.endswith("os.open")
                    and not any(each in text for each in SAFE)
                    and "flags" not in text
                ):
                    unsafe.append(f"{module}: {name}")
    assert {module: sorted(set(names)) for module, names in found.items()} == WRITERS
    assert unsafe == []
