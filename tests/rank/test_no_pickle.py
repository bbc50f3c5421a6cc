"""What ranks tell each other is never unpickled, which would execute what arrives."""

from contextlib import closing
from pathlib import Path
from unittest import mock

import pytest
from torch.distributed import distributed_c10d as c10d

from fsdp_lab.backends.state import gather_json
from tests.pool import Place, Pool
from tests.rank.test_session import DDP, session, spec


def _life(place: Place, folder: str) -> list[int]:
    """Start, all switches, a suspension, a checkpoint and its resume, while torch's functions for objects raise; and what
    all ranks tell each other."""
    refuse, steps = mock.Mock(side_effect=AssertionError("pickled")), []
    patched = mock.patch.multiple(c10d, _object_to_tensor=refuse, _tensor_to_object=refuse)
    with patched, closing(session(place)) as s:
        told = gather_json({"pair": (place.rank, None), "exact": 0.1 + place.rank, "text": "é" * place.rank})
        assert told == [{"pair": [r, None], "exact": 0.1 + r, "text": "é" * r} for r in range(2)]
        for changes in ({}, {"backend": "fsdp2"}, {"backend": "fsdp1"}, DDP, {"sharding": "zero1", "offload": "all"}):
            s.apply("run", spec(**changes).to_dict())
            steps.append(s.train(1)["step"])
        s.suspend()
        s.resume("run")
        s.save(folder)
        s.saves(30.0)
        s.world.barrier().wait()
        (path,) = (p for p in Path(folder).iterdir() if p.is_dir())
        s.restore("run", spec(backend="fsdp2").to_dict(), str(path))
        steps.append(s.train(1)["step"])
    return steps


@pytest.mark.slow
def test_ranks_start_switch_save_and_resume_without_a_pickle(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(_life, 2, str(tmp_path), reduction=None) == [[1, 2, 3, 4, 5, 6]] * 2
