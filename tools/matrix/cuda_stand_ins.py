"""Lets a build of torch for CUDA be imported on a machine without a GPU, without CUDA's libraries of several GB.

PyPI has builds of torch for Linux that are linked to NVIDIA's libraries. On a CPU, torch calls only the
runtime of these, which reports that there is no GPU. The runtime is installed; for each other library, one of the same
name is built whose functions do nothing. Needs `cc`, `nm` and `readelf`.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

NVIDIA = re.compile(r"lib(cu|nv|nccl)")
DRIVER = "libcuda.so.1"  # in none of NVIDIA's packages, so torch gets along without it
RUNTIMES = {"libcudart.so.12": "nvidia-cuda-runtime-cu12", "libcudart.so.13": "nvidia-cuda-runtime==13.*"}
PACKAGES = re.compile(r"Requires-Dist: (nvidia|cuda|triton|pytorch-triton)")
FUNCTIONS = re.compile(r"(cu|nccl|nv)[a-zA-Z]\w*")


def forget_requirements(site_packages: Path) -> None:
    """Removes NVIDIA's packages from the requirements of torch, so that pip does not install them."""
    (metadata,) = site_packages.glob("torch-*.dist-info/METADATA")
    lines = metadata.read_text(encoding="utf-8").splitlines(keepends=True)
    metadata.write_text("".join(line for line in lines if not PACKAGES.match(line)), encoding="utf-8")


def runtime(site_packages: Path) -> str:
    """Returns the package of the runtime, which pip must install first."""
    return next(package for library, package in RUNTIMES.items() if library in _needed(site_packages))


def write(site_packages: Path) -> None:
    """Writes a stand-in into torch/lib for each library that torch is linked to and that is missing."""
    torch = _libraries(site_packages)
    present = {path.name for folder in ("torch/lib", "nvidia") for path in (site_packages / folder).rglob("*.so*")}
    undefined = set(re.findall(r" U (\S+)", _output("nm", "--dynamic", "--undefined-only", *torch)))
    versions = _versions(_output("readelf", "--version-info", "--wide", *torch))
    for library in _needed(site_packages) - present - {DRIVER}:
        _build(site_packages / "torch" / "lib", library, undefined, versions.get(library, set()))


def _libraries(site_packages: Path) -> list[str]:
    return [str(path) for path in (site_packages / "torch" / "lib").glob("*.so*")]


def _needed(site_packages: Path) -> set[str]:
    dynamic = _output("readelf", "--dynamic", *_libraries(site_packages))
    return {name for name in re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic) if NVIDIA.match(name)}


def _versions(text: str) -> dict[str, set[str]]:
    """Returns the versions of symbols that torch needs from each library."""
    versions: dict[str, set[str]] = {}
    for library, block in re.findall(r"File: (\S+)(.*(?:\n.*Name: .*)*)", text):
        versions.setdefault(library, set()).update(re.findall(r"Name: (\S+)", block))
    return versions


def _build(folder: Path, library: str, undefined: set[str], versions: set[str]) -> None:
    """Builds the functions of `versions`, or all of NVIDIA's without a version if the library has no versions."""
    symbols = [symbol.partition("@")[::2] for symbol in undefined]
    names = {
        version: [name for name, asked in symbols if asked == version and (version or FUNCTIONS.fullmatch(name))]
        for version in versions or {""}
    }
    source = "".join(f"int {name}() {{ return 1; }}\n" for some in names.values() for name in some)
    command = ["cc", "-shared", "-fPIC", "-w", f"-Wl,-soname,{library}", "-x", "c", "-", "-o", str(folder / library)]
    if versions:
        script = folder / "stand_in.map"
        script.write_text("".join(f"{version} {{ {'; '.join([*some, ''])} }};\n" for version, some in names.items()))
        command.append(f"-Wl,--version-script={script}")
    subprocess.run(command, input=source, text=True, check=True)


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
