"""Backends against each other in one run, a step of each in turn, and what else a bench measures: `fsdp-lab bench`.

Read plan.py (what is compared, on what work), interleave.py (the loop in a rank), launch.py (how ranks start and end),
ratios.py (what comes out), benches.py (each bench: measure, ratios with a control, text and JSON). The launcher needs torch
only to count GPUs, the ranks no Jupyter. Benches on a Lab are in cli/lab_benches.py.
"""
