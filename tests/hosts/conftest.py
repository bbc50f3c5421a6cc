"""Two hosts for this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hosts.machines import Site, site


@pytest.fixture(scope="package")
def two() -> Iterator[Site]:
    with site(["alpha", "beta"]) as made:
        yield made
