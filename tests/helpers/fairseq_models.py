"""Tiny random fairseq models in process, with their tasks and ragged samples: no data folder, no download.

A case is lively: weights are so large that a wrong key or a wrong beam changes tokens (with fairseq's own initial
values it would not), and the output vector of the end of sentence is `end` times as long as the others, so that its
logit swings and hypotheses end early or late. Of seeds 0 to 149, each with `end` 1.5, 2.5 and 4, every case has one
whose sentences finish at many different steps with beam 3 (upstream drops them from the batch one after the other), and
whose hypotheses repeat one word least.
"""

import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from fairseq.data import Dictionary, LanguagePairDataset
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY
from fairseq.models.transformer_lm import TransformerLanguageModelConfig
from fairseq.tasks import TASK_REGISTRY
from fairseq.tasks.language_modeling import LanguageModelingConfig, LanguageModelingTask
from fairseq.tasks.speech_to_text import SpeechToTextTask
from fairseq.tasks.translation import TranslationConfig, TranslationTask
from fairseq.tasks.translation_from_pretrained_bart import TranslationFromPretrainedBARTTask
from fairseq.tasks.translation_lev import TranslationLevenshteinConfig, TranslationLevenshteinTask
from torch import Tensor, nn

# Decoders that fastgen leaves to fairseq.
LEFT_ALONE = ("FConvDecoder", "LSTMDecoder", "LightConvDecoder")
WORDS = 40
LENGTHS = (9, 4, 7, 2, 6)
SIZE = {
    "encoder_embed_dim": 16,
    "decoder_embed_dim": 16,
    "encoder_ffn_embed_dim": 32,
    "decoder_ffn_embed_dim": 32,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "dropout": 0.3,
    "max_source_positions": 64,
    "max_target_positions": 64,
}


@dataclass
class Case:
    """Models that generate together, their task, a sample, and further arguments of `task.inference_step`."""

    models: list[nn.Module]
    task: Any
    sample: dict[str, Any]
    inference: dict[str, Any] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return len(self.sample["id"])

    @property
    def accelerated(self) -> bool:
        """Returns whether fastgen must do the work of these models, or must leave it to fairseq and report why."""
        return not any(type(model.decoder).__name__ in LEFT_ALONE for model in self.models)


