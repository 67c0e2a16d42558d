"""n-gram blocking in fairseq works on every device like its CUDA kernel; scripted generators stay as they are."""

import pytest
import torch
from fairseq import ngram_repeat_block as blocking
from fairseq_generation import BlockingFromDefinition

import fastgen

PAD, EOS, VOCABULARY = 1, 2, 11


def tokens_and_scores(bsz: int, beam_size: int, step: int, seed: int = 0, width: int = 12):
    """Returns scores, and tokens like those of fairseq's generator: EOS, `step` tokens, padding."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.full((bsz * beam_size, width), PAD)
    tokens[:, 0] = EOS
    tokens[:, 1 : step + 1] = torch.randint(4, 6, (bsz * beam_size, step), generator=generator)
    return tokens, torch.randn(bsz * beam_size, VOCABULARY, generator=generator)


@pytest.mark.parametrize("ngram_size", [1, 2, 3, 4])
def test_ngrams_are_blocked_on_the_cpu(ngram_size):
    block = blocking.NGramRepeatBlock(ngram_size)
    blocked = 0
    for step in range(11):
        tokens, lprobs = tokens_and_scores(3, 2, step, seed=step)
        expected = BlockingFromDefinition(ngram_size)(tokens, lprobs.clone(), 3, 2, step)
        assert block(tokens, lprobs, 3, 2, step) is lprobs and torch.equal(lprobs, expected)
        blocked += int(lprobs.isinf().sum())
    assert blocked > 10


def test_only_blocking_differs_from_the_library_on_the_cpu():
    """The one intended difference: without fastgen the padding is compared, and nothing is blocked."""
    tokens, lprobs = torch.tensor([[EOS, 5, 6, 5, PAD, PAD]]), torch.zeros(1, VOCABULARY)
    block = blocking.NGramRepeatBlock(2)
    with fastgen.disabled():
        assert not block(tokens, lprobs.clone(), 1, 1, 3).isinf().any()
    assert block(tokens, lprobs.clone(), 1, 1, 3).isinf().nonzero().tolist() == [[0, 6]]


def test_wrong_sizes_are_refused_as_the_library_does():
    tokens, lprobs = tokens_and_scores(2, 2, 5)
    with pytest.raises(AssertionError, match="expected 6 got"):
        blocking.NGramRepeatBlock(2)(tokens, lprobs, 3, 2, 5)


@pytest.mark.parametrize("with_fastgen", [True, False])
def test_a_scripted_block_is_the_librarys_own(with_fastgen):
    """Its graph must run in a process without fastgen."""
    block = blocking.NGramRepeatBlock(2)
    if with_fastgen:
        scripted = torch.jit.script(block)
    else:
        with fastgen.disabled():
            scripted = torch.jit.script(block)
    assert "fastgen::" not in str(scripted.inlined_graph)
    tokens, lprobs = tokens_and_scores(2, 3, step=11)
    with fastgen.disabled():
        expected = block(tokens, lprobs.clone(), 2, 3, 11)
    assert torch.equal(scripted(tokens, lprobs.clone(), 2, 3, 11), expected)
