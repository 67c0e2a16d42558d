"""fairseq-generate's output for a batch: the S-, T-, H-, D-, P-, A-, I- and E-lines, and pairs to score.

Tests: tests/cli/fairseq/test_cli_fairseq_output.py
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from fairseq import utils

Pair = tuple[Any, Any]  # a target and its hypothesis: two texts, or two lists of tokens


class Hypothesis(NamedTuple):
    """The printed fields of a hypothesis. Fields that no flag asks for are empty: they may be large."""

    tokens: list[int]
    score: str = ""
    positional_scores: Sequence[float] = ()
    alignment: Any = None
    steps: str = ""
    history: Sequence[list[int]] = ()


class Sentence(NamedTuple):
    """The printed fields of a sentence. Its sides are tokens, texts if unknown words are replaced, or None."""

    number: int
    source: list[int] | str | None
    target: list[int] | str | None
    hypotheses: list[Hypothesis]


class Printer:
    """Turns hypotheses into lines, as the flags require, in two steps: `sentences` here, `lines` in a worker.

    Dictionaries grow by the words of scored texts, as in fairseq-generate; each worker's may differ, because a pair is
    only compared within itself.
    """

    def __init__(self, cfg: Any, task: Any, generator: Any, scorer: Any) -> None:
        generation = cfg.generation  # read once: omegaconf is slow
        self.quiet, self.post_process = cfg.common_eval.quiet, cfg.common_eval.post_process
        self.nbest, self.alignment_format = generation.nbest, generation.print_alignment
        self.prints_steps, self.prints_history = generation.print_step, generation.retain_iter_history
        self.replacements = utils.load_align_dict(generation.replace_unk)
        self.tokenizer, self.bpe = task.build_tokenizer(cfg.tokenizer), task.build_bpe(cfg.bpe)
        self.dataset = task.dataset(cfg.dataset.gen_subset)
        self.source_dictionary = None
        self.target_dictionary = task.target_dictionary
        with suppress(NotImplementedError):
            self.source_dictionary = getattr(task, "source_dictionary", None)
        has_symbols = hasattr(generator, "symbols_to_strip_from_output")
        self.stripped = generator.symbols_to_strip_from_output if has_symbols else {generator.eos}
        self.scores_texts = hasattr(scorer, "add_string")

    def sentences(self, sample: dict[str, Any], hypos: list[list[dict[str, Any]]]) -> list[Sentence]:
        """Returns a batch without tensors."""
        numbers = sample["id"].tolist()
        has_source = self.source_dictionary is not None or self.replacements is not None
        sources = self._side("src", sample["net_input"]["src_tokens"] if has_source else None, numbers)
        targets = self._side("tgt", sample["target"], numbers)
        best = [[self._hypothesis(hypo) for hypo in hypos_of_one[: self.nbest]] for hypos_of_one in hypos]
        return [Sentence(*fields) for fields in zip(numbers, sources, targets, best)]

    def _side(self, name: str, tokens: torch.Tensor | None, numbers: list[int]) -> list[Any]:
        if tokens is None:
            return [None] * len(numbers)
        if self.replacements is not None:
            return [getattr(self.dataset, name).get_original_text(number) for number in numbers]
        padding = self.target_dictionary.pad()
        return [[token for token in row if token != padding] for row in tokens.tolist()]

    def _hypothesis(self, hypo: dict[str, Any]) -> Hypothesis:
        """Returns the printed fields; turns natural logarithms into those of base 2."""
        fields = Hypothesis(hypo["tokens"].tolist())
        if not self.quiet:
            positional_scores = (hypo["positional_scores"] / math.log(2)).tolist()
            fields = fields._replace(score=f"{hypo['score'] / math.log(2)}", positional_scores=positional_scores)
        if self.alignment_format or self.replacements is not None:
            alignment = hypo["alignment"]
            fields = fields._replace(alignment=alignment.tolist() if torch.is_tensor(alignment) else alignment)
        if self.prints_steps:
            fields = fields._replace(steps=f"{hypo['steps']}")
        if self.prints_history:
            fields = fields._replace(history=[step["tokens"].tolist() for step in hypo["history"]])
        return fields

    def lines(self, batch: list[Sentence]) -> tuple[str, list[Pair]]:
        """Returns the lines of a batch, and a pair for each sentence with a target."""
        lines: list[str] = []
        pairs: list[Pair] = []
        ignored = {"extra_symbols_to_ignore": self.stripped}
        for number, source, target, hypotheses in batch:
            source_text = self._decoded(self._text(source, self.source_dictionary))
            target_text = self._decoded(self._text(target, self.target_dictionary, escape_unk=True, **ignored))
            if self.source_dictionary is not None:
                lines.append(f"S-{number}\t{source_text}")
            if target is not None:
                lines.append(f"T-{number}\t{target_text}")
            for index, hypothesis in enumerate(hypotheses):
                text = self._text(hypothesis.tokens, self.target_dictionary, **ignored)
                if self.replacements is not None:
                    unknown = self.target_dictionary.unk_string()
                    text = utils.replace_unk(text, source_text, hypothesis.alignment, self.replacements, unknown)
                decoded = self._decoded(text)
                lines += self._hypothesis_lines(number, hypothesis, text, decoded)
                if index == 0 and target is not None:
                    pairs.append(self._pair((target_text, decoded), (target, hypothesis.tokens)))
        return "" if self.quiet else "".join(f"{line}\n" for line in lines), pairs

    def _text(self, side: list[int] | str | None, dictionary: Any, **options: Any) -> str:
        """Returns the text of a source, target or hypothesis before it is decoded; "" if there is none."""
        if isinstance(side, list):
            return dictionary.string(torch.IntTensor(side), self.post_process, **options)
        return side or ""

    def _decoded(self, text: str) -> str:
        """Returns plain text, with the pieces of --bpe and the tokens of --tokenizer joined."""
        for codec in (self.bpe, self.tokenizer):
            text = text if codec is None else codec.decode(text)
        return text

    def _hypothesis_lines(self, number: int, hypothesis: Hypothesis, text: str, decoded: str) -> Iterator[str]:
        yield f"H-{number}\t{hypothesis.score}\t{text}"
        yield f"D-{number}\t{hypothesis.score}\t{decoded}"
        yield f"P-{number}\t{' '.join(f'{score:.4f}' for score in hypothesis.positional_scores)}"
        if self.alignment_format:
            separator = "-" if self.alignment_format == "hard" else ","
            yield f"A-{number}\t{' '.join(separator.join(map(str, entry)) for entry in hypothesis.alignment)}"
        if self.prints_steps:
            yield f"I-{number}\t{hypothesis.steps}"
        for step, tokens in enumerate(hypothesis.history):
            yield f"E-{number}_{step}\t{self.target_dictionary.string(torch.IntTensor(tokens))}"

    def _pair(self, texts: tuple[str, str], tokens: tuple[Any, Any]) -> Pair:
        """Returns what the scorer compares: texts, or tokens; those of the texts if pieces or words were replaced."""
        if self.scores_texts or (self.replacements is None and self.post_process is None):
            return texts if self.scores_texts else tokens
        target, hypothesis = (self.target_dictionary.encode_line(text, add_if_not_exist=True) for text in texts)
        return target.tolist(), hypothesis.tolist()
