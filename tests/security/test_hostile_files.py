"""Files that anybody may have written: each costs a line, and neither time, memory nor the other runs."""

from __future__ import annotations

import json
import os
import resource
import sqlite3
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.recorded import bounded
from support.warm import interpreter

from danling.cli.main import main
from danling.config.inputs import read_settings
from danling.reporting.jsonl import JsonLines, read_jsonl
from danling.stream import DirectoryStore, FileChannel, SQLiteChannel
from danling.stream.refs import SampleRef, TensorSpec
from danling.utils.files import read_text
from danling.utils.plain import parse_json, parse_yaml

SECONDS = 30


def run_at(path: Path) -> Path:
    """Write a run of which nothing is wrong."""
    (path / "metadata").mkdir(parents=True)
    (path / "metadata" / "config.full.yaml").write_text("score_name: acc\nscore_split: val\n")
    (path / "metadata" / "config.canonical.yaml").write_text("optim:\n  lr: 0.1\n")
    (path / "metrics.jsonl").write_text('{"step": 7, "time": 5.0, "train/loss": 2.0}\n')
    (path / "results.json").write_text('{"7": {"val": {"acc": 0.5}}}')
    (path / "best.json").write_text('{"index": 7, "score": 0.5, "result": {"val": {"acc": 0.5}}}')
    return path


def text(content: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(content)


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(6 << 30)


def link_to_a_device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


ALIASES = "a0: &a0 [x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 8)}]\n" for i in range(1, 41)
)
"""About 2 kB that expand to 8**40 values."""
SELF = "a: &a\n  b: *a\n"
DIGITS = "1" + "0" * 400
DEEP_END = '{"end":' + "[" * 9999

HOSTILE: dict[str, tuple[str, Callable[[Path], object]]] = {
    "aliases of aliases": ("metadata/config.full.yaml", text(ALIASES)),
    "settings that refer to themselves": ("metadata/config.canonical.yaml", text(SELF)),
    "a list that holds itself": ("metadata/config.full.yaml", text("a: &a [*a]\n")),
    "sparse settings": ("metadata/config.full.yaml", sparse),
    "sparse metrics": ("metrics.jsonl", sparse),
    "sparse results": ("results.json", sparse),
    "metrics that are a device": ("metrics.jsonl", link_to_a_device),
    "settings that are a named pipe": ("metadata/config.full.yaml", pipe),
    "metrics that are a named pipe": ("metrics.jsonl", pipe),
    "a figure of 401 digits": ("best.json", text(f'{{"index": 7, "score": {DIGITS}, "result": {{"val": {{"acc": 0.5}}}}}}')),
    "an index of 401 digits": ("best.json", text(f'{{"index": {DIGITS}, "score": 1, "result": {{"val": {{}}}}}}')),
    "a score that is a list": ("best.json", text('{"index": 7, "score": [1], "result": {"val": {"acc": 0.5}}}')),
    "results out of range": ("results.json", text('{"7": {"val": {"acc": 1e999}}}')),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_costs_its_run_a_line_and_others_nothing(tmp_path: Path, name: str) -> None:
    file, spoil = HOSTILE[name]
    whole, broken = run_at(tmp_path / "whole"), run_at(tmp_path / "broken")
    spoil(broken / file)
    for words in (
        ["runs", tmp_path],
        ["plot", tmp_path, "-o", tmp_path / "curves.png"],
        ["explain", tmp_path / "broken"],
    ):
        done = bounded(*words)
        assert "Traceback" not in done.stderr and done.returncode in (0, 1), done.stderr
        if words[0] == "runs":
            assert done.returncode == (0 if file == "results.json" else 1)
            rows = [line.split()[0] for line in done.stdout.splitlines() if line]
            assert {"whole", "broken"} <= set(rows)
        told = [line for line in done.stderr.splitlines() if str(broken / file) in line]
        assert len(told) == done.returncode, done.stderr
        assert str(whole) not in done.stderr


def test_metrics_with_figures_of_401_digits_keep_their_other_lines(tmp_path: Path) -> None:
    run = run_at(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(f'{{"step": 8, "train/loss": {DIGITS}}}\n{{"step": 9, "train/loss": 1.0}}\n')
    assert [record["step"] for record in read_jsonl(run / "metrics.jsonl")] == [7, 9]
    assert bounded("plot", run, "-o", tmp_path / "curve.png").returncode == 0


@pytest.mark.parametrize(
    "content", ["[" * 100_000, DIGITS, "1e999", '{"a": [' + DIGITS + "]}", "," * 10_000_001]
)  # fmt: skip
def test_json_beyond_the_bounds_is_a_value_error(content: str) -> None:
    for given in (content, content.encode()):
        with pytest.raises(ValueError):
            parse_json(given)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (ALIASES, "more than 500,000 values"),
        (SELF, "refers to itself"),
        ("&a [*a]", "refers to itself"),
        ("[" * 300 + "]" * 300, "nested"),
        ("[" + "1," * 500_001 + "]", "more than 500,000 values"),
    ],
)
def test_yaml_beyond_the_bounds_is_a_value_error(
    tmp_path: Path, content: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        parse_yaml(content)
    (tmp_path / "settings.yaml").write_text(content)
    with pytest.raises(ValueError, match=message):
        read_settings(tmp_path / "settings.yaml")


def test_a_text_is_read_up_to_its_limit(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("four")
    assert read_text(tmp_path / "text", limit=4) == "four"
    with pytest.raises(ValueError, match="at most 3 bytes"):
        read_text(tmp_path / "text", limit=3)
    with pytest.raises(OSError, match="Not a regular file"):
        read_text(tmp_path)


def _in_a_child(program: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [interpreter(), "-c", program, *words], timeout=SECONDS, capture_output=True, text=True
    )


@pytest.mark.parametrize("kind", ["metrics", "digests"])
def test_partial_write_of_a_line_loses_no_row(tmp_path: Path, kind: str) -> None:
    """The system takes a part of a line, then fails, then has room again, as a disk that others fill and clear."""
    program = """
import errno, resource, sys
from pathlib import Path
from danling.audit.digests import DigestFile, DigestLine
from danling.reporting.jsonl import JsonlTracker
file, kind = Path(sys.argv[1]), sys.argv[2]
lines = JsonlTracker(file) if kind == "metrics" else DigestFile(file, resume_step=0)
def write(step):
    if kind == "metrics":
        lines.log({"train/loss": float(step)}, step)
    else:
        lines.add(DigestLine(step, float(step), None, {"samples": step, "weights": step}))
write(1)
size = file.stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, resource.RLIM_INFINITY))
try:
    write(2)
except OSError as error:
    assert error.errno == errno.EFBIG, error
    print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
write(3)
lines.close()
"""
    file = tmp_path / f"{kind}.jsonl"
    done = _in_a_child(program, str(file), kind)
    assert done.returncode == 0, done.stderr
    assert (
        f"Expected to write a line to {file}." in done.stdout and "Free space there" in done.stdout
    )
    assert [record["step"] for record in read_jsonl(file)] == [1, 3]
    assert file.read_bytes().count(b"\n") == 2


def test_a_full_disk_is_named_with_its_path_and_advice(tmp_path: Path) -> None:
    full = tmp_path / "metrics.jsonl"
    lines = JsonLines(full)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5, limits[1]))
    try:
        with pytest.raises(
            OSError,
            match=rf"Expected to write a line to {full}\. Received: File too large\. Free space",
        ):
            lines.write({"step": 1})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    lines.close()


