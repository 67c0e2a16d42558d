"""`--user-dir`: models, tasks and criteria that a program brings under names that fastgen has registered.

Tests: tests/models/prophetnet/test_prophetnet.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastgen.models.prophetnet import names


def import_user_module(original: Callable, args: Any) -> None:
    """`fairseq.utils.import_user_module`: the program's own come first."""
    if getattr(args, "user_dir", None) is None:
        return original(args)
    with names.withdrawn():
        return original(args)
