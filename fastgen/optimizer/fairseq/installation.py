"""How fairseq is installed, for programs that have none, or one that their Python cannot import.

Neither way installs torchaudio, which fairseq's metadata require and nothing here uses: its builds on PyPI need CUDA's
libraries, and beside a CPU build of torch they break the import of fairseq and of models of transformers.

Tests: tests/optimizer/fairseq/test_fairseq_installation.py
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
