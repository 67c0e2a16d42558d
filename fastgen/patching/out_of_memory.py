"""Errors that mean that no memory was left: trying again in another way would need more."""

from __future__ import annotations

# What allocators say that raise a RuntimeError.
TEXTS = ("out of memory", "can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the host had no memory left, however its allocator says so."""
    return isinstance(error, MemoryError) or any(text in str(error) for text in TEXTS)
