"""Write docs/reference/errors.md: how every error and warning of the library begins, taken from the sources.

python scripts/list_errors.py             # writes the page
python scripts/list_errors.py --check     # ends with 1 if the page is not that of the sources
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "errors.md"
HEAD = """\
# Every error text

The first sentence of every error and warning, by the file that raises it. Search for a few words of your text, without its
values, which are *italics* here. The rest of a message says what was received and what to change.
[Answers](../answers/errors.md) explains the frequent ones.

`python scripts/list_errors.py` writes this page, and a test compares it with the sources.
"""
OPEN, CLOSE = "\ue000", "\ue001"
LONGEST_NAME = 32
SHORTEST_TEXT = 12


class Collector(ast.NodeVisitor):
    """Collects the texts of one file, in their order."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self._taken: set[int] = set()

    def visit_Raise(self, node: ast.Raise) -> None:
        """Take the text of what is raised."""
        if isinstance(node.exc, ast.Call) and name_of(node.exc.func)[:1].isupper():
            self._take(node.exc.args)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        """Take the text of a warning, and of an exception that is made to be raised elsewhere."""
        name = name_of(node.func)
        owner = name_of(node.func.value) if isinstance(node.func, ast.Attribute) else ""
        if owner in ("logger", "LOGGER") and name in ("warning", "error", "exception"):
            self._take(node.args[:1], values=node.args[1:])
        elif "warn" in name or name.endswith(("Error", "Mismatch", "Damaged")):
            self._take(node.args)
        self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Take a text that begins as messages do, wherever it is."""
        self._expected(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        """Take a text that begins as messages do, wherever it is."""
        self._expected(node)

    def _expected(self, node: ast.expr) -> None:
        text = text_of(node)
        if (
            id(node) not in self._taken
            and text is not None
            and text.startswith("Expected ")
            and len(text) > 30
        ):
            self._note(node, text)

    def _take(self, arguments: Sequence[ast.expr], *, values: Sequence[ast.expr] = ()) -> None:
        for argument in (part for whole in arguments for part in choices_of(whole)):
            text = text_of(argument, values)
            if id(argument) not in self._taken and text is not None and is_whole(text):
                self._note(argument, text)

    def _note(self, node: ast.expr, text: str) -> None:
        self._taken |= {id(part) for part in ast.walk(node)}
        self.found.append(first_sentence(text))


def choices_of(node: ast.expr) -> list[ast.expr]:
    """Return what a conditional expression chooses from, or the expression itself."""
    return (
        [*choices_of(node.body), *choices_of(node.orelse)]
        if isinstance(node, ast.IfExp)
        else [node]
    )


def name_of(node: ast.expr) -> str:
    """Return the last name of a dotted one."""
    return (
        node.attr
        if isinstance(node, ast.Attribute)
        else node.id
        if isinstance(node, ast.Name)
        else ""
    )


def text_of(node: ast.expr, values: Sequence[ast.expr] = ()) -> str | None:
    """Return the text that an expression makes, with its values between `OPEN` and `CLOSE`; `None` where it is none.

    Args:
        node: The expression.
        values: What is put in where it has `%s` and the like.
    """
    if isinstance(node, ast.Constant):
        if not isinstance(node.value, str):
            return None
        names = map(value_of, values)
        return one_line(
            re.sub(r"%\.?\d*[rsdgf]", lambda _: next(names, f"{OPEN}...{CLOSE}"), node.value)
        )
    if isinstance(node, ast.JoinedStr):
        return one_line("".join(piece_of(part) for part in node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        parts = [text_of(side) or value_of(side) for side in (node.left, node.right)]
        return "".join(parts) if any(words_of(part) for part in parts) else None
    return None


def piece_of(node: ast.expr) -> str:
    """Return one part of a formatted string."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    assert isinstance(node, ast.FormattedValue)
    return value_of(node.value)


def value_of(node: ast.expr) -> str:
    """Return a value by the name that it has in the sources, where that is short."""
    name = ast.unparse(node)
    plain = re.fullmatch(r"[\w.\[\]]+", name) is not None and len(name) <= LONGEST_NAME
    return f"{OPEN}{name.removeprefix('self.').strip('_') if plain else '...'}{CLOSE}"


def one_line(text: str) -> str:
    """Return a text without its line breaks."""
    return re.sub(r"\s+", " ", text)


def words_of(text: str) -> str:
    """Return a text without its values."""
    return re.sub(f"{OPEN}.*?{CLOSE}", "", text).strip()


def is_whole(text: str) -> bool:
    """Whether a text is a message, and no word of one, such as the name of a key."""
    begins = text.startswith(("Expected ", OPEN)) or text[:1].isupper()
    return begins and len(words_of(text)) >= SHORTEST_TEXT and " " in words_of(text)


def first_sentence(text: str) -> str:
    """Return the first sentence of a message, or all of it where that sentence has only values."""
    found = re.search(rf"\.(?= [A-Z`{OPEN}])", text)
    head = text[: found.end()] if found else text
    return head.strip() if len(words_of(head)) >= SHORTEST_TEXT else text.strip()


def in_table(text: str) -> str:
    """Return a text as a cell: nothing in it is markup but the values, in italics."""
    text = re.sub(r"([\\`*_{}\[\]#|])", r"\\\1", escape(text, quote=False))
    return text.replace(OPEN, "<i>").replace(CLOSE, "</i>")


def messages_of(file: Path) -> list[str]:
    """Return how the messages of one file begin, in alphabetical order."""
    collector = Collector()
    collector.visit(ast.parse(file.read_text(encoding="utf-8")))
    return sorted(
        set(map(in_table, collector.found)),
        key=lambda text: (re.sub(r"<i>.*?</i>|\W", "", text).lower(), text),
    )


def page(root: Path) -> str:
    """Return the page of the sources below `root`: a table with a row for each file and a line for each message."""
    found = {file: messages_of(file) for file in sorted(root.rglob("*.py"))}
    rows = [
        f"| `{file.relative_to(root)}` | {'<br>'.join(texts)} |"
        for file, texts in found.items()
        if texts
    ]
    return "\n".join([HEAD, "| file | messages |\n|---|---|", *rows, ""])


def main(arguments: Sequence[str]) -> int:
    """Write the page, or compare it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; end with 1 if the page is not current"
    )
    options = parser.parse_args(arguments)
    made = page(ROOT / "danling")
    if options.check:
        current = PAGE.exists() and PAGE.read_text() == made
        if not current:
            print(
                f"{PAGE} is not that of the sources. Run: python scripts/list_errors.py",
                file=sys.stderr,
            )
        return 0 if current else 1
    PAGE.write_text(made)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
