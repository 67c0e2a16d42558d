"""A tiny multi-query Transformer learns to copy and to sort; `copy_and_sort.py` trains the other variants."""

import pytest
from models.mqa.copy_and_sort import VARIANTS, exact_match, trained

pytestmark = pytest.mark.slow


def test_a_multi_query_model_learns_to_copy_and_to_sort(one_thread):
    model = trained(700, **VARIANTS["multi-query local"])
    assert exact_match(model) >= 0.99
    assert exact_match(model, num_beams=4) >= 0.99
