"""What no-repeat-n-gram refuses: the error names the argument, what it was and what would be accepted."""

from __future__ import annotations

import pytest
import torch

from fastgen.ops.no_repeat_ngram import no_repeat_ngram, no_repeat_ngram_

FORMS = [no_repeat_ngram_, no_repeat_ngram]
OPS = [torch.ops.fastgen.no_repeat_ngram_.default, torch.ops.fastgen.no_repeat_ngram.default]

# How arguments that are accepted are changed into such that are not, and the error without the argument's name.
CHANGES = (
    ("tokens", lambda old: old.tolist(), "is of type list (accepted: Tensor)"),
    ("tokens", lambda old: old.short(), "has dtype int16 (accepted: int32, int64)"),
    ("tokens", lambda old: old.float(), "has dtype float32 (accepted: int32, int64)"),
    ("tokens", lambda old: old[0], "has shape [5] (accepted: [rows, width])"),
    ("tokens", lambda old: old.to("meta"), "is on meta (accepted: cpu, as scores)"),
    ("scores", lambda old: None, "is of type NoneType (accepted: Tensor)"),
    ("scores", lambda old: old.double(), "has dtype float64 (accepted: float32, float16, bfloat16)"),
    ("scores", lambda old: old[None], "has shape [1, 4, 7] (accepted: [rows, vocabulary_size])"),
    ("scores", lambda old: old[:3], "has 3 rows (accepted: 4, as tokens)"),
    (
        "scores",
        lambda old: old.requires_grad_(),
        "requires gradients (accepted: scores that do not, or a call under torch.no_grad())",
    ),
    ("ngram_size", lambda old: 2.0, "is of type float (accepted: int)"),
    ("ngram_size", lambda old: True, "is of type bool (accepted: int)"),
    ("ngram_size", lambda old: 0, "is 0 (accepted: 1 or more)"),
    ("ngram_size", lambda old: -3, "is -3 (accepted: 1 or more)"),
    ("lengths", lambda old: old.tolist(), "is of type list (accepted: int, tensor of int32 or int64, None)"),
    ("lengths", lambda old: 5.0, "is of type float (accepted: int, tensor of int32 or int64, None)"),
    ("lengths", lambda old: False, "is of type bool (accepted: int, tensor of int32 or int64, None)"),
    ("lengths", lambda old: 6, "is 6 (accepted: 0 to 5, the width of tokens)"),
    ("lengths", lambda old: -1, "is -1 (accepted: 0 to 5, the width of tokens)"),
    ("lengths", lambda old: old.half(), "has dtype float16 (accepted: int32, int64)"),
    ("lengths", lambda old: old[:1], "has shape [1] (accepted: [] or [4])"),
    ("lengths", lambda old: old[:, None], "has shape [4, 1] (accepted: [] or [4])"),
    ("lengths", lambda old: old.to("meta"), "is on meta (accepted: cpu, as scores)"),
    ("encoder_tokens", lambda old: [[1]], "is of type list (accepted: Tensor, None)"),
    ("encoder_tokens", lambda old: old.int(), "has dtype int32 (accepted: int64)"),
    ("encoder_tokens", lambda old: old[0], "has shape [5] (accepted: [rows / beams, source_width])"),
    ("encoder_tokens", lambda old: old.new_zeros(3, 5), "has 3 rows (accepted: a divisor of 4, the rows of tokens)"),
    ("encoder_tokens", lambda old: old[:0], "has 0 rows (accepted: a divisor of 4, the rows of tokens)"),
    ("encoder_tokens", lambda old: old.to("meta"), "is on meta (accepted: cpu, as scores)"),
)
# torch itself refuses what is no tensor or no int, and takes a length that is an int only as a tensor.
CHECKED_BY_THE_OP = [change for change in CHANGES if "is of type" not in change[2] and "0 to 5" not in change[2]]


@pytest.fixture
def arguments() -> dict:
    return {
        "tokens": torch.zeros(4, 5, dtype=torch.int64),
        "scores": torch.zeros(4, 7),
        "ngram_size": 2,
        "lengths": torch.full((4,), 5),
        "encoder_tokens": torch.zeros(2, 5, dtype=torch.int64),
    }


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("name", "change", "message"), CHANGES, ids=[f"{name} {m}" for name, _, m in CHANGES])
def test_what_is_wrong_is_named(name, change, message, form, arguments):
    form(**arguments)  # accepted as it is
    scores = arguments["scores"].zero_()
    arguments[name] = change(arguments[name])
    with pytest.raises(TypeError if "type" in message else ValueError) as raised:
        form(**arguments)
    assert str(raised.value) == f"{name} {message}"
    assert not scores.any()


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("name", "change", "message"), CHECKED_BY_THE_OP, ids=[m for *_, m in CHECKED_BY_THE_OP])
def test_the_registered_ops_check_too(name, change, message, op, arguments):
    arguments[name] = change(arguments[name])
    with pytest.raises(TypeError if "type" in message else ValueError) as raised:
        op(**arguments)
    assert str(raised.value) == f"{name} {message}"


@pytest.mark.parametrize("form", FORMS)
def test_tensors_without_data_are_checked_too(form, arguments):
    without_data = {key: value.to("meta") if key != "ngram_size" else value for key, value in arguments.items()}
    assert form(**without_data).shape == (4, 7)
    with pytest.raises(ValueError, match="scores has 3 rows"):
        form(**without_data | {"scores": torch.zeros(3, 7, device="meta")})


@pytest.mark.parametrize(("shape", "dimension"), [((4, 1), 1), ((1, 7), 0)])
def test_expanded_scores_are_written_only_as_a_copy(shape, dimension, arguments):
    arguments["scores"] = torch.zeros(shape).expand(4, 7)
    with pytest.raises(ValueError) as raised:
        no_repeat_ngram_(**arguments)
    wanted = f"scores is expanded along dimension {dimension} (accepted: scores with memory of their own)"
    assert str(raised.value) == wanted
    assert (no_repeat_ngram(**arguments) == -torch.inf).nonzero().tolist() == [[row, 0] for row in range(4)]
    assert not arguments["scores"].any()


def test_scores_with_rows_that_overlap_are_written_only_as_a_copy(arguments):
    arguments["scores"] = torch.zeros(100).as_strided(arguments["scores"].shape, (1, 1))
    with pytest.raises(ValueError, match="strides 1 and 1, rows overlap"):
        no_repeat_ngram_(**arguments)
    no_repeat_ngram(**arguments)
