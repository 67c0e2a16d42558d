"""Seamless M4T from text or speech to speech: its stages for `fastgen.explain()`, and what they need not keep.

Encoder and text decoder are those of the call of `generate` inside; then come text-to-unit and vocoder. The library
asks that call for the scores and hidden states of every step and reads only its sequences and the encoder's states
(unread.py).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from fastgen.optimizer.decoding.generation import generating, stage
from fastgen.optimizer.transformers.unread import ENCODER_STATES, reading_only


def generate(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    generate_speech = kwargs.get("generate_speech", args[5] if len(args) > 5 else True)
    unread = reading_only(ENCODER_STATES) if generate_speech else nullcontext()
    with generating(type(self).__name__, has_stages=True), unread:
        return original(self, *args, **kwargs)


def text_to_unit(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """In version 2 one forward; in version 1 a step of a call of `generate`, which is the stage."""
    with stage("text-to-unit"):
        return original(self, *args, **kwargs)


def vocoder(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    with stage("vocoder"):
        return original(self, *args, **kwargs)
