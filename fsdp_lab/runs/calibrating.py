"""`calibrate`: the ranks' measurements as a `Calibration`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from fsdp_lab.cluster import Cluster
from fsdp_lab.core.spec import Spec
from fsdp_lab.planner.calibration import Calibration, references
from fsdp_lab.planner.shapes.presets import shape_for

PASSES = 6


def calibrate(cluster: Cluster, beside: Sequence[Spec] = (), *, passes: int = PASSES) -> Calibration:
    """Measures on all ranks of an idle cluster; see `Lab.calibrate`."""
    begun_s, devices = time.monotonic(), cluster.placement.devices
    on_gpu = devices[0] != "cpu"
    dtypes = ("fp32", "bf16", "fp16") if on_gpu else ("fp32", "bf16")  # products in fp16 are no use on a CPU
    timed = references(len(devices), dtypes, devices)
    shapes = tuple(replace(shape_for(r.spec.workload.model, r.spec.strategy.wrap), tapes={}) for r in timed)
    specs = [spec.to_dict() for spec in (*(r.spec for r in timed), *beside)]
    each = cluster.call("calibrate", specs=specs, dtypes=dtypes, passes=passes)
    name = str(cluster.call("status")[0]["device_name"])
    return Calibration.of(each, unix_s=time.time(), seconds=time.monotonic() - begun_s, name=name, devices=devices,
                          shapes=shapes)  # fmt: skip
