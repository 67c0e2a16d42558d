"""Seconds of the stages of a call: multi-query Transformers, and Seamless M4T from speech to speech.

`mqa`: Table 2 of "Fast Transformer Decoding: One Write-Head is All You Need" for the models of its Tables 1
(translation) and 3 (language models), of full size. An encoder's microseconds are per source token, a decoder's per
target token of an input, as in the paper; a language model's prompt counts as its encoder.

`seamless`: Figures 2 and 16 of "Seamless M4T, fast" (Lee et al., 2024), one input of 10 s. Lengths that random weights
would leave to chance are those of speech: v2 speaks 3 units for each of the 4 letters of a token, v1's vocoder holds
each unit for 2 frames, of 20 ms. End tokens come after the requested number of tokens; other special tokens and units
have weights of zero, with which they are never the best. A stage's seconds are without those of stages inside of it;
the library runs the speech encoder twice in a call, and both count.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from measure import Clock, Options, Seconds, medians

import fastgen

WAYS = {"stock": fastgen.disabled, "fastgen": nullcontext}

ENCODER, DECODER, TOTAL = "encoder", "decoder", "total"
SEARCHES = {"greedy": {"num_beams": 1}, "beam 4": {"num_beams": 4}}
WINDOW, WARM_UP = 32, 20  # new tokens

STAGES, REST, END_TO_END = ("speech encoder", "text decoder", "text-to-unit", "vocoder"), "rest", "end to end"
LANGUAGE, FRAMES, SPECIAL_TOKENS = "eng", 500, 4
TOLERANCES = {torch.float32: 1e-5, torch.float16: 0.05, torch.bfloat16: 0.05}  # of waveforms


@dataclass(frozen=True)
class MultiQuery:
    """A row of the paper's Table 1, or of Table 3 (`is_lm`), all of the same number of parameters."""

    key_value_heads: int
    d_ff: int
    local_window: int | None = None
    is_lm: bool = False
    batch: int = 4
    length: int = 128

    def make(self) -> Any:
        from fastgen.models import mqa

        config = mqa.MQATransformerConfig(
            num_key_value_heads=self.key_value_heads,
            d_ff=self.d_ff,
            local_window=self.local_window,
            is_encoder_decoder=not self.is_lm,
            eos_token_id=None,
            **SIZES,
        )
        torch.manual_seed(0)
        kind = mqa.MQATransformerForCausalLM if self.is_lm else mqa.MQATransformerForConditionalGeneration
        return kind(config).eval()

    def measure(self, options: Options) -> dict[str, Any]:
        timed = TimedSearches(self, options)
        timed.microseconds(WARM_UP)
        turns = [timed.microseconds(self.length) for _ in range(options.repeats)]
        ratios = [turn["stock"]["beam 4"] / turn["fastgen"]["beam 4"] for turn in turns]
        return {
            "batch": self.batch,
            "length": self.length,
            "dtype": options.dtype,
            "parameters": sum(weight.numel() for weight in timed.model.parameters()),
            "microseconds": {way: medians([turn[way] for turn in turns]) for way in WAYS},
            "turns": turns,
            "ratios": {"stock": statistics.median(ratios)},
            "equal": timed.equal,
        }


