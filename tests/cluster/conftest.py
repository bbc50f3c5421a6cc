"""One cluster of two ranks without torch for this folder; what breaks it is repaired by the next test that takes it."""

from collections.abc import Iterator

import pytest

from fsdp_lab.cluster.cluster import Cluster
from fsdp_lab.spec.spec import Spec

FAKE = "tests.cluster.fake_rank"


@pytest.fixture(scope="package")
def resident() -> Iterator[Cluster]:
    with Cluster(2, rank_module=FAKE) as cluster:
        yield cluster


@pytest.fixture
def cluster(resident: Cluster) -> Cluster:
    """Two healthy ranks that have applied the default Spec."""
    if not resident.running or resident.ranks != 2:
        resident.resize(2)
    order(resident)
    return resident


def order(cluster: Cluster, data: str = "stdlib", run: str = "r") -> None:
    """Applies a Spec whose data orders a failure (see `fake_rank`)."""
    cluster.call("apply", run=run, spec=Spec(world_size=cluster.ranks).replace(data=data).to_dict(), fresh=True)
