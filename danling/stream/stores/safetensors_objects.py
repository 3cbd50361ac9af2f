"""One object of a stream as a safetensors file, which any other reader of the format opens too."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from torch import Tensor

from danling.utils.files import open_file
from danling.utils.nesting import parse_json

from .objects import checksum, owned

_KEY = "danling"
_RESERVED = "__metadata__"
_LONGEST = 160


def require_safetensors() -> None:
    """Check that safetensors is installed.

    Raises:
        ImportError: If it is not.
    """
    if find_spec("safetensors") is None:
        raise ImportError(
            "Expected the package 'safetensors' to be installed for a DirectoryStore. Received: no such package. "
            "Run `pip install safetensors`."
        )


def file_name(object_id: str) -> str:
    """Return a file name for any object id, another one for each."""
    name = quote(object_id, safe="", errors="surrogatepass")
    if name[:1] in (".", "~"):
        name = f"%{ord(name[0]):02X}{name[1:]}"
    if len(name) > _LONGEST:
        name = "~" + hashlib.sha256(object_id.encode(errors="surrogatepass")).hexdigest()
    return f"{name}.safetensors"


def serialize(object_id: str, tensors: Mapping[str, Tensor]) -> bytes:
    """Return the file of an object.

    Args:
        object_id: Its name, which stands in the file too.
        tensors: Contiguous tensors on the CPU.

    Raises:
        TypeError: If a tensor cannot be held by the format.
    """
    import safetensors.torch

    # The format's writer refuses tensors that share memory.
    storages = [tensor.untyped_storage().data_ptr() for tensor in tensors.values()]
    plain = dict(tensors) if len(set(storages)) == len(storages) else owned(tensors)
    _check(object_id, plain)
    about = json.dumps({"object": object_id, "sum": checksum(plain)})
    data: bytes = safetensors.torch.save(plain, metadata={_KEY: about})
    return data


def _check(object_id: str, tensors: Mapping[str, Tensor]) -> None:
    if _RESERVED in tensors:
        raise TypeError(
            f"Expected names that safetensors does not use itself in object {object_id!r}. Received: {_RESERVED!r}. Call it otherwise."
        )
    for name, tensor in tensors.items():
        if not _can_hold(tensor.dtype):
            raise TypeError(
                f"Expected dtypes that safetensors can hold in object {object_id!r}. Received: {name!r} of {tensor.dtype}. "
                "Return it from capture in another, such as the real and imaginary parts of complex128 by view_as_real."
            )


@cache
def _can_hold(dtype: torch.dtype) -> bool:
    import safetensors.torch

    try:
        safetensors.torch.save({"x": torch.empty(0, dtype=dtype)})
    except Exception:  # its own error differs between versions: KeyError, ValueError, SafetensorError
        return False
    return True


def load(file: Path, object_id: str) -> dict[str, Tensor]:
    """Return the tensors of an object, read through a memory map into memory of their own.

    Args:
        file: Its file.
        object_id: The name that it should have.

    Raises:
        FileNotFoundError: If there is none.
        ValueError: If it is damaged, or is another object.
    """
    import safetensors

    open_file(file).close()  # safetensors would wait for the writer of a named pipe
    try:
        with safetensors.safe_open(file, framework="pt") as opened:
            about = (opened.metadata() or {}).get(_KEY)
            tensors = owned({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118
    except safetensors.SafetensorError as error:
        raise ValueError(f"a damaged object: {error}") from error
    if about is not None:
        _compare(parse_json(about), tensors, object_id)
    return tensors


def _compare(about: Mapping[str, Any], tensors: Mapping[str, Tensor], object_id: str) -> None:
    if about.get("object") != object_id:
        raise ValueError(f"object {about.get('object')!r}")
    if about.get("sum") != checksum(tensors):
        raise ValueError("a damaged object: the sum of its words is not the one that was written")
