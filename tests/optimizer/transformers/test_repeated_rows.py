"""Rows that the caller has repeated, not all equally often: the prefill runs for one of each."""

import pytest
import torch
from architectures import SPECIAL
from hooks import watched
from hypothesis import given, settings
from hypothesis import strategies as st
from parity import compared
from reports import CROSS, PREFILL, PROMPT, is_shared
from tiny_models import TOKENS_ONLY, inputs_of, unchanged

from fastgen.optimizer.decoding.report import KV_CACHE, Report
from fastgen.optimizer.transformers import row_groups
from fastgen.optimizer.transformers.row_groups import RowGroups

GROUPS = "prefill: one of each group of equal rows"

pytestmark = pytest.mark.usefixtures("share_always")


def rows(name: str, *sizes: int) -> dict[str, torch.Tensor]:
    """Returns inputs of different lengths, each repeated so often."""
    inputs = inputs_of(name, *range(9, 9 - len(sizes), -1))
    return {key: value.repeat_interleave(torch.tensor(sizes), dim=0) for key, value in inputs.items()}


def repeated_because(report: Report, names: str) -> bool:
    """Returns whether the prefill ran once per group, and keys are stored for each row: no size divides all."""
    repeated = [
        reason.text for part, reason in report.not_done if part == KV_CACHE and reason.code == "GROUP_SIZES_DIFFER"
    ]
    return GROUPS in report.shared and any(names in text for text in repeated)


@pytest.mark.parametrize("name", ("llama", "gpt2", "mistral", "bart", "t5", "falcon_h1"))
@pytest.mark.parametrize("options", ({"do_sample": True}, {"do_sample": False}), ids=("samples", "greedy"))
def test_groups_of_several_sizes_are_computed_once(name, options):
    both = compared(unchanged(name), rows(name, 5, 3, 1), max_new_tokens=7, **options)
    assert repeated_because(both.report, "groups of 5, 3, 1, not of one size")


@pytest.mark.parametrize("name", ("llama", "bart"))
def test_keys_are_shared_by_as_many_rows_as_divide_all_groups(name):
    both = compared(unchanged(name), rows(name, 4, 2), max_new_tokens=7, do_sample=True)
    for part in (GROUPS, PROMPT, *[CROSS] * (name == "bart")):
        assert any(item.startswith(part) for item in both.report.shared), part
    assert both.report.inputs == 3 and both.report.rows == 6


def test_one_row_of_each_group_goes_through_the_model():
    with watched("take a row of each group") as taken:
        compared(unchanged("llama"), rows("llama", 5, 3), max_new_tokens=3, do_sample=False)
    assert [call.result["input_ids"].shape for call in taken] == [(2, 9)]


def test_groups_of_one_size_are_inputs():
    both = compared(unchanged("llama"), rows("llama", 3, 3), max_new_tokens=7, do_sample=True)
    assert is_shared(both.report, PROMPT) and PREFILL in both.report.shared and both.report.inputs == 2


def test_rows_with_other_masks_or_apart_are_other_groups():
    masked, apart = rows("llama", 2, 2), {key: value[[0, 0, 2, 2, 2, 0]] for key, value in rows("llama", 2, 2).items()}
    masked["attention_mask"][3, 3] = 0
    for inputs, sizes in ((masked, "2, 1, 1"), (apart, "2, 3, 1")):
        both = compared(unchanged("llama"), inputs, max_new_tokens=5, do_sample=False)
        assert repeated_because(both.report, f"groups of {sizes}")


def test_groups_may_end_at_different_times():
    inputs = rows("llama", 4, 2, 2, 4)
    model = unchanged("llama")
    both = compared(model, inputs, max_new_tokens=12, do_sample=False, output_scores=False, output_logits=False)
    ends = both.stock.sequences[[0, 4], [-9, -5]].tolist()  # two inputs end, after different numbers of tokens
    both = compared(model, inputs, max_new_tokens=12, do_sample=False, eos_token_id=ends, **TOKENS_ONLY)
    assert GROUPS in both.report.shared


@pytest.mark.parametrize("name", ("llama", "bart"))
def test_groups_share_the_prefill_of_static_caches(name):
    both = compared(
        unchanged(name), rows(name, 3, 1), max_new_tokens=5, do_sample=False, cache_implementation="static",
        disable_compile=True,
    )  # fmt: skip
    assert GROUPS in both.report.shared


@pytest.mark.parametrize("axes", [3, 4, 6])
def test_position_ids_of_several_axes_have_their_rows_second(axes):
    position_ids = torch.arange(axes * 6 * 5).view(axes, 6, 5)  # with 6 axes as many axes as rows
    taken = row_groups.take({"position_ids": position_ids}, 6, RowGroups([3, 3]).firsts)["position_ids"]
    assert torch.equal(taken, position_ids[:, [0, 3]])
    repeated = row_groups.repeat({"position_ids": taken}, RowGroups([3, 3]))["position_ids"]
    assert torch.equal(repeated, position_ids[:, [0, 0, 0, 3, 3, 3]])


def test_rows_of_position_ids_are_compared_row_by_row():
    position_ids = torch.arange(3 * 3 * 5).view(3, 3, 5)
    assert not row_groups.groups_are_equal_sync({"position_ids": position_ids}, RowGroups([3]))
    assert row_groups.groups_are_equal_sync({"position_ids": position_ids[:, :1].expand(3, 3, 5)}, RowGroups([3]))


@settings(deadline=None, max_examples=25)
@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    name=st.sampled_from(["llama", "t5", "mistral"]),
    do_sample=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_groups_of_random_sizes_agree_with_the_library(sizes, name, do_sample, seed):
    generator = torch.Generator().manual_seed(seed)
    ends = torch.randint(5, 90, (8,), generator=generator).tolist()
    both = compared(
        unchanged(name), rows(name, *sizes), max_new_tokens=8, do_sample=do_sample,
        eos_token_id=[SPECIAL["eos_token_id"], *ends],
    )  # fmt: skip
    assert both.report.rows == sum(sizes)
