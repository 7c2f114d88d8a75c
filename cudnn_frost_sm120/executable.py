"""One plan on the buffers of cudnn-frontend's variant packs.

Every call reads what the pack says of each buffer. A pack that says what an accepted one said, of the same addresses,
has been judged already, and goes straight to the launch.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_char, c_void_p, sizeof
from typing import Any

from .launch import BOUND_LAUNCHES, Launcher
from .plan import BwdPlan
from .remembered import Remembered

_CPU, _CUDA, _CUDA_MANAGED = 1, 2, 13  # DLPack's device types
_UNKNOWN_DEVICE, _UNKNOWN_DTYPE = (-1, -1), (0, 0)  # what the native pack says where the caller's object does not
_DLPACK_DTYPE = {"fp16": (2, 16), "bf16": (4, 16), "fp32": (2, 32), "int32": (0, 32)}  # (type code, bits)

_Launch = Callable[[int], None]


class Executable:
    """A plan, its launcher, and the sets of buffers that it has accepted. Safe from any thread."""

    def __init__(self, plan: BwdPlan, launcher: Launcher) -> None:
        self.plan = plan
        self._launcher = launcher
        inputs, outputs = list(plan.facts.inputs()), list(plan.facts.outputs())
        self.tensors = [*inputs, *outputs]
        self._input_count = len(inputs)
        self._layout: tuple[Any, tuple[int, ...], Any] = ((), (), c_char * 0)
        self._accepted: Remembered[tuple[bytes, int], tuple[tuple[Any, ...], _Launch]] = Remembered(BOUND_LAUNCHES)

    def run(self, pack: Any, device: int, workspace: Any, stream: int) -> None:
        """Enqueue on ``stream``. Raises ValueError, before anything is launched, for buffers that do not fit.

        ``pack`` is cudnn-frontend's variant pack, ``device`` the ordinal of the GPU that this runs on, ``workspace``
        what the caller passed for it.
        """
        native = pack.native
        _, slots, pointers = self._layout_of(pack)
        key = pointers.from_address(native.address).raw, pack.workspace
        observed = (
            slots,
            device,
            pack.workspace_bytes,
            getattr(workspace, "device", None),
            *map(native.observed_bytes, slots),
            *map(native.dtype, slots),
        )  # not where each buffer lies: an address that was on this device still is
        accepted = self._accepted.get(key)
        if accepted is None or accepted[0] != observed:
            accepted = observed, self._accept(native, slots, pack, device, workspace)
            self._accepted.keep(key, accepted)
        accepted[1](stream)

    def slots_of(self, pack: Any) -> tuple[int, ...]:
        """The pack's slot of each tensor, inputs first."""
        return self._layout_of(pack)[1]

    def _layout_of(self, pack: Any) -> tuple[Any, tuple[int, ...], Any]:
        """The pack's uids, `slots_of`, and the ctypes array that the addresses of its slots are."""
        layout = self._layout
        if layout[0] != pack.uids:
            index_of = pack.index_of_uid
            for tensor in self.tensors:
                if tensor.uid not in index_of:
                    raise ValueError(f"no buffer was passed for {tensor.name}")
            slots = tuple(index_of[tensor.uid] for tensor in self.tensors)
            layout = self._layout = (pack.uids, slots, c_char * (len(pack.uids) * sizeof(c_void_p)))
        return layout

    def _accept(self, native: Any, slots: tuple[int, ...], pack: Any, device: int, workspace: Any) -> _Launch:
        addresses = tuple(map(native.pointer, slots))
        for tensor, slot, address in zip(self.tensors, slots, addresses, strict=True):
            name, needed, dtype = tensor.name, tensor.required_bytes, _DLPACK_DTYPE[tensor.dtype]
            if not address:  # nothing passed, or a null address
                raise ValueError(f"no buffer was passed for {name}")
            held = native.observed_bytes(slot)
            if 0 <= held < needed:
                raise ValueError(f"the buffer of {name} holds {held} bytes; this call needs {needed}")
            where = native.observed_device(slot)
            if tensor.by_value:  # read by the host: an address that does not say where it points would be trusted
                if where[0] != _CPU:
                    raise ValueError(f"{name} is passed by value, and takes a buffer in host memory")
            elif where not in ((_CUDA, device), _UNKNOWN_DEVICE, (_CUDA_MANAGED, device)):
                raise ValueError(f"the buffer of {name} is not on cuda:{device}, where this runs")
            given = native.dtype(slot)
            if given not in (dtype, _UNKNOWN_DTYPE):
                raise ValueError(f"the buffer of {name} has another dtype than the graph declares")
        read, written = set(addresses[: self._input_count]), set(addresses[self._input_count :])
        if len(written) < len(self.tensors) - self._input_count or read & written:
            raise ValueError("an output lies on another operand's buffer; each needs its own")
        _check_workspace_device(workspace, device)
        # A bare address tells no size; some releases report that as None, others as 0.
        size = None if type(workspace) is int else pack.workspace_bytes
        named = {tensor.name: address for tensor, address in zip(self.tensors, addresses, strict=True)}
        return self._launcher.bind(named, pack.workspace, size)


def _check_workspace_device(workspace: Any, device: int) -> None:
    where = getattr(workspace, "device", None)
    kind, index = getattr(where, "type", None), getattr(where, "index", None)
    if kind is not None and (kind != "cuda" or index not in (None, device)):
        raise ValueError(f"the workspace is on {where}, and this runs on cuda:{device}")
