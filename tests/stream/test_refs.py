"""References of samples go through the log unchanged, and hold no tensors."""

from __future__ import annotations

import pytest
import torch

from danling.stream import SampleRef, TensorSpec


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.bool, torch.int64, torch.float32, torch.complex64]
)
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_a_reference_comes_back_from_its_line(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.zeros(shape, dtype=dtype)
    ref = SampleRef(
        "prompt 7\n", "a1", {"hidden": TensorSpec.of(tensor)}, {"version": 3, "source": "naïve"}
    )
    assert "\n" not in ref.to_json()
    assert SampleRef.from_json(ref.to_json()) == ref
    assert ref.nbytes == tensor.nbytes and ref.tensors["hidden"].torch_dtype is dtype


@pytest.mark.parametrize("value", [torch.ones(2), float("nan"), {1, 2}, object()])
def test_metadata_without_a_json_form_is_refused_with_the_sample(value: object) -> None:
    with pytest.raises(TypeError, match="Expected plain JSON in the metadata of sample 'seven'"):
        SampleRef("seven", "a1", {}, {"value": value})


def test_metadata_equals_the_metadata_read_from_the_log() -> None:
    meta = {"of": (1, 2), 3: [None]}
    ref = SampleRef("a", "b", {}, meta)
    meta[3].append(1)  # type: ignore[union-attr]
    assert ref.meta == {"of": [1, 2], "3": [None]} and SampleRef.from_json(ref.to_json()) == ref


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="Received: 'float31'"):
        TensorSpec((1,), "float31")


@pytest.mark.parametrize(
    "line",
    ["", "{}", '{"id":"a","object":"b","tensors":{"x":[[1],"float32"]}', '{"id":1}', "[]", "null"],
)
def test_line_without_a_reference_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="Expected the reference of a sample as one line of JSON"):
        SampleRef.from_json(line)


def test_ids_are_strings() -> None:
    for ids in ((1, "a"), ("a", None)):
        with pytest.raises(
            TypeError, match="Expected strings as the ids of a sample and of its object"
        ):
            SampleRef(*ids, {})  # type: ignore[arg-type]