def lively(model: nn.Module, seed: int, end: float, gain: float = 1.2) -> nn.Module:
    """Makes weights large, and the output vector of the end of sentence `end` times as long; evaluation mode."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                fan_in = parameter[0].numel()
                parameter.normal_(0.0, gain * fan_in**-0.5, generator=generator)
        projection = output_weights(model)
        if projection is not None:
            projection[Dictionary().eos()] *= end
    return model.eval()


def output_weights(model: nn.Module) -> Tensor | None:
    """Returns the matrix of the logits, `[words, width]`, or None for an adaptive softmax."""
    decoder = model.decoder
    for name in ("output_projection", "fc_out", "fc3"):
        if isinstance(getattr(decoder, name, None), nn.Linear):
            return getattr(decoder, name).weight
    return decoder.embed_tokens.weight if getattr(decoder, "adaptive_softmax", None) is None else None


def dictionary(words: int = WORDS, extra: Sequence[str] = ()) -> Dictionary:
    result = Dictionary()
    for word in [f"w{number}" for number in range(words)] + list(extra):
        result.add_symbol(word)
    return result


def token_rows(lengths: Sequence[int] = LENGTHS, seed: int = 1, words: int = WORDS) -> list[Tensor]:
    """Returns sentences of so many random words each, with the end of sentence."""
    generator = torch.Generator().manual_seed(seed)
    first, eos = Dictionary().nspecial, torch.tensor([Dictionary().eos()])
    return [torch.cat([torch.randint(first, first + words, (length,), generator=generator), eos]) for length in lengths]


def collated(dataset: Any) -> dict[str, Any]:
    return dataset.collater([dataset[index] for index in range(len(dataset))])


def source_sample(task: Any, lengths: Sequence[int] = LENGTHS, seed: int = 1, **inference: Any) -> dict[str, Any]:
    """Returns a batch like those of `fairseq-interactive` and the hub interfaces: padded, the longest first."""
    rows = token_rows(lengths, seed)
    return collated(task.build_dataset_for_inference(rows, [len(row) for row in rows], **inference))


def pair_sample(task: Any, lengths: Sequence[int] = LENGTHS, seed: int = 1, **dataset: Any) -> dict[str, Any]:
    """Returns a batch like those of `fairseq-generate`: with targets."""
    sources, targets = token_rows(lengths, seed), token_rows(lengths[::-1], seed + 1)
    sizes = [[len(row) for row in rows] for rows in (sources, targets)]
    words = task.source_dictionary, task.target_dictionary
    return collated(LanguagePairDataset(sources, sizes[0], words[0], targets, sizes[1], words[1], **dataset))


def build(arch: str, task: Any, seed: int, end: float, **settings: Any) -> nn.Module:
    """Returns a lively model of a registered architecture; settings are its command-line flags."""
    torch.manual_seed(seed)
    args = Namespace(arch=arch, **SIZE | settings)
    ARCH_CONFIG_REGISTRY[arch](args)
    return lively(ARCH_MODEL_REGISTRY[arch].build_model(args, task), seed, end)


def translation_task() -> TranslationTask:
    return TranslationTask(TranslationConfig(), dictionary(), dictionary())


def translation(arch: str, seeds: Sequence[int], end: float, **settings: Any) -> Case:
    """Translation with one model for each seed."""
    task = translation_task()
    return Case([build(arch, task, seed, end, **settings) for seed in seeds], task, source_sample(task))


def bart(seed: int, end: float, **settings: Any) -> Case:
    """BART for summaries: a joint dictionary, padding on the right, and `<s>` as the first token of each output."""
    words = dictionary()
    task = TranslationTask(TranslationConfig(), words, words)
    model = build("bart_base", task, seed, end, **settings)
    prefix = torch.full((len(LENGTHS), 1), words.bos())
    return Case([model], task, pair_sample(task, left_pad_source=False), {"prefix_tokens": prefix})


def mbart(seed: int, end: float) -> Case:
    """mBART: the end of sentence is the token of the target's language."""
    words = dictionary()
    args = Namespace(langs="xx,yy", source_lang="xx", target_lang="yy")
    task = TranslationFromPretrainedBARTTask(args, words, words)
    task.args = args  # upstream reads it, but has set only `cfg`
    model = build("mbart_base", task, seed, end=1.0)
    with torch.no_grad():
        output_weights(model)[words.index("[yy]")] *= end
    return Case([model], task, source_sample(task))


def multilingual(seed: int, end: float, *flags: str) -> Case:
    """translation_multi_simple_epoch, which gives language tokens to the encoder and the decoder."""
    with tempfile.TemporaryDirectory() as folder:
        for language in ("xx", "yy"):
            dictionary().save(str(Path(folder, f"dict.{language}.txt")))
        parser = ArgumentParser()
        task_class = TASK_REGISTRY["translation_multi_simple_epoch"]
        task_class.add_args(parser)
        pair = [folder, "-s", "xx", "-t", "yy", "--lang-pairs", "xx-yy", "--langs", "xx,yy"]
        args = parser.parse_args([*pair, "--encoder-langtok", "tgt", "--decoder-langtok", *flags])
        args.seed = 1
        task = task_class.setup_task(args)
    return Case([build("transformer", task, seed, end, share_all_embeddings=True)], task, source_sample(task))


def language_model(seed: int, end: float, **settings: Any) -> Case:
    """A language model that continues prefixes of different lengths."""
    words = dictionary()
    task = LanguageModelingTask(LanguageModelingConfig(), words)
    settings = (
        vars(TransformerLanguageModelConfig()) | SIZE | {"decoder_input_dim": 16, "decoder_output_dim": 16} | settings
    )
    return Case([build("transformer_lm", task, seed, end, **settings)], task, prompts(words))


