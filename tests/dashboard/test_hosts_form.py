"""The form of hosts: what it asks the lab for, and what it says."""

from __future__ import annotations

import re

import pytest

from fsdp_lab.cluster.hosts import SlurmHosts, SshHosts
from fsdp_lab.dashboard.opened_forms import HERE, LOSES, SLURM, HostsForm
from tests.dashboard.fake_lab import FakeLab
from tests.waiting import until


@pytest.fixture
def lab() -> FakeLab:
    return FakeLab()


@pytest.fixture
def chosen() -> list[dict[str, object]]:
    return []


@pytest.fixture
def form(lab: FakeLab, chosen: list[dict[str, object]]) -> HostsForm:
    return HostsForm(lab, chosen.append)


def moved(form: HostsForm) -> str:
    """Presses the button, and waits for what is said."""
    form._start.click()
    until(lambda: not form.is_asking)
    form.tick()
    return str(form.message.value)


def test_it_starts_ranks_by_ssh(lab: FakeLab, form: HostsForm, chosen: list[dict[str, object]]) -> None:
    assert LOSES in form.message.value
    form._names.value, form._each.value, form._options.value = "gpu1, me@gpu2", 4, "-F 'my config'"
    assert "4 ranks are on gpu1 and gpu2. Start begins a run there." in moved(form)
    ((hosts, ranks),) = lab.moves
    assert (
        hosts == SshHosts(names=("gpu1", "me@gpu2"), ranks_per_host=4, ssh_args=("-F", "my config")) and ranks is None
    )
    assert chosen == [{"world_size": 4, "devices": None}], "the next start is on all of them"


def test_it_starts_ranks_in_a_job_and_here(lab: FakeLab, form: HostsForm) -> None:
    form._where.value = SLURM
    form._count.value, form._time.value, form._python.value, form._sync.value = 3, "1:00:00", "/opt/python", True
    assert "6 ranks are on gpu1, gpu2 and gpu3." in moved(form)
    form._where.value, form._ranks.value = HERE, 1
    assert "1 rank is on gpu1." in moved(form)
    asked = SlurmHosts(hosts=3, time="1:00:00", python="/opt/python", sync=True)
    assert lab.moves == [(asked, None), (None, 1)]


def test_only_the_fields_of_a_place_are_shown(form: HostsForm) -> None:
    def shown() -> set[str]:
        fields = {widget for fields in form._fields.values() for widget in fields}
        return {widget.description for widget in fields if widget.layout.display != "none"}

    assert {"hosts", "options"} < shown() and "partition" not in shown()
    form._where.value = SLURM
    assert {"partition", "time"} < shown()
    form._where.value = HERE
    assert shown() == {"ranks"}


def test_what_is_wrong_is_said(lab: FakeLab, form: HostsForm) -> None:
    form._names.value = "gpu1, gpu1"
    assert "gpu1 is named twice" in moved(form).lower()
    form._options.value = "-F 'open"
    assert "quot" in moved(form).lower()
    assert lab.moves == [], "before anything is started"
    form._names.value, form._options.value = "nowhere", ""
    said = moved(form)
    assert "the name nowhere does not resolve: give an address" in said and "fsdp-refused" in said


def test_a_queue_is_shown_and_left(lab: FakeLab, form: HostsForm) -> None:
    lab.move_gate.clear()
    form._where.value = SLURM
    assert form._cancel.disabled
    form._start.click()

    def seconds() -> int:
        form.tick()
        found = re.search(r"Job 7 is pending \(Resources\): 0 of 2, (\d+) s", form.message.value)
        return int(found[1]) if found else 0

    until(lambda: seconds() >= 1)
    assert form._start.disabled and not form._cancel.disabled
    form._start.click()  # a second press does nothing
    form._cancel.click()
    until(lambda: not form.is_asking)
    form.tick()
    assert "cancelled, and ranks are where they were" in form.message.value
    assert not form._start.disabled and len(lab.moves) == 1
