"""Lines of code of the examples and of their ports to Lightning in `benchmarks/ports`: python benchmarks/port_lines.py.

Blank lines, comments and docstrings are left out, and what a port takes from the example (models, windows of a text, the score).
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]


def code_lines(path: Path, shared: set[str]) -> int:
    """Return the lines of the code of a file, less those of definitions that are shared."""
    lines: set[int] = set()
    docs: set[int] = set()
    for statement in ast.parse(path.read_text()).body:
        if getattr(statement, "name", None) in shared:
            continue
        for node in ast.walk(statement):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                docs.update(range(node.lineno, (node.end_lineno or 0) + 1))
        lines.update(range(statement.lineno, (statement.end_lineno or 0) + 1))
    text = path.read_text().splitlines()
    return sum(
        bool(text[number - 1].strip()) and not text[number - 1].lstrip().startswith("#")
        for number in lines - docs
    )


def main() -> None:
    """Print the lines of each example and of its port."""
    for port in sorted((ROOT / "benchmarks" / "ports").glob("*.py")):
        imports = [
            node
            for node in ast.walk(ast.parse(port.read_text()))
            if isinstance(node, ast.ImportFrom)
        ]
        shared = {name.name for node in imports if node.module == port.stem for name in node.names}
        example, ported = (
            code_lines(ROOT / "examples" / port.name, shared),
            code_lines(port, shared),
        )
        print(f"{port.name}: {example} lines, {ported} for Lightning")


if __name__ == "__main__":
    main()
