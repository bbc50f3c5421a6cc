"""Two hosts for this folder."""

from collections.abc import Iterator

import pytest

from tests.hosts.machines import Site, site


@pytest.fixture(scope="package")
def two() -> Iterator[Site]:
    with site(["alpha", "beta"]) as made:
        yield made
