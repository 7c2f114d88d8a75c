"""Options of the whole suite; pytest wants them where every run starts."""

import os

import pytest

REAL_STDERR: pytest.StashKey[int] = pytest.StashKey()
"""A file descriptor that no capture takes."""


def pytest_addoption(parser):
    parser.addoption("--verification-report", metavar="FILE", help="write a Markdown summary of tests/gpu to FILE")


def pytest_configure(config):
    config.stash[REAL_STDERR] = os.dup(2)
