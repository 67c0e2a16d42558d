"""Rates of devices: constants of a CPU and, until a minute of steps was generated on a GPU, of an H200."""

import json
from contextlib import contextmanager
from dataclasses import asdict, replace
from unittest import mock

import pytest
import torch
from reports import capturing
from tiny_models import padded, tiny

from fastgen.__main__ import _rates
from fastgen.ops import device_rates, measurements
from fastgen.ops.device_rates import CPU, GPU, DeviceRates
from fastgen.optimizer.decoding.cost_model import size_of
from fastgen.optimizer.transformers.checks import KNOWN
from fastgen.testing import configured

CUDA = torch.device("cuda", 0)
SLOW = DeviceRates(launch=9e-6, replayed_launch=1e-6, module=90e-6, bytes=3e11, multiply_adds=3e13)
NAME = "a GPU (80 GB)"


def later_process() -> None:
    device_rates._measured.clear()
    device_rates._generated.clear()


@pytest.fixture
def probes(tmp_path):
    """The devices that were probed; torch says that there is a GPU, and no rates of it are stored yet."""
    devices = []

    def probe(device):
        devices.append(device)
        return SLOW

    torch_says = {
        "is_initialized": lambda: True,
        "get_device_name": lambda device: NAME,
        "mem_get_info": lambda device: (1 << 36, 1 << 37),
    }
    later_process()
    gpu, probing = mock.patch.multiple(torch.cuda, **torch_says), mock.patch.object(device_rates, "probe_sync", probe)
    with configured(cache=str(tmp_path)), gpu, probing:
        yield devices
    later_process()


def test_without_a_measurement_rates_are_constants():
    assert device_rates.rates_of(torch.device("cpu")) is CPU
    assert device_rates.rates_of(torch.device("mps")) is GPU
    with mock.patch.object(torch.cuda, "is_initialized", lambda: False):
        assert device_rates.rates_of(CUDA) is GPU


def test_a_gpu_is_measured_after_a_minute_of_steps(probes):
    for _ in range(59):
        device_rates.probe_after_sync(CUDA, 1.0)
    assert not probes and device_rates.rates_of(CUDA) is GPU
    for _ in range(3):
        device_rates.probe_after_sync(CUDA, 1.0)
        assert len(probes) == 1 and device_rates.rates_of(CUDA) == SLOW


def test_a_cpu_is_never_measured(probes):
    device_rates.probe_after_sync(torch.device("cpu"), 1e6)
    assert not probes


def test_later_processes_read_the_rates_that_were_stored_first(probes):
    device_rates.probe_after_sync(CUDA, 100.0)
    measurements.store(device_rates.KIND, NAME, asdict(GPU))
    later_process()
    device_rates.probe_after_sync(CUDA, 100.0)
    assert len(probes) == 1 and device_rates.rates_of(CUDA) == SLOW


def test_repeatable_calls_use_constant_rates(probes):
    with configured(repeatable=True):
        device_rates.probe_after_sync(CUDA, 100.0)
        assert not probes
    device_rates.probe_after_sync(CUDA, 100.0)
    assert device_rates.rates_of(CUDA) == SLOW
    with configured(repeatable=True):
        assert device_rates.rates_of(CUDA) is GPU


def test_a_gpu_without_free_memory_is_not_measured(probes):
    with mock.patch.object(torch.cuda, "mem_get_info", lambda device: (1 << 20, 1 << 37)):
        device_rates.probe_after_sync(CUDA, 100.0)
    assert not probes and device_rates.rates_of(CUDA) is GPU


DAMAGED = [
    "1", "[]", "{}", "null", json.dumps(asdict(SLOW) | {"launch": "x"}), json.dumps(asdict(SLOW) | {"bytes": 0}),
    json.dumps(asdict(SLOW) | {"module": float("nan")}), json.dumps(asdict(SLOW) | {"launch": None}),
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_rates_are_skipped(probes, damage):
    file = measurements.path(device_rates.KIND, NAME)
    file.write_text(damage + "\n")
    assert device_rates.rates_of(CUDA) is GPU
    later_process()
    file.write_text(damage + "\n" + json.dumps(asdict(SLOW)) + "\n")
    assert device_rates.rates_of(CUDA) == SLOW


@contextmanager
def tiny_probe(**sizes):
    """Makes a probe so small that a CPU runs it."""
    sizes = {"ROUNDS": 2, "LAUNCHES": 8, "READS": 1, "PRODUCTS": 1, "BUFFER_BYTES": 1 << 16, "WIDTH": 16} | sizes
    with mock.patch.multiple(device_rates, **sizes), mock.patch.object(torch.cuda, "synchronize", lambda device: None):
        yield


def test_the_probe_divides_the_work_by_the_time():
    seconds = iter([0.0, 9.0, 10.0, 10.5, 20.0, 20.25] * 3)
    with tiny_probe(), mock.patch.object(device_rates.time, "perf_counter", lambda: next(seconds)):
        rates = device_rates.probe_sync(torch.device("cpu"))
    assert rates.launch == 0.25 / 8 and rates.bytes == (1 << 16) / 0.25 and rates.multiply_adds == 16**3 / 0.25
    assert rates.module == pytest.approx(GPU.module * rates.launch / GPU.launch)
    assert rates.replayed_launch == GPU.replayed_launch


def test_the_probe_leaves_random_numbers_and_modes_alone():
    state = torch.get_rng_state()
    with tiny_probe():
        device_rates.probe_sync(torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), state) and torch.is_grad_enabled()


def test_rates_are_shown_with_their_units():
    rates = replace(SLOW, launch=9.04e-6)
    assert str(rates) == "9.0 µs a launch, 90 µs a module, 300 GB/s, 30,000 G multiply-adds/s"


def test_captured_calls_count_their_seconds_first():
    model = tiny("gpt2")
    with capturing(), mock.patch.object(device_rates, "probe_after_sync") as counted:
        model.generate(**padded(9, 5), num_beams=3, max_new_tokens=7)
    [(device, seconds)] = [call.args for call in counted.call_args_list]
    assert device == torch.device("cpu")
    assert seconds == pytest.approx(7 * CPU.module * size_of(model, KNOWN).modules, rel=0.2)


def test_the_report_says_whose_rates_are_used(probes):
    with mock.patch.multiple(torch.cuda, is_available=lambda: True, init=lambda: None):
        assert _rates() == [f"Rates of a CPU: {CPU}", f"Rates of an H200: {GPU}"]
        device_rates.probe_after_sync(CUDA, 100.0)
        assert _rates()[1] == f"Rates of this GPU: {SLOW}"
