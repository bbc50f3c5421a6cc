"""The dashboard of a run on several hosts: ranks by host, and what crosses to other hosts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.browser.driver import DashboardPage
from tests.browser.jupyter import JupyterServer
from tests.hosts.machines import SshServers, site

FAKE = """\
from tests.dashboard.fake_lab import FakeLab
from fsdp_lab.dashboard import Dashboard
lab = FakeLab({ranks}, step_s=0.2, hosts={hosts})
dashboard = Dashboard(lab)
dashboard"""
REAL = """\
from fsdp_lab import Lab
from fsdp_lab.dashboard import Dashboard
lab = Lab(2, history=False)
dashboard = Dashboard(lab)
dashboard"""
AXIS = "(name) => [...window.Bokeh.documents].map(d => d.get_model_by_name(name)).find(Boolean)"
NAMES = f"(name) => [...({AXIS})(name).major_label_overrides.values()]"


def names(desk: DashboardPage, figure: str) -> list[str]:
    return list(desk.page.evaluate(NAMES, f"{figure}.rank_axis"))


@pytest.mark.slow
def test_64_ranks_are_named_by_their_hosts(server: JupyterServer, open_notebook, watched, picture) -> None:
    ranks, hosts = 64, 8
    desk = DashboardPage(open_notebook())
    watched(desk.notebook)
    desk.notebook.open(server.write(f"hosts{ranks}.ipynb", [FAKE.format(ranks=ranks, hosts=hosts)]))
    desk.notebook.run_all()
    desk.wait_drawn()
    desk.start()
    desk.wait_step(8)
    first = [f"gpu{i + 1}  {i * ranks // hosts}" for i in range(hosts)]
    for figure in ("communication.now", "memory.now"):
        told = names(desk, figure)
        assert [name for name in told if "gpu" in name] == first and len(told) <= 12
    note = desk.page.locator(".fsdp-card-communication", has_text="To other hosts").inner_text()
    assert "% of all" in note
    assert f"{ranks} ranks on {hosts} hosts" in desk.page.locator(".fsdp-lab").first.inner_text()
    for width, theme in ((1280, "Light"), (900, "Dark")):
        desk.show(width, theme)
        assert desk.clipped() == []
        desk.photograph(picture(f"hosts-{ranks}-{width}-{theme.lower()}"))


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_ranks_are_started_on_two_hosts_by_the_form(
    server: JupyterServer, open_notebook, watched, picture, tmp_path: Path
) -> None:
    with site(["alpha", "beta"], 7) as made:
        servers = SshServers(made, tmp_path)
        try:
            desk = DashboardPage(open_notebook())
            watched(desk.notebook)
            desk.notebook.open(server.write("ssh.ipynb", [REAL]))
            desk.notebook.run_all()
            desk.wait_drawn()
            desk.button("Hosts…").click()
            form = desk.page.locator(".fsdp-sweep:visible")
            assert "lose what they have trained" in form.inner_text()
            for label, value in (("hosts", "alpha, beta"), ("ranks per host", "1"), ("options", f"-F {servers.config}"),
                                 ("Python there", sys.executable)):  # fmt: skip
                role = "spinbutton" if value.isdigit() else "textbox"
                form.get_by_role(role, name=label, exact=True).fill(value)
            for width, theme in ((1280, "Light"), (900, "Dark")):
                desk.show(width, theme)
                assert desk.clipped() == []
                desk.photograph(picture(f"hosts-form-{width}-{theme.lower()}"))
            form.get_by_role("button", name="Start there").click()
            form.get_by_text("2 ranks are on alpha and beta.").wait_for(timeout=120_000)
            desk.start()
            desk.wait_step(12)
            assert names(desk, "communication.now") == ["alpha  0", "beta  1"]
            desk.choose("sharding", "shard_grad_op")
            desk.wait_note("sharding", r"applied at step \d+")
            desk.wait_steps_more(8)
            desk.show(1280, "Light")
            desk.photograph(picture("hosts-ssh"))
            desk.notebook.execute("lab.close()")
        finally:
            servers.close()
