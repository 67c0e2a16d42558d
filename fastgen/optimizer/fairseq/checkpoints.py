"""Loading of fairseq's checkpoints with torch's safe loader.

Since torch 2.6 `torch.load` builds only objects on a list, and a checkpoint of fairseq holds more than tensors: at
least the `argparse.Namespace` of its training run. The types that fairseq itself writes are allowed while one of its
checkpoints is read; anything else is refused by name. Older versions of torch need none of this.

Tests: tests/optimizer/fairseq/test_fairseq_checkpoints.py
"""

from __future__ import annotations

import importlib
import pickle
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch

# Names in the file. Each is a container of values, or creates one; none runs its arguments.
ALLOWED = (
    # The arguments of the run, which fairseq stores for models and tasks without a dataclass.
    "argparse.Namespace",
    # The vocabulary in the task's state (HuBERT, fine-tuned wav2vec 2.0).
    "fairseq.data.dictionary.Dictionary",
    # fairseq before 0.9 stored meters as objects; later versions store their numbers.
    *(f"fairseq.meters.{name}Meter" for name in ("Average", "Time", "Stopwatch")),
    # Sums of the training metrics, such as the n-gram counts of --eval-bleu, written by numpy 1 and numpy 2. Only types
    # of numbers: an array of objects stays refused.
    "numpy.dtype",
    "numpy.ndarray",
    *(f"numpy.{core}.multiarray.{name}" for core in ("core", "_core") for name in ("_reconstruct", "scalar")),
    *(f"numpy.dtypes.{name}DType" for name in ("Bool", "Int32", "Int64", "Float16", "Float32", "Float64")),
    # Development versions of 2020 and 2021 stored the configuration as omegaconf's objects.
    *(f"omegaconf.base.{name}" for name in ("ContainerMetadata", "Metadata")),
    "omegaconf.dictconfig.DictConfig",
    "omegaconf.listconfig.ListConfig",
    "omegaconf.nodes.AnyNode",
    *(f"builtins.{name}" for name in ("dict", "int", "list")),
    "collections.defaultdict",
    "typing.Any",
)

# torch has one list for the whole process: a thread that ends must not clear it while another one reads.
_READING = threading.RLock()


def load_checkpoint_to_cpu(original: Callable[..., dict], path: str, *args: Any, **kwargs: Any) -> dict:
    """Replaces fairseq's `load_checkpoint_to_cpu`; raises UnpicklingError in one line for objects not in ALLOWED."""
    try:
        with allowed():
            return original(path, *args, **kwargs)
    except pickle.UnpicklingError as error:
        raise pickle.UnpicklingError(refusal(path, error)) from error


@contextmanager
def allowed() -> Iterator[None]:
    """A context in which torch's safe loader accepts ALLOWED; what user code has allowed stays allowed afterwards."""
    if not hasattr(torch.serialization, "safe_globals"):  # torch 2.4 loads everything by default
        yield
        return
    with _READING:
        user_globals = set(torch.serialization.get_safe_globals())
        with torch.serialization.safe_globals([entry for entry in _available() if entry not in user_globals]):
            yield


def refusal(path: str, error: BaseException) -> str:
    """Returns one line in place of torch's many: the file, and what it holds that fairseq does not write."""
    match = re.search(r"GLOBAL (\S+)", str(error)) or re.search(r"but got (?:<class ')?([\w.]+)", str(error))
    if match is None:
        return f"{path}: not a checkpoint ({' '.join(str(error).split())})"
    return (
        f"{path}: holds {match[1]}, which fairseq does not write into checkpoints; not loaded, because creating it may "
        "run code (accepted after torch.serialization.add_safe_globals, if you trust the file)"
    )


def _available() -> list[tuple[Any, str]]:
    """Returns the entries of ALLOWED that this installation has, with their names in files."""
    entries = []
    is_old = numpy.__version__.startswith("1.")
    for name in ALLOWED:
        module, _, attribute = name.rpartition(".")
        module = module if is_old else module.replace("numpy.core", "numpy._core")  # the old name warns
        try:
            entries.append((getattr(importlib.import_module(module), attribute), name))
        except (ImportError, AttributeError):
            continue  # numpy 1 has no numpy._core, and numpy before 1.25 no numpy.dtypes
    return entries