class TimedSearches:
    """A multi-query model, and whether outputs were equal so far."""

    def __init__(self, case: MultiQuery, options: Options) -> None:
        self.case, self.equal = case, True
        self.model = case.make().to(device=options.device, dtype=options.torch_dtype)
        shape, generator = (case.batch, case.length), torch.Generator().manual_seed(1)
        vocabulary = self.model.config.vocab_size
        self.input_ids = torch.randint(3, vocabulary, shape, generator=generator).to(options.device)
        self.clock = Clock(options, rest=DECODER)

    def microseconds(self, new_tokens: int) -> dict[str, Seconds]:
        """Returns microseconds per token in each way, of the encoder and of each search's decoder."""
        measured: dict[str, Seconds] = {way: {} for way in WAYS}
        lengths = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
        for search, arguments in SEARCHES.items():
            outputs = []
            for way in WAYS:
                with WAYS[way](), self._timed_encoder():
                    self.clock.start()
                    outputs.append(self.model.generate(self.input_ids, do_sample=False, **lengths, **arguments))
                    seconds = self.clock.stop(TOTAL)
                measured[way][ENCODER] = seconds[ENCODER] / self.input_ids.numel() * 1e6
                measured[way][search] = seconds[DECODER] / (self.case.batch * new_tokens) * 1e6
            self.equal &= all(torch.equal(outputs[0], output) for output in outputs)
        return measured

    @contextmanager
    def _timed_encoder(self) -> Iterator[None]:
        """Times the encoder; of a language model, the forward of the prompt."""
        from fastgen.models.mqa.stack import MQATransformerDecoder, MQATransformerEncoder

        kind = MQATransformerDecoder if self.case.is_lm else MQATransformerEncoder
        original, length = kind.forward, self.case.length
        timed = self.clock.stage(ENCODER)(original)

        def only_prompt(self, input_ids, *args, **kwargs):  # type: ignore[no-untyped-def]
            return (timed if input_ids.shape[1] == length else original)(self, input_ids, *args, **kwargs)

        with mock.patch.object(kind, "forward", only_prompt if self.case.is_lm else timed):
            yield


def exactly(prefix: str, tokens: int) -> dict[str, Any]:
    """Returns the arguments with which one of the two inner calls of `generate` generates `tokens` tokens."""
    limits = {"min_new_tokens": tokens, "max_new_tokens": tokens, "num_beams": 5, "do_sample": False}
    return {f"{prefix}_{name}": value for name, value in limits.items()}


