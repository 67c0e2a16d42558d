"""Builds of the C++ kernels with kernel_driver.cpp: which compiler, which instructions, and what runs the result."""

from __future__ import annotations

import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from host_compiler import CSRC, WARNINGS
from python_process import REPOSITORY

from fastgen.ops import simd

SOURCES = (REPOSITORY / "tests" / "helpers" / "kernel_driver.cpp", *sorted(CSRC.glob("*.cpp")))
IS_ARM = platform.machine() == "aarch64"


@dataclass(frozen=True)
class Build:
    """compiler: its command. flags: of the instruction set. emulator: the command that runs the result."""

    compiler: str
    flags: tuple[str, ...]
    emulator: tuple[str, ...] = ()

    @property
    def missing(self) -> list[str]:
        return [command for command in (self.compiler, *self.emulator[:1]) if shutil.which(command) is None]

    def compile(self, source: Path, output: Path, *options: str) -> None:
        """Raises AssertionError with what the compiler says, warnings included."""
        command = [self.compiler, "-std=c++17", *WARNINGS, *self.flags, "-ffp-contract=fast", f"-I{CSRC}", *options]
        done = subprocess.run([*command, source, "-o", output], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    def driver(self, folder: Path, *options: str) -> list[str | Path]:
        """Compiles the kernels and the driver with these options, and returns the command that runs it."""
        objects = [folder / f"{source.stem}.o" for source in SOURCES]
        for source, output in zip(SOURCES, objects):
            self.compile(source, output, "-c", *options)
        command = [self.compiler, *self.flags, "-pthread", *options, *objects, "-o", folder / "driver"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return [*self.emulator, folder / "driver"]


def _x86(width: int, *flags: str, compiler: str = "g++") -> Build:
    return Build(compiler, ("-mf16c", "-mfma", f"-DWIDTH={width}", *flags))


def _arm(*flags: str) -> Build:
    """Returns a build that is linked statically, so that the emulator needs no libraries of that CPU."""
    flags = ("-DWIDTH=4", *flags)
    return Build("g++", flags) if IS_ARM else Build("aarch64-linux-gnu-g++", (*flags, "-static"), ("qemu-aarch64",))


BUILDS = {
    "AVX2": _x86(8, "-mavx2"),
    "registers of AVX512 in AVX2": _x86(16, "-mavx2", "-Wno-psabi"),
    "AVX512": _x86(16, "-mavx512f"),
    "AVX512_BF16": _x86(16, "-mavx512f", "-mavx512bf16"),
    "NEON": _arm(),
    "NEON_BF16": _arm("-march=armv8.2-a+bf16"),
}
# What each of these instruction sets includes.
_INCLUDED = {
    "AVX2": ["AVX2", "registers of AVX512 in AVX2"],
    "NEON": ["NEON"],
    "NEON_BF16": ["NEON", "NEON_BF16"],
}
_INCLUDED["AVX512"] = [*_INCLUDED["AVX2"], "AVX512"]
_INCLUDED["AVX512_BF16"] = [*_INCLUDED["AVX512"], "AVX512_BF16"]
NATIVE = _INCLUDED.get(simd.instructions(), [])


def runnable(name: str) -> Build:
    """Returns the build; skips the test where this machine cannot compile or run it."""
    build = BUILDS[name]
    if not build.emulator and name not in NATIVE:
        pytest.skip(f"{name}: the CPU has {simd.instructions()}")
    if build.missing:
        pytest.skip(f"{name}: no {' and no '.join(build.missing)} (make emulator installs them)")
    return build
