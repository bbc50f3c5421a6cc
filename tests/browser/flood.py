"""A lab whose events come from real engines in real messages, many more than ranks could run here: each of two engines
speaks for half of the ranks, a message a rank and step, as ranks do."""

from __future__ import annotations

import time
from typing import Any

import ipyparallel

from fsdp_lab.cluster.calls import Sink
from fsdp_lab.runs import RunState, Switch
from fsdp_lab.spec.spec import Spec
from tests.dashboard.fake_lab import FakeLab, FakeRun

ENGINES = 2
HZ = 10.0


def speak(spec: dict[str, Any], run: str, ranks: list[int], hz: float, steps: int) -> float:
    """In an engine: so many steps of these ranks, at most so many a second. Returns how long that took, in seconds."""
    import time

    from ipyparallel.datapub import publish_data

    from fsdp_lab.spec.spec import Spec
    from tests.dashboard.fake_lab import event

    wanted = Spec.from_dict(spec)
    begun_s = time.monotonic()
    for step in range(steps):
        for rank in ranks:
            publish_data({"events": [event(wanted, run, rank, step, first=step == 0).to_dict()]})
        time.sleep(max(0.0, begun_s + (step + 1) / hz - time.monotonic()))
    return time.monotonic() - begun_s


def get_ready() -> None:
    """In an engine: what `speak` imports."""
    import tests.dashboard.fake_lab  # noqa: F401


class FloodRun(FakeRun):
    """`spoken_s` is how long each engine took to tell its steps, when it is over."""

    def __init__(self, run_id: str, spec: Spec, *, spoken: int, client: Any) -> None:
        self.spoken_s: list[float] = []
        self._spoken, self._client = spoken, client
        super().__init__(run_id, spec, steps=None, step_s=0.0)

    def _train(self) -> None:
        self.switches.append(Switch(step=0, before=None, after=self.spec, seconds=0.0, carried=False))
        self.state = RunState.RUNNING
        n = self.spec.world_size
        parts = [list(range(n))[i::ENGINES] for i in range(ENGINES)]
        told = []
        for engine, ranks in zip(self._client.ids, parts, strict=True):
            future = self._client[engine].apply_async(speak, self.spec.to_dict(), self.id, ranks, HZ, self._spoken)
            self._client.metadata[future.msg_ids[0]]["data"] = Sink(lambda data: self.events.add(data["events"]))
            told.append(future)
        self.spoken_s = [future.get() for future in told]
        self.state = RunState.FINISHED


class FloodLab(FakeLab):
    def __init__(self, ranks: int, steps: int) -> None:
        super().__init__(ranks)
        self._steps = steps
        self._cluster = ipyparallel.Cluster(n=ENGINES)
        self._client = self._cluster.start_and_connect_sync(activate=False)
        begun_s = time.monotonic()
        while len(self._client) < ENGINES and time.monotonic() - begun_s < 60:
            time.sleep(0.1)
        self._client[:].apply_sync(get_ready)

    def run(self, spec: Spec | None = None, **options: Any) -> FakeRun:
        self.current = FloodRun("flood", self.spec, spoken=self._steps, client=self._client)
        return self.current

    def close(self) -> None:
        self._client.close()
        self._cluster.stop_cluster_sync()
        self.closed = True
