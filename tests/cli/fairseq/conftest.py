"""The data and model of fairseq's commands; no test changes them."""

import pytest


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    from fairseq_command_data import command_data

    return command_data(tmp_path_factory.getbasetemp())
