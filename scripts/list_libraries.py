"""Write the table of libraries that are known to work, from the tests that show it.

    python scripts/list_libraries.py

A module of `tests/ecosystem` says in its docstring, a line each, what it shows with the real library: `Library:` its name on the package
index, `Works:` what was tried, and `Exact:` what is the same to the bit, or to the rounding that the test allows. The version is that of
`constraints.txt`, which the tests have passed with. The table is between two comments of `docs/guides/libraries.md`.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/guides/libraries.md"
BEGIN, END = (
    "<!-- libraries: written by scripts/list_libraries.py -->\n",
    "<!-- end of libraries -->\n",
)
FIELDS = ("Library", "Works", "Exact")


def main() -> None:
    """Write the table into the page."""
    PAGE.write_text(page())


def page() -> str:
    """Return the page with the table as it follows from the tests."""
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    return before + BEGIN + table() + END + rest.split(END)[1]


def table() -> str:
    """Return the table in Markdown, a row for each library, by name."""
    versions = pinned(ROOT / "constraints.txt")
    rows = [
        f"| {row['Library']} {versions[normal(row['Library'])]} | {row['Works']} | {row['Exact']} | `{path}` |"
        for path, row in sorted(declared().items(), key=lambda item: item[1]["Library"].lower())
    ]
    head = ["| library, version | works | exact | test |", "|---|---|---|---|"]
    return "".join(f"{line}\n" for line in [*head, *rows])


def declared() -> dict[str, dict[str, str]]:
    """Return what each module of `tests/ecosystem` declares, by its path."""
    found = {}
    for path in sorted((ROOT / "tests/ecosystem").glob("test_*.py")):
        docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
        row = dict(re.findall(rf"^({'|'.join(FIELDS)}): (.+)$", docstring, re.MULTILINE))
        name = path.relative_to(ROOT).as_posix()
        missing = [field for field in FIELDS if field not in row]
        if missing:
            raise ValueError(
                f"Expected the docstring of {name} to have a line each for {', '.join(FIELDS)}. Received: none for {', '.join(missing)}."
            )
        found[name] = row
    return found


def pinned(constraints: Path) -> dict[str, str]:
    """Return the version of each package of a file of constraints, by its normal name.

    Args:
        constraints: The file.
    """
    lines = re.findall(r"^([\w.-]+)==([^\s;]+)", constraints.read_text(), re.MULTILINE)
    return {normal(name): version for name, version in lines}


def normal(name: str) -> str:
    """Return a name of a package in the form in which two spellings of it are equal."""
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    main()
