"""Faster text generation with Hugging Face transformers and fairseq, with identical output.

    import fastgen

is all it takes, before or after the library is imported: it patches the library's `generate`, and whatever it does
not know it leaves to the original. `python -m fastgen` shows what is patched and what is not, and why.
"""

from __future__ import annotations

from fastgen.config import CONFIG, start_logging
from fastgen.optimizer import PATCH_SET
from fastgen.patching import PatchState, disabled
from fastgen.patching.import_hooks import explain_failure

TYPE_CHECKING = False  # type checkers take it for true; importing typing takes a quarter of `import fastgen`
if TYPE_CHECKING:
    from fastgen.optimizer.report import Report

__all__ = ["PatchState", "disable", "disabled", "enable", "explain", "status"]
__version__ = "0.1.0"


def enable() -> None:
    """Patches the libraries that are imported, and the others as soon as they are; importing fastgen does this.

    Does nothing under FASTGEN_DISABLE=1, and nothing for patches that have failed: see `status()`.
    """
    if CONFIG.disable:
        PATCH_SET.skip("FASTGEN_DISABLE=1")
    else:
        explain_failure("fairseq", _import_hint)
        PATCH_SET.arm()


def _import_hint(error: Exception) -> str:
    from fastgen.optimizer.fairseq.installation import import_hint

    return import_hint(error)


def disable() -> None:
    """Puts the originals back, in all threads; libraries imported later stay as they are until `enable()`."""
    PATCH_SET.revert("disabled")


def status() -> list[PatchState]:
    """For each patch its name, state (pending, applied, skipped, failed or reverted) and the reason."""
    return PATCH_SET.states()


def explain() -> Report | None:
    """What the last `generate` of this thread that went through fastgen shared, which kernels ran, what fell back.

    Print it to read it. None if there was none; a call inside `disabled()` is not seen.
    """
    from fastgen.optimizer import report

    return report.last()


start_logging(CONFIG.log)
enable()
