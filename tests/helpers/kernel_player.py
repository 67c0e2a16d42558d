"""Does what kernel_driver.cpp does with shared libraries: `python kernel_player.py LIBRARY ... CASES RESULTS`.

Runs under each Python that fastgen supports, with no package installed.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from typing import BinaryIO


def play(libraries: list[ctypes.CDLL], cases: BinaryIO, results: BinaryIO) -> None:
    """Calls the kernel of each case, which one of the libraries has, and writes down the bytes of its outputs."""
    while start := cases.read(8):
        name = cases.read(struct.unpack("<q", start)[0]).decode()
        blocks = _read_blocks(cases)
        starts = [ctypes.addressof(block) for block in blocks]
        arguments: list[ctypes.c_void_p | ctypes.c_float | ctypes.c_int64] = []
        for _ in range(_next(cases)):
            kind, value, byte = (_next(cases) for _ in range(3))
            if kind == 2:
                arguments.append(ctypes.c_void_p(None if value < 0 else starts[value] + byte))
            elif kind == 1:
                arguments.append(ctypes.c_float(struct.unpack("<f", struct.pack("<q", value)[:4])[0]))
            else:
                arguments.append(ctypes.c_int64(value))
        function = next(getattr(library, name) for library in libraries if hasattr(library, name))
        function.restype = None
        function(*arguments)
        for _ in range(_next(cases)):
            results.write(blocks[_next(cases)])


def _next(cases: BinaryIO) -> int:
    return struct.unpack("<q", cases.read(8))[0]


def _read_blocks(cases: BinaryIO) -> list[ctypes.Array]:
    blocks, addresses = [], []
    for number in range(_next(cases)):
        content = cases.read(_next(cases))
        blocks.append((ctypes.c_char * len(content)).from_buffer_copy(content))
        addresses += [(number, *(_next(cases) for _ in range(3))) for _ in range(_next(cases))]
    for number, at, block, byte in addresses:
        struct.pack_into("<q", blocks[number], at, ctypes.addressof(blocks[block]) + byte)
    return blocks


if __name__ == "__main__":
    *paths, cases_path, results_path = sys.argv[1:]
    with open(cases_path, "rb") as cases, open(results_path, "wb") as results:
        play([ctypes.CDLL(path) for path in paths], cases, results)
