"""A task that tiny multi-query Transformers learn in minutes: copy a sequence of symbols, or sort it.

python tests/models/mqa/copy_and_sort.py     trains multi-head, grouped, multi-query and local models
"""

import time

import torch
from torch import Tensor

from fastgen.models.mqa import MQATransformerConfig, MQATransformerForConditionalGeneration

PAD, START, END, COPY, SORT, FIRST, SYMBOLS = 0, 1, 2, 3, 4, 5, 12
LONGEST = 8
VARIANTS = {
    "multi-head": {"num_key_value_heads": 4},
    "grouped": {"num_key_value_heads": 2},
    "multi-query": {"num_key_value_heads": 1},
    "multi-query local": {"num_key_value_heads": 1, "local_window": 4},
}


def examples(rows: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """Returns sources (the task, then symbols) and targets (symbols and the end), 3 to 8 symbols each, padded."""
    symbols = torch.randint(FIRST, FIRST + SYMBOLS, (rows, LONGEST), generator=generator)
    lengths = torch.randint(3, LONGEST + 1, (rows, 1), generator=generator)
    tasks = torch.randint(COPY, SORT + 1, (rows, 1), generator=generator)
    beyond = torch.arange(LONGEST)[None] >= lengths
    ordered = symbols.masked_fill(beyond, FIRST + SYMBOLS).sort(dim=1).values
    targets = torch.where(tasks == SORT, ordered, symbols).masked_fill(beyond, PAD)
    targets = torch.cat([targets, torch.zeros(rows, 1, dtype=torch.long)], dim=1).scatter(1, lengths, END)
    sources = torch.cat([tasks, symbols.masked_fill(beyond, PAD)], dim=1)
    return {"input_ids": sources, "attention_mask": (sources != PAD).long()}, targets


def trained(steps: int, seed: int = 0, **variant: int) -> MQATransformerForConditionalGeneration:
    """Trains a model for so many steps of 64 examples."""
    torch.manual_seed(seed)
    config = MQATransformerConfig(
        vocab_size=FIRST + SYMBOLS, d_model=64, d_ff=128, encoder_layers=2, decoder_layers=2, num_attention_heads=4,
        head_dim=16, max_position_embeddings=16, dropout=0.0, pad_token_id=PAD, bos_token_id=START, eos_token_id=END,
        decoder_start_token_id=START, initializer_range=0.05, **variant,
    )  # fmt: skip
    model = MQATransformerForConditionalGeneration(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps, pct_start=0.1)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        inputs, targets = examples(64, generator)
        loss = model(**inputs, labels=targets.masked_fill(targets == PAD, -100)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval()


def exact_match(model: MQATransformerForConditionalGeneration, rows: int = 500, **arguments: int) -> float:
    """Returns the share of new examples whose whole output is right, up to its end."""
    inputs, targets = examples(rows, torch.Generator().manual_seed(12345))
    outputs = model.generate(**inputs, max_new_tokens=LONGEST + 1, **arguments)[:, 1:]
    padded = torch.nn.functional.pad(outputs, (0, targets.shape[1] - outputs.shape[1]), value=PAD)
    return ((padded == targets) | (targets == PAD)).all(dim=1).double().mean().item()


if __name__ == "__main__":
    for name, variant in VARIANTS.items():
        start = time.perf_counter()
        model = trained(1000, **variant)
        print(f"{name}: {time.perf_counter() - start:.0f} s, greedy {exact_match(model):.3f}", end=", ")
        print(f"beam 4 {exact_match(model, num_beams=4):.3f}", flush=True)
