"""A folder with a small policy and six problems, for the runs of one file of tests."""

import pytest

from tests.training.small_run import make_files


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    make_files(folder)
    return folder
