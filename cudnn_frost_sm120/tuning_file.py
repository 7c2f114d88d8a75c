"""What was measured: the winner of each configuration bucket, in a JSON file that the ranking of plans reads.

    {
      "format": 1,
      "gpu": "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
      "versions": {"cudnn_frost_sm120": "0.1.0", "cudnn_frontend": "1.32.0"},
      "winners": {
        "bf16 d64/64 group 4 causal heads 64 sq 4096 sk 4096": {
          "engine": "frost_sm120_sdpa_bwd", "engine_id": 20690,
          "knobs": {"TILE_M": 64, "TILE_N": 128, "STAGES": 2, "PACK_GQA": 4, "REDUCTION_MODE": 0},
          "milliseconds": {"frost_sm120_sdpa_bwd[PACK_GQA=4, ...]": 1.18, "sdpa_bwd_sm120[...]": 1.52},
          "tuned": "2026-11-30"
        }
      }
    }

``engine`` is "backend" for a plan of the cuDNN library, whose plans are placed as one block. The file is
``$CUDNN_FROST_SM120_TUNING_FILE``, else one for each GPU model below ``$XDG_CACHE_HOME/cudnn_frost_sm120``. A reader
sees a whole file or the one before it: it is replaced in one step, by one process at a time. A file that is damaged, or
from another GPU or version, is ignored with a warning, and a tuner that writes then starts it anew.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from .facts import BwdFacts
from .log import logger
from .target import Target

PATH_ENV = "CUDNN_FROST_SM120_TUNING_FILE"
BACKEND_NAME = "backend"
FORMAT = 1
_LOG = logger(__name__)


@dataclass(frozen=True)
class Winner:
    """The fastest plan of a bucket."""

    engine: str  # name of a Python engine, or BACKEND_NAME
    engine_id: int
    knobs: dict[str, int]  # by member name of cudnn.knob_type
    milliseconds: dict[str, float]  # of every plan that was timed, by plan name
    tuned: str  # ISO date


def bucket_of(facts: BwdFacts) -> str:
    """The configuration bucket: what changes the kernels, and sizes rounded up to powers of two."""
    mask, features = facts.mask, []
    if mask.right_bound is not None:
        features.append("causal" if mask.right_bound == 0 else f"right {_rounded(mask.right_bound)}")
    if mask.left_bound is not None:
        features.append(f"left {_rounded(mask.left_bound)}")
    named = {
        "bottom-right": mask.bottom_right,
        "padding": mask.padding,
        "bias": facts.bias is not None,
        "dbias": facts.dbias is not None,
        "dsink": facts.dsink is not None,
        "deterministic": facts.deterministic,
    }
    features += [name for name, asked in named.items() if asked]
    sizes = {"heads": facts.batch * facts.heads_q, "sq": facts.seqlen_q, "sk": facts.seqlen_k}
    rounded = [f"{name} {_rounded(size)}" for name, size in sizes.items()]
    dims = f"d{facts.headdim_qk}/{facts.headdim_v}"
    return " ".join([facts.dtype, dims, f"group {facts.group}", *(features or ["full"]), *rounded])


def _rounded(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()


def gpu_of(target: Target) -> str | None:
    """The name of the target's GPU; None where planning has no device."""
    if target.device is None:
        return None
    from cudnn._device import device_info

    return str(device_info(target.device).device_name)


def path_for(gpu: str) -> Path:
    named = os.environ.get(PATH_ENV)
    if named:
        return Path(named)
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(cache) / "cudnn_frost_sm120" / f"tuning-{re.sub(r'[^A-Za-z0-9]+', '-', gpu).strip('-')}.json"


def winner_for(facts: BwdFacts, target: Target) -> Winner | None:
    """What was measured fastest for the bucket of ``facts`` on this GPU with these versions, or None."""
    try:
        gpu = gpu_of(target)
        path = path_for(gpu) if gpu is not None else None
        status = path.stat() if path is not None else None
    except Exception:  # no such file, no driver, no home: nothing was measured
        return None
    if gpu is None or path is None or status is None:
        return None
    return _read(path, gpu, status.st_mtime_ns, status.st_size).get(bucket_of(facts))


def store(path: Path, gpu: str, bucket: str, winner: Winner) -> None:
    """Put a winner into the file, keeping those of other buckets. Raises OSError where the file cannot be written."""
    from filelock import FileLock

    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"):
        winners = {**(_winners(path, gpu) if path.exists() else {}), bucket: winner}
        content = {
            "format": FORMAT,
            "gpu": gpu,
            "versions": _versions(),
            "winners": {name: asdict(held) for name, held in sorted(winners.items())},
        }
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(content, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(temporary)


@lru_cache(maxsize=8)
def _read(path: Path, gpu: str, modified: int, size: int) -> dict[str, Winner]:
    return _winners(path, gpu)


def _winners(path: Path, gpu: str) -> dict[str, Winner]:
    """What the file holds, or, with a warning, nothing."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        here = {"format": FORMAT, "gpu": gpu, "versions": _versions()}
        differing = [f"{name} {content[name]}, not {value}" for name, value in here.items() if content[name] != value]
        if differing:
            _LOG.warning("the tuning file %s is ignored: it is for %s", path, "; ".join(differing))
            return {}
        return {bucket: _winner(entry) for bucket, entry in content["winners"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        _LOG.warning("the tuning file %s is ignored: it is damaged (%s: %s)", path, type(error).__name__, error)
        return {}


def _winner(entry: dict[str, Any]) -> Winner:
    return Winner(
        engine=str(entry["engine"]),
        engine_id=int(entry["engine_id"]),
        knobs={str(name): int(value) for name, value in entry["knobs"].items()},
        milliseconds={str(name): float(value) for name, value in entry["milliseconds"].items()},
        tuned=str(entry["tuned"]),
    )


def _versions() -> dict[str, str]:
    import cudnn

    from . import __version__

    return {"cudnn_frost_sm120": __version__, "cudnn_frontend": str(cudnn.__version__)}
