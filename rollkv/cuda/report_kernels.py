"""`python -m rollkv.cuda.report_kernels [ARCH ...]`: compiles every kernel instance for every architecture, prints what each takes, and
fails when one spills registers. Needs no GPU."""

import importlib
import pkgutil
import re
import sys
from dataclasses import dataclass
from types import ModuleType

from rollkv.cuda import kernels
from rollkv.cuda.nvrtc import ARCHS, Cubin, KernelSpec, compile_cubin

_FUNCTION = re.compile(r"Function properties for (\S+)")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True)
class Resources:
    """What the assembler says of one kernel. shared_bytes counts static shared memory alone."""

    registers: int
    shared_bytes: int
    stack_bytes: int
    spill_bytes: int


def kernel_modules() -> tuple[ModuleType, ...]:
    """The modules of rollkv.cuda.kernels that have instances to compile."""
    names = sorted(module.name for module in pkgutil.iter_modules(kernels.__path__))
    modules = tuple(importlib.import_module(f"{kernels.__name__}.{name}") for name in names)
    return tuple(module for module in modules if hasattr(module, "instances"))


def by_source(specs: tuple[KernelSpec, ...], arch: str) -> dict[str, tuple[str, ...]]:
    """Expressions to compile for an architecture, by source file."""
    groups: dict[str, dict[str, None]] = {}
    for spec in specs:
        if spec.compiles_for(arch):
            groups.setdefault(spec.source, {})[spec.expression] = None
    return {source: tuple(expressions) for source, expressions in groups.items()}


def resources(cubin: Cubin) -> dict[str, Resources]:
    """By expression, read from the compiler's log. Functions that a kernel calls count as part of it when they spill or use a stack.

    Raises ValueError when the log does not tell: an unreadable log must not pass for a kernel without spills.
    """
    found: dict[str, list[int]] = {}
    called = [0, 0]  # stack and spills of device functions that are not inlined
    name, current = "", [0, 0, 0, 0]
    for line in cubin.log.splitlines():
        if match := _FUNCTION.search(line):
            name, current = match[1], [-1, 0, 0, 0]
            if name in cubin.lowered.values():
                found[name] = current
        elif match := _STACK.search(line):
            current[2], current[3] = int(match[1]), int(match[2]) + int(match[3])
            if name not in found:
                called = [max(called[0], current[2]), called[1] + current[3]]
        elif match := _REGISTERS.search(line):
            current[0] = int(match[1])
            shared = _SHARED.search(line)
            current[1] = int(shared[1]) if shared else 0
    missing = [expression for expression, lowered in cubin.lowered.items() if found.get(lowered, [-1])[0] < 0]
    if missing:
        raise ValueError(f"the compiler's log says nothing of {', '.join(missing)}: {cubin.log[:500]}")
    return {
        expression: Resources(r[0], r[1], max(r[2], called[0]), r[3] + called[1])
        for expression, r in ((expression, found[lowered]) for expression, lowered in cubin.lowered.items())
    }


def main(archs: tuple[str, ...]) -> int:
    """Prints one line a kernel and architecture; 1 when any spills."""
    spilling = 0
    print(f"{'arch':8} {'registers':>9} {'shared':>7} {'stack':>6} {'spill':>6}  kernel")
    for module in kernel_modules():
        for arch in archs:
            for source, expressions in by_source(module.instances(), arch).items():
                for expression, used in resources(compile_cubin(source, expressions, arch)).items():
                    spilling += used.spill_bytes > 0
                    print(
                        f"{arch:8} {used.registers:9} {used.shared_bytes:7} {used.stack_bytes:6} {used.spill_bytes:6}  {expression}",
                        flush=True,
                    )
    if spilling:
        print(f"{spilling} kernels spill registers to memory", file=sys.stderr)
    return 1 if spilling else 0


if __name__ == "__main__":
    sys.exit(main(tuple(sys.argv[1:]) or ARCHS))
