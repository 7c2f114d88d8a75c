"""What a compiled chain costs, read from its cubin: registers, stack, shared memory, and the instructions it uses.

Needs `cuobjdump` and `nvdisasm` (PATH, or the nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm packages); no GPU.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from .config.arch import FORBIDDEN_SASS, SPILL_SASS
from .config.roles import DqWarps
from .config.smem import SmemLayout
from .knobs import ReductionMode
from .plan import ChainKey
from .sass import has, parse
from .target import Target

KERNELS = ("dq_recompute", "preprocess", "main", "dq_gemm", "accumulator_convert", "dbias", "dsink")


@dataclass(frozen=True)
class KernelResources:
    """One kernel of a chain. `seconds` is the compile time of the whole chain."""

    kernel: str
    registers: int  # per thread
    stack_bytes: int  # local memory per thread
    shared_bytes: int  # per CTA, as launched
    seconds: float


@dataclass(frozen=True)
class Cubin:
    key: ChainKey
    target: Target
    image: bytes
    seconds: float

    def report(self) -> list[KernelResources]:
        text = _run("cuobjdump", "-res-usage", self.image)
        found = []
        for symbol, usage in re.findall(r"Function (\S+):\s*\n?\s*(REG:.*)", text):
            kernel = kernel_of(symbol)
            numbers = {name: int(value) for name, value in re.findall(r"(REG|STACK|SHARED):(\d+)", usage)}
            found.append(
                KernelResources(kernel, numbers["REG"], numbers["STACK"], self._shared_bytes(kernel), self.seconds)
            )
        return sorted(found, key=lambda row: KERNELS.index(row.kernel))

    def _shared_bytes(self, kernel: str) -> int:
        """What the kernel's own layout takes; the cubin does not say, as it is asked for at launch."""
        from .compile import build_chain

        if kernel in ("dbias", "dq_gemm"):
            return getattr(build_chain(self.key), kernel).smem_bytes
        return SmemLayout(self.key.tile).total if kernel == "main" else 0

    @cached_property
    def sass(self) -> str:
        """Disassembly of every kernel."""
        return disassemble(self.image)

    def kernel_sass(self, kernel: str) -> str:
        """Disassembly of one of KERNELS."""
        return next(text for symbol, text in functions(self.sass) if kernel_of(symbol) == kernel)

    def early_frees(self) -> list[str]:
        """`reads_under_way` of every kernel, where no TMA write may follow.

        Arrivals of the main kernel that free dS are left out: ordinary stores follow, which do come behind earlier
        reads.
        """
        found = []
        for symbol, text in functions(self.sass):
            lines = reads_under_way(text)
            found += lines if len(lines) > (self._frees_of_ds() if kernel_of(symbol) == "main" else 0) else []
        return found

    def _frees_of_ds(self) -> int:
        """Arrivals that free dS as soon as it is read: ahead of the adds. Two groups have a last tile of their own."""
        if self.key.tile.dq is DqWarps.DQ_GROUP:
            return 1
        return 2 if self.key.reduction is ReductionMode.ATOMIC else 0

    def forbidden_instructions(self) -> list[str]:
        """Lines that SM120 does not have, or that touch local memory."""
        return [line.strip() for line in self.sass.splitlines() if is_forbidden(line)]


def kernel_of(symbol: str) -> str:
    """Which of KERNELS a symbol is."""
    return next(name for name in KERNELS if f"kernels{name}" in symbol)


def disassemble(image: bytes) -> str:
    """Of every kernel in a cubin."""
    return _run("nvdisasm", "-c", image)


def functions(sass: str) -> list[tuple[str, str]]:
    """(symbol, disassembly) of every kernel in a disassembly."""
    parts = re.split(r"^\.text\.(\S+):", sass, flags=re.M)
    return list(zip(parts[1::2], parts[2::2], strict=True))


_FORBIDDEN = re.compile(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?(?:" + "|".join((*FORBIDDEN_SASS, *SPILL_SASS)) + ")")


def is_forbidden(line: str) -> bool:
    """Whether a line of a disassembly is an instruction that no kernel of ours may have."""
    return _FORBIDDEN.match(line) is not None


_FREES = re.compile(r"SYNCS\.ARRIVE\S*A1T0|BAR\.SYNC")


def reads_under_way(sass: str) -> list[str]:
    """Of one kernel: the arrivals and CTA barriers that an `ldmatrix` comes before whose result nothing has taken in.

    What TMA writes behind such an arrival may go over the data (device/pipeline.py). Code is taken as it stands; a loop
    that holds products begins with nothing under way, as what was read ahead of it stays. `ldmatrix` results arrive in
    order, on which ptxas relies too.
    """
    code, jumps = parse(sass)
    heads = {target for at, target in jumps if has(code[target:at], "HMMA")}
    under_way: list[set[int]] = []  # destination registers of each load
    found = []
    for at, (opcode, operands) in enumerate(code):
        if at in heads:
            under_way = []
        read = _registers_read(opcode, operands)
        taken = [load for load, registers in enumerate(under_way) if registers & read]
        under_way = under_way[taken[-1] + 1 :] if taken else under_way
        if opcode.startswith("LDSM"):
            first = int(re.findall(r"\bR(\d+)\b", operands)[0])
            under_way.append(set(range(first, first + int(opcode[-1]))))
        elif under_way and _FREES.match(opcode):
            found.append(f"{opcode} {operands}")
    return found


def _registers_read(opcode: str, operands: str) -> set[int]:
    """By their numbers; of the operands that are vectors, those of HMMA are known to be."""
    read: set[int] = set()
    stores = opcode.startswith(("ST", "RED"))
    for place, operand in enumerate(operands.split(",")):
        if place == 0 and not stores:
            continue
        width = {1: 4, 2: 2, 3: 4}[place] if opcode.startswith("HMMA") else 4 if stores else 1
        for number in re.findall(r"\bR(\d+)\b", operand):
            read |= set(range(int(number), int(number) + width))
    return read


def compile_cubin(key: ChainKey, target: Target) -> Cubin:
    """Compile a chain for its cubin alone; works with no GPU."""
    import cutlass.cute as cute

    from .compile import build_chain, compile_options, fake_arguments
    from .device.mma import throttled

    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, throttled(key.throttled):
        options = f"{compile_options(target)} --keep-cubin --dump-dir {folder}"
        kept = cute.compile(build_chain(key), *fake_arguments(key), options=options).artifacts.CUBIN
        image = kept if isinstance(kept, bytes) else Path(kept).read_bytes()
    return Cubin(key, target, image, time.perf_counter() - started)


def report(key: ChainKey, target: Target) -> list[KernelResources]:
    """Resources of every kernel of a chain, in launch order."""
    return compile_cubin(key, target).report()


def _run(tool: str, option: str, image: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(image)
        file.flush()
        return subprocess.run([_tool(tool), option, file.name], capture_output=True, text=True, check=True).stdout


@cache
def _tool(name: str) -> str:
    """Path of a CUDA binary tool; raises FileNotFoundError if there is none."""
    import site
    import sysconfig

    roots = {*site.getsitepackages(), sysconfig.get_paths()["purelib"]}
    packaged = [path for root in roots for path in Path(root).glob(f"nvidia/*/bin/{name}")]
    found = shutil.which(name) or (str(packaged[0]) if packaged else None)
    if found is None:
        raise FileNotFoundError(f"{name} is needed to read a cubin: pip install nvidia-cuda-{name}")
    return found
