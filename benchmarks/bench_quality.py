"""The trained model inside the package on its sample: lines that are equal without and with fastgen, ROUGE of both.

    python benchmarks/bench_quality.py [float32] [bfloat16] [--lines 200] [--device cpu] [--json FILE]

Table 4 of FastSeq (Yan et al., 2021), with float16 on a GPU in the place of bfloat16. Beam 4, batches of BATCH lines as
they stand in the file. ROUGE needs `pip install rouge-score` and is left out without it. The status is 1 where lines
differ in float32, or where the ratio of seconds is below its floor; in half precision rounding differs, as it does with
another batch size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from harness import compare, missed_by, parse_flags, parser_of, run_cases, summary, with_and_without
from machine import print_head
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from fastgen.models.demo import demo_path, sample_path

BATCH, BEAMS = 32, 4
CASES = ("float32", "bfloat16", "float16")
ROUGE = {"rouge1": "R-1", "rouge2": "R-2", "rougeL": "R-L"}

Texts = list[str]


def generator(dtype: torch.dtype, device: str) -> Callable[[Texts], Texts]:
    tokenizer = AutoTokenizer.from_pretrained(demo_path())
    model = AutoModelForSeq2SeqLM.from_pretrained(demo_path()).to(device=device, dtype=dtype).eval()

    def generate(lines: Texts) -> Texts:
        texts: Texts = []
        for start in range(0, len(lines), BATCH):
            batch = tokenizer(lines[start : start + BATCH], padding=True, return_tensors="pt").to(device)
            sequences = model.generate(
                input_ids=batch.input_ids, attention_mask=batch.attention_mask, num_beams=BEAMS, do_sample=False
            )
            texts += tokenizer.batch_decode(sequences, skip_special_tokens=True)
        return texts

    return generate


def rouge(texts: Texts, references: Texts) -> dict[str, float]:
    """Means of the F measures, in percent."""
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(list(ROUGE))
    scores = [scorer.score(reference, text) for text, reference in zip(texts, references, strict=True)]
    return {short: sum(score[name].fmeasure for score in scores) / len(scores) * 100 for name, short in ROUGE.items()}


def measure(name: str, lines: int, repeats: int, device: str) -> dict[str, Any]:
    inputs, references = (
        path.read_text(encoding="utf-8").splitlines()[:lines]
        for path in (sample_path(), demo_path() / "sample.ref.txt")
    )
    returned: dict[str, Texts] = {}

    def are_equal(stock: Texts, fast: Texts) -> bool:
        returned.update(stock=stock, fastgen=fast)
        return stock == fast or name != "float32"

    generate = generator(getattr(torch, name), device)
    for way in with_and_without(partial(generate, inputs[:BATCH])).values():
        way()  # warms it up
    result = compare(name, with_and_without(partial(generate, inputs)), repeats, are_equal, warm_up=0)
    same = sum(a == b for a, b in zip(returned["stock"], returned["fastgen"], strict=True))
    right = {way: sum(a == b for a, b in zip(texts, references, strict=True)) for way, texts in returned.items()}
    scores = {way: rouge(texts, references) for way, texts in returned.items()} if find_spec("rouge_score") else {}
    return result | {"lines": len(inputs), "same": same, "right": right, "rouge": scores}


def main(argv: list[str] | None = None) -> int:
    parser = parser_of(__doc__, CASES)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--lines", type=int, default=200, help="of the 500 (default 200)")
    args = parse_flags(parser, argv, "quality", CASES)
    if args.cases == list(CASES):
        args.cases = ["float32", "bfloat16" if args.device == "cpu" else "float16"]
    print_head()
    return run_cases(
        args,
        partial(measure, lines=args.lines, repeats=args.repeats, device=args.device),
        lambda result: f"{summary(result)}; {result['same']} of {result['lines']} lines equal",
        lambda result: missed_by(result, args.floors, "lines"),
    )


if __name__ == "__main__":
    raise SystemExit(main())
