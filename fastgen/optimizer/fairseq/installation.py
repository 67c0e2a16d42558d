"""Which distribution of fairseq works, for programs that have one that does not."""

from __future__ import annotations

import sys

# What setup.py asks for.
INSTALL = f"pip install {'fairseq==0.12.2' if sys.version_info < (3, 11) else 've-fairseq==0.12.3'} 'numpy<2'"


def import_hint(error: Exception) -> str:
    """One line for an error that ended the import of fairseq, if fairseq's own age explains it; else empty.

    fairseq 0.12.2 gives dataclasses mutable defaults, which Python refuses from 3.11 on.
    """
    if "mutable default" not in str(error):
        return ""
    version = ".".join(map(str, sys.version_info[:2]))
    return (
        f"the fairseq that is installed cannot be imported by Python {version} (accepted: ve-fairseq, the same code "
        f"for Python 3.11 and newer): pip uninstall fairseq hydra-core omegaconf, then {INSTALL}"
    )
