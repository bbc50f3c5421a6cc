"""`Predictor`: predictions of Specs for the live panels, made by a thread of their own so that nobody waits for one."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict

from fsdp_lab.core.errors import FieldError
from fsdp_lab.core.spec import Spec
from fsdp_lab.dashboard.panels.base import Prediction
from fsdp_lab.dashboard.ports import LabLike, PlansLike
from fsdp_lab.models.check import is_language
from fsdp_lab.planner.plan import Plan
from fsdp_lab.planner.questions import planned_memory

MOST = 32  # that are remembered
AGAIN_S = 3.0  # where a time was lacking, it is asked for again after so long: the lab may have been calibrated

log = logging.getLogger(__name__)


class Predictor:
    """`of` may be called ten times a second: it looks up, or has a thread work out what is not known yet."""

    def __init__(self, lab: LabLike) -> None:
        self._lab = lab
        self._lock = threading.Lock()
        self._known: OrderedDict[str, tuple[Prediction | None, float]] = (
            OrderedDict()
        )  # spec -> prediction, due again at
        self._busy = False

    def of(self, spec: Spec) -> Prediction | None:
        """What is predicted of it; None where nothing is, or not yet."""
        with self._lock:
            ghost, due_s = self._known.get(spec.id, (None, 0.0))
            if time.monotonic() >= due_s and not self._busy:
                self._busy = True
                threading.Thread(target=self._work, args=(spec,), name="fsdp-lab-foretelling", daemon=True).start()
            return ghost

    def _work(self, spec: Spec) -> None:
        ghost, again_s = None, float("inf")
        try:
            ghost = self._foretold(spec)
            if ghost.step_time_s is None and isinstance(self._lab, PlansLike):
                again_s = time.monotonic() + AGAIN_S
        except FieldError:
            pass  # of such a model nothing can be said
        except Exception:
            log.exception("nothing could be predicted of %s", spec.workload.model)
        with self._lock:
            self._known[spec.id] = (ghost, again_s)
            self._known.move_to_end(spec.id)
            while len(self._known) > MOST:
                self._known.popitem(last=False)
            self._busy = False

    def _foretold(self, spec: Spec) -> Prediction:
        devices = spec.devices or self._lab.devices
        memory = planned_memory(spec, device="cpu" if "cpu" in devices else "cuda")
        plan = self._planned(spec)
        samples = spec.global_batch
        return Prediction(
            spec_id=spec.id,
            at_peak=memory.at_peak,
            host_bytes=memory.host_bytes,
            step_time_s=None if plan is None else plan.step_time_s,
            tokens=samples * spec.workload.seq_len if is_language(spec.workload) else samples,
        )

    def _planned(self, spec: Spec) -> Plan | None:
        if not isinstance(self._lab, PlansLike):
            return None
        try:
            return self._lab.plan(spec)
        except FieldError:  # the machine is not calibrated, or not for as many ranks
            return None
