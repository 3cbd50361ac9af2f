"""Keys of a run in an object store, and which of them count."""

from __future__ import annotations

from danling.remote.stored_run import RunLayout, listed, unreferenced

TARGET, KILLED, OLD = "00000012-1a2b3c4d", "00000013-1a2b3c4d", "00000011-1a2b3c4d"
A, B = "a" * 64, "b" * 64


def test_keys_lie_below_the_run() -> None:
    layout = RunLayout("line-abc", "abc-0123-2")
    assert layout.lock == "line-abc/abc-0123-2/lock"
    assert layout.object(A) == f"line-abc/abc-0123-2/checkpoints/objects/{A}"
    assert layout.manifest("best") == "line-abc/abc-0123-2/checkpoints/best.pth.sha256"
    assert layout.target_manifest(TARGET) == f"line-abc/abc-0123-2/checkpoints/targets/{TARGET}/manifest.sha256"
    assert layout.pointer("latest") == "line-abc/abc-0123-2/checkpoints/latest"
    assert layout.file("logs/1.log") == "line-abc/abc-0123-2/files/logs/1.log"


def test_what_is_there_is_told_from_the_keys_alone() -> None:
    layout = RunLayout("line", "id")
    whole = [
        layout.object(A),
        layout.manifest("latest"),
        layout.manifest("ckpt-e000001"),
        layout.pointer("best"),
        layout.target_file(TARGET, "index.json"),
        layout.target_manifest(TARGET),
        layout.target_file(KILLED, "index.json"),
    ]
    foreign = ["notes.txt", "objects/abc", "targets/mine/x", "somebody.pth.sha256"]
    found = listed([*(key.removeprefix(f"{layout.checkpoints}/") for key in whole), *foreign])
    assert found.manifests == {"latest", "ckpt-e000001"} and found.pointers == {"best"} and found.objects == {A}
    assert found.complete == {TARGET} and found.parts.keys() == {TARGET, KILLED}


def test_what_nothing_leads_to_is_removed_manifest_first() -> None:
    keys = [f"objects/{A}", f"objects/{B}"]
    keys += [f"targets/{target}/{file}" for target in (OLD, TARGET) for file in ("0.distcp", "manifest.sha256")]
    keys += [f"targets/{KILLED}/0.distcp", "targets/of-somebody/0.distcp"]
    found = listed(keys)
    assert unreferenced(found, digests=[A], targets=[TARGET]) == [
        f"objects/{B}",
        f"targets/{OLD}/manifest.sha256",
        f"targets/{OLD}/0.distcp",
        f"targets/{KILLED}/0.distcp",
    ]
    assert unreferenced(found, digests=[A], targets=[TARGET], spared=[B, OLD, KILLED]) == []
