"""Registers the grouped models with `AutoConfig` as early as possible.

If a program imports BartConfig or T5Config before anything else of transformers, this runs during that import; then the
first model registers them.
"""

from contextlib import suppress

with suppress(ImportError):
    import fastgen.models.mqa.grouped_configuration  # noqa: F401
