"""The model card of the demo model, README.md in its folder; train.py fills in what it has measured."""

CARD = """\
---
language: en
license: mit
library_name: transformers
pipeline_tag: text2text-generation
---

# Written to spoken English

A small encoder-decoder that comes with fastgen, so that generation can be tried and checked with no network. It turns
a written line into the words that a person would say:

    Dr. Smith paid $1,250.50 on 3 May 2021 at 4:15 p.m.
    doctor smith paid one thousand two hundred fifty dollars and fifty cents on the third of may twenty twenty one at
    four fifteen p m

## Task

The output is lower case, has no punctuation, and spells out numbers, dates, times, money, units, ordinals,
percentages, fractions, years, telephone numbers and other digit strings, Roman chapter numbers, acronyms and common
abbreviations. A line without any of them is copied in lower case. Numbers are said in the American way, without
"and". Outputs have between 2 and 100 words.

## Data

Lines and references are made by rules (`tools/demo_model/spoken_english.py`), so every line has exactly one right
output. Training draws new lines all the time and skips those of `held_out_pairs()` (generator seed {held_out_seed});
`sample.txt` and `sample.ref.txt` are the first 500 held-out lines and their references. The tokenizer's merges are
counted on more lines of the same rules.

## Model

`BartForConditionalGeneration`, 3 encoder and 3 decoder layers, width 128, 4 heads, {parameters:,} parameters;
one embedding table of {vocab_size} tokens for source, target and output; positions are fixed sines. The
tokenizer is a byte-level BPE that splits numbers into single digits. Weights have 8 bits, which a power of
two for each row scales; they are stored as float16, which a wheel compresses to that, and loaded as float32. Sources
have at most 256 tokens, outputs at most 160.

## Training

    python -m tools.demo_model.train --output DIR --steps {args.steps} --seed {args.seed}

{steps} steps, {million_tokens:.1f} million target tokens, {minutes:.0f} minutes on \
{threads}.

## Accuracy

Exact match, the whole output letter by letter, of the stored weights in float32:

| Lines | Search | Exact match |
|---|---|---|
| {lines} held out | beam search, 4 beams | {beam:.1%} |
| {lines} held out | greedy | {greedy:.1%} |
| sample.txt, the first 500 of them | beam search, 4 beams | {sample_beam:.1%} |

## Limits

The held-out lines come from the same rules as the training lines. The model knows the words, names and sentence
patterns of these rules only: expect mistakes on free text, on words outside the lists in `slots.py`, on
numbers of other sizes and on lines much longer than those of `sample.txt`. It is meant for trying out and testing
generation, not for reading text aloud.
"""
