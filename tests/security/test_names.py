"""A name from a file that leads elsewhere is refused by the one parser of such names."""

from __future__ import annotations

import pytest

from danling.utils.files import is_plain_path, plain_name, plain_path

HOSTILE = [
    *("", ".", "..", "/etc/passwd", "../a", "a/../../b", "a//b", "a\0b", "a\nb", "C:a", "a\\b", "a/", "./a", "a" * 300),
    *(5, None, "\ud800"),
]


@pytest.mark.parametrize("name", HOSTILE)
def test_the_parser_takes_no_name_that_leads_elsewhere(name: object) -> None:
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
