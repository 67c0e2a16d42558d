"""Device, model and tokenizer of a run, with every way in which they can be missing turned into one clear message."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.utils import logging as hub_logging
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
)
from transformers.utils import logging

from fastgen.cli.errors import InputError
from fastgen.cli.transformers.flags.generation_config import apply_file
from fastgen.cli.transformers.flags.languages import set_languages
from fastgen.cli.transformers.flags.run_config import RunConfig
from fastgen.cli.transformers.model.speaking import KINDS, check_settings_have_a_use

# Their positions are computed, for as many tokens as there are; what the config says is no limit.
GROWING_POSITIONS = ("fsmt", "m2m_100", "nllb-moe", "xglm")
# What loads a model, by how the command is told of it.
PLAIN = "without --causal_lm and --task"
SPEECH_TO_SPEECH = {  # the library has no class that finds them
    "seamless_m4t": "SeamlessM4TForSpeechToSpeech",
    "seamless_m4t_v2": "SeamlessM4Tv2ForSpeechToSpeech",
}
TRANSCRIBING = (MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES, "AutoModelForSpeechSeq2Seq")
AUTO_CLASSES = {
    PLAIN: (MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, "AutoModelForSeq2SeqLM"),
    "with --causal_lm": (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "AutoModelForCausalLM"),
    "with --task automatic-speech-recognition": TRANSCRIBING,
    "with --task speech-to-text": TRANSCRIBING,
    "with --task text-to-speech": (KINDS, "AutoModelForTextToWaveform"),
    "with --task speech-to-speech": (SPEECH_TO_SPEECH, None),
}
AUDIO_PACKAGES = ("soundfile", "soxr")


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode on its device, and a tokenizer that can pad.

    speaks: outputs are sounds. feature_extractor: what turns sound into the model's inputs; None for models of text.
    """

    model: transformers.PreTrainedModel
    tokenizer: transformers.PreTrainedTokenizerBase
    causal_lm: bool
    feature_extractor: transformers.SequenceFeatureExtractor | None = None
    speaks: bool = False

    @property
    def is_whisper(self) -> bool:
        """Whose generate goes through a sound in windows and passes of its own."""
        return self.model.config.model_type == "whisper"

    @property
    def generation_config(self) -> transformers.GenerationConfig | None:
        """The model's own; None where it has no generate."""
        return getattr(self.model, "generation_config", None)


def choose_device(args: RunConfig) -> torch.device:
    """The device of --device, tried out; raises InputError where this machine or this torch does not have it."""
    name = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        # Reading the value back refuses the meta device too, which holds no values.
        torch.zeros(1, device=name).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InputError(f"--device {name}: cannot be used here ({_first_line(error)})") from error
    device = torch.device(name)
    if _dtype_name(args) == "float16" and device.type == "cpu":
        flag = "--fp16" if args.fp16 else "--dtype float16"
        raise InputError(f"{flag} does not go with --device {name} (accepted on the CPU: --bf16, or neither)")
    return device


def load_model(args: RunConfig, device: torch.device) -> LoadedModel:
    """Model and tokenizer of MODEL; raises InputError where it does not exist, is broken, or cannot generate."""
    has_sounds = args.hears or args.speaks
    if has_sounds and (missing := [name for name in AUDIO_PACKAGES if find_spec(name) is None]):
        needs = f"needs the package {' and '.join(missing)}: pip install {' '.join(missing)}"
        raise InputError(f"--task {args.task} {needs}")
    source = _source(args.model)
    try:
        with _quiet_loading():
            config = transformers.AutoConfig.from_pretrained(source)
            model, loading_info = _auto_class(args, config).from_pretrained(
                source, output_loading_info=True, **_loading_options(args)
            )
            tokenizer, feature_extractor = _processors(args, source)
    except InputError:
        raise
    except Exception as error:
        # from_pretrained raises almost anything for a broken folder: OSError, ValueError, KeyError, SafetensorError, …
        raise InputError(_what_failed(args, error)) from error
    if not (model.can_generate() or args.speaks):
        raise InputError(f"MODEL {args.model}: {type(model).__name__} cannot generate")
    parameters = dict(model.named_parameters())
    if missing := sorted(name for name in loading_info["missing_keys"] if name in parameters):
        raise InputError(
            f"MODEL {args.model}: has no weights for {', '.join(missing[:3])}{' and more' * (len(missing) > 3)}, "
            f"so {type(model).__name__} would generate at random"
        )
    check_settings_have_a_use(args, model)
    apply_file(args, model)
    _prepare_tokenizer(args, tokenizer)
    set_languages(args, tokenizer, model)
    return LoadedModel(model.to(device).eval(), tokenizer, args.causal_lm, feature_extractor, args.speaks)


