"""Every class of transformers that generates has equal outputs, and the table of docs/ says what it gets."""

import re

import pytest
import transformers
from auto_models import WITHOUT_MODEL, auto_classes, auto_model, modeling_modules
from auto_parity import EVERY_CLASS, PAGE, cells_of, read_table

pytestmark = pytest.mark.slow

TABLE = read_table(EVERY_CLASS)
IS_VERSION_OF_TABLE = f"transformers {transformers.__version__}," in PAGE.read_text(encoding="utf-8")


def skip_if_missing(name: str) -> None:
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")


@pytest.mark.parametrize("name", TABLE)
def test_a_class_is_equal_and_gets_what_the_table_says(name, record_property):
    skip_if_missing(name)
    model = auto_model(name)
    record_property("modeling_modules", sorted(modeling_modules(model)))
    cells = cells_of(model)
    assert cells == TABLE[name] or not IS_VERSION_OF_TABLE


@pytest.mark.parametrize("name", WITHOUT_MODEL)
def test_no_tiny_model_of_the_other_classes_generates(name):
    skip_if_missing(name)
    with pytest.raises(Exception, match=re.escape(WITHOUT_MODEL[name]) if IS_VERSION_OF_TABLE else ""):
        cells_of(auto_model(name))


@pytest.mark.skipif(not IS_VERSION_OF_TABLE, reason="the table is of another version")
def test_every_class_of_the_auto_mappings_is_listed():
    assert sorted(auto_classes()) == sorted([*TABLE, *WITHOUT_MODEL])
