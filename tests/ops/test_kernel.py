"""The kernels of each operation: which is chosen, and that each list is complete and ends with torch's own."""

import re

import pytest
from hooks import without
from python_process import REPOSITORY, run_code

from fastgen import ops
from fastgen.ops.kernel import Kernel, first_supported


def test_the_first_kernel_that_can_is_chosen():
    asked = []
    missing = Kernel("missing", lambda: ["not built"], print, "cpu", lambda *arguments: asked.append("missing"))
    gpu = Kernel("GPU", lambda: asked.append("GPU"), print, "cuda")
    few = Kernel("few rows", list, print, "cpu", lambda rows: rows < 3)
    torch = Kernel("torch", list, print)
    kernels = (missing, gpu, few, torch)
    assert [first_supported(kernels, "cpu", rows) for rows in (2, 3)] == [few, torch] and not asked
    assert (str(missing), str(torch)) == ("missing: not built", "torch: usable")


def test_without_a_kernel_the_next_is_chosen():
    kernels = ops.kernels()["move rows"]
    with without("C++"):
        assert first_supported(kernels, "cpu") is kernels[-1] and kernels[0].state == "none was built"


@pytest.mark.parametrize("operation", ops.OPERATIONS)
def test_torch_comes_last_and_runs_everywhere(operation):
    *faster, last = ops.kernels()[operation]
    assert faster and last.state == "usable" and last.device == ""
    assert all(kernel.device for kernel in faster)


def test_operations_are_all_modules_with_kernels():
    folder = REPOSITORY / "fastgen" / "ops"
    lists = set()
    for path in folder.rglob("*.py"):
        module = ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__init__")
        for name in re.findall(r"^(\w*KERNELS) = \(", path.read_text(encoding="utf-8"), re.MULTILINE):
            lists.add(module if name == "KERNELS" else f"{module}:{name}")
    assert lists == set(ops.OPERATIONS.values())


def test_without_torch_nothing_is_usable():
    code = "import sys; sys.modules['torch'] = None; import importlib.util as u; find = u.find_spec\n"
    code += "import fastgen.ops as ops; ops.find_spec = lambda name: None\n"
    code += "print({str(kernel) for kernels in ops.kernels().values() for kernel in kernels})"
    assert run_code(code).strip() == "{'all: torch is not installed'}"
