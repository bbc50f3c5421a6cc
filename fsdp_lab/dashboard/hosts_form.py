"""The form of hosts: where the ranks are to be, on this machine, by SSH or by Slurm, and a button that starts them there.

A start takes seconds, or as long as Slurm's queue, so it has a thread of its own.
"""

from __future__ import annotations

import shlex
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import ipywidgets as widgets

from fsdp_lab.base.formatting import plural
from fsdp_lab.cluster import ClusterError
from fsdp_lab.cluster.assembly import StartProgress
from fsdp_lab.cluster.hosts import Hosts, SlurmHosts, ssh_hosts
from fsdp_lab.dashboard.forms import HIDDEN, InputForm, put, styled
from fsdp_lab.dashboard.lab_like import LabLike

HERE, SSH, SLURM = "this machine", "hosts by SSH", "a job of Slurm"
MOST = 4096
LOSES = (
    "The hosts are looked at first. When all can be used, the ranks here end and lose what they have trained: save it "
    "before, in a folder that the hosts have too, and resume there."
)


class HostsForm(InputForm):
    """`toggle` opens and closes it; `choose` takes field values of a Spec that follow from a move: the number of ranks."""

    css = "fsdp-sweep"

    def __init__(self, lab: LabLike, choose: Callable[[Mapping[str, Any]], None]) -> None:
        super().__init__()
        self._lab, self._choose = lab, choose
        self._mover: threading.Thread | None = None
        self._cancelled = threading.Event()
        self._progress: tuple[StartProgress, float] | None = None  # the newest, and when the start began, monotonic
        self._where = self.dropdown("ranks on", (HERE, SSH, SLURM), SSH, "Where the ranks are to be")
        styled(self._where, "fsdp-select")
        self._ranks = self._narrow("ranks", 2, 1, "Number of ranks on this machine")
        self._names = self._text("hosts", "gpu1, user@gpu2", "Names or addresses, as for ssh, with commas between them")
        self._count = self._narrow("hosts", 2, 1, "Number of hosts")
        self._each = self._narrow("ranks per host", 0, 0, "0: one for each GPU of a host, or one")
        self._partition = self._text("partition", "default", "Of the job, as for sbatch")
        self._time = self._text("time", "1:00:00", "Of the job, as for sbatch")
        self._options = self._text("options", "-J gateway", "More arguments for ssh, or for salloc")
        path = "Its path on the hosts, if it is another one than here"
        self._python = self._text("Python there", sys.executable, path)
        sync = widgets.Checkbox(value=False, description="install what they lack", indent=False)
        self._sync = self.add(styled(sync, "fsdp-check"))
        self._start = self.button("Start there", "play", "End the ranks, and start others there", self.start)
        self._start.button_style = "primary"
        leave = "Leave the queue; ranks start again where they were"
        self._cancel = self.button("Cancel", "stop", leave, self._cancelled.set)
        self._close = self.button("Close", "", "Close this form", self.toggle)
        self.message = styled(widgets.HTML(), "fsdp-sweep-said")
        self._fields = {
            HERE: (self._ranks,),
            SSH: (self._names, self._each, self._options, self._python, self._sync),
            SLURM: (self._count, self._each, self._partition, self._time, self._options, self._python, self._sync),
        }
        shown = dict.fromkeys(widget for fields in self._fields.values() for widget in fields)
        row = styled(widgets.Box([self._where, *shown, self._start, self._cancel, self._close]), "fsdp-sweep-row")
        self.widget = styled(widgets.VBox([row, self.message], layout=widgets.Layout(display=HIDDEN)), "fsdp-sweep")
        self._where.observe(lambda change: self._show_fields(), "value")
        self._show_fields()
        self.say(LOSES)
        self.tick()

    def _narrow(self, label: str, value: int, least: int, tooltip: str) -> widgets.BoundedIntText:
        return styled(self.number(label, value, least, MOST, tooltip), "fsdp-number")

    def _text(self, label: str, placeholder: str, tooltip: str) -> widgets.Text:
        entry = widgets.Text(placeholder=placeholder, description=label, tooltip=tooltip)
        return self.add(styled(entry, "fsdp-prompt"))

    def _show_fields(self) -> None:
        for field in {widget for fields in self._fields.values() for widget in fields}:
            put(field.layout, "display", "" if field in self._fields[self._where.value] else HIDDEN)

    @property
    def moving(self) -> bool:
        return self._mover is not None and self._mover.is_alive()

    def start(self) -> None:
        """Starts ranks there, on a thread. Raises ArgumentError for a field that is wrong."""
        if self.moving:
            return
        hosts, ranks = self._hosts(), self._ranks.value if self._where.value == HERE else None
        self._cancelled.clear()
        self.say("The hosts are looked for; until they are found, the run goes on.")
        move = (partial(self._move, hosts, ranks),)
        self._mover = threading.Thread(target=self.attempt, args=move, name="fsdp-lab-move", daemon=True)
        self._mover.start()
        self.tick()

    def _hosts(self) -> Hosts | None:
        options = tuple(shlex.split(self._options.value))
        python = self._python.value.strip() or None
        each, sync = self._each.value or None, self._sync.value
        common: dict[str, Any] = {"ranks_per_host": each, "python": python, "sync": sync}
        if self._where.value == SSH:
            return ssh_hosts(self._names.value, ssh_args=options, **common)
        if self._where.value == SLURM:
            partition, time_limit = self._partition.value.strip() or None, self._time.value.strip() or None
            job: dict[str, Any] = {"partition": partition, "time": time_limit, "options": options}
            return SlurmHosts(hosts=self._count.value, **job, **common)
        return None

    def _move(self, hosts: Hosts | None, ranks: int | None) -> None:
        try:
            self._lab.move(hosts, ranks, progress=self._report)
        finally:
            self._progress = None
        places = dict.fromkeys(status.host for status in self._lab.rank_status())
        n = len(self._lab.devices)
        self._choose({"world_size": n, "devices": None})
        self.say(f"{plural(n, 'rank')} {'are' if n > 1 else 'is'} on {listed([*places])}. Start begins a run there.")

    def _report(self, p: StartProgress) -> None:
        """Raises ClusterError where the start was cancelled."""
        if self._cancelled.is_set():
            raise ClusterError("the start there was cancelled, and ranks are where they were")
        self._progress = p, time.monotonic() - p.seconds

    def tick(self) -> None:
        """Buttons that can be pressed now, and how far a start is."""
        if (progress := self._progress) is not None:
            p, began_s = progress
            self.say(f"{p.stage[0].upper()}{p.stage[1:]}: {p.done} of {p.total}, {time.monotonic() - began_s:.0f} s")
        put(self._start, "disabled", self.moving or self._lab.closed)
        put(self._cancel, "disabled", not self.moving)


def listed(names: Sequence[str]) -> str:
    """`gpu1, gpu2 and gpu3`; of more than five names four, and the number of the others."""
    shown = [*names[:4], f"{len(names) - 4} more"] if len(names) > 5 else [*names]
    return f"{', '.join(shown[:-1])} and {shown[-1]}" if len(shown) > 1 else "".join(shown)
