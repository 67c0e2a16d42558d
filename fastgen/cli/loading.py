"""Device, model and tokenizer of a run, with every way in which they can be missing turned into one clear message."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from huggingface_hub.utils import logging as hub_logging
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)
from transformers.utils import logging

from fastgen.cli.errors import InputError


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode on its device, and a tokenizer that can pad."""

    model: transformers.PreTrainedModel
    tokenizer: transformers.PreTrainedTokenizerBase
    causal_lm: bool


def choose_device(args: argparse.Namespace) -> torch.device:
    """The device of --device, tried out; raises InputError where this machine or this torch does not have it."""
    name = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        # Reading the value back refuses the meta device too, which holds no values.
        torch.zeros(1, device=name).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InputError(f"--device {name}: cannot be used here ({_first_line(error)})") from error
    device = torch.device(name)
    if args.fp16 and device.type == "cpu":
        raise InputError("--fp16 needs a GPU, and there is none here (accepted on the CPU: --bf16, or neither)")
    return device


def load_model(args: argparse.Namespace, device: torch.device) -> LoadedModel:
    """Model and tokenizer of MODEL; raises InputError where it does not exist, is broken, or cannot generate."""
    source = _source(args.model)
    try:
        with _quiet_loading():
            config = transformers.AutoConfig.from_pretrained(source)
            _check_architecture(args, config)
            auto_class = transformers.AutoModelForCausalLM if args.causal_lm else transformers.AutoModelForSeq2SeqLM
            model, loading_info = auto_class.from_pretrained(source, output_loading_info=True, **_dtype(args))
            tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    except InputError:
        raise
    except Exception as error:
        # from_pretrained raises almost anything for a broken folder: OSError, ValueError, KeyError, SafetensorError, …
        raise InputError(f"MODEL {args.model}: cannot be loaded ({_first_line(error)})") from error
    if not model.can_generate():
        raise InputError(f"MODEL {args.model}: {type(model).__name__} cannot generate")
    parameters = dict(model.named_parameters())
    if missing := sorted(name for name in loading_info["missing_keys"] if name in parameters):
        raise InputError(
            f"MODEL {args.model}: has no weights for {', '.join(missing[:3])}{' and more' * (len(missing) > 3)}, "
            f"so {type(model).__name__} would generate at random"
        )
    _prepare_tokenizer(args, tokenizer)
    return LoadedModel(model.to(device).eval(), tokenizer, args.causal_lm)


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


def _check_architecture(args: argparse.Namespace, config: transformers.PretrainedConfig) -> None:
    """Only encoder-decoders and, with --causal_lm, decoder-only models turn text into text."""
    kind = config.model_type
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if args.causal_lm else MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    if kind in known:
        return
    if args.causal_lm and kind in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES:
        raise InputError(f"MODEL {args.model}: {kind} is an encoder-decoder (accepted without --causal_lm)")
    if not args.causal_lm and kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise InputError(f"MODEL {args.model}: {kind} is not an encoder-decoder (a decoder-only one needs --causal_lm)")
    raise InputError(f"MODEL {args.model}: {kind} models cannot generate text")


def _dtype(args: argparse.Namespace) -> dict[str, torch.dtype]:
    if args.fp16:
        return {"dtype": torch.float16}
    return {"dtype": torch.bfloat16} if args.bf16 else {}


def _prepare_tokenizer(args: argparse.Namespace, tokenizer: transformers.PreTrainedTokenizerBase) -> None:
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