def positions(config: transformers.PretrainedConfig, part: str) -> int | None:
    """How many tokens the "encoder" or the "decoder" has positions for; None where there is no limit."""
    if config.model_type in GROWING_POSITIONS:
        return None
    text_config = getattr(config, part, None)  # a config of its own in EncoderDecoderModel and T5Gemma
    if not isinstance(text_config, transformers.PretrainedConfig):
        text_config = config.get_text_config(**{part: True})
    for name in (f"max_{part}_position_embeddings", "max_position_embeddings"):
        limit = getattr(text_config, name, None)
        if isinstance(limit, int) and limit > 0:
            return limit
    return None


def _source(model: str) -> str:
    if model == "demo":
        from fastgen.models.demo import demo_path

        return str(demo_path())
    path = Path(model).expanduser()
    if path.is_dir():
        return str(path)
    if path.exists():
        raise InputError(f"MODEL {model}: is a file (accepted: a folder, a hub name, or demo)")
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise InputError(f"MODEL {model}: there is no such folder")
    return model


def _auto_class(args: RunConfig, config: transformers.PretrainedConfig) -> Any:
    """The class that loads MODEL for what the flags ask for; raises InputError where it does not know such models."""
    asked = f"with --task {args.task}"
    if asked not in AUTO_CLASSES:
        asked = "with --causal_lm" if args.causal_lm else PLAIN
    known, auto_class = AUTO_CLASSES[asked]
    kind = config.model_type
    if kind not in known:
        others = [way for way, (names, _) in AUTO_CLASSES.items() if kind in names]
        raise InputError(f"MODEL {args.model}: {kind} cannot generate {asked} ({_accepted(others)})")
    if args.hears and not config.is_encoder_decoder:
        raise InputError(f"MODEL {args.model}: {kind} needs a text beside the sound (accepted: Whisper, Moonshine, …)")
    return getattr(transformers, auto_class or known[kind])


def _accepted(ways: list[str]) -> str:
    return f"accepted {' or '.join(ways)}" if ways else "accepted: models that generate text from text or from speech"


def _dtype_name(args: RunConfig) -> str | None:
    if args.fp16:
        return "float16"
    return "bfloat16" if args.bf16 else args.dtype


def _loading_options(args: RunConfig) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if name := _dtype_name(args):
        options["dtype"] = name if name == "auto" else getattr(torch, name)
    if args.attn_implementation is not None:
        options["attn_implementation"] = args.attn_implementation
    return options


def _processors(
    args: RunConfig, source: str
) -> tuple[transformers.PreTrainedTokenizerBase, transformers.SequenceFeatureExtractor | None]:
    if not args.hears:
        return transformers.AutoTokenizer.from_pretrained(source), None
    processor = transformers.AutoProcessor.from_pretrained(source)
    parts = [getattr(processor, name, None) for name in ("tokenizer", "feature_extractor")]
    if None in parts:
        raise InputError(f"MODEL {args.model}: has no processor with a tokenizer and a feature extractor")
    return tuple(parts)


def _what_failed(args: RunConfig, error: Exception) -> str:
    name = args.attn_implementation
    if name is not None and (name in str(error) or "attention" in str(error).lower()):
        return f"--attn_implementation {name}: MODEL {args.model} cannot be loaded with it ({_first_line(error)})"
    return f"MODEL {args.model}: cannot be loaded ({_first_line(error)})"


def _prepare_tokenizer(args: RunConfig, tokenizer: transformers.PreTrainedTokenizerBase) -> None:
    """Make sure that it can pad; decoder-only models go on from the last column, so they are padded on the left."""
    # For a folder without tokenizer files transformers may build a tokenizer that knows no words and raises nothing.
    if len(tokenizer.get_vocab()) - len(tokenizer.all_special_tokens) < 2:
        raise InputError(f"MODEL {args.model}: has no tokenizer")
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise InputError(f"MODEL {args.model}: its tokenizer has neither a pad nor an eos token")
        tokenizer.pad_token = tokenizer.eos_token
    if args.padding_side is not None:
        tokenizer.padding_side = args.padding_side
    elif args.causal_lm:
        tokenizer.padding_side = "left"
    if args.chat:
        _try_chat_template(args, tokenizer)


def _try_chat_template(args: RunConfig, tokenizer: transformers.PreTrainedTokenizerBase) -> None:
    """Raises InputError where there is no template, or where it refuses a system message."""
    if tokenizer.chat_template is None:
        raise InputError(f"--chat: the tokenizer of MODEL {args.model} has no chat template")
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    try:
        tokenizer.apply_chat_template(
            [*system, {"role": "user", "content": "a"}], tokenize=False, add_generation_prompt=True
        )
    except Exception as error:
        # A template is a program that raises what it likes.
        flag = "--chat" if args.system is None else f"--system {args.system}"
        raise InputError(
            f"{flag}: the chat template of MODEL {args.model} refuses it ({_first_line(error)})"
        ) from error


@contextmanager
def _quiet_loading() -> Iterator[None]:
    """Without the bars and reports of transformers and of the hub: what matters of them is said in one line."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    hub_verbosity = hub_logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    hub_logging.set_verbosity(hub_logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        hub_logging.set_verbosity(hub_verbosity)
        if bars:
            logging.enable_progress_bar()


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
