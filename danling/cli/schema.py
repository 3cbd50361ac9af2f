"""Print the JSON schema of the configuration, by which an editor checks and completes a YAML file.

Keys of your own at the top level are allowed. Editors with the YAML language server use the schema that a first line of the file names:
`# yaml-language-server: $schema=danling.schema.json`.

Example: danling schema > danling.schema.json
"""

from __future__ import annotations

import argparse

from .output import OK, print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand, of which there are none."""


def run(options: argparse.Namespace) -> int:
    """Print the schema."""
    from danling.config.json_schema import schema  # only here, since torch takes its time

    print_json(schema())
    return OK
