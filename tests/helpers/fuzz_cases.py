"""Cases of the comparison fuzzer: one is drawn from one seed, and the same seed draws the same case."""

import functools
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from architectures import BY_NAME
from own_models import ODD, odd_model, preparing_model
from tiny_models import padded, tiny, token_ids
from torch import nn

# Checkpoints of these keep is_decoder=False: their forward fills the caller's cache and does not return it.
ENCODERS = ("bert", "roberta", "xlm-roberta", "electra", "camembert", "big_bird")
# Built with more positions, for prompts of which few queries see many keys.
LONG = ("pegasus", "bart", "marian", "gpt2", "llama")
# In half precision a token that another expert computes differs by more than rounding.
HALF = "gpt2 llama llama-eager mistral qwen2 gemma2 opt bart bart-eager pegasus t5 mt5".split()
WAYS = {way.__name__: way for way in ODD}
# Decoder-only models that prepare the inputs of a step by a method of their own, see `own_models.py`.
PREPARING = ("llama-prefix", "llama-counting", "phi3-short")
# Models whose tokens have types, of which two exist everywhere.
TYPED = ("gpt2", "gpt2-long", "bert", "roformer", "openai-gpt", "ctrl")
POSITIONS = {"max_position_embeddings": 512, "n_positions": 512}

NAMES = {
    **dict.fromkeys(BY_NAME, 1),
    **dict.fromkeys((f"{name}-encoder" for name in ENCODERS), 1),
    **dict.fromkeys((f"{name}-long" for name in LONG), 3),
    **dict.fromkeys((f"odd-{way}" for way in WAYS), 1),
}

HALF_DTYPES = {"bfloat16": torch.bfloat16, "float16, skinny GEMM": torch.float16}
HALF_CONTEXTS = (*HALF_DTYPES, "autocast")
CONTEXTS = {
    "plain": 24,
    "inference mode": 3,
    "two threads": 3,
    "poisoned memory": 4,
    "oneDNN": 2,
    "skinny GEMM": 3,
    "captured": 6,
    "captured, skinny GEMM": 3,
    "default gates": 1,
    "repeated keys": 4,
    "keys written in place": 3,
    "bfloat16": 2,
    "float16, skinny GEMM": 2,
    "autocast": 2,
    "compiled forward": 0.2,
    "training mode": 3,
    "training mode without dropout": 4,
    "changes in a call": 3,
    "captured, changes in a call": 4,
    "changes between calls": 2,
    "captured, changes between calls": 2,
    "kept prefix": 6,
    "captured, kept prefix": 3,
    "replaced helper": 4,
    "captured, replaced helper": 2,
    "weights that are not finite": 3,
    "captured, weights that are not finite": 1,
}


# Contexts in which user code of fuzz_changes.py calls generate.
CHANGING = ("changes in a call", "changes between calls", "kept prefix", "replaced helper")


@dataclass
class Case:
    """One call of generate with all its arguments."""

    seed: int
    name: str
    context: str
    inputs: dict[str, torch.Tensor]
    arguments: dict[str, Any]
    words: list[str] = field(default_factory=list)  # its peculiarities
    by_embeddings: bool = False  # the model gets `inputs_embeds` in place of `input_ids`
    copies: bool = False  # user code forces a text that copies the prompt, and notes its calls
    pads: bool = False  # this text has padding tokens inside
    stops: bool = False  # a stopping criterion of the program ends rows
    passes_cache: bool = False  # an empty cache of the program is filled
    tokens_only: bool = False  # no scores, attentions and caches, which only the library's loops return

    def __str__(self) -> str:
        shapes = {name: tuple(value.shape) for name, value in self.inputs.items()}
        return f"seed {self.seed}: {self.name}, {self.context}, {shapes}, {self.arguments} {' '.join(self.words)}"

    @property
    def kind(self) -> str:
        """ "causal", "seq2seq", "speech" or "vision"."""
        return kind_of(self.name)

    @property
    def keeps_state(self) -> bool:
        """Returns whether a second call differs in the library, too: each way gets a copy of an unused model.

        BigBird and BigBird-Pegasus give up sparse attention at a short input, for good, with new modules that draw
        random numbers; RecurrentGemma remembers its last states. PEFT's prefix tuning, and a program that counts steps,
        set attributes of the model in each call, so two threads cannot call it.
        """
        return "bird" in self.name or self.name in ("recurrent_gemma", "llama-prefix", "llama-counting")

    @property
    def program(self) -> str:
        """The key of `PROGRAMS`, if user code changes something."""
        return self.context.removeprefix("captured, ")

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return HALF_DTYPES.get(self.context, torch.float32)

    @property
    def is_half(self) -> bool:
        return self.context in HALF_CONTEXTS


