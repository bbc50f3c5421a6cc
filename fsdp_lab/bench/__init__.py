"""Backends against each other, step by step in one run: `fsdp-lab bench step`.

Read forms.py (what is compared), plan.py (on what work), interleave.py (the loop in a rank), ratios.py (what comes out
of it), launch.py (how the ranks are started and ended). The kernel's side needs no torch, the ranks no Jupyter.
"""
