"""Whether a method is fairseq's own, or a program has put another in its place."""

from __future__ import annotations

from fairseq import sequence_generator


def is_of_fairseq(owner: object, name: str) -> bool:
    """Whether `owner.name` is what fairseq's sequence_generator.py defines, for this object and its class."""
    function = getattr(type(owner), name)
    code = getattr(function, "__code__", None)
    return name not in vars(owner) and code is not None and code.co_filename == sequence_generator.__file__
