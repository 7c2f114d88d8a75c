"""``python -m cudnn_frost_sm120 COMMAND``. Each command is a module: ``add_arguments(parser)``, ``run(options)``."""

from __future__ import annotations

import argparse
import importlib
import sys

from . import __version__

COMMANDS = {
    "bench": ("bench", "time our plan against other engines on a grid of problems"),
    "demo": ("demo", "one attention layer on real text, from graph to checked gradients"),
    "explain": ("explain", "say which plans a saved graph gets, and why"),
    "tune": ("tuner", "time every plan, ours and others', and keep the fastest for later planning"),
    "warm": ("warm", "compile kernels ahead of time; needs no GPU"),
}
"""Command -> (submodule, one line of help)."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m cudnn_frost_sm120")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (module, summary) in COMMANDS.items():
        command = importlib.import_module(f".{module}", __package__)
        subparser = commands.add_parser(name, help=summary, description=command.__doc__)
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    options = parser.parse_args(arguments)
    return int(options.run(options))


if __name__ == "__main__":
    sys.exit(main())
