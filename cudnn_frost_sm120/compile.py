"""Compiling a chain: symbolic arguments, an in-process memo, the kernel store, and cudnn-frontend's compiled cache.

Arguments are scalars whose values mean nothing at compile time, so one compile serves every shape, stride, scale and
window width. What is on disk is keyed by versions, by `ChainKey`, and by a digest of this package's kernel sources: an
edited kernel is a miss, never a stale hit.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from . import frontend_cache, kernel_store
from .kernel_store import KernelName
from .log import logger
from .plan import ChainKey
from .target import Target

_LOG = logger(__name__)
_LOCK = threading.Lock()
_COUNT: Counter[str] = Counter()
_CHAINS: dict[tuple[ChainKey, str, int | None], tuple[Any, Callable[..., None]]] = {}
"""The compiled object, kept alive, and its positional entry."""


def compile_count() -> dict[str, int]:
    """Compiles of this process by chain name; a chain served from memory or disk is not counted."""
    with _LOCK:
        return dict(_COUNT)


def compile_chain(key: ChainKey, target: Target) -> Callable[..., None]:
    """The compiled chain, positional: the arguments of `kernels.chain.BackwardChain.__call__` as plain integers.

    Thread-safe; compiles at most once per (key, target) and process, and not at all where the disk has it. With no
    device the result can be inspected but not called.
    """
    slot = (key, target.arch, target.device)
    with _LOCK:
        if slot not in _CHAINS:
            chain = _stored(key, target)
            _CHAINS[slot] = chain or _compiled(key, target)
            if chain is None:
                return _CHAINS[slot][1]  # which cudnn-frontend knows of
        if not key.throttled:
            frontend_cache.offer(kernel_name(key, target), target.device)
        return _CHAINS[slot][1]


def _stored(key: ChainKey, target: Target) -> tuple[Any, Callable[..., None]] | None:
    """The chain from the store, without cutlass."""
    from cudnn.frost import compiled_cache

    if key.throttled or target.device is None or not compiled_cache.enabled():
        return None
    chain = kernel_store.load(kernel_name(key, target))
    if chain is None:
        return None
    _LOG.info("%s for %s: loaded from the kernel store", key.name, target.arch)
    return chain, chain


def _compiled(key: ChainKey, target: Target) -> tuple[Any, Callable[..., None]]:
    """The chain from cudnn-frontend's compiled cache, which compiles what it does not have."""
    from cudnn.frost import compiled_cache
    from cudnn.frost.device import build_device

    from .device.mma import throttled

    name = kernel_name(key, target)
    before = compiled_cache.stats()
    with build_device(target.device), throttled(key.throttled):
        if not key.throttled:
            frontend_cache.install(name, target.device)
        cache_key = None if key.throttled else name.key
        compiled = compiled_cache.compile_cached(
            build_chain(key), *fake_arguments(key), cache_key=cache_key, symbol=name.symbol, options=name.options
        )
    after = compiled_cache.stats()
    compiles = sum(after[kind] - before[kind] for kind in ("misses", "bypassed"))
    if compiles:
        _COUNT[key.name] += compiles
    _LOG.info("%s for %s: %s", key.name, target.arch, "compiled" if compiles else "loaded from the compiled cache")
    frontend_cache.keep(compiled, name)
    return compiled, compiled_cache.positional_entry(compiled) or compiled


def kernel_name(key: ChainKey, target: Target) -> KernelName:
    """What caches know the chain by: everything that its code depends on, but for versions of packages."""
    identity = f"cudnn_frost_sm120|{sources_digest()}|{key!r}|{target.arch}"
    return KernelName(identity, key.name, compile_options(target))


def compile_options(target: Target) -> str:
    return f"--enable-tvm-ffi --gpu-arch {target.arch}"


def build_chain(key: ChainKey) -> Any:
    """The traceable chain for a key."""
    import cutlass

    from .device.mask import MaskKinds
    from .kernels.chain import BackwardChain
    from .kernels.dbias import DbiasConfig
    from .kernels.main_setup import MainConfig

    dtypes = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16, "fp32": cutlass.Float32, None: None}
    mask = MaskKinds(key.mask_right, key.mask_left, rows=key.bias is not None)
    config = MainConfig(
        dtypes[key.dtype],
        key.tile,
        mask,
        key.grouped,
        key.padded,
        key.reduction,
        dtypes[key.bias],
        key.every_lane_arrives,
    )
    dbias = None
    if key.dbias is not None:
        dbias = DbiasConfig(dtypes[key.dbias], key.dbias_over_q, key.dbias_over_k)
    return BackwardChain(config, dbias)


def fake_arguments(key: ChainKey) -> list[Any]:
    """One argument of the right type for every parameter of the chain."""
    import cutlass.cute as cute
    from cutlass import Int64

    from .kernels.operands import TENSORS

    present = [True] * len(TENSORS) + list(key.optional_operands.values()) + [True, True]  # workspace, geometry
    return [*(Int64(1) if given else None for given in present), cute.runtime.make_fake_stream()]


@lru_cache(maxsize=1)
def sources_digest() -> str:
    """Digest of every source file that shapes a traced kernel."""
    root = Path(__file__).parent
    digest = hashlib.sha256()
    for folder in ("config", "device", "kernels"):
        for path in sorted((root / folder).glob("*.py")):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
