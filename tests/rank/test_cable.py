"""A cable that is really pulled: two ranks in network namespaces of their own, and the link between them goes down."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.rank.test_torchrun import tiny

LIMIT_S = 3.0
ENDS_S = 40.0  # `LIMIT_S`, then what ranks wait for each other's word, and for a store that does not answer
ADDRESSES = ("10.231.77.1", "10.231.77.2")
STORE = """
import sys
from fsdp_lab.rank import host_store
store = host_store(sys.argv[1])
print(store.place.rpartition(":")[2], flush=True)
sys.stdin.read()
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)


@pytest.fixture
def cable() -> Iterator[list[str]]:
    """Two namespaces with a cable between them, "cable0" and "cable1"."""
    names = [f"fsdp-lab-{os.getpid()}-{side}" for side in (0, 1)]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "cable0", "netns", names[0], "type", "veth", "peer", "name", "cable1", "netns", names[1])
        for i, name in enumerate(names):
            ip("-n", name, "addr", "add", f"{ADDRESSES[i]}/24", "dev", f"cable{i}")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", f"cable{i}", "up")
        yield names
    except (OSError, subprocess.CalledProcessError) as e:
        pytest.skip(f"network namespaces are not to be had here: {getattr(e, 'stderr', '') or e}".strip())
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=20)


@dataclass
class Sides:
    """What was started, in the namespaces of these names."""

    names: list[str]
    spec: Path
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, side: int, *command: str, **environment: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.names[side], sys.executable, *command],
            env={**os.environ, "OMP_NUM_THREADS": "1", "RES_OPTIONS": "timeout:1 attempts:1", **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def start_rank(self, rank: int, port: str) -> subprocess.Popen[str]:
        """As torchrun would."""
        where = {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "True",
                 "GLOO_SOCKET_IFNAME": f"cable{rank}"}  # fmt: skip
        command = ["-m", "fsdp_lab.rank", str(self.spec), "--steps", "1000000", "--hang-s", str(LIMIT_S)]
        return self.start(rank, *command, RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE="2", **where)

    def end(self) -> None:
        for process in self.started:
            process.kill()
            process.communicate()


@pytest.fixture
def sides(cable: list[str], tmp_path: Path) -> Iterator[Sides]:
    file = tmp_path / "spec.json"
    file.write_text(tiny().to_json())
    sides = Sides(cable, file)
    yield sides
    sides.end()


@pytest.mark.slow
def test_both_ranks_end_by_themselves_and_name_the_collective(sides: Sides) -> None:
    store = sides.start(0, "-c", STORE, ADDRESSES[0])
    assert store.stdout is not None
    port = store.stdout.readline().strip()
    ranks = [sides.start_rank(rank, port) for rank in (0, 1)]
    for step in range(3):
        assert ranks[0].stdout is not None
        line = ranks[0].stdout.readline()
        assert line, ranks[0].communicate(timeout=20)[1]
        assert json.loads(line)["step"] == step
    ip("-n", sides.names[1], "link", "set", "cable1", "down")
    end_s = time.monotonic() + ENDS_S
    for rank in ranks:
        _, error = rank.communicate(timeout=end_s - time.monotonic())
        assert rank.returncode == 1
        assert re.search(r"RankAborted: .*(all_gather of unit|reduce_scatter of unit|control) ", error), error
