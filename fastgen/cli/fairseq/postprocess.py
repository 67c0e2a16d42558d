"""What is printed of a batch: from tensors to plain numbers beside the model, and from these to lines in a worker.

S- and T- are source and target, H- and D- a hypothesis before and after detokenisation with its score, P- the scores
of its tokens, A- its alignment, I- the number of refinement steps, E- what it was after each of them.

Tests: tests/cli/fairseq/test_cli_fairseq_output.py
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from fairseq import scoring, utils
from fairseq.data import Dictionary
from torch import Tensor

_LOG_2 = math.log(2)  # fairseq prints scores in base 2


@dataclass(frozen=True)
class Batch:
    """What is printed of a batch, without tensors; lists hold a value for each sentence."""

    ids: list[int]
    sources: list[list[int]] | None  # padded
    targets: list[list[int]] | None  # padded
    originals: list[tuple[str, str]] | None  # sources and targets as they were read, for --replace-unk
    hypotheses: list[list[dict[str, Any]]]  # the first --nbest, each with those of fairseq's keys that are needed
    ignored: set[int]  # symbols that are not part of a text


def to_host(
    sample: dict[str, Any], hypos: list[list[dict[str, Any]]], flags: Namespace, ignored: set[int], dataset: Any
) -> Batch:
    """A batch and its hypotheses, copied in as few pieces as possible.

    flags: those of generation, and whether anything is `printed`. dataset: what `sample` comes from.
    """
    ids, source, target = sample["id"].tolist(), sample["net_input"].get("src_tokens"), sample["target"]
    # The features of speech are no tokens.
    sources = source.tolist() if flags.printed and source is not None and source.dim() == 2 else None
    originals = None
    if flags.replace_unk is not None:
        originals = [(dataset.src.get_original_text(i), dataset.tgt.get_original_text(i)) for i in ids]
    chosen = [sentence[: flags.nbest] for sentence in hypos]
    rows = iter(_rows([hypo for sentence in chosen for hypo in sentence], flags))
    hypotheses = [list(islice(rows, len(sentence))) for sentence in chosen]
    return Batch(ids, sources, None if target is None else target.tolist(), originals, hypotheses, ignored)


def _rows(hypos: list[dict[str, Any]], flags: Namespace) -> list[dict[str, Any]]:
    """Hypotheses without tensors. Scores are divided where they are: a GPU may differ from the host in the last bit."""
    columns: dict[str, Sequence[Any]] = {"tokens": _lists([hypo["tokens"].int() for hypo in hypos])}
    if flags.printed:
        scores = [hypo["score"] for hypo in hypos]
        numbers = all(isinstance(score, Tensor) and score.dim() == 0 for score in scores)
        columns["score"] = (torch.stack(scores) / _LOG_2).tolist() if numbers else [f"{s / _LOG_2}" for s in scores]
        columns["positional_scores"] = _lists([hypo["positional_scores"] for hypo in hypos], _LOG_2)
    if (flags.printed and flags.print_alignment is not None) or flags.replace_unk is not None:
        columns["alignment"] = [utils.apply_to_sample(Tensor.tolist, {"": hypo["alignment"]})[""] for hypo in hypos]
    if flags.printed and flags.print_step:
        columns["steps"] = [str(hypo["steps"]) for hypo in hypos]
    if flags.printed and flags.retain_iter_history:
        columns["history"] = [_lists([step["tokens"].int() for step in hypo["history"]]) for hypo in hypos]
    return [dict(zip(columns, row)) for row in zip(*columns.values())]


def _lists(tensors: list[Tensor], divisor: float | None = None) -> list[list[Any]]:
    """The values, divided: one copy from the device where the tensors are rows of one kind."""
    if {tensor.dim() for tensor in tensors} == {1} and len({(tensor.dtype, tensor.device) for tensor in tensors}) == 1:
        joined = torch.cat(tensors)
        values = iter((joined if divisor is None else joined / divisor).tolist())
        return [list(islice(values, len(tensor))) for tensor in tensors]
    return [(tensor if divisor is None else tensor / divisor).tolist() for tensor in tensors]


class Postprocessor:
    """Turns batches into lines as the flags of the run say, and into pairs for the scorer.

    The dictionaries grow by the words of the texts that are scored, as they do in fairseq-generate. That is seen only
    in scores, which depend on which numbers of a pair are equal, not on what they are.
    """

    def __init__(self, cfg: Any, task: Any) -> None:
        torch.set_num_threads(1)  # the cores belong to the model
        self.kind_of_alignment = cfg.generation.print_alignment
        self.post_process, self.printed = cfg.common_eval.post_process, not cfg.common_eval.quiet
        try:
            self.src_dict: Dictionary | None = getattr(task, "source_dictionary", None)
        except NotImplementedError:
            self.src_dict = None
        self.tgt_dict: Dictionary = task.target_dictionary
        self.align_dict = utils.load_align_dict(cfg.generation.replace_unk)
        self.tokenizer, self.bpe = task.build_tokenizer(cfg.tokenizer), task.build_bpe(cfg.bpe)
        self.scores_texts = hasattr(scoring.build_scorer(cfg.scoring, self.tgt_dict), "add_string")

    def __call__(self, batch: Batch) -> tuple[str, list[tuple[Any, Any]]]:
        """The lines, and for each sentence with a target what the scorer gets: two texts, or two lists of tokens."""
        self.pairs: list[tuple[Any, Any]] = []
        lines = [line for place in range(len(batch.ids)) for line in self._sentence(batch, place)]
        return "".join(f"{line}\n" for line in lines), self.pairs

    def _sentence(self, batch: Batch, place: int) -> Iterator[str]:
        number, pad, strip = batch.ids[place], self.tgt_dict.pad(), {"extra_symbols_to_ignore": batch.ignored}
        source, target, target_tokens = "", None, list[int]()
        if batch.originals is not None:
            source, target = batch.originals[place]
        elif batch.sources is not None and self.src_dict is not None:
            source = _string(self.src_dict, [i for i in batch.sources[place] if i != pad], self.post_process)
        if batch.targets is not None:
            target_tokens = [i for i in batch.targets[place] if i != pad]
            if target is None:
                target = _string(self.tgt_dict, target_tokens, self.post_process, escape_unk=True, **strip)
            target = self._decode(target)
        source = self._decode(source)
        if self.printed and self.src_dict is not None:
            yield f"S-{number}\t{source}"
        if self.printed and target is not None:
            yield f"T-{number}\t{target}"
        for rank, hypothesis in enumerate(batch.hypotheses[place]):
            text = _string(self.tgt_dict, hypothesis["tokens"], self.post_process, **strip)
            if self.align_dict is not None:
                unk = self.tgt_dict.unk_string()
                text = utils.replace_unk(text, source, hypothesis["alignment"], self.align_dict, unk)
            detokenized = self._decode(text)
            if self.printed:
                yield f"H-{number}\t{hypothesis['score']}\t{text}"
                yield f"D-{number}\t{hypothesis['score']}\t{detokenized}"
                yield from self._details(number, hypothesis)
            if rank > 0 or target is None:
                continue
            if self.scores_texts:
                self.pairs.append((target, detokenized))
            elif self.align_dict is None and self.post_process is None:
                self.pairs.append((target_tokens, hypothesis["tokens"]))
            else:
                self.pairs.append((self._encode(target), self._encode(detokenized)))

    def _details(self, number: int, hypothesis: dict[str, Any]) -> Iterator[str]:
        yield f"P-{number}\t" + " ".join(f"{score:.4f}" for score in hypothesis["positional_scores"])
        if self.kind_of_alignment == "hard":
            yield f"A-{number}\t" + " ".join(f"{source}-{target}" for source, target in hypothesis["alignment"])
        if self.kind_of_alignment == "soft":
            yield f"A-{number}\t" + " ".join(",".join(probabilities) for probabilities in hypothesis["alignment"])
        if "steps" in hypothesis:
            yield f"I-{number}\t{hypothesis['steps']}"
        for step, tokens in enumerate(hypothesis.get("history", ())):
            yield f"E-{number}_{step}\t{_string(self.tgt_dict, tokens, None)}"

    def _decode(self, text: str) -> str:
        if self.bpe is not None:
            text = self.bpe.decode(text)
        return text if self.tokenizer is None else self.tokenizer.decode(text)

    def _encode(self, text: str) -> list[int]:
        """The words of a text as numbers."""
        return self.tgt_dict.encode_line(text, add_if_not_exist=True).tolist()


def _string(dictionary: Dictionary, tokens: list[int], post_process: str | None, **options: Any) -> str:
    """A dictionary's string; from plain numbers, unless it is a kind that may insist on a tensor."""
    plain = type(dictionary).string is Dictionary.string
    return dictionary.string(tokens if plain else torch.IntTensor(tokens), post_process, **options)
