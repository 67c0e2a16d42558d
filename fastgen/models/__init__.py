"""Models that no host library has, one folder each; they are registered with a host after its import.

Tests: tests/models/test_registration.py
"""

from __future__ import annotations

import importlib
import logging
from types import ModuleType

from fastgen.config import CONFIG
from fastgen.patching.import_hooks import call_after_import
from fastgen.patching.target import older_than

LOWEST = {"transformers": "5.0.0"}  # older versions are left alone

# For each module of a host, the modules of fastgen whose import registers models with it. They are small: the code of a
# model is imported when one is created.
REGISTRATIONS: dict[str, tuple[str, ...]] = {
    "transformers.models.auto.configuration_auto": (
        "fastgen.models.mqa.configuration",
        "fastgen.models.unilm.configuration",
    ),
    "transformers.models.auto.modeling_auto": ("fastgen.models.mqa.grouped_registration",),
    "transformers.modeling_utils": ("fastgen.models.mqa.grouped_configuration",),
    "transformers.models.auto.tokenization_auto": ("fastgen.models.unilm.tokenizer",),
    "fairseq.models": ("fastgen.models.prophetnet.model",),
    "fairseq.criterions": ("fastgen.models.prophetnet.criterion",),
    "fairseq.tasks": ("fastgen.models.prophetnet.task",),
}


def register() -> None:
    """Registers the models with the hosts that are imported, and with the other hosts after their import.

    Not with fairseq under FASTGEN_DISABLE=1: a user's `--user-dir` may define the same names, which needs a patch.
    """
    for host in REGISTRATIONS:
        if CONFIG.disable and host.startswith("fairseq."):
            continue
        call_after_import(host, _register_with)


def _register_with(host: ModuleType) -> None:
    package = host.__name__.partition(".")[0]
    if package in LOWEST and older_than(LOWEST[package], package):
        return
    for module in REGISTRATIONS[host.__name__]:
        try:
            importlib.import_module(module)
        except Exception:
            if CONFIG.strict:
                raise
            logging.getLogger("fastgen").warning("fastgen cannot add %s to %s", module, host.__name__, exc_info=True)
