"""Other settings for a block of a test, and functions of fastgen that are watched, replaced or broken there.

The functions that fastgen's own tests name are in tests/helpers/hooks.py. Each context manager restores everything when
its block ends; none may be used by several threads at the same time.

Tests: tests/test_testing.py
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

from fastgen.config import CONFIG


class Call(NamedTuple):
    """A call of a watched function. args: for a method, the object comes first. result: None after an error."""

    args: tuple
    kwargs: dict[str, Any]
    result: Any


@contextmanager
def configured(**settings: Any) -> Iterator[None]:
    """Sets fields of the configuration, such as `share="never"`, for calls in all threads."""
    with mock.patch.multiple(CONFIG, **settings):
        yield


@contextmanager
def replaced(owner: Any, name: str, by: Callable) -> Iterator[None]:
    """Calls `by` in place of this attribute; like a patch's replacement, it gets the original, then the arguments.

    An error that `by` raises counts as user code's, not fastgen's: see `watched`.
    """
    original = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        return by(original, *args, **kwargs)

    if not isinstance(original, type):
        functools.update_wrapper(call, original)
    with mock.patch.object(owner, name, call):
        yield


@contextmanager
def watched(
    owner: Any, name: str, error: BaseException | type[BaseException] | None = None, start: int = 0
) -> Iterator[list[Call]]:
    """Yields a list to which each call of this attribute is appended when it ends.

    error: raised by its calls from index `start` on, as if it were fastgen's own.
    """
    calls: list[Call] = []

    def noting(original: Callable, *args: Any, **kwargs: Any) -> Any:
        result = None
        try:
            if error is not None and len(calls) >= start:
                raise error
            result = original(*args, **kwargs)
        finally:
            calls.append(Call(args, kwargs, result))
        return result

    with replaced(owner, name, noting):
        yield calls
