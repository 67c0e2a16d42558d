"""What makes fairseq faster, as data; the replacements are imported when they are first called."""

from fastgen.patching import Patch

_TESTED = ("0.12.0", "0.12.3")

PATCHES = (
    Patch(
        "fairseq.no_repeat_ngram",
        "fairseq.ngram_repeat_block:NGramRepeatBlock.forward",
        "fastgen.optimizer.fairseq.no_repeat_ngram:no_repeat_ngram",
        tested=_TESTED,
        parameters=("self", "tokens", "lprobs", "bsz", "beam_size", "step"),
        group="fairseq.no_repeat_ngram",
    ),
)
