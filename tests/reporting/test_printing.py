"""Printing on one process, with the builtin left alone."""

from __future__ import annotations

import builtins
import io

import pytest

from danling.reporting import Printer


def test_speaks_where_enabled_and_takes_the_arguments_of_print(capsys: pytest.CaptureFixture[str]) -> None:
    builtin = builtins.print
    Printer()("a", 1, sep="-", end="!\n")
    Printer(enabled=False)("b")
    other = io.StringIO()
    Printer()("c", file=other, flush=True)
    assert capsys.readouterr().out == "a-1!\n"
    assert other.getvalue() == "c\n"
    assert builtins.print is builtin
