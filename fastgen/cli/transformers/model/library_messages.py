"""What transformers logs while a run goes on: each message once, and errors only with --quiet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from logging import LogRecord

from transformers.utils import logging


@contextmanager
def said_once(quiet: bool) -> Iterator[None]:
    """A warning about a batch would be logged for every batch."""
    handlers, verbosity = logging.get_logger().handlers, logging.get_verbosity()
    said: set[str] = set()

    def once(record: LogRecord) -> bool:
        before = len(said)
        said.add(record.getMessage())
        return len(said) > before

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
