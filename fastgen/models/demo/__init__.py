"""A small trained model that comes with the package, so that generation can be tried with no network.

It turns written English into spoken English; data/README.md says how it was trained and how well it works.

Tests: tests/models/test_demo_model.py
"""

from __future__ import annotations

from pathlib import Path

DEMO = "demo"


def demo_path() -> Path:
    """The folder of the model and its tokenizer, as `from_pretrained` takes it."""
    return Path(__file__).parent / "data"


def sample_path() -> Path:
    """500 input lines that were held out of training; the right outputs are in sample.ref.txt beside them."""
    return demo_path() / "sample.txt"