def test_control_characters_in_names_are_shown_escaped(tmp_path: Path) -> None:
    evil = "\x1b[2J\x1b]0;owned\x07\x9b31m\u202e"
    run = run_at(tmp_path / f"a{evil}b")
    (run / "metadata" / "config.full.yaml").write_text(
        json.dumps({"score_name": evil, "note": f"x\nrow {evil}"})
    )
    other = run_at(tmp_path / "other")
    torch.save({f"weight{evil}": torch.ones(2)}, tmp_path / f"weights{evil}.pt")
    for words in (
        ["runs", tmp_path, "--all-settings"],
        ["runs", tmp_path, "--json"],
        ["inspect", tmp_path / f"weights{evil}.pt", "--tensors"],
        ["inspect", tmp_path / f"no{evil}.pt"],
        ["plot", run, other, "-o", tmp_path / "out.png"],
        ["verify", run],
        [f"no{evil}"],
    ):
        done = bounded(*words)
        assert "Traceback" not in done.stderr, done.stderr
        shown = done.stdout + done.stderr
        assert shown and not any(sign in shown for sign in "\x1b\x07\x9b\u202e"), (words, shown)
    assert "\\x1b[2J" in bounded("runs", tmp_path).stdout
    assert "\nrow" not in bounded("runs", tmp_path, "--all-settings").stdout


def sample(place: int) -> SampleRef:
    return SampleRef(f"sample-{place}", f"object-{place}", {})


@pytest.mark.parametrize(
    "committed", ["1e999", "1" + "0" * 30, "-5", '"a"', "null", "true", DIGITS, "NaN", "[" * 9999]
)
def test_impossible_watermark_is_one_error(tmp_path: Path, committed: str) -> None:
    channel = FileChannel(tmp_path / "files")
    channel.append([sample(0), sample(1)])
    (tmp_path / "files" / "committed.json").write_text(f'{{"committed": {committed}}}')
    with pytest.raises(ValueError, match="Expected .*watermark.* Received: "):
        FileChannel(tmp_path / "files").committed()
    database = SQLiteChannel(tmp_path / "log.db")
    database.append([sample(0)])
    database.close()
    with sqlite3.connect(tmp_path / "log.db") as connection:
        connection.execute("INSERT OR REPLACE INTO facts VALUES ('committed', ?)", (committed,))
    connection.close()
    with pytest.raises(ValueError, match="Expected .*watermark.* Received: "):
        SQLiteChannel(tmp_path / "log.db").committed()