def kind_of(name: str) -> str:
    name = name.removesuffix("-long")
    return BY_NAME[name].kind if name in BY_NAME else "causal"


@functools.cache
def model_of(name: str, dtype: torch.dtype) -> nn.Module:
    if name in PREPARING:
        return preparing_model(name).to(dtype)
    if name.startswith("odd-"):
        return odd_model(WAYS[name.removeprefix("odd-")]).to(dtype)
    if name.endswith("-long"):
        return tiny(name.removesuffix("-long"), **POSITIONS).to(dtype)
    return tiny(name).to(dtype)


def draw(seed: int) -> Case:
    random = Random(seed)
    context = random.choices(list(CONTEXTS), list(CONTEXTS.values()))[0]
    if context in HALF_CONTEXTS:
        name = random.choice(HALF)
    elif context == "compiled forward":
        name = random.choice(("gpt2", "llama"))
    else:
        name = random.choices(list(NAMES), list(NAMES.values()))[0]
    case = Case(seed, name, context, {}, {})
    _draw_decoding(random, case)
    _draw_options(random, case)
    _draw_inputs(random, case)
    case.tokens_only = random.random() < 0.4
    if case.tokens_only and not case.is_half:  # rows end at many different steps
        case.arguments |= {
            "eos_token_id": random.sample(range(2, 90), 10),
            "max_new_tokens": random.choice((7, 12, 30)),
        }
    case.stops = random.random() < 0.1
    case.passes_cache = case.kind == "causal" and random.random() < 0.1 and case.arguments.get("use_cache", True)
    case.words += ["(a criterion of the program)"] * case.stops + ["(a cache of the program)"] * case.passes_cache
    return case


def draw_copying(seed: int) -> Case:
    """Returns a greedy or sampling case, long enough for drafts, whose text copies its prompt."""
    random, case = Random(seed), draw(seed)
    while case.kind not in ("causal", "seq2seq") or case.program in CHANGING or case.is_half:
        seed += 1_000_003
        case = draw(seed)
    case.tokens_only, case.copies = True, True
    for name in ("num_beams", "num_return_sequences", "output_hidden_states"):
        case.arguments.pop(name, None)
    case.arguments["max_new_tokens"] = random.choice((12, 24, 40))
    if random.random() < 0.7:
        _draw_repetitions(random, case)
    case.pads = random.random() < 0.25
    if case.kind == "causal" and "input_ids" in case.inputs and random.random() < 0.4:
        _draw_preparation(random, case)
    case.words.append("(a copied text with padding inside)" if case.pads else "(a copied text)")
    return case


