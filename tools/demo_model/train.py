"""Trains the demo model from nothing: `python -m tools.demo_model.train --output DIR`.

The tokenizer and the model are made from generated pairs (see spoken_english.py). Lines of `held_out_pairs` are left
out of training: the first `SAMPLE_LINES + TEST_LINES` measure the finished model, the last `CHECK_LINES` show progress.
The output folder gets everything that the package carries: model, tokenizer, sample lines and model card.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    BartConfig,
    BartForConditionalGeneration,
    GenerationConfig,
    PreTrainedTokenizerFast,
)
from transformers.utils.logging import disable_progress_bar

from fastgen.reasons import counted

from .model_card import CARD
from .spoken_english import HELD_OUT_SEED, Pair, held_out_pairs, make_pair

SAMPLE_LINES = 500
TEST_LINES = 1000
CHECK_LINES = 300

BOS, PAD, EOS, UNK = "<s>", "<pad>", "</s>", "<unk>"
MAX_SOURCE_TOKENS = 256
MAX_TARGET_TOKENS = 160
TOKENIZER_PAIRS = 20_000

# Pairs drawn at a time, to be sorted by length and cut into batches.
POOL_PAIRS = 4096


def train_tokenizer(rng: Random, vocab_size: int) -> PreTrainedTokenizerFast:
    """Returns a byte-level BPE tokenizer that keeps every digit a token of its own and restores any text."""
    tokenizer = Tokenizer(models.BPE(unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, PAD, EOS, UNK],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pairs = (make_pair(rng) for _ in range(TOKENIZER_PAIRS))
    tokenizer.train_from_iterator((line for pair in pairs for line in pair), trainer)
    eos_id = tokenizer.token_to_id(EOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {EOS}", pair=f"$A {EOS} $B {EOS}", special_tokens=[(EOS, eos_id)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        model_max_length=MAX_SOURCE_TOKENS,
        padding_side="right",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> BartForConditionalGeneration:
    """Returns a Bart of about 1.6 million parameters with random weights; the embeddings are shared and tied."""
    ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "decoder_start_token_id": tokenizer.eos_token_id,
    }
    config = BartConfig(
        vocab_size=len(tokenizer),
        d_model=128,
        encoder_layers=3,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=512,
        decoder_ffn_dim=512,
        max_position_embeddings=MAX_SOURCE_TOKENS,
        activation_function="relu",
        dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        init_std=0.06,
        forced_eos_token_id=None,
        **ids,
    )
    model = BartForConditionalGeneration(config)
    initialize_positions(model)
    model.generation_config = GenerationConfig(max_length=MAX_TARGET_TOKENS, num_beams=4, **ids)
    return model


def initialize_positions(model: BartForConditionalGeneration) -> None:
    """Sets positions to fixed sines, and the first layers to look at the neighbors of a token.

    Reading a digit takes the digits around it, anywhere in a line. A model that begins with this needs a fraction of
    the training; all weights but the positions are trained afterwards.
    """
    config = model.config
    frequencies = 3.0 * 500 ** -torch.linspace(0, 1, config.d_model // 2)
    for part in (model.model.encoder, model.model.decoder):
        table = part.embed_positions.weight
        angles = torch.arange(len(table))[:, None] * frequencies
        table.data.copy_(torch.cat([angles.sin(), angles.cos()], dim=1) * config.init_std * 2**0.5)
        table.requires_grad_(False)
    encoder, decoder = model.model.encoder.layers, model.model.decoder.layers
    for attention, offsets in (
        (encoder[0].self_attn, (-2, -1, 1, 2)),
        (encoder[1].self_attn, (-3, -1, 1, 3)),
        (decoder[0].self_attn, (-2, -1)),
    ):
        for head, offset in enumerate(offsets):
            _look_at_offset(attention, head, offset, frequencies)


def _look_at_offset(attention: torch.nn.Module, head: int, offset: int, frequencies: torch.Tensor) -> None:
    """Sets a head's query at position i to the sines of i + offset, its key at position j to those of j."""
    size, half = attention.head_dim, len(frequencies)
    sines = torch.arange(size // 2)
    turn = frequencies[: size // 2] * offset
    sine_rows = head * size + sines
    cosine_rows = sine_rows + size // 2
    # The score is largest where j is i + offset, and smaller by about 4 elsewhere.
    gain = 1.5**0.5
    with torch.no_grad():
        for weight in (attention.q_proj.weight, attention.k_proj.weight):
            weight[head * size : (head + 1) * size] = 0
        attention.q_proj.weight[sine_rows, sines] = gain * turn.cos()
        attention.q_proj.weight[sine_rows, half + sines] = gain * turn.sin()
        attention.q_proj.weight[cosine_rows, half + sines] = gain * turn.cos()
        attention.q_proj.weight[cosine_rows, sines] = -gain * turn.sin()
        attention.k_proj.weight[sine_rows, sines] = gain
        attention.k_proj.weight[cosine_rows, half + sines] = gain


def batches(
    rng: Random, tokenizer: PreTrainedTokenizerFast, exclude: set[str], batch_tokens: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Yields endless batches of about `batch_tokens` target tokens: input_ids [B, S], labels [B, T]."""
    while True:
        pairs = [pair for pair in (make_pair(rng) for _ in range(POOL_PAIRS)) if pair[0] not in exclude]
        sources = tokenizer([written for written, _ in pairs])["input_ids"]
        targets = tokenizer([spoken for _, spoken in pairs])["input_ids"]
        rows = [row for row in zip(sources, targets, strict=True) if len(row[1]) <= MAX_TARGET_TOKENS]
        rows.sort(key=lambda row: (len(row[1]), len(row[0])))
        groups: list[list[tuple[list[int], list[int]]]] = [[]]
        for row in rows:
            # Sorted, so that this row is as long as the longest of its group.
            if groups[-1] and (len(groups[-1]) + 1) * len(row[1]) > batch_tokens:
                groups.append([])
            groups[-1].append(row)
        rng.shuffle(groups)
        for group in groups:
            input_ids = _pad([source for source, _ in group], tokenizer.pad_token_id)
            yield {
                "input_ids": input_ids,
                "attention_mask": (input_ids != tokenizer.pad_token_id).long(),
                "labels": _pad([target for _, target in group], -100),
            }


def _pad(rows: list[list[int]], value: int) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=value)


def exact_match(
    model: BartForConditionalGeneration,
    tokenizer: PreTrainedTokenizerFast,
    pairs: list[Pair],
    num_beams: int,
    batch_size: int = 50,
) -> float:
    """Returns the share of the pairs whose output is exactly the reference."""
    pairs = sorted(pairs, key=lambda pair: len(pair[0]))
    right = 0
    training = model.training
    model.eval()
    for start in range(0, len(pairs), batch_size):
        part = pairs[start : start + batch_size]
        inputs = tokenizer([written for written, _ in part], padding=True, return_tensors="pt")
        with torch.inference_mode():
            output = model.generate(**inputs, num_beams=num_beams)
        texts = tokenizer.batch_decode(output, skip_special_tokens=True)
        right += sum(text == spoken for text, (_, spoken) in zip(texts, part, strict=True))
    model.train(training)
    return right / len(pairs)


def in_8_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Rounds each row of a matrix to multiples of a power of two, at most 127 of them.

    float16 has them exactly, and a wheel compresses them to less than 8 bits each.
    """
    if tensor.dim() != 2:
        return tensor
    largest = tensor.abs().amax(1, keepdim=True).clamp(min=1e-4)
    step = torch.exp2(torch.ceil(torch.log2(largest / 127)))
    return (tensor / step).round() * step


def save(model: BartForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Saves weights of 8 bits as float16, for their size; the config says float32, which they are loaded in."""
    halves: dict[int, torch.Tensor] = {}
    weights = {}
    for name, tensor in model.state_dict().items():
        # A tied weight stays one tensor, so that it is stored once.
        weights[name] = halves.setdefault(tensor.data_ptr(), in_8_bits(tensor).to(torch.float16))
    model.save_pretrained(folder, state_dict=weights)
    (folder / "model.safetensors").chmod(0o644)
    # The last call's padding would be stored with it.
    tokenizer.backend_tokenizer.no_padding()
    tokenizer.save_pretrained(folder)


def train(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    rng = Random(args.seed)
    started = time.monotonic()
    held_out = held_out_pairs()
    exclude = {written for written, _ in held_out}
    check = held_out[-CHECK_LINES:]

    tokenizer = train_tokenizer(rng, args.vocab_size)
    model = build_model(tokenizer)
    save(model, tokenizer, args.output)
    print(f"{len(tokenizer)} tokens, {model.num_parameters():,} parameters", flush=True)

    # Warm-up, then half a cosine down to 2 % of the learning rate.
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    warmup = min(300, args.steps // 10 + 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(
            (step + 1) / warmup,
            0.02 + 0.98 * (0.5 + 0.5 * math.cos(math.pi * max(0, step - warmup) / max(1, args.steps - warmup))),
        ),
    )
    model.train()
    total, tokens = 0.0, 0
    for step, batch in enumerate(batches(rng, tokenizer, exclude, args.batch_tokens), start=1):
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        total, tokens = total + loss.item(), tokens + int((batch["labels"] != -100).sum())
        if step % 100 == 0:
            seconds = time.monotonic() - started
            print(f"step {step:5} loss {total / 100:.4f} {tokens / 1e6:.2f} M tokens {seconds:.0f} s", flush=True)
            total = 0.0
        if step % args.check_every == 0 or step == args.steps:
            accuracy = exact_match(model, tokenizer, check, num_beams=1)
            print(f"step {step:5} exact match, greedy, {len(check)} lines: {accuracy:.1%}", flush=True)
            save(model, tokenizer, args.output)
        if step == args.steps:
            break
    measure_and_write(args, steps=step, tokens=tokens, minutes=(time.monotonic() - started) / 60)


def measure_and_write(args: argparse.Namespace, steps: int, tokens: int, minutes: float) -> None:
    """Measures the model in the output folder, loaded as users load it; writes the sample lines and the model card."""
    tokenizer = AutoTokenizer.from_pretrained(args.output)
    model = AutoModelForSeq2SeqLM.from_pretrained(args.output, dtype=torch.float32)
    held_out = held_out_pairs()
    sample, test = held_out[:SAMPLE_LINES], held_out[: SAMPLE_LINES + TEST_LINES]
    for name, column in (("sample.txt", 0), ("sample.ref.txt", 1)):
        (args.output / name).write_text("".join(pair[column] + "\n" for pair in sample), encoding="utf-8")
    figures = {
        "parameters": model.num_parameters(),
        "vocab_size": len(tokenizer),
        "steps": steps,
        "million_tokens": tokens / 1e6,
        "minutes": minutes,
        "threads": counted(args.threads, "CPU thread"),
        "held_out_seed": HELD_OUT_SEED,
        "lines": len(test),
        "beam": exact_match(model, tokenizer, test, num_beams=4),
        "greedy": exact_match(model, tokenizer, test, num_beams=1),
        "sample_beam": exact_match(model, tokenizer, sample, num_beams=4),
    }
    print(figures, flush=True)
    (args.output / "README.md").write_text(CARD.format(args=args, **figures), encoding="utf-8")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Trains the demo model and writes its folder.")
    parser.add_argument("--output", type=Path, required=True, help="folder of the model; made if it does not exist")
    parser.add_argument("--steps", type=int, default=6500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--vocab-size", type=int, default=1000)
    parser.add_argument("--batch-tokens", type=int, default=1600, help="target tokens of a batch, padding included")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--check-every", type=int, default=500, help="steps between two checkpoints")
    args = parser.parse_args(argv)
    if args.steps < 1:
        parser.error(f"--steps is {args.steps}; accepted: 1 or more")
    disable_progress_bar()
    args.output.mkdir(parents=True, exist_ok=True)
    train(args)


if __name__ == "__main__":
    main()
