"""Write `llms.txt` from the documentation: the pages in the order of the navigation, with the first sentence of each.

    python scripts/write_llms.py [--check]

`--check` writes nothing, and ends with 1 if the file is not what would be written.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "llms.txt"
HEAD = (
    "# danling\n\n"
    "> A training library for PyTorch. You subclass a `Runner`, set model, data and optimizer, and override what you want to change. "
    "A run that is killed at any moment continues bit for bit, on one process or on many.\n\n"
    "Requires Linux, Python 3.11 and torch 2.11 or later. It is not on PyPI: the package with this name there is another project. "
    "Work on the sources begins with [AGENTS.md](AGENTS.md).\n"
)


class _Loader(yaml.SafeLoader):
    """Reads `mkdocs.yml`, whose plug-ins may have tags of Python."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python", lambda loader, suffix, node: None)


def text_of(root: Path) -> str:
    """Return the file for the documentation below a directory."""
    settings = yaml.load((root / "mkdocs.yml").read_text(encoding="utf-8"), Loader=_Loader)
    return "\n".join([HEAD, *_sections(settings["nav"], root)])


def _sections(nav: Sequence[dict[str, object]], root: Path) -> Iterator[str]:
    for entry in nav:
        ((title, content),) = entry.items()
        pages = content if isinstance(content, list) else [{title: content}]
        yield f"## {title}\n"
        for page in pages:
            ((name, file),) = page.items()
            sentence = first_sentence((root / "docs" / str(file)).read_text(encoding="utf-8"))
            yield f"- [{name}](docs/{file})" + (f": {sentence}" if sentence else "")
        yield ""


def first_sentence(page: str) -> str:
    """Return the first sentence of a page's text, without its links; nothing where the page begins with something else."""
    body = re.sub(r"\A---\n.*?\n---\n", "", page, flags=re.DOTALL)
    paragraphs = [part.strip() for part in body.split("\n\n")]
    plain = [
        part
        for part in paragraphs
        if part and not part.startswith(("#", "```", "|", "!", ":::", "-", "<", "--8<--"))
    ]
    if not plain:
        return ""
    line = " ".join(plain[0].split())
    line = re.sub(r"\[([^\]]*)\]\([^)]*\)(\{[^}]*\})?", r"\1", line).replace("**", "")
    found = re.match(r".*?[.:](?= [A-Z`]|$)", line)
    return (found.group() if found else line).rstrip(":")


def main(arguments: Sequence[str]) -> int:
    """Write the file, or look whether it is right."""
    text = text_of(ROOT)
    if "--check" in arguments:
        return 0 if FILE.exists() and FILE.read_text(encoding="utf-8") == text else 1
    FILE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
