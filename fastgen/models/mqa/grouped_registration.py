"""Makes the grouped models known to `AutoConfig` as soon as that can be.

Where a program imports BartConfig or T5Config before anything else of transformers, this runs in the middle of that;
then it is done with the first model.
"""

from contextlib import suppress

with suppress(ImportError):
    import fastgen.models.mqa.grouped_configuration  # noqa: F401
