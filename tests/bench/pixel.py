"""From the end of a step to the frame on the screen: a dashboard in JupyterLab in chromium, by its acknowledgements."""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from fsdp_lab.cli.bench import say
from tests.browser.driver import DashboardPage
from tests.browser.jupyter import JupyterServer, Notebook, chromium

MAKE = "from fsdp_lab import Lab; lab = Lab(ranks={ranks}, history=False)"
MAKE_FAKE = "from tests.dashboard.fake_lab import FakeLab; lab = FakeLab({ranks}, step_s={step_s})"
CELL = """\
import time
from fsdp_lab import Dashboard
dashboard = Dashboard(lab)
feed, live, waiting, due, took_s, begun = dashboard._feed, dashboard._live, [], {}, [], []
def tick(tick=feed.tick):
    waiting.extend(events := tick())
    if live._seq > max(due, default=0) and feed._stage.last is not None:
        drawn = [e for e in waiting if e.step <= feed._stage.last.number]
        waiting[:] = [e for e in waiting if e.step > feed._stage.last.number]
        due[live._seq] = [e.end_unix_s for e in drawn]
    return events
def painted(widget, content, buffers):
    for seq in [seq for seq in due if content.get("kind") == "ack" and seq <= content["seq"]]:
        took_s.extend(time.time() - end for end in due[seq])
        due[seq] = ()
feed.tick = tick
live.on_msg(painted)
dashboard"""
BEGIN = "begun += [live._seq, time.process_time()]; lab.run(lab.spec.replace(model='gpt2-1m'))"
END = (
    """print(json.dumps({"took_s": took_s, "ticks": live._seq - begun[0], "cpu_s": time.process_time() - begun[1]}))"""
)


def pixel(args: argparse.Namespace) -> dict[str, Any]:
    """`--step-ms`: steps of a lab without ranks; 0: real ones. The kernel's CPU time is of the dashboard, above all."""
    make = (MAKE_FAKE if args.step_ms else MAKE).format(ranks=args.ranks, step_s=args.step_ms / 1e3)
    with tempfile.TemporaryDirectory() as home, sync_playwright() as playwright, chromium(playwright) as browser:
        server = JupyterServer(Path(home))
        try:
            notebook = Notebook(browser.new_context(viewport={"width": 1280, "height": 900}).new_page(), server)
            notebook.open(server.write("pixel.ipynb", [""]))
            notebook.show(f"{make}\n{CELL}")
            desk = DashboardPage(notebook)
            desk.wait_drawn()
            desk.tab("loss")
            cdp = notebook.page.context.new_cdp_session(notebook.page)
            cdp.send("Performance.enable")
            notebook.execute(BEGIN)
            before_s = thread_s(cdp)
            notebook.page.wait_for_timeout(1e3 * args.seconds)
            page_s = thread_s(cdp) - before_s
            measured = json.loads(notebook.execute(f"import json; {END}"))
            notebook.execute("dashboard.close(); lab.close()")
        finally:
            server.stop()
    took_s = sorted(measured.pop("took_s"))
    p50_s, p95_s = (took_s[int(share * len(took_s))] for share in (0.5, 0.95))
    rates = {name: value / args.seconds for name, value in measured.items()}
    message_s = page_s / measured["ticks"]
    say(f"{args.ranks} ranks, {len(took_s)} events: p50 {1e3 * p50_s:.0f} ms, p95 {1e3 * p95_s:.0f} ms; "
        f"{rates['ticks']:.1f} messages a second, {rates['cpu_s']:.2f} cores of the kernel, "
        f"{1e3 * message_s:.0f} ms of the page's thread a message")  # fmt: skip
    row = {"p50_s": p50_s, "p95_s": p95_s, "events": len(took_s), "page_s": message_s, **rates}
    return {"rows": [row], "environment": {}}


def thread_s(cdp: Any) -> float:
    """CPU seconds of the page's main thread."""
    return next(m["value"] for m in cdp.send("Performance.getMetrics")["metrics"] if m["name"] == "ThreadTime")
