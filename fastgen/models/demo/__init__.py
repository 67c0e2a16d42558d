"""A small trained model in the package, with which generation can be tried without a network.

It turns written English into spoken English; data/README.md describes its training and accuracy.

Tests: tests/models/test_demo_model.py
"""

from __future__ import annotations

from pathlib import Path

DEMO = "demo"


def demo_path() -> Path:
    """Returns the folder of the model and its tokenizer, for `from_pretrained`."""
    return Path(__file__).parent / "data"


def sample_path() -> Path:
    """Returns the path of 500 input lines that were not trained on; sample.ref.txt next to it has their outputs."""
    return demo_path() / "sample.txt"
