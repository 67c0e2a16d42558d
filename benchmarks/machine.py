"""The CPU that figures were measured on. Virtual machines name all CPUs of one maker alike, so more than the name."""

from __future__ import annotations

import platform
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
L3_SIZE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")


def cpu() -> dict[str, str]:
    """name, family, model and l3 ("32768K"), of what the system tells."""
    if not CPUINFO.exists():
        return {"name": platform.processor() or platform.machine()}
    first = CPUINFO.read_text().split("\n\n")[0]
    told = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}
    fields = {"name": "model name", "family": "cpu family", "model": "model"}
    found = {name: told[field] for name, field in fields.items() if field in told}
    return found | ({"l3": L3_SIZE.read_text().strip()} if L3_SIZE.exists() else {})


def describe_cpu() -> str:
    """For example "AMD EPYC, family 25, model 1, l3 32768K"."""
    found = cpu()
    return ", ".join([found.pop("name", platform.machine()), *(f"{key} {value}" for key, value in found.items())])


def print_head() -> None:
    """Versions, threads and the CPU; transformers is quiet from then on. fairseq's benchmarks do not need it."""
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {torch.get_num_threads()} threads")
    print(describe_cpu())
