"""Compiles kernels in Triton for GPUs that need not be there, and tells which versions of a kernel calls would compile.

Both need a process without TRITON_INTERPRET; see `python_process.run_functions`.
"""

import re
from collections.abc import Callable, Collection
from contextlib import redirect_stdout
from io import StringIO
from types import SimpleNamespace
from typing import Any
from unittest import mock

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver

# Architectures, and how many bytes may not fit into registers: ptxas stores a few so that more programs run at once.
MOST_SPILLED = {80: 32, 90: 16, 100: 16}


def compile_kernel(
    kernel: Any,
    architecture: int,
    types: dict[str, str],
    constants: dict[str, Any],
    aligned: Collection[str] = (),
    **options: Any,
) -> Any:
    """Returns the compiled kernel; fails if it needs more registers than there are.

    types: of arguments; the others are int32. aligned: integers that are multiples of 16, as all pointers are.
    """
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    places = {name: (index,) for index, name in enumerate(kernel.arg_names)}
    divisible = [name for name, kind in signature.items() if kind.startswith("*") or name in aligned]
    source = ASTSource(
        kernel,
        signature,
        {places[name]: value for name, value in constants.items()},
        {places[name]: [["tt.divisibility", 16]] for name in divisible},
    )
    with knobs.compilation.scope(), knobs.nvidia.scope(), redirect_stdout(StringIO()) as log:
        knobs.nvidia.dump_ptxas_log = True  # registers, bytes that do not fit into them, shared memory
        knobs.compilation.always_compile = True  # a kernel of the cache would log nothing
        binary = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    assert binary.asm["cubin"]
    used = log.getvalue()
    spilled = max(int(number) for number in re.findall(r"(\d+) bytes spill", used))
    assert spilled <= MOST_SPILLED[architecture], (architecture, types, constants, used)
    return binary


def versions_of(run: Callable[[], None]) -> set[str]:
    """Returns the keys of all versions of kernels that a GPU would compile for these launches; launches nothing."""
    versions = set()

    def skip_compilation(key: str, **others: Any) -> bool:
        versions.add(key)
        return True

    gpu = {"target": GPUTarget("cuda", 90, 32), "device": 0, "stream": 0}
    gpu = {f"get_current_{name}": lambda *device, value=value: value for name, value in gpu.items()}
    driver.set_active(SimpleNamespace(**gpu))
    with mock.patch.object(knobs.runtime, "jit_cache_hook", skip_compilation):
        run()
    return versions
