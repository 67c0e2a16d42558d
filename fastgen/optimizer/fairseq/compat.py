"""Versions: which Python a build of fairseq exists for, and what differs between versions of torch and numpy.

How fairseq is installed is said to programs that have none, or one that their Python cannot import. No way installs
torchaudio, which fairseq's metadata require and nothing here uses: its builds on PyPI need CUDA's libraries, and beside
a CPU build of torch they break the import of fairseq and of models of transformers. Importing this loads no torch.

Tests: tests/optimizer/fairseq/test_fairseq_installation.py, tests/optimizer/fairseq/test_fairseq_checkpoints.py
"""

from __future__ import annotations

import sys

_PYTHON = ".".join(map(str, sys.version_info[:2]))
_NEEDS = "'numpy<2' bitarray cffi cython hydra-core omegaconf regex sacrebleu scikit-learn"
_WHEELS = f"pip install --no-deps ve-fairseq==0.12.3 && pip install {_NEEDS}"


def how_to_install() -> str:
    """One line: the commands for this version of Python, or where to read them, or which versions have a fairseq."""
    if sys.version_info >= (3, 13):
        return f"no build of it exists for Python {_PYTHON} (accepted: 3.10 to 3.12)"
    if sys.version_info >= (3, 11):
        return _WHEELS
    return "see docs/fairseq.md, Install: Python 3.10 needs a C++ compiler and pip < 24.1"


def import_hint(error: Exception) -> str:
    """One line for an error that ended the import of fairseq, if fairseq's own age explains it; else empty.

    fairseq 0.12.2 gives dataclasses mutable defaults, which Python refuses from 3.11 on.
    """
    if "mutable default" not in str(error):
        return ""
    return (
        f"Python {_PYTHON} cannot import the fairseq that is installed (accepted: ve-fairseq, the same code for Python "
        f"3.11 and 3.12): pip uninstall fairseq hydra-core omegaconf, then {how_to_install()}"
    )


def has_safe_loader() -> bool:
    """Whether torch has a list of what checkpoints may hold: from 2.5 on; 2.4 loads everything unless asked not to."""
    import torch

    return hasattr(torch.serialization, "safe_globals")


def name_in_numpy(module: str) -> str:
    """What the installed numpy calls a module, which a file calls as the numpy that wrote it: the old name warns."""
    import numpy

    return module if numpy.__version__.startswith("1.") else module.replace("numpy.core", "numpy._core")
