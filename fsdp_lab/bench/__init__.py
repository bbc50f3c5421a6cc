"""`fsdp-lab bench`: backends compared with each other in one launch, one step of each in turn, and the other benches.

Read plan.py (what is compared, on which work), interleave.py (the loop in a rank), launch.py (a rank),
benches.py (each bench: measurements, ratios with a control, text and JSON), and gpu.py (`bench gpu`, a list of them). The
launcher needs torch only to count GPUs, the ranks need no Jupyter. Benches on a Lab are in cli/lab_benches.py.
"""
