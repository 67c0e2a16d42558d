"""What holds for single architectures, by their `model_type`, and no attribute of the library tells."""

from __future__ import annotations

# The rows of a batch have an influence on each other.
COUPLED_ROWS = {
    "nllb-moe": "the capacity of its experts depends on the number of rows",
    "big_bird": "its sparse attention draws random numbers for each row",
}

# A key's column counts beside its position.
COUNTED_COLUMNS = {
    "gpt_neo": "its local attention counts columns",
    "mpt": "its attention biases count columns",
}

# Positions are counted in the attention mask, which all rows have.
POSITIONS_OF_MASK = ("bloom",)

# Steps do not wait for the device with the positions of seamless.py, whatever the library says.
SYNC_FREE = ("seamless_m4t", "seamless_m4t_v2")

# Arguments that a model takes and does not read while it decodes. Whisper's generate goes on with the mask of all
# recordings when some of them have ended, or are decoded again at another temperature.
UNREAD_ARGUMENTS = {"whisper": ("attention_mask",)}
