"""The patches of fairseq, as data, and how fairseq is installed; importing this module loads no torch.

Replacements are imported when they are first called.

Tests: tests/test_package.py, tests/optimizer/fairseq/test_fairseq_installation.py
"""

import sys
from functools import partial

from fastgen.patching import Patch, patch_group

LOWEST = "0.12.2"
_group = partial(patch_group, "fairseq", LOWEST)
_VOCODER = "models.text_to_speech.vocoder:"

PATCHES = (
    *_group(
        "checkpoints",
        ("checkpoints", "checkpoint_utils:load_checkpoint_to_cpu(path)", "checkpoints:load_checkpoint_to_cpu"),
    ),
    *_group(
        "generation",
        (
            "generate",
            "sequence_generator:SequenceGenerator._generate(self, sample, prefix_tokens, constraints, bos_token)",
            "generate:generate",
        ),
        (
            "attention",
            "modules.multihead_attention:MultiheadAttention.forward"
            "(self, query, key, value, key_padding_mask, incremental_state, need_weights)",
            "modules:multihead_attention",
        ),
        (
            "decoder",
            "models.transformer.transformer_decoder:TransformerDecoderBase.extract_features_scriptable"
            "(self, prev_output_tokens, encoder_out, incremental_state)",
            "modules:extract_features",
        ),
        (
            "learned_positions",
            "modules.learned_positional_embedding:LearnedPositionalEmbedding.forward"
            "(self, input, incremental_state, positions)",
            "modules:positions",
        ),
        (
            "sinusoidal_positions",
            "modules.sinusoidal_positional_embedding:SinusoidalPositionalEmbedding.forward"
            "(self, input, incremental_state, timestep, positions)",
            "modules:positions",
        ),
    ),
    *_group(
        "no_repeat_ngram",
        (
            "no_repeat_ngram",
            "ngram_repeat_block:NGramRepeatBlock.forward(self, tokens, lprobs, bsz, beam_size, step)",
            "modules:no_repeat_ngram",
        ),
    ),
    Patch(
        "fairseq.user_module",
        "fairseq.utils:import_user_module",
        "fastgen.models.prophetnet.names:import_user_module",
        LOWEST,
        parameters=("args",),
        group="fairseq.user_module",
    ),
    *_group(
        "vocoder",
        ("vocoder", "models.text_to_speech.hifigan:Generator.forward(self, x)", "modules:vocode"),
        (
            "unit_vocoder",
            f"{_VOCODER}CodeHiFiGANVocoder.forward(self, x, dur_prediction)",
            "modules:vocode_without_gradients",
        ),
        ("spectrogram_vocoder", f"{_VOCODER}HiFiGANVocoder.forward(self, x)", "modules:vocode_without_gradients"),
    ),
)

_PYTHON = ".".join(map(str, sys.version_info[:2]))


def how_to_install() -> str:
    """Returns one line: the commands for this version of Python, or where to read them, or which versions work.

    The commands do not install torchaudio, which fairseq's metadata require and nothing here uses: its builds on PyPI
    need CUDA's libraries; next to a CPU build of torch they break the import of fairseq and of transformers' models.
    """
    if sys.version_info >= (3, 13):
        return f"no build of it exists for Python {_PYTHON} (accepted: 3.10 to 3.12)"
    if sys.version_info < (3, 11):
        return "see docs/fairseq.md, Install: Python 3.10 needs a C++ compiler and pip < 24.1"
    needs = "'numpy<2' bitarray cffi cython hydra-core omegaconf regex sacrebleu scikit-learn"
    return f"pip install --no-deps ve-fairseq==0.12.3 && pip install {needs}"


def import_hint(error: Exception) -> str:
    """Returns a hint for an error at the import of fairseq, if its age explains the error; otherwise an empty string.

    Dataclasses of fairseq 0.12.2 have mutable defaults, which Python refuses from 3.11 on.
    """
    if "mutable default" not in str(error):
        return ""
    return (
        f"Python {_PYTHON} cannot import the fairseq that is installed (accepted: ve-fairseq, the same code for Python "
        f"3.11 and 3.12): pip uninstall fairseq hydra-core omegaconf, then {how_to_install()}"
    )