@dataclass(frozen=True)
class Seamless:
    """A version of Seamless M4T with at most `layers` layers in each encoder and decoder; all are 24.

    frames: how many the vocoder holds a unit for. unit_method: of the text-to-unit model, which returns units. units:
    how many v1 generates.
    """

    version: str
    frames: int
    unit_method: str
    tokens: int = 40
    units: int = 0
    layers: int = 24

    def measure(self, options: Options) -> dict[str, Any]:
        model = self.make().to(device=options.device, dtype=options.torch_dtype)
        torch.manual_seed(1)
        features = torch.randn(1, FRAMES, model.config.feature_projection_input_dim).to(model.device, model.dtype)
        arguments = {"input_features": features, "tgt_lang": LANGUAGE, "return_intermediate_token_ids": True}
        arguments |= exactly("text", self.tokens) | (exactly("speech", self.units) if self.units else {})
        clock, turns, equal = Clock(options, rest=REST), [], True
        with timed_stages(model, self.unit_method, clock):
            for turn in range(-1, options.repeats):  # the first warms both up
                seconds, outputs = {}, {}
                for way in [*WAYS][:: -1 if turn % 2 else 1]:
                    with WAYS[way]():
                        clock.start()
                        outputs[way] = model.generate(**arguments)
                        seconds[way] = clock.stop(END_TO_END)
                turns.append(seconds)
                equal = equal and self.are_equal(outputs["stock"], outputs["fastgen"])
        stock, turns = outputs["stock"], turns[1:]
        ratios = [{stage: turn["stock"][stage] / turn["fastgen"][stage] for stage in turn["stock"]} for turn in turns]
        return {
            "layers": self.layers,
            "weights": sum(weight.numel() for weight in model.parameters()),
            "dtype": options.dtype,
            "tokens": stock.sequences.shape[1],
            "units": stock.unit_sequences.shape[1],
            "seconds": {way: medians([turn[way] for turn in turns]) for way in WAYS},
            "turns": turns,
            "ratios": medians(ratios),
            "equal": equal,
        }

    def are_equal(self, stock: Any, fast: Any) -> bool:
        """Returns whether tokens and units are equal, and waveforms up to rounding."""
        equal = all(torch.equal(stock[name], fast[name]) for name in ("sequences", "unit_sequences"))
        return equal and torch.allclose(stock.waveform, fast.waveform, rtol=0, atol=TOLERANCES[stock.waveform.dtype])

    def make(self) -> Any:
        """Returns a model for inference; its weights, always the same, keep states about as large as they are."""
        import transformers
        from transformers.initialization import no_init_weights

        config = getattr(transformers, f"{self.version}Config")(**SIZES)
        for name in ("speech_encoder", "decoder", "t2u_encoder", "t2u_decoder"):
            setattr(config, f"{name}_layers", min(self.layers, getattr(config, f"{name}_layers")))
        with no_init_weights():  # takes a minute
            model = getattr(transformers, f"{self.version}ForSpeechToSpeech")(config).eval()
        model.tie_weights()
        torch.manual_seed(0)
        durations = getattr(model.t2u_model.model.decoder, "duration_predictor", None)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.dim() == 1:
                    weight.fill_(0 if name.endswith("bias") else 1)
                else:
                    bound = math.sqrt(3 / weight[0].numel())
                    weight.uniform_(-bound, bound)
            model.shared.weight[:SPECIAL_TOKENS] = 0
            units = model.t2u_model.lm_head.weight
            units[: config.vocoder_offset] = 0
            units[config.vocoder_offset + config.unit_hifi_gan_vocab_size :] = 0
            for predictor, duration in ((model.vocoder.dur_predictor, self.frames), (durations, 3)):
                if predictor is not None:
                    predictor.proj.weight.zero_()
                    predictor.proj.bias.fill_(math.log1p(duration))
        own = model.generation_config
        own.text_decoder_lang_to_code_id = {LANGUAGE: config.vocab_size - 1}
        own.t2u_lang_code_to_id = {LANGUAGE: config.t2u_vocab_size - 1}
        own.vocoder_lang_code_to_id = {LANGUAGE: 0}
        if durations is not None:
            own.id_to_text = {str(token): "abcd" for token in range(config.vocab_size)}
            own.char_to_id = {letter: SPECIAL_TOKENS + place for place, letter in enumerate("abcd")}
        return model


@contextmanager
def timed_stages(model: Any, unit_method: str, clock: Clock) -> Iterator[None]:
    """Times the stages inside Seamless M4T where the library calls them."""
    from transformers import GenerationMixin

    kinds = (type(model.speech_encoder), type(model).__base__, type(model.t2u_model), type(model.vocoder))
    methods = list(zip(kinds, ("forward", "generate", unit_method, "forward")))
    functions = [getattr(kind, method, GenerationMixin.generate) for kind, method in methods]
    with ExitStack() as stack:
        for stage, (kind, method), function in zip(STAGES, methods, functions):
            stack.enter_context(mock.patch.object(kind, method, clock.stage(stage)(function), create=True))
        yield


SIZES: dict[str, int] = {}  # of all models here, other than those of the papers: for tests
CASES: dict[str, dict[str, Any]] = {
    "mqa": {
        "multi-head": MultiQuery(8, 4096),
        "grouped": MultiQuery(2, 5248),
        "multi-query": MultiQuery(1, 5440),
        "multi-head local": MultiQuery(8, 4096, WINDOW),
        "multi-query local": MultiQuery(1, 5440, WINDOW),
        "lm multi-head": MultiQuery(8, 8192, is_lm=True),
        "lm multi-query": MultiQuery(1, 9088, is_lm=True),
    },
    "seamless": {
        "v2": Seamless("SeamlessM4Tv2", 1, "forward"),
        "v1": Seamless("SeamlessM4T", 2, "generate", units=200),
    },
}


def measure(kind: str, name: str, case: MultiQuery | Seamless, options: Options) -> dict[str, Any]:
    return {"case": name, **case.measure(options)}
