"""Options of the whole suite; pytest wants them where every run starts."""

import os

import pytest

REAL_STDERR: pytest.StashKey[int] = pytest.StashKey()
"""A file descriptor that no capture takes."""


def pytest_addoption(parser):
    parser.addoption("--verification-report", metavar="FILE", help="write a Markdown summary of tests/gpu to FILE")
    parser.addoption(
        "--warm",
        metavar="TARGET",
        help="compile what the chosen tests of tests/gpu need for sm_120, sm_121 or sm_90 into the kernel store, run "
        "nothing; needs no GPU",
    )


def pytest_configure(config):
    config.stash[REAL_STDERR] = os.dup(2)
