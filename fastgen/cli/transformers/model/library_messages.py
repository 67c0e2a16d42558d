"""What transformers logs while a run goes on: each message once, and errors only with --quiet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from logging import Filter, LogRecord

from transformers.utils import logging


class _Once(Filter):
    def __init__(self) -> None:
        super().__init__()
        self._said: set[str] = set()

    def filter(self, record: LogRecord) -> bool:
        message = record.getMessage()
        first = message not in self._said
        self._said.add(message)
        return first


@contextmanager
def said_once(quiet: bool) -> Iterator[None]:
    """A warning about a batch would be logged for every batch."""
    handlers, once, verbosity = logging.get_logger().handlers, _Once(), logging.get_verbosity()
    for handler in handlers:
        handler.addFilter(once)
    if quiet:
        logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        for handler in handlers:
            handler.removeFilter(once)
