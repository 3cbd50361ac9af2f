"""Check the links of a built site: every internal page, file and anchor must be there.

python scripts/check_links.py site          # prints what is missing and ends with 1 if anything is

Links to other sites are not followed: a check that needs the network fails on other days than the documentation does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Anchors(HTMLParser):
    """Collects the targets (`id`, `name`) of a page and the links (`href`, `src`) that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: set[str] = set()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what a tag names and where it leads."""
        for name, value in attrs:
            if value and (name == "id" or (name == "name" and tag == "a")):
                self.targets.add(value)
            elif value and name in ("href", "src"):
                self.links.append(value)


def read(page: Path) -> Anchors:
    """Return targets and links of one page."""
    anchors = Anchors()
    anchors.feed(page.read_text(encoding="utf-8"))
    return anchors


def broken_links(site: Path) -> Iterator[tuple[Path, str, str]]:
    """Yield page, link and reason of every internal link that leads nowhere.

    Args:
        site: Directory of the built site. Its page for unknown addresses, whose links are absolute, is left out.
    """
    pages = {
        page.resolve(): read(page)
        for page in sorted(site.rglob("*.html"))
        if page.name != "404.html"
    }
    for page, anchors in pages.items():
        for link in anchors.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            if target.is_dir():
                target = target / "index.html"
            if not target.is_file():
                yield page, link, "no such page or file"
            elif (
                parts.fragment
                and target in pages
                and unquote(parts.fragment) not in pages[target].targets
            ):
                yield page, link, "no such anchor"


def main(arguments: list[str]) -> int:
    """Check one site; return the exit code."""
    if len(arguments) != 1 or not Path(arguments[0]).is_dir():
        print(
            "Expected the directory of a built site: python scripts/check_links.py site",
            file=sys.stderr,
        )
        return 2
    site = Path(arguments[0])
    broken = list(broken_links(site))
    for page, link, reason in broken:
        print(f"{page.relative_to(site.resolve())}: {link}: {reason}")
    print(f"{len(list(site.rglob('*.html')))} pages, {len(broken)} broken links")
    return 1 if broken else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
