"""Draw which room of the library imports which, from its source: `python scripts/draw_rooms.py [--check] [FILE]`.

A room is a package below `danling`. It is one floor above the highest room that it imports, so every arrow runs down. An arrow that
follows from others (`a` imports `b`, `b` imports `c`, and so `a` may import `c`) is left out.
"""

from __future__ import annotations

import ast
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1] / "danling"
PICTURE = Path(__file__).parents[1] / "docs" / "assets" / "rooms.svg"
WIDTH, HEIGHT, ACROSS, DOWN, MARGIN = 116, 34, 24, 52, 16

Rooms = dict[str, set[str]]


def rooms_of(root: Path) -> Rooms:
    """Return what each room imports of the others.

    Args:
        root: The package.
    """
    found: Rooms = {path.name: set() for path in root.iterdir() if (path / "__init__.py").exists()}
    for file in root.glob("*/**/*.py"):
        room = file.relative_to(root).parts[0]
        tree = ast.parse(file.read_text(encoding="utf-8"))
        # Names of types are not imported when the library runs.
        types = [
            node
            for node in tree.body
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        ]
        for node in set(ast.walk(tree)) - {inner for block in types for inner in ast.walk(block)}:
            if (
                isinstance(node, ast.ImportFrom)
                and node.level == 0
                and (node.module or "").startswith(f"{root.name}.")
            ):
                found[room].add(str(node.module).split(".")[1])
        found[room] &= found.keys() - {room}
    return found


def floors_of(rooms: Rooms) -> list[list[str]]:
    """Return the rooms by floor, the lowest first.

    Args:
        rooms: What each of them imports.

    Raises:
        SystemExit: If two rooms import each other, in however many steps.
    """
    try:
        order = list(TopologicalSorter(rooms).static_order())
    except CycleError as error:
        raise SystemExit(
            f"Expected imports that run down. Received a circle: {' -> '.join(error.args[1])}."
        ) from None
    height: dict[str, int] = {}
    for room in order:
        height[room] = max((height[below] + 1 for below in rooms[room]), default=0)
    return [
        [room for room in sorted(rooms) if height[room] == floor]
        for floor in range(max(height.values()) + 1)
    ]


def without_shortcuts(rooms: Rooms) -> Rooms:
    """Return the imports that do not follow from others.

    Args:
        rooms: What each room imports, without a circle.
    """

    @cache
    def reached(room: str) -> frozenset[str]:
        return frozenset(rooms[room]).union(*(reached(below) for below in rooms[room]))

    return {
        room: {b for b in below if not any(b in reached(other) for other in below)}
        for room, below in rooms.items()
    }


def drawn(rooms: Rooms) -> str:
    """Return the picture as SVG.

    Args:
        rooms: What each room imports.
    """
    floors = floors_of(rooms)
    broadest = max(map(len, floors))
    width = 2 * MARGIN + broadest * WIDTH + (broadest - 1) * ACROSS
    height = 2 * MARGIN + len(floors) * HEIGHT + (len(floors) - 1) * DOWN
    place: dict[str, tuple[float, float]] = {}
    for floor, names in enumerate(reversed(floors)):
        left = (width - len(names) * WIDTH - (len(names) - 1) * ACROSS) / 2
        for column, name in enumerate(names):
            place[name] = (left + column * (WIDTH + ACROSS), MARGIN + floor * (HEIGHT + DOWN))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="14">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 8 4 0 8z" fill="#888"/></marker></defs>',
    ]
    for room, below in sorted(without_shortcuts(rooms).items()):
        x, y = place[room]
        for other in sorted(below):
            to_x, to_y = place[other]
            start, end = y + HEIGHT, to_y
            bend = (start + end) / 2
            lines.append(
                f'<path d="M{x + WIDTH / 2:g} {start:g} C{x + WIDTH / 2:g} {bend:g} {to_x + WIDTH / 2:g} {bend:g} '
                f'{to_x + WIDTH / 2:g} {end:g}" fill="none" stroke="#888" marker-end="url(#tip)"/>'
            )
    for room, (x, y) in sorted(place.items()):
        lines.append(
            f'<rect x="{x:g}" y="{y:g}" width="{WIDTH}" height="{HEIGHT}" rx="6" fill="#f4f6fb" stroke="#4051b5"/>'
            f'<text x="{x + WIDTH / 2:g}" y="{y + HEIGHT / 2 + 5:g}" text-anchor="middle" fill="#1a1f36">{room}</text>'
        )
    return "\n".join([*lines, "</svg>", ""])


def main(arguments: list[str]) -> int:
    """Write the picture, or with `--check` say whether the one that is there is that of the source."""
    check = "--check" in arguments
    named = [Path(name) for name in arguments if name != "--check"]
    file, picture = (named or [PICTURE])[0], drawn(rooms_of(ROOT))
    if not check:
        file.write_text(picture, encoding="utf-8")
    elif not file.exists() or file.read_text(encoding="utf-8") != picture:
        print(
            f"Expected {file} to show what the source imports. Received another picture. Run python scripts/draw_rooms.py."
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