@pytest.mark.parametrize(
    "end", ['{"end":"complete"}', '{"end":[],"published":1e999,"reason":""}', '{"end":"stopped","published":"x","reason":1}', DEEP_END]
)  # fmt: skip
def test_impossible_end_is_one_error(tmp_path: Path, end: str) -> None:
    FileChannel(tmp_path / "files").append([sample(0)])
    with (tmp_path / "files" / "log.jsonl").open("a") as file:
        file.write(end + "\n")
    with pytest.raises(ValueError, match="Expected a sample or an end"):
        FileChannel(tmp_path / "files").ended()
    database = SQLiteChannel(tmp_path / "log.db")
    database.append([sample(0)])
    database.close()
    with sqlite3.connect(tmp_path / "log.db") as connection:
        connection.execute("INSERT INTO facts VALUES ('end', ?)", (end,))
    connection.close()
    with pytest.raises(ValueError, match="Expected how a stream ended"):
        SQLiteChannel(tmp_path / "log.db").ended()


def test_rubbish_in_a_database_is_one_error(tmp_path: Path) -> None:
    for number, content in enumerate([b"", b"SQLite format 3\0" + b"\xff" * 500, os.urandom(5000)]):
        place = tmp_path / f"{number}.db"
        place.write_bytes(content)
        if content:
            with pytest.raises((ValueError, OSError), match="Expected "):
                SQLiteChannel(place).published()
    channel = SQLiteChannel(tmp_path / "log.db")
    channel.append([sample(0)])
    channel.close()
    with sqlite3.connect(tmp_path / "log.db") as connection:
        connection.execute(
            "UPDATE samples SET ref = ?",
            ('{"id":"sample-0","object":{},"tensors":{"a":[[1e999],"float32"]},"meta":{}}',),
        )
    connection.close()
    with pytest.raises(ValueError, match="Expected the reference of a sample"):
        SQLiteChannel(tmp_path / "log.db").read(0, 1)


def test_a_named_pipe_in_a_channel_is_not_waited_for(tmp_path: Path) -> None:
    for name in ("log.jsonl", "committed.json", "owner.json"):
        FileChannel(tmp_path / name).append([sample(0)])
        (tmp_path / name / name).unlink(missing_ok=True)
        os.mkfifo(tmp_path / name / name)
    program = """
import sys
from danling.stream import FileChannel
from danling.stream.refs import SampleRef
for place in sys.argv[1:]:
    channel = FileChannel(place)
    for ask in (lambda: channel.read(0, 1), channel.committed, channel.published, lambda: channel.claim("run"),
                lambda: channel.append([SampleRef("b", "b", {})])):
        try:
            ask()
        except (OSError, ValueError) as error:
            print("refused:", place)
"""
    places = sorted(map(str, tmp_path.iterdir()))
    done = _in_a_child(program, *places)
    refused = {line.split()[1] for line in done.stdout.splitlines()}
    assert done.returncode == 0 and sorted(refused) == places, done.stdout + done.stderr


def test_hostile_objects_of_a_directory_store_are_refused_and_nothing_outside_is_touched(
    tmp_path: Path,
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    store = DirectoryStore(tmp_path / "store")
    for object_id in ("../outside/kept", "/etc/passwd", "a/../../outside/kept", "nul\0name"):
        store.put(object_id, {"a": torch.ones(2)})
        ref = SampleRef("s", object_id, {"a": TensorSpec((2,), "float32")})
        assert torch.equal(store.get(ref)["a"], torch.ones(2))
        (file,) = (tmp_path / "store" / "objects").rglob("*.safetensors")
        file.unlink()
        os.mkfifo(file)
        with pytest.raises(OSError, match="Not a regular file"):
            store.get(ref)
        (tmp_path / "store" / "usage.json").write_text(
            '{"bytes": 1e999, "pending": {"../../outside/kept": 5}}'
        )
        store.discard([object_id])
    assert [path.name for path in outside.iterdir()] == ["kept"] and (
        outside / "kept"
    ).read_text() == "kept"


@pytest.mark.parametrize(
    "header",
    ["[1.5, null]", "null", '"a"', '{"a": 5}', '{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}',
     '{"a": {"dtype": "F32", "shape": "ab", "data_offsets": [0, 4]}}', '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}',
     '{"a": {"dtype": "F32", "shape": [1e999], "data_offsets": [0, 4]}}', '{"a": {"dtype": [], "shape": [1], "data_offsets": [0, 9e9]}}',
     '{"a": {"dtype": "F32", "shape": [1.5, null], "data_offsets": [1.5, null]}}', '{"__metadata__": 5}', "[" * 99_999],
)  # fmt: skip
def test_invalid_header_of_safetensors_is_one_line(
    tmp_path: Path, header: str, capsys: pytest.CaptureFixture[str]
) -> None:
    content = header.encode()
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(content)) + content + b"\0" * 8)
    assert main(["inspect", str(tmp_path / "a.safetensors"), "--tensors"]) == 1
    told = capsys.readouterr().err
    assert told.startswith("danling: Expected a header of safetensors.") and told.count("\n") == 1
