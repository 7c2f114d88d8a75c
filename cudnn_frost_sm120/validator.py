"""The family's graph validator: the original's, but for graphs that it refuses and our engine serves.

Before any engine is asked, cudnn-frontend refuses some graphs that are well formed: S_q = S_k = 1, a window or a
bottom-right diagonal with S_q > S_k, a bottom-right diagonal with a bias.
"""

from __future__ import annotations

from typing import Any

from .engine import analyze
from .register import is_offered, original_hook


def validator(graph: Any) -> bool:
    """True where ``graph`` is valid, False where cudnn-frontend's classic validation must decide.

    Raises what the original raises, unless that is "not supported" and our engine admits the graph: then True.
    Admission has every rule that such a graph must meet, and the cuDNN library declines it later, at planning.
    """
    import cudnn

    validate_original = original_hook("validator")
    if validate_original is None:
        return False
    try:
        return bool(validate_original(graph))
    except cudnn.cudnnGraphNotSupportedError:
        if is_offered() and graph._facts_for(analyze).declined is None:
            return True
        raise
