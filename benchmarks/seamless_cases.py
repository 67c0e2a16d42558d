"""What bench_seamless.py measures: Seamless M4T from speech to speech, both versions, with random weights.

The layers are those of v1-large and v2-large, which are the defaults of transformers. What random weights leave to
chance is set to what speech has: v2 speaks 3 units for each of the 4 letters of a token, and v1's vocoder holds each
unit for 2 frames, of 20 ms. End tokens come when all tokens that were asked for are there. Other special tokens and
units have weights of zero, with which they are never the best.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from transformers.initialization import no_init_weights

LANGUAGE = "eng"
FRAMES = 500  # of 20 ms: 10 s of speech
TOKENS = 40
SPECIAL_TOKENS = 4
LAYERS = (24, 12, 6, 3)
BEAMS = 5


def sizes(version: str, layers: int) -> transformers.PretrainedConfig:
    """The configuration of a version, with at most so many layers in each encoder and decoder."""
    config = getattr(transformers, f"{version}Config")()
    for name in ("speech_encoder", "decoder", "t2u_encoder", "t2u_decoder"):
        setattr(config, f"{name}_layers", min(layers, getattr(config, f"{name}_layers")))
    return config


def exactly(prefix: str, tokens: int, num_beams: int) -> dict[str, Any]:
    """Arguments with which one of the two calls of `generate` inside makes so many tokens."""
    limits = {"min_new_tokens": tokens, "max_new_tokens": tokens, "num_beams": num_beams, "do_sample": False}
    return {f"{prefix}_{name}": value for name, value in limits.items()}


@dataclass(frozen=True)
class Case:
    """A version of Seamless M4T.

    frames: for how many the vocoder holds a unit. unit_method: of the text-to-unit model, what makes units. arguments:
    of `generate`. sizes: a configuration, of a version and a number of layers.
    """

    version: str
    frames: int
    unit_method: str
    arguments: dict[str, Any] = field(default_factory=dict)
    sizes: Callable[[str, int], transformers.PretrainedConfig] = sizes

    def make(self, layers: int) -> transformers.PreTrainedModel:
        """A model in evaluation mode; the same weights in each call."""
        config = self.sizes(self.version, layers)
        with no_init_weights():  # takes a minute
            model = self._of(config).eval()
        model.tie_weights()
        torch.manual_seed(0)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                _fill(name, weight)
            model.shared.weight[:SPECIAL_TOKENS] = 0
            units = model.t2u_model.lm_head.weight
            units[: config.vocoder_offset] = 0
            units[config.vocoder_offset + config.unit_hifi_gan_vocab_size :] = 0
            _always(model.vocoder.dur_predictor, self.frames)
            if (durations := getattr(model.t2u_model.model.decoder, "duration_predictor", None)) is not None:
                _always(durations, 3)
        own = model.generation_config
        own.text_decoder_lang_to_code_id = {LANGUAGE: config.vocab_size - 1}
        own.t2u_lang_code_to_id = {LANGUAGE: config.t2u_vocab_size - 1}
        own.vocoder_lang_code_to_id = {LANGUAGE: 0}
        if durations is not None:
            own.id_to_text = {str(token): "abcd" for token in range(config.vocab_size)}
            own.char_to_id = {letter: SPECIAL_TOKENS + place for place, letter in enumerate("abcd")}
        return model

    def weights(self, layers: int) -> int:
        """How many numbers the model has."""
        with torch.device("meta"):
            return sum(weight.numel() for weight in self._of(self.sizes(self.version, layers)).parameters())

    def inputs(self, model: transformers.PreTrainedModel) -> dict[str, torch.Tensor]:
        """One row of features."""
        torch.manual_seed(1)
        features = torch.randn(1, FRAMES, model.config.feature_projection_input_dim).to(model.device, model.dtype)
        return {"input_features": features}

    def _of(self, config: transformers.PretrainedConfig) -> transformers.PreTrainedModel:
        return getattr(transformers, f"{self.version}ForSpeechToSpeech")(config)


def _fill(name: str, weight: torch.Tensor) -> None:
    """Numbers that keep states about as large as they are."""
    if weight.dim() == 1:
        weight.fill_(0 if name.endswith("bias") else 1)
        return
    bound = math.sqrt(3 / weight[0].numel())
    weight.uniform_(-bound, bound)


def _always(predictor: torch.nn.Module, duration: int) -> None:
    """Lets a predictor of durations say this one."""
    predictor.proj.weight.zero_()
    predictor.proj.bias.fill_(math.log1p(duration))


TEXT = exactly("text", TOKENS, BEAMS)
CASES = {
    "v2": Case("SeamlessM4Tv2", 1, "forward", TEXT),
    "v1": Case("SeamlessM4T", 2, "generate", TEXT | exactly("speech", 200, BEAMS)),
}
