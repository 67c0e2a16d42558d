"""ProphetNet's names in fairseq's registries; a `--user-dir` with its own ProphetNet, like the authors', gets them.

Tests: tests/models/prophetnet/test_prophetnet.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fairseq import criterions, models, tasks

from fastgen.models.prophetnet.model import NAME

ARCHITECTURES = (NAME, f"{NAME}_base", f"{NAME}_large")


def _entries() -> dict[str, list[tuple[dict[str, Any], str]]]:
    """Returns what was registered: for each kind its registries and the names in them, the main one first."""
    by_architecture = (models.ARCH_MODEL_REGISTRY, models.ARCH_MODEL_NAME_REGISTRY, models.ARCH_CONFIG_REGISTRY)
    return {
        "model": [
            (models.MODEL_REGISTRY, NAME),
            (models.ARCH_MODEL_INV_REGISTRY, NAME),
            *((registry, name) for registry in by_architecture for name in ARCHITECTURES),
        ],
        "task": [
            (tasks.TASK_REGISTRY, "translation_prophetnet"),
            (tasks.TASK_DATACLASS_REGISTRY, "translation_prophetnet"),
        ],
        "criterion": [(criterions.CRITERION_REGISTRY, "ngram_language_loss")],
    }


def import_user_module(original: Callable, args: Any) -> None:
    """Replaces `fairseq.utils.import_user_module`, so that a `--user-dir` may register the same names.

    The names are free while it runs; afterwards those that nobody has taken are fastgen's again.
    """
    if getattr(args, "user_dir", None) is None:
        return original(args)
    freed = {
        kind: [(registry, name, registry.pop(name)) for registry, name in entries if name in registry]
        for kind, entries in _entries().items()
        if entries[0][0][entries[0][1]].__module__.startswith("fastgen.")
    }
    try:
        return original(args)
    finally:
        for kind, entries in freed.items():
            main, name = _entries()[kind][0]
            if name not in main:
                for registry, key, value in entries:
                    registry[key] = value
