"""The private corner of ipykernel that `answer_while_busy` uses: there, and doing what we think."""

from __future__ import annotations

import ipywidgets
from ipykernel.comm.comm import BaseComm

from fsdp_lab.dashboard.forms import answer_while_busy


def test_this_ipykernel_routes_answers_as_we_believe():
    """Its rule: the answer goes to the shell that used the comm last. Where this fails, its docstring must be read anew;
    nothing else in the package depends on it."""
    comm = BaseComm(primary=False)
    comm._reply_subshell_id = "the shell that ran the cell"
    assert comm._reply_subshell_for({}, "the page's subshell") == "the shell that ran the cell"


def test_a_widget_answers_on_the_shell_that_the_page_chose():
    widget = ipywidgets.Button()
    widget.comm = BaseComm(primary=False)
    widget.comm._reply_subshell_id = "the shell that ran the cell"
    assert answer_while_busy([widget]) == 1
    assert widget.comm._reply_subshell_for({}, "the page's subshell") == "the page's subshell"


def test_without_such_routing_nothing_is_touched():
    widget = ipywidgets.Button()
    widget.comm = None
    assert answer_while_busy([widget]) == 0
