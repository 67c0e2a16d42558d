"""From arrays to the lines of fairseq-generate, and to scores: what a worker process does.

S- and T- are source and target, H- and D- a hypothesis before and after detokenisation with its score, P- the scores
of its tokens, A- its alignment, I- the number of refinement steps, E- what it was after each of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from fairseq import scoring, utils
from fairseq.data import Dictionary
from fairseq.tokenizer import tokenize_line

from fastgen.cli.fairseq.hypotheses import Hypothesis, Sentences
from fastgen.cli.fairseq.scores import Part, PartialScorer


@dataclass(frozen=True)
class Finished:
    """Some sentences, ready to be written."""

    text: str
    part: Part


class Postprocessor:
    """Turns sentences into text as the flags of the run say.

    The dictionaries grow by the words of the texts that are scored, as they do in fairseq-generate. That is seen only
    in scores, which depend on which numbers are equal, not on what they are.
    """

    def __init__(self, cfg: Any, task: Any, src_dict: Dictionary | None, tgt_dict: Dictionary) -> None:
        torch.set_num_threads(1)  # the cores belong to the model
        self.cfg = cfg
        self.src_dict = src_dict
        self.tgt_dict = tgt_dict
        self.align_dict = utils.load_align_dict(cfg.generation.replace_unk)
        self.tokenizer = task.build_tokenizer(cfg.tokenizer)
        self.bpe = task.build_bpe(cfg.bpe)
        self.scorer = PartialScorer(scoring.build_scorer(cfg.scoring, tgt_dict))

    def __call__(self, sentences: Sentences) -> Finished:
        """The lines of the sentences and what they add to the score."""
        lines = [line for row in range(len(sentences.ids)) for line in self._sentence(sentences, row)]
        return Finished("".join(f"{line}\n" for line in lines), self.scorer.take())

    def _sentence(self, sentences: Sentences, row: int) -> Iterator[str]:
        number, printed = sentences.ids[row], not self.cfg.common_eval.quiet
        source, target_tokens, target = self._source_and_target(sentences, row)
        if printed and self.src_dict is not None:
            yield f"S-{number}\t{source}"
        if printed and target is not None:
            yield f"T-{number}\t{target}"
        for place, hypothesis in enumerate(sentences.hypotheses[row]):
            text = self._text(hypothesis, source, sentences.ignored)
            detokenized = self._decode(text)
            if printed:
                yield f"H-{number}\t{hypothesis.score}\t{text}"
                yield f"D-{number}\t{hypothesis.score}\t{detokenized}"
                yield from self._details(number, hypothesis)
            if place == 0 and target is not None:
                self._score(target_tokens, target, hypothesis.tokens, detokenized)

    def _source_and_target(self, sentences: Sentences, row: int) -> tuple[str, np.ndarray | None, str | None]:
        """The source's text, the target's tokens and the target's text."""
        pad = self.tgt_dict.pad()
        target_tokens = None if sentences.target is None else _without(pad, sentences.target[row]).astype(np.int32)
        target = None
        if sentences.originals is not None:
            source, target = sentences.originals[row]
        else:
            source = ""
            needed = not self.cfg.common_eval.quiet
            if self.src_dict is not None and sentences.src_tokens is not None and needed:
                tokens = _without(pad, sentences.src_tokens[row])
                source = _string(self.src_dict, tokens, self.cfg.common_eval.post_process)
            if target_tokens is not None:
                target = _string(
                    self.tgt_dict,
                    target_tokens,
                    self.cfg.common_eval.post_process,
                    escape_unk=True,
                    extra_symbols_to_ignore=sentences.ignored,
                )
        return self._decode(source), target_tokens, None if target_tokens is None else self._decode(target)

    def _text(self, hypothesis: Hypothesis, source: str, ignored: frozenset[int]) -> str:
        text = _string(
            self.tgt_dict, hypothesis.tokens, self.cfg.common_eval.post_process, extra_symbols_to_ignore=ignored
        )
        if self.align_dict is None:
            return text
        return utils.replace_unk(text, source, hypothesis.alignment, self.align_dict, self.tgt_dict.unk_string())

    def _details(self, number: int, hypothesis: Hypothesis) -> Iterator[str]:
        yield f"P-{number}\t" + " ".join(f"{score:.4f}" for score in hypothesis.positional_scores.tolist())
        kind = self.cfg.generation.print_alignment
        if kind == "hard":
            yield f"A-{number}\t" + " ".join(f"{source}-{target}" for source, target in hypothesis.alignment)
        if kind == "soft":
            yield f"A-{number}\t" + " ".join(",".join(probabilities) for probabilities in hypothesis.alignment)
        if hypothesis.step is not None:
            yield f"I-{number}\t{hypothesis.step}"
        for step, tokens in enumerate(hypothesis.history or ()):
            yield f"E-{number}_{step}\t{_string(self.tgt_dict, tokens, None)}"

    def _score(self, target_tokens: np.ndarray, target: str, tokens: np.ndarray, hypothesis: str) -> None:
        if not self.scorer.wants_tokens:
            self.scorer.add_string(target, hypothesis)
        elif self.align_dict is None and self.cfg.common_eval.post_process is None:
            self.scorer.add_tokens(target_tokens, tokens)
        else:
            self.scorer.add_tokens(self._encode(target), self._encode(hypothesis))

    def _decode(self, text: str) -> str:
        if self.bpe is not None:
            text = self.bpe.decode(text)
        return text if self.tokenizer is None else self.tokenizer.decode(text)

    def _encode(self, text: str) -> np.ndarray:
        """The words of a text as numbers."""
        if type(self.tgt_dict).encode_line is not Dictionary.encode_line:
            return self.tgt_dict.encode_line(text, add_if_not_exist=True).numpy()
        # The same without a tensor that is filled number by number, which takes most of encode_line's time.
        numbers = [self.tgt_dict.add_symbol(word) for word in tokenize_line(text)]
        return np.array([*numbers, self.tgt_dict.eos()], dtype=np.int32)


def _without(pad: int, tokens: np.ndarray) -> np.ndarray:
    return tokens[tokens != pad]


def _string(dictionary: Dictionary, tokens: np.ndarray, post_process: str | None, **options: Any) -> str:
    """A dictionary's string; from plain numbers, unless it is a kind that may insist on a tensor."""
    if tokens.ndim == 1 and type(dictionary).string is Dictionary.string:
        return dictionary.string(tokens.tolist(), post_process, **options)
    return dictionary.string(torch.from_numpy(tokens), post_process, **options)
