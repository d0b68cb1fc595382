"""Programs that are compiled once for all tests of the ways to Metal."""

import pytest


@pytest.fixture(scope="session")
def lanes(tmp_path_factory):
    from metal.lanes import Lanes

    return Lanes(tmp_path_factory.mktemp("metal"))
