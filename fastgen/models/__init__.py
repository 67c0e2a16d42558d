"""Models that no host library has, one folder each; a host learns of them as soon as it is imported.

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

# For each module of a host, those of ours that add their models to it when they are imported. They are small: what a
# model needs to run is imported when one is made.
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
    """Adds the models to the hosts that are imported, and to the others when they are.

    Not to fairseq under FASTGEN_DISABLE=1: names there may be those of a program's own `--user-dir`, for which a patch
    makes room.
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
