"""Typing helpers for the sections of a configuration; they have no effect at run time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

if TYPE_CHECKING:
    from collections.abc import Mapping

    from typing_extensions import Self

    S = TypeVar("S")

    class Nested(Generic[S]):
        """A key that holds a section: it reads as the section, and is set to one or to a mapping, `config.optim = {"lr": 0.1}`."""

        @overload
        def __get__(self, owner: None, kind: type) -> Self: ...
        @overload
        def __get__(self, owner: Any, kind: type) -> S: ...
        def __get__(self, owner: object, kind: type) -> object: ...
        def __set__(self, owner: object, value: S | Mapping[str, Any]) -> None: ...

else:

    class Nested:
        """The section's own class, which is all that a configuration asks for."""

        def __class_getitem__(cls, section):
            return section
