"""What a user should know once: each sentence is said the first time, and never again."""

from __future__ import annotations

import warnings

from torch.compiler import assume_constant_result

from ..log import logger

_LOGGER = logger("cudnn_frost_sm120")
_said: set[str] = set()


@assume_constant_result  # torch.compile calls it while it traces, and leaves no trace of it
def say_once(sentence: str) -> None:
    """A Python warning, which is seen without any set-up, and one of the logger ``cudnn_frost_sm120``, whose records an
    application keeps; a repetition is dropped."""
    if sentence not in _said:
        _said.add(sentence)
        _LOGGER.warning("%s", sentence)
        warnings.warn(sentence, stacklevel=3)