def _draw_repetitions(random: Random, case: Case) -> None:
    """Chooses inputs that are long enough to be copied, and arguments that allow it."""
    for name in ("use_cache", "eos_token_id", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"):
        case.arguments.pop(name, None)
    case.by_embeddings = False
    lengths = [random.randint(12, 30) for _ in range(random.choice((1, 1, 2, 3)))]
    case.inputs = padded(*lengths, side="left" if case.kind == "causal" else "right", seed=case.seed)


def _draw_preparation(random: Random, case: Case) -> None:
    """Chooses a model whose inputs of a step depend on more than tokens and positions."""
    case.by_embeddings = False
    case.name = random.choice(PREPARING * 2 + TYPED)
    if case.name in TYPED:
        ids = case.inputs["input_ids"]
        generator = torch.Generator().manual_seed(case.seed)
        case.inputs["token_type_ids"] = torch.randint(0, 2, ids.shape, generator=generator)


def _draw_decoding(random: Random, case: Case) -> None:
    arguments = case.arguments
    way = random.choice(("beams", "beams", "samples", "samples", "beam samples", "greedy", "sample"))
    if "beam" in way:
        arguments["num_beams"] = random.choice((2, 3, 4, 8))
        arguments["num_return_sequences"] = random.choice((1, arguments["num_beams"]))
    if way == "samples":
        arguments["num_return_sequences"] = random.choice((2, 3, 5))
    arguments["do_sample"] = "sample" in way
    arguments["max_new_tokens"] = random.choice((1, 2, 4, 7, 12))
    if case.is_half:  # the tokens are fixed, so that rounding decides about none
        arguments.update(do_sample=True, num_beams=1, num_return_sequences=random.choice((2, 4)))


def _draw_options(random: Random, case: Case) -> None:
    arguments = case.arguments

    def sometimes(probability: float, **options: Any) -> None:
        if random.random() < probability:
            arguments.update(options)

    sometimes(0.1, output_hidden_states=True)
    sometimes(0.1, use_cache=False)
    if case.kind == "causal":
        sometimes(0.06, prefill_chunk_size=random.choice((2, 4)))
    if case.is_half:
        return
    sometimes(0.2, no_repeat_ngram_size=random.choice((1, 2, 3)))
    if case.kind == "seq2seq":
        sometimes(0.15, encoder_no_repeat_ngram_size=random.choice((1, 2)))
    sometimes(0.1, repetition_penalty=1.7)
    sometimes(0.1, min_new_tokens=random.choice((2, 5)))
    sometimes(0.1, length_penalty=random.choice((-1.0, 2.0)))
    sometimes(0.1, early_stopping=random.choice((True, "never")))
    sometimes(0.1, bad_words_ids=[[7], [11, 12]], suppress_tokens=[20, 21])
    sometimes(0.05, forced_eos_token_id=2)
    sometimes(0.05, renormalize_logits=True)
    sometimes(0.05, sequence_bias=[[[31], 4.0]])
    sometimes(0.05, eos_token_id=list(range(2, 30)))  # rows end at many different steps
    if arguments["do_sample"]:
        sometimes(0.3, temperature=random.choice((0.5, 1.5)))
        sometimes(0.3, top_k=random.choice((0, 5)))
        sometimes(0.3, top_p=0.8)


def _draw_inputs(random: Random, case: Case) -> None:
    rows = random.choice((1, 1, 2, 3, 4))
    if case.kind in ("speech", "vision"):
        case.inputs = {name: value.clone() for name, value in BY_NAME[case.name].inputs().items()}
        return
    lengths = [random.randint(1, 12) for _ in range(rows)]
    if case.name.endswith("-long"):
        lengths[-1] = random.randint(250, 300)
    if case.name.startswith("big_bird"):
        lengths[-1] = random.randint(60, 80)
    usual = "left" if case.kind == "causal" else "right"
    side = usual if random.random() < 0.7 else random.choice(("left", "right"))
    inputs = padded(*lengths, side=side, seed=case.seed)
    if case.kind == "causal" and rows > 1 and random.random() < 0.5:
        inputs = _with_prefix(random, case, inputs, lengths)
    if random.random() < 0.08:
        inputs["attention_mask"][random.randrange(rows)] = 0
        case.words.append("(a row whose mask is all zero)")
    if random.random() < 0.15:
        del inputs["attention_mask"]
    fan_out = max(case.arguments.get("num_beams", 1), case.arguments.get("num_return_sequences", 1))
    if fan_out == 1 and random.random() < 0.6:
        each = random.choice((2, 3, 8))
        repeats = [each] * rows if random.random() < 0.5 else [random.randint(1, each) for _ in range(rows)]
        inputs = {name: value.repeat_interleave(torch.tensor(repeats), dim=0) for name, value in inputs.items()}
        case.words.append(f"(rows repeated {repeats} times)")
    if case.kind == "seq2seq" and random.random() < 0.1:
        inputs["decoder_input_ids"] = token_ids(inputs["input_ids"].shape[0], 3, seed=case.seed)
    if case.kind == "causal" and "attention_mask" in inputs and random.random() < 0.1:
        _pad_both_sides(random, case, inputs)
    case.by_embeddings = case.kind == "causal" and case.name in BY_NAME and random.random() < 0.06
    case.inputs = inputs


def _pad_both_sides(random: Random, case: Case, inputs: dict[str, torch.Tensor]) -> None:
    """Moves the tokens of each row to anywhere between its padding."""
    for row, mask in enumerate(inputs["attention_mask"]):
        by = random.randint(0, int((mask == 0).sum())) * (-1 if mask[-1] else 1)
        for values in inputs.values():
            values[row] = values[row].roll(by)
    case.words.append("(padding on both sides)")


def _with_prefix(
    random: Random, case: Case, inputs: dict[str, torch.Tensor], lengths: list[int]
) -> dict[str, torch.Tensor]:
    """Returns the same prompts after a common prefix, of which some of the rows may have more in common."""
    common = random.choice((2, 3, 9, 20))
    prefix = token_ids(1, common + 4, seed=case.seed + 1)[0]
    more = [random.choice((0, 4)) for _ in lengths] if random.random() < 0.3 else [0] * len(lengths)
    texts = [
        torch.cat([prefix[: common + extra], ids[mask.bool()]])
        for extra, ids, mask in zip(more, inputs["input_ids"], inputs["attention_mask"])
    ]
    longest = max(map(len, texts))
    left = bool(inputs["attention_mask"][:, -1].all())
    input_ids, mask = torch.full((len(texts), longest), 1), torch.zeros(len(texts), longest).long()
    for row, text in enumerate(texts):
        place = slice(longest - len(text), None) if left else slice(len(text))
        input_ids[row, place], mask[row, place] = text, 1
    case.words.append(f"(common prefix of {common})")
    return {"input_ids": input_ids, "attention_mask": mask}
