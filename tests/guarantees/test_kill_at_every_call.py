"""G2: a process that is killed at any system call of a restart and a save leaves what the next one goes on from, bitwise.

`make chaos` kills at every one of them; here it is at some.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.chaos import ASKED, report
from support.saves import KINDS, litter, load, make_manager, train_on
from support.syscalls import has_strace, strikes, struck

from danling.cli.verify import verify

FIRST, KILLED, LAST = 3, 4, 6
SOME = 8


@pytest.mark.skipif(
    not has_strace(), reason="strace is not installed, or may not trace: tests of faults use patched calls"
)
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("mode", ["disabled", "async"])
@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_a_system_call(kind: str, mode: str, tmp_path: Path) -> None:
    earlier = tmp_path / "earlier"
    train_on(kind, earlier, FIRST)
    # Everything is imported by then, and the whole run is what it is compared with.
    assert train_on(kind, Path(shutil.copytree(earlier, tmp_path / "whole")), LAST, mode=mode) == FIRST
    alone = Path(shutil.copytree(earlier, tmp_path / "alone"))
    left_alone = struck(_train_to_the_kill, kind, alone, mode, inject=None)
    assert left_alone.error == "" and left_alone.signal == 0
    calls = strikes(left_alone.calls)
    assert len(calls) > 200
    chosen = calls if ASKED else calls[:: -(-len(calls) // SOME)]
    kills = 0
    for when in chosen:
        place = Path(shutil.copytree(earlier, tmp_path / "killed"))
        ended = struck(_train_to_the_kill, kind, place, mode, inject=f"{when}:signal=KILL")
        kills += ended.signal == 9
        begun = train_on(kind, place, LAST, mode=mode)
        assert begun >= FIRST, when
        manager = make_manager(kind, place)
        found = {record.name: load(manager, record.name) for record in manager.store.records(complete=True)}
        newest = {"latest": LAST, "best": LAST, f"ckpt-s{LAST:012d}": LAST, f"ckpt-s{LAST - 1:012d}": LAST - 1}
        assert newest.items() <= found.items(), when
        # Beside what retention keeps there is the one that was resumed, under whatever name it was found.
        assert set(found.values()) == {LAST, LAST - 1, begun}, when
        assert litter(place) == [], when
        assert not [verdict for verdict in verify(place, "full") if verdict["problems"]], when
        shutil.rmtree(place)
    # In the background the calls come in another order each time, and the last ones of a count may not come.
    assert kills > 0.75 * len(chosen)
    report(f"at system calls of a restart and a save: {kind}, {mode}", kills, len(chosen))


def _train_to_the_kill(kind: str, place: Path, mode: str) -> None:
    train_on(kind, place, KILLED, mode=mode)
