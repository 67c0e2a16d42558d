"""Sampling by row draws the tokens of each row with its own random numbers, with fastgen and without."""

import numpy as np
import pytest
import torch
import transformers
from tiny_models import tiny

import fastgen
from fastgen.optimizer.transformers.row_draws import RowDraws, can_draw_by_row, drawing_by_row

CPU = torch.device("cpu")
PROBS = torch.tensor([0.0, 0.5, 0.0, 0.3, 0.2, 0.0])


def test_tokens_are_drawn_with_their_probabilities():
    rows = 20_000
    draws = RowDraws([(5, number, 0) for number in range(rows)], CPU)
    scores = PROBS.log().expand(rows, -1)
    chosen = draws(torch.zeros(rows, 1, dtype=torch.int64), scores).argmax(dim=-1)
    shares = torch.bincount(chosen, minlength=6) / rows
    assert torch.allclose(shares, PROBS, atol=0.015) and (shares[PROBS == 0] == 0).all()


def test_each_bit_of_a_key_gives_other_draws():
    keys = [(1 << bit, 0, 0) for bit in range(64)] + [(0, 1 << bit, 0) for bit in range(64)]
    keys += [((1 << 64) - 7, 0, 0), ((1 << 64) - 8, 0, 0), (0, 0, 0), (0, 0, 1)]
    draws = RowDraws(keys, CPU)
    scores, ids = torch.zeros(len(keys), 30_000), torch.zeros(len(keys), 1, dtype=torch.int64)
    drawn = [draws(torch.cat([ids] * length, dim=1), scores).argmax(dim=-1) for length in (1, 2, 3)]
    assert len({*map(tuple, torch.stack(drawn, dim=1).tolist())}) == len(keys)


def test_numbers_are_those_of_philox_in_their_order():
    generator = np.random.Philox(key=(3, 9), counter=(0, 0, 0, 1))
    draws = RowDraws([(3, 9, 1)], CPU)
    scores = torch.zeros(1, 1000)
    for length in range(1, 150):
        expected = int(((int(generator.random_raw()) >> 11) * 2.0**-53) * 1000)
        token = draws.tokens(torch.zeros(1, length, dtype=torch.int64), scores, torch.tensor([0])).item()
        assert abs(token - expected) <= 1  # sums of equal probabilities are rounded


@pytest.mark.parametrize("name", ["gpt2", "bart"])
@pytest.mark.parametrize("samples", [1, 3])
def test_samples_are_those_without_fastgen_and_of_one_row(name, samples):
    model, vocabulary = tiny(name), tiny(name).config.vocab_size
    ids = torch.randint(5, vocabulary, (4, 7), generator=torch.Generator().manual_seed(1))
    settings = {"do_sample": True, "num_return_sequences": samples, "max_new_tokens": 9, "top_k": 12}
    settings |= {"eos_token_id": list(range(20, vocabulary, 3)), "pad_token_id": 0}
    keys = [(7, number, sample) for number in range(4) for sample in range(samples)]

    def run(rows: slice) -> torch.Tensor:
        row_keys = keys[rows.start * samples : rows.stop * samples]
        with drawing_by_row(model, RowDraws(row_keys, CPU)):
            return model.generate(ids[rows], attention_mask=torch.ones_like(ids[rows]), **settings)

    with fastgen.disabled():
        expected = run(slice(0, 4))
    for _ in range(3):  # the last call captures its steps
        assert torch.equal(run(slice(0, 4)), expected)
    alone = run(slice(2, 3))
    width = alone.shape[1]
    assert torch.equal(alone, expected[2 * samples : 3 * samples, :width])
    assert "_get_logits_processor" not in vars(model)


def test_continuations_are_drawn_without_replacement():
    rows = 20_000
    draws = RowDraws([(5, number, 0) for number in range(rows)], CPU)
    drawn = draws.continuations(PROBS.log().expand(rows, -1), 2, 4)
    assert (drawn.sort(dim=1).values.diff(dim=1) > 0).all()  # no index twice, also of those without a probability
    shares = torch.zeros(6, 6).index_put((drawn[:, 0], drawn[:, 1]), torch.tensor(1 / rows), accumulate=True)
    expected = PROBS[:, None] * PROBS / (1 - PROBS[:, None])  # the second is drawn from the rest
    assert torch.allclose(shares, expected.fill_diagonal_(0), atol=0.015)
    later = draws.continuations(PROBS.log().expand(rows, -1), 3, 4)
    assert not torch.equal(later, drawn)


@pytest.mark.parametrize("name", ["gpt2", "bart"])
@pytest.mark.parametrize("early_stopping", [True, False])
def test_sampled_beams_are_those_of_one_input(name, early_stopping):
    model, vocabulary = tiny(name), tiny(name).config.vocab_size
    ids = torch.randint(5, vocabulary, (4, 7), generator=torch.Generator().manual_seed(1))
    settings = {"do_sample": True, "num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 9, "top_k": 12}
    settings |= {"eos_token_id": list(range(20, vocabulary, 9)), "pad_token_id": 0, "early_stopping": early_stopping}
    settings |= {"output_scores": True, "return_dict_in_generate": True}

    def run(rows: slice, seed: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
        draws = RowDraws([(seed, number, 0) for number in range(rows.start, rows.stop)], CPU)
        with drawing_by_row(model, draws, beams=True):
            generated = model.generate(ids[rows], attention_mask=torch.ones_like(ids[rows]), **settings)
        return generated.sequences, generated.sequences_scores

    with fastgen.disabled():
        expected, scores = run(slice(0, 4))
    assert torch.equal(run(slice(0, 4))[0], expected)
    assert not torch.equal(run(slice(0, 4), seed=8)[0], expected)
    for row in range(4):
        alone, score = run(slice(row, row + 1))
        assert torch.equal(alone, expected[2 * row : 2 * row + 2, : alone.shape[1]])
        assert torch.allclose(score, scores[2 * row : 2 * row + 2])
    assert "_get_top_k_continuations" not in vars(model)


@pytest.mark.parametrize("num_beams", [1, 2])
def test_draws_from_scores_that_are_not_finite_are_an_error(num_beams):
    model = tiny("gpt2")
    with torch.no_grad():
        model.lm_head.weight[:] = float("nan")
    for context in (fastgen.disabled, fastgen.enabled):
        draws = drawing_by_row(model, RowDraws([(1, 1, 0)] * 2, CPU), num_beams > 1)
        with context(), draws, pytest.raises(RuntimeError):
            model.generate(torch.full((2, 5), 6), do_sample=True, num_beams=num_beams, max_new_tokens=9)


def test_a_model_with_its_own_generate_is_left_alone():
    assert can_draw_by_row(tiny("gpt2"))
    assert can_draw_by_row(tiny("gpt2"), beams=True)
    assert not can_draw_by_row(tiny("whisper"))
    assert not can_draw_by_row(tiny("whisper"), beams=True)
    assert not can_draw_by_row(transformers.GPT2Model(tiny("gpt2").config))
