"""Reading a kernel's disassembly: its instructions, its branches, its loops."""

from __future__ import annotations

import re
from collections.abc import Iterator

Instruction = tuple[str, str]  # opcode with modifiers, operands
Body = list[Instruction]
Jump = tuple[int, int]  # places of a branch and of what it leads to
_LINE = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_LABEL = re.compile(r"^(\.L_x_\d+):")


def parse(sass: str) -> tuple[Body, list[Jump]]:
    """The instructions of one kernel as they stand, and its branches to labels."""
    code: Body = []
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        label, instruction = _LABEL.match(line), _LINE.match(line)
        if label:
            labels[label.group(1)] = len(code)
        elif instruction:
            code.append((instruction.group(1), instruction.group(2)))
    return code, list(_jumps(code, labels))


def _jumps(code: Body, labels: dict[str, int]) -> Iterator[Jump]:
    for at, (opcode, operands) in enumerate(code):
        named = re.search(r"\.L_x_\d+", operands) if opcode.startswith("BRA") else None
        if named and named.group(0) in labels:
            yield at, labels[named.group(0)]


def has(body: Body, *opcodes: str) -> bool:
    """Whether one of these is among the instructions, with whatever modifiers."""
    return any(opcode.split(".")[0] in opcodes for opcode, _ in body)


def main_loops(sass: str, rare_blocks: bool = False) -> list[Body]:
    """Bodies of the innermost loops that hold HMMAs, in order.

    Blocks that a branch inside the loop skips and that do no matrix or exponential work (masking) are left out, as most
    tiles skip them, unless `rare_blocks`.
    """
    code, jumps = parse(sass)
    loops: list[tuple[int, int]] = []
    for at, target in sorted(jumps, key=lambda jump: jump[0] - jump[1]):
        body = code[target : at + 1]
        inner = any(target <= first and last <= at for first, last in loops)
        if target < at and not inner and has(body, "HMMA") and not has(body, "EXIT"):
            loops.append((target, at))
    if rare_blocks:
        return [code[first : last + 1] for first, last in sorted(loops)]
    return [_without_rare_blocks(code, first, last, jumps) for first, last in sorted(loops)]


def _without_rare_blocks(code: Body, first: int, last: int, jumps: list[Jump]) -> Body:
    skipped: set[int] = set()
    for at, target in jumps:
        if first <= at < target <= last + 1 and not has(code[at + 1 : target], "HMMA", "MUFU", "UTMALDG"):
            skipped |= set(range(at + 1, target))
    return [code[i] for i in range(first, last + 1) if i not in skipped]
