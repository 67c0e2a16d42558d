"""The kernels of fastgen, built where there is a compiler, and the addresses in the metadata of a release.

Nothing fails where there is no compiler, and nothing where the address of the repository is not known.
"""

import copy
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

# Machine code for these, of what the compiler knows, and what a driver can translate for other GPUs.
GPU_ARCHITECTURES = ("80", "90", "100")
OLDEST_GPU_ARCHITECTURE = "75"

IS_WINDOWS = sys.platform == "win32"
SUFFIX = ".pyd" if IS_WINDOWS else ".so"


def nvcc():
    """Returns the path of NVIDIA's compiler, or None: that of CUDA_HOME if it is set, else where installers put it."""
    if home := os.environ.get("CUDA_HOME"):
        return shutil.which("nvcc", path=str(Path(home, "bin")))
    of_pip = sorted(Path(sysconfig.get_path("purelib"), "nvidia").glob("*/bin"))
    places = [os.environ.get("PATH", os.defpath), "/usr/local/cuda/bin", *map(str, of_pip)]
    return shutil.which("nvcc", path=os.pathsep.join(places))


class BuildKernels(build_ext):
    """Builds shared libraries for ctypes: they are no Python modules, and `.cu` files go to nvcc."""

    def finalize_options(self):
        """All kernels at the same time, on as many CPUs as there are, where --parallel says nothing else."""
        super().finalize_options()
        self.parallel = self.parallel or True

    def run(self):
        """Removes kernels of earlier builds first: where one cannot be built now, the old one must not be installed."""
        folders = [Path(self.build_lib), *([Path()] if self.inplace else [])]
        for folder in folders:
            for library in folder.glob(f"fastgen/**/*{SUFFIX}"):
                library.unlink()
        super().run()

    def build_extension(self, ext):
        """Each in a folder of its own: what is compiled of the same file for other instructions has the same name."""
        apart = copy.copy(self)
        apart.build_temp = str(Path(self.build_temp, ext.name))
        if ext.sources[0].endswith(".cu"):
            apart._build_with_nvcc(ext)
        else:
            super(BuildKernels, apart).build_extension(ext)

    def get_ext_filename(self, fullname):
        """Returns a name without the version of a Python, none of whose headers a kernel includes."""
        return str(Path(*fullname.split("."))) + SUFFIX

    def get_export_symbols(self, ext):
        return ext.export_symbols

    def _build_with_nvcc(self, ext):
        output = self.get_ext_fullpath(ext.name)
        self.mkpath(str(Path(output).parent))
        listed = subprocess.run([nvcc(), "--list-gpu-code"], capture_output=True, text=True, check=False).stdout.split()
        codes = [f"arch=compute_{OLDEST_GPU_ARCHITECTURE},code=compute_{OLDEST_GPU_ARCHITECTURE}"]
        codes += [f"arch=compute_{a},code=sm_{a}" for a in GPU_ARCHITECTURES if f"sm_{a}" in listed]
        options = ["-O3", "-std=c++17", "--shared", "--cudart=static"] + ([] if IS_WINDOWS else ["-Xcompiler", "-fPIC"])
        for code in codes:
            options += ["-gencode", code]
        self.spawn([nvcc(), *options, "-o", output, *ext.sources])


class BuildWheel(bdist_wheel):
    """One wheel for all versions of Python on a platform: the kernels include neither Python's headers nor torch's."""

    def get_tag(self):
        *_, platform_tag = super().get_tag()
        return "py3", "none", platform_tag


def kernel(name, source, **options):
    return Extension(name, [source], depends=["csrc/no_repeat_ngram.h"], optional=True, **options)


def simd(instructions, *flags):
    """Registers as vectors, which Microsoft's compiler does not know, for one instruction set."""
    names = ("skinny_gemm", "few_queries", "flash_attention", "layer_norm", "rms_norm", "gelu", "lookup")
    names += ("beam_top_k", "move_rows")
    return Extension(
        f"fastgen.ops._{instructions}",
        [f"csrc/{name}.cpp" for name in names],
        depends=["csrc/vectors.h", "csrc/attention.h", "csrc/gelu.h"],
        optional=True,
        extra_compile_args=["-O3", "-g0", "-std=c++17", "-ffp-contract=fast", *flags],
    )


KERNELS = [
    kernel(
        "fastgen.ops.no_repeat_ngram._cpu",
        "csrc/no_repeat_ngram.cpp",
        export_symbols=["fastgen_no_repeat_ngram_cpu"],
        extra_compile_args=["/std:c++17"] if IS_WINDOWS else ["-O3", "-g0", "-std=c++17", "-pthread"],
        extra_link_args=[] if IS_WINDOWS else ["-pthread"],
    )
]
# The platform that is built for: a cross compiler's is told by _PYTHON_HOST_PLATFORM.
if sysconfig.get_platform() == "linux-aarch64":
    KERNELS += [
        simd("aarch64_neon", "-DWIDTH=4"),
        simd("aarch64_neon_bf16", "-march=armv8.2-a+bf16", "-DWIDTH=4"),
    ]
elif sysconfig.get_platform().endswith("x86_64"):
    KERNELS += [
        simd("x86_avx2", "-mf16c", "-mavx2", "-mfma", "-DWIDTH=8"),
        simd("x86_avx512", "-mf16c", "-mavx512f", "-mfma", "-DWIDTH=16"),
        simd("x86_avx512_bf16", "-mf16c", "-mavx512f", "-mavx512bf16", "-mfma", "-DWIDTH=16"),
    ]
if nvcc():
    KERNELS.append(kernel("fastgen.ops.no_repeat_ngram._cuda", "csrc/no_repeat_ngram.cu"))


def repository():
    """Returns the addresses of the repository and of the tag that is built, None where GitHub's workflow says none."""
    server, name, tag = (os.environ.get(f"GITHUB_{part}") for part in ("SERVER_URL", "REPOSITORY", "REF_NAME"))
    return (f"{server}/{name}", tag) if server and name and tag else None


def metadata():
    """Returns README as the package index shows it, where relative links lead nowhere, and the project's addresses."""
    readme = Path("README.md").read_text(encoding="utf-8")
    if (of_release := repository()) is None:
        return {"long_description": readme, "project_urls": {}}
    address, tag = of_release
    readme = re.sub(r"(!\[[^\]]*\]\()(?!https?:)", rf"\1{address}/raw/{tag}/", readme)
    readme = re.sub(r"(\]\()(?!https?:|#)", rf"\1{address}/blob/{tag}/", readme)
    urls = {
        "Repository": address,
        "Documentation": f"{address}/tree/{tag}/docs",
        "Changes": f"{address}/blob/{tag}/CHANGELOG.md",
        "Issues": f"{address}/issues",
    }
    return {"long_description": readme, "project_urls": urls}


setup(
    ext_modules=KERNELS,
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": BuildWheel},
    long_description_content_type="text/markdown",
    **metadata(),
)