def prompts(words: Dictionary, lengths: Sequence[int] = (5, 3, 6, 2, 4), seed: int = 3) -> dict[str, Any]:
    """Returns the batch of `LanguageModelingTask.build_dataset_for_inference`, which raises under numpy 2."""
    rows = token_rows(lengths, seed)
    tokens = torch.full((len(rows), 1 + max(lengths)), words.pad())
    for index, row in enumerate(rows):
        tokens[index, 0], tokens[index, 1 : len(row)] = words.eos(), row[:-1]
    net_input = {"src_tokens": tokens, "src_lengths": torch.tensor(lengths) + 1}
    return {"id": torch.arange(len(rows)), "net_input": net_input}


def speech(seed: int, end: float, lengths: Sequence[int] = (40, 33, 21, 12)) -> Case:
    """Speech to text: frames instead of tokens, which convolutions shorten, and their lengths."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.yaml").write_text("input_feat_per_channel: 8\n")
        args = Namespace(data=folder, config_yaml="config.yaml", max_source_positions=200, max_target_positions=64)
        task = SpeechToTextTask(args, dictionary())
    settings = {"input_feat_per_channel": 8, "input_channels": 1, "conv_channels": 16, "max_source_positions": 200}
    model = build("s2t_transformer", task, seed, end, **settings)
    frames = torch.randn(len(lengths), max(lengths), 8, generator=torch.Generator().manual_seed(2))
    for row, length in enumerate(lengths):
        frames[row, length:] = 0
    net_input = {"src_tokens": frames, "src_lengths": torch.tensor(lengths)}
    return Case([model], task, {"id": torch.arange(len(lengths)), "net_input": net_input})


def iterative(seed: int, end: float) -> Case:
    """A conditional masked language model: all words at once, refined step by step."""
    words = dictionary()
    task = TranslationLevenshteinTask(TranslationLevenshteinConfig(), words, words)
    model = build("cmlm_transformer", task, seed, end)
    with torch.no_grad():
        model.decoder.embed_length.weight[12:] = 0  # of 256 lengths a random model would choose any
    return Case([model], task, source_sample(task))


PRE_NORM = {
    "encoder_normalize_before": True,
    "decoder_normalize_before": True,
    "encoder_learned_pos": True,
    "decoder_learned_pos": True,
}
ADAPTIVE = {"adaptive_softmax_cutoff": "8,20", "adaptive_softmax_dropout": 0, "tie_adaptive_weights": False}
ALIGN = {"alignment_layer": 1, "alignment_heads": 1}
KERNELS = {
    "encoder_kernel_size_list": [3, 5],
    "decoder_kernel_size_list": [3, 5],
    "encoder_conv_type": "lightweight",
    "decoder_conv_type": "lightweight",
    "weight_softmax": True,
}
CONVOLUTIONS = {"encoder_layers": "[(16, 3)] * 2", "decoder_layers": "[(16, 3)] * 2", "decoder_out_embed_dim": 16}
RECURRENT = {"encoder_hidden_size": 16, "decoder_hidden_size": 16, "decoder_out_embed_dim": 16, "criterion": "any"}

CASES: dict[str, Callable[[], Case]] = {
    "transformer": lambda: translation("transformer", [122], 1.5),
    "pre-norm, learned positions": lambda: translation("transformer", [58], 1.5, **PRE_NORM),
    "adaptive softmax": lambda: translation("transformer", [7], 4.0, **ADAPTIVE),
    "cross_self_attention": lambda: translation("transformer", [6], 4.0, cross_self_attention=True),
    "transformer_align": lambda: translation("transformer_align", [122], 1.5, **ALIGN),
    "bart": lambda: bart(117, 2.5),
    "mbart": lambda: mbart(90, 4.0),
    "language tokens as prefix": lambda: multilingual(62, 4.0),
    "language tokens as first token": lambda: multilingual(10, 4.0, "--lang-tok-replacing-bos-eos"),
    "ensemble": lambda: translation("transformer", [6, 56], 2.5),
    "transformer_lm": lambda: language_model(18, 1.5),
    "fconv": lambda: translation("fconv", [2], 2.5, **CONVOLUTIONS),
    "lstm": lambda: translation("lstm", [12], 2.5, **RECURRENT),
    "lightconv": lambda: translation("lightconv", [11], 1.5, **KERNELS),
    "s2t_transformer": lambda: speech(0, 1.5),
}
