"""The one table of the parallel axes, beside the lists that stood where it is looked up now, and beside axes laid out by hand."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields

import pytest

from danling.config.schema import AxesConfig
from danling.mesh.axes import AXES, MESH_ORDER, TRAITS, AxisTraits, axes_with


def test_the_order_of_the_mesh() -> None:
    assert MESH_ORDER == ("pipeline", "replicate", "shard", "context", "expert", "expert_tensor", "tensor")
    assert sorted(row.mesh_place for row in TRAITS.values()) == list(range(len(TRAITS)))


def test_the_configuration_has_a_degree_for_each_axis() -> None:
    assert tuple(AxesConfig().keys()) == AXES


def test_an_unknown_trait_is_an_error() -> None:
    with pytest.raises(AttributeError, match="reads_datum"):
        axes_with(reads_datum=True)
    assert "reads_data" in {field.name for field in fields(AxisTraits)}


def test_axes_are_read_without_torch() -> None:
    code = "import sys, danling.mesh; danling.mesh.AXES; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
