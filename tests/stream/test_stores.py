"""Every store keeps the same promises."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from support.mooncake import WHY_NOT, mooncake_master
from support.processes import fork, wait
from support.streams import reference
from torch import Tensor

from danling.stream import (
    DirectoryStore,
    FeatureStore,
    MemoryStore,
    MooncakeStore,
    SampleRef,
    TensorSpec,
)

Make = Callable[..., FeatureStore]
KINDS = [
    "memory",
    "directory",
    pytest.param("mooncake", marks=pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)),
]


@pytest.fixture(scope="module")
def mooncake_store() -> Iterator[MooncakeStore | None]:
    if WHY_NOT:
        yield None
        return
    with mooncake_master() as (master, metrics):
        store = MooncakeStore(master, metrics=metrics, lend_bytes=16 << 20)
        yield store
        store.close()


@pytest.fixture(params=KINDS)
def make(
    request: pytest.FixtureRequest, tmp_path: Path, mooncake_store: MooncakeStore | None
) -> Iterator[Make]:
    made: list[FeatureStore] = []

    def memory(**options: int) -> FeatureStore:
        made.append(MemoryStore(**options))
        return made[-1]

    def directory(**options: int) -> FeatureStore:
        made.append(DirectoryStore(tmp_path / "store", **options))
        return made[-1]

    def mooncake() -> FeatureStore:
        assert mooncake_store is not None
        return mooncake_store

    yield {"memory": memory, "directory": directory, "mooncake": mooncake}[request.param]
    for store in made:
        store.close()
    if request.param == "mooncake":
        mooncake()._store.remove_all(True)  # type: ignore[attr-defined]


def features(seed: int = 0, rows: int = 3) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 256, (rows, 32), generator=generator, dtype=torch.uint8)
    bits[0, :8] = 255  # NaN with a payload
    return {
        "hidden": bits.view(torch.bfloat16),
        "half": bits.view(torch.float16),
        "loss": bits.view(torch.float32),
        "exact": bits.view(torch.float64),
        "ids": bits.view(torch.int64),
        "short": bits.view(torch.int16),
        "mask": bits > 127,
        "bytes": bits,
        "fp8": bits.view(torch.float8_e4m3fn),
        "scalar": torch.tensor(-0.0),
        "nothing": torch.empty(0, 4),
    }


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return list(one) == list(other) and all(
        one[name].dtype == other[name].dtype
        and one[name].shape == other[name].shape
        and one[name].numpy(force=True).tobytes() == other[name].numpy(force=True).tobytes()
        if one[name].dtype not in (torch.bfloat16, torch.float8_e4m3fn)
        else torch.equal(one[name].view(torch.uint8), other[name].view(torch.uint8))
        for name in one
    )


def test_an_object_comes_back_bit_for_bit_in_memory_of_its_own(make: Make) -> None:
    store, tensors = make(), features()
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    store.put("a", tensors)
    ref = reference("a", tensors)
    for tensor in tensors.values():
        tensor.zero_()
    first = store.get(ref)
    assert same(first, before)
    for tensor in first.values():
        tensor.zero_()
        assert tensor.is_contiguous() and not tensor.requires_grad
    assert same(store.get(ref), before)


def test_views_and_tensors_with_a_gradient_are_stored_by_value(make: Make) -> None:
    store = make()
    base = torch.arange(12.0).reshape(3, 4)
    tensors = {
        "t": base.t(),
        "part": base[1:, ::2],
        "same": base.t(),
        "leaf": torch.ones(2, requires_grad=True),
    }
    store.put("a", tensors)
    found = store.get(reference("a", tensors))
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert found["t"].is_contiguous() and not found["leaf"].requires_grad


def test_discarded_or_missing_object_is_a_key_error(make: Make) -> None:
    store, tensors = make(), features()
    store.put("a", tensors)
    store.put("b", tensors)
    store.discard(["a", "never", "a"])
    for name in ("a", "never"):
        with pytest.raises(KeyError, match=f"features of sample 'sample 7'.*no object '{name}'"):
            store.get(reference(name, tensors))
    assert same(store.get(reference("b", tensors)), tensors)


def test_usage_counts_the_bytes_of_kept_objects(make: Make) -> None:
    store = make()
    assert store.usage() == 0
    sizes = []
    for seed in range(3):
        store.put(str(seed), features(seed, rows=seed + 1))
        sizes.append(store.usage())
    assert sizes[0] >= sum(tensor.nbytes for tensor in features(0, rows=1).values())
    assert sizes == sorted(set(sizes))
    store.discard(["1", "0"])
    assert store.usage() == sizes[2] - sizes[1]
    store.discard(["2", "1"])
    assert store.usage() == 0


def test_the_same_bytes_again_are_no_error_and_other_bytes_are_refused(make: Make) -> None:
    store, tensors = make(), features()
    store.put("a", tensors)
    usage = store.usage()
    store.put("a", tensors)
    assert store.usage() == usage
    for other in (features(1), features(0, rows=2), {**tensors, "more": torch.ones(1)}, {}):
        with pytest.raises(
            ValueError,
            match="Expected a name that no object.*Received: 'a', which holds other bytes",
        ):
            store.put("a", other)
    assert same(store.get(reference("a", tensors)), tensors) and store.usage() == usage


@pytest.mark.parametrize("make", ["memory", "directory"], indirect=True)
def test_a_budget_is_enforced_and_freed_bytes_can_be_used_again(make: Make) -> None:
    tensors = features()
    store = make(max_bytes=5_000)
    with pytest.raises(
        BufferError,
        match="Expected at most 5000 bytes.*Received: object '.*' of .* bytes in addition",
    ):
        for index in range(100):
            store.put(str(index), tensors)
    assert 1 < index < 100 and store.usage() <= 5_000
    with pytest.raises(KeyError):
        store.get(reference(str(index), tensors))
    store.discard(["0"])
    store.put(str(index), tensors)
    assert same(store.get(reference(str(index), tensors)), tensors)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"ids": TensorSpec((2, 4), "int64")},
            r"Expected int64\[2, 4\] as feature 'ids' of sample '7'.*int64\[3, 4\]",
        ),
        (
            {"ids": TensorSpec((3, 4), "int32")},
            r"Expected int32\[3, 4\] as feature 'ids' of sample '7'",
        ),
        (
            {"more": TensorSpec((1,), "int32")},
            r"Expected int32\[1\] as feature 'more'.*Received: nothing",
        ),
    ],
)
def test_object_different_from_its_reference_is_refused(
    make: Make, change: dict[str, TensorSpec], message: str
) -> None:
    store, tensors = make(), features()
    store.put("a", tensors)
    ref = reference("a", tensors)
    with pytest.raises(ValueError, match=message):
        store.get(SampleRef("7", "a", {**ref.tensors, **change}))
    with pytest.raises(ValueError, match="Expected nothing as feature 'bytes'"):
        store.get(
            SampleRef(
                "7", "a", {name: spec for name, spec in ref.tensors.items() if name != "bytes"}
            )
        )


@pytest.mark.parametrize("value", [1.0, [torch.ones(1)], None, torch.eye(2).to_sparse()])
def test_value_other_than_a_dense_tensor_is_refused_with_object_and_name(
    make: Make, value: object
) -> None:
    store = make()
    with pytest.raises(
        TypeError, match="Expected dense, whole tensors by name in object 'a'. Received: 'x': "
    ):
        store.put("a", {"x": value})  # type: ignore[dict-item]
    assert store.usage() == 0
    with pytest.raises(KeyError):
        store.get(reference("a", {}))


def test_threads_put_get_and_discard_at_once(make: Make) -> None:
    store, tensors = make(), {"x": torch.arange(64.0)}
    errors: list[BaseException] = []

    def work(worker: int) -> None:
        try:
            for index in range(25):
                name = f"{worker}-{index}"
                store.put(name, {"x": tensors["x"] + worker})
                assert torch.equal(store.get(reference(name, tensors))["x"], tensors["x"] + worker)
                store.discard([name])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and store.usage() == 0


def _get_is_refused(store: MemoryStore) -> None:
    with pytest.raises(RuntimeError, match="Use a DirectoryStore between processes"):
        store.get(reference("a", {"x": torch.ones(1)}))


def test_a_store_in_memory_is_refused_in_a_forked_process() -> None:
    store = MemoryStore()
    store.put("a", {"x": torch.ones(1)})
    assert wait(fork(_get_is_refused, store)) == 0


def _swap_pages(data: bytearray, draw: random.Random) -> None:
    one, other = (4096 * page for page in draw.sample(range(len(data) // 4096), 2))
    data[one : one + 4096], data[other : other + 4096] = (
        data[other : other + 4096],
        data[one : one + 4096],
    )


def _flip_twice(data: bytearray, draw: random.Random) -> None:
    bit = draw.randrange(64)
    for word in draw.sample(range(len(data) // 8), 2):
        data[8 * word + bit // 8] ^= 1 << bit % 8


def _swap_names(store: FeatureStore, pair: dict[str, Tensor]) -> None:
    """Give each of two features the name of the other one, where the store keeps it."""
    if isinstance(store, MemoryStore):
        tensors, written = store._objects["a"]
        store._objects["a"] = {"one": tensors["two"], "two": tensors["one"]}, written
        return
    raw = _raw(store)
    header = raw[: raw.index(pair["one"].numpy().tobytes()[:64])]
    for old, new in ((b'"one"', b'"ten"'), (b'"two"', b'"one"'), (b'"ten"', b'"two"')):
        assert header.count(old) == 1
        header = header.replace(old, new)
    _replace(store, header + raw[len(header) :])


def _raw(store: FeatureStore) -> bytes:
    if isinstance(store, DirectoryStore):
        return (store.path / "objects" / "a.safetensors").read_bytes()
    assert isinstance(store, MooncakeStore)
    return bytes(store._store.get(store._key("a")))


def _replace(store: FeatureStore, data: bytes) -> None:
    if isinstance(store, DirectoryStore):
        (store.path / "objects" / "a.safetensors").write_bytes(data)
    elif isinstance(store, MooncakeStore):
        store.discard(["a"])
        assert store._store.put(store._key("a"), data) == 0


def _strike(
    store: FeatureStore, pair: dict[str, Tensor], damage: Callable[[bytearray], None]
) -> None:
    """Damage the bytes of the first feature."""
    values = bytearray(pair["one"].numpy().tobytes())
    before = bytes(values)
    damage(values)
    if isinstance(store, MemoryStore):
        store._objects["a"][0]["one"].copy_(torch.frombuffer(values, dtype=torch.uint8))
    else:
        raw = _raw(store)
        assert raw.count(before) == 1
        _replace(store, raw.replace(before, bytes(values)))


def _pair() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    one, two = torch.randint(0, 256, (2, 8 * 4096), generator=generator, dtype=torch.uint8)
    return {"one": one.clone(), "two": two.clone()}


@pytest.mark.parametrize("damage", [_swap_pages, _flip_twice])
def test_no_damage_of_values_comes_back_as_a_sample(
    make: Make, damage: Callable[..., None]
) -> None:
    store, pair, draw = make(), _pair(), random.Random(11)
    store.put("a", pair)
    for _ in range(60):
        _strike(store, pair, partial(damage, draw=draw))
        with pytest.raises(
            ValueError, match="sample 'sample 7' in .*Received: a damaged object: its checksum"
        ):
            store.get(reference("a", pair))
        if isinstance(store, MemoryStore):
            store._objects["a"][0]["one"].copy_(pair["one"])
        else:
            store.discard(["a"])
            store.put("a", pair)
        assert same(store.get(reference("a", pair)), pair)


def test_features_with_each_others_names_are_damage(make: Make) -> None:
    store, pair = make(), _pair()
    store.put("a", pair)
    _swap_names(store, pair)
    with pytest.raises(
        ValueError, match="sample 'sample 7' in .*Received: a damaged object: its checksum"
    ):
        store.get(reference("a", pair))
