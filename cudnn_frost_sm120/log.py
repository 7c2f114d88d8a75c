"""Loggers of this package: below ``cudnn_frost_sm120``, and quiet until the application gives logging a handler."""

from __future__ import annotations

import logging

logging.getLogger(__package__).addHandler(logging.NullHandler())


def logger(name: str) -> logging.Logger:
    """The logger of a module, by its ``__name__``, or of all."""
    return logging.getLogger(name)
