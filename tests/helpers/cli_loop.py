"""The loop that a user would write around the unpatched library, and the command on the same lines."""

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers

import fastgen
from fastgen.batch.pipeline import SplitOnOOM
from fastgen.cli.transformers.command import main


def plain_loop(
    folder: Path, lines: list[str], bs: int, causal_lm: bool = False, device: str = "cpu", **settings: object
) -> list[str]:
    """Generates as a user would without fastgen."""
    kind = transformers.AutoModelForCausalLM if causal_lm else transformers.AutoModelForSeq2SeqLM
    model, tokenizer = kind.from_pretrained(folder).to(device), transformers.AutoTokenizer.from_pretrained(folder)
    if causal_lm:
        tokenizer.padding_side = "left"
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    texts = []
    with fastgen.disabled():
        for start in range(0, len(lines), bs):
            batch = tokenizer(lines[start : start + bs], padding=True, return_tensors="pt").to(device)
            sequences = model.generate(
                input_ids=batch.input_ids,
                attention_mask=batch.attention_mask,
                **settings,
                pad_token_id=tokenizer.pad_token_id,
            )
            skipped = batch.input_ids.shape[1] if causal_lm else 0
            texts += tokenizer.batch_decode(sequences[:, skipped:], skip_special_tokens=True)
    return texts


def command(*arguments: object) -> int:
    """Runs the command with these arguments; returns its exit status."""
    return main([*map(str, arguments)])


def interrupted_after(batches: int) -> Any:
    """Returns a context in which Ctrl-C ends each run after so many batches."""
    original, left = SplitOnOOM.__call__, iter(range(batches))

    def call(self: SplitOnOOM, *batch: Any) -> Any:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return original(self, *batch)

    return mock.patch.object(SplitOnOOM, "__call__", call)


def write_lines(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def generate(tmp_path: Path, model: object, lines: list[str], *flags: object) -> list[str]:
    """Runs the command on these lines; returns the lines of OUTPUT."""
    source, output = write_lines(tmp_path / "input.txt", lines), tmp_path / "output.txt"
    assert command(model, source, output, "--overwrite", *flags) == 0
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix == ".part") == []
    text = output.read_text(encoding="utf-8")
    assert text.endswith("\n")
    return text[:-1].split("\n")


def plain_samples(
    folder: Path, line: str, keys: list[tuple[int, int, int]], max_new_tokens: int, **warpers: float
) -> list[str]:
    """Draws samples of a line with these keys, a row and a step at a time, without `generate`.

    warpers: temperature, top_k or top_p.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    kinds = {"temperature": "TemperatureLogitsWarper", "top_k": "TopKLogitsWarper", "top_p": "TopPLogitsWarper"}
    warp = [getattr(transformers, kind)(warpers[name]) for name, kind in kinds.items() if name in warpers]
    texts = []
    for seed, number, sample in keys:
        key = np.array((seed, number), np.uint64)
        generator = np.random.Philox(key=key, counter=(0, 0, 0, sample))
        ids = prompt = tokenizer(line, return_tensors="pt").input_ids
        while ids.shape[1] < prompt.shape[1] + max_new_tokens and ids[0, -1] != model.generation_config.eos_token_id:
            with torch.no_grad():
                scores = model(ids, use_cache=False).logits[:, -1].float()
            for warper in warp:
                scores = warper(ids, scores)
            sums = scores[0].double().softmax(-1).cumsum(-1).numpy()
            uniform = (int(generator.random_raw()) >> 11) * 2.0**-53
            token = int(np.searchsorted(sums, uniform * sums[-1], side="right"))
            ids = torch.cat([ids, torch.tensor([[token]])], dim=1)
        texts.append(tokenizer.decode(ids[0, prompt.shape[1] :], skip_special_tokens=True))
    return texts
