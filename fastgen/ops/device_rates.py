"""Rates of a device: how long a launch, a byte and a multiply-add take, from which the cost model makes seconds.

On a CPU they are constants. A probe of each CPU would decide worse: the decisions compare its Python and the kernels of
whole steps, of which single operations show little. On an AMD EPYC (family 25, model 17) one takes 2 µs, and the second
product of a shared prompt as long as 12 launches of 17 µs. With 2 µs for a launch, and for a module in proportion, 9 of
24 small calls were slower than stock by more than 3 %, with the constants none (benchmarks/small.py, seed 77).

GPUs differ by a factor of ten. So the first process that has generated for a minute on one (`probe_sync`) measures its
rates, in some 0.2 seconds, and stores them for later processes, see fastgen/ops/measurements.py. Until then, and always
with FASTGEN_REPEATABLE=1, the rates are those of an H200. The probe has not yet run on a GPU.

Tests: tests/ops/test_device_rates.py
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace

import torch
from torch.utils._python_dispatch import _disable_current_modes

from fastgen.config import CONFIG
from fastgen.ops import measurements

KIND = "rates"  # of measurements
PATIENCE = 60.0  # seconds that a process has generated, by estimate, before it measures
ROUNDS, LAUNCHES, READS, PRODUCTS = 5, 100, 8, 4
BUFFER_BYTES, WIDTH = 1 << 28, 4096  # larger than any cache; large enough for a product at full speed
FREE_BYTES = 1 << 31  # with less free memory nothing is measured


@dataclass(frozen=True)
class DeviceRates:
    """The rates of a device.

    launch: seconds of the host to launch one of the kernels of a step; replayed_launch: seconds of the device for the
    same in a CUDA graph. module: seconds of the host for one module of a model in a forward, its launches included.
    bytes: bytes read in a second. multiply_adds: those of a matrix product in a second.
    """

    launch: float
    replayed_launch: float
    module: float
    bytes: float
    multiply_adds: float

    def __str__(self) -> str:
        launches = f"{self.launch * 1e6:.1f} µs a launch, {self.module * 1e6:.0f} µs a module"
        return f"{launches}, {self.bytes / 1e9:,.0f} GB/s, {self.multiply_adds / 1e9:,.0f} G multiply-adds/s"


# AMD EPYC (family 25, model 17), fp32, one thread: 37 G multiply-adds a second in a product of 1024 x 1024, 20 GB/s.
# Launches and modules are those that put the break-even of small calls and of shared prompts where it was measured.
CPU = DeviceRates(launch=16.8e-6, replayed_launch=16.8e-6, module=52.4e-6, bytes=20e9, multiply_adds=40e9)
# H200, torch 2.11 (docs/gpu-checks.md): 7.8 ms for a step of the 111 modules of Llama-8B with 8 layers; 70 µs of the
# host for the launches that a shared prompt adds to a layer, and 7.3 µs in a graph. Multiply-adds were not measured:
# they are two thirds of what the data sheet says for bf16.
GPU = DeviceRates(launch=5.6e-6, replayed_launch=0.583e-6, module=70e-6, bytes=3.43e12, multiply_adds=3.3e14)

_measured: dict[str, DeviceRates | None] = {}  # by the name of the GPU; None: not measured yet
_generated: defaultdict[str, float] = defaultdict(float)  # the estimated seconds of this process's steps on each GPU
_lock = threading.Lock()


def rates_of(device: torch.device) -> DeviceRates:
    """Returns the rates of a device: constants, or what was measured on this GPU."""
    return CPU if device.type == "cpu" else measured_rates(device) or GPU


def measured_rates(device: torch.device) -> DeviceRates | None:
    """Returns the rates measured on GPUs of this name, by this or an earlier process; None if there are none to use."""
    if not _uses_measurements(device):
        return None
    name = torch.cuda.get_device_name(device)
    if name not in _measured:
        _measured[name] = next(filter(None, map(_parsed, measurements.stored(KIND, name))), None)
    return _measured[name]


def _uses_measurements(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_initialized() and not CONFIG.repeatable


def _parsed(record: object) -> DeviceRates | None:
    with suppress(TypeError, ValueError, KeyError):
        rates = DeviceRates(**{field.name: float(record[field.name]) for field in fields(DeviceRates)})  # type: ignore[index]
        if all(0 < rate < float("inf") for rate in asdict(rates).values()):
            return rates
    return None


def probe_after_sync(device: torch.device, seconds: float) -> None:
    """Measures a GPU's rates before steps of so many seconds, if they end a minute of steps and none are stored.

    Waits for the device then; it must not be called between two steps.
    """
    if not _uses_measurements(device) or measured_rates(device) is not None:
        return
    name = torch.cuda.get_device_name(device)
    with _lock:
        before = _generated[name]
        _generated[name] += seconds
        if before < PATIENCE <= _generated[name] and torch.cuda.mem_get_info(device)[0] >= FREE_BYTES:
            rates = _measured[name] = probe_sync(device)
            measurements.store(KIND, name, asdict(rates))


def probe_sync(device: torch.device) -> DeviceRates:
    """Returns the measured rates of a device. Of several rounds the fastest counts: others may use the device."""
    with _disable_current_modes(), torch.inference_mode():  # the user's modes must not see measurements
        small = torch.ones(2, 8, 64, device=device)
        keys, buffer = small.mT.contiguous(), torch.ones(BUFFER_BYTES // 4, device=device)
        factor = torch.ones(WIDTH, WIDTH, dtype=torch.float16, device=device)

        def launches() -> None:  # as attention has them
            for _ in range(LAUNCHES // 4):
                torch.cat([torch.softmax(torch.bmm(small, keys) * 0.5, -1), keys[..., :8, :8]], 1)

        launch = _fastest(launches, device, waits=False) / LAUNCHES
        read = _fastest(lambda: [buffer.sum() for _ in range(READS)], device) / READS
        product = _fastest(lambda: [factor @ factor for _ in range(PRODUCTS)], device) / PRODUCTS
    scaled = replace(GPU, launch=launch, module=GPU.module * launch / GPU.launch)
    return replace(scaled, bytes=buffer.nbytes / read, multiply_adds=WIDTH**3 / product)


def _fastest(run: Callable[[], object], device: torch.device, waits: bool = True) -> float:
    """Returns the seconds of the fastest round. waits: until the device has finished, not only until the host has."""
    seconds = []
    for _ in range(1 + ROUNDS):  # the first loads kernels
        torch.cuda.synchronize(device)
        begun = time.perf_counter()
        run()
        if waits:
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begun)
    return min(seconds[1:])
