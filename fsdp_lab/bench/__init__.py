"""`fsdp-lab bench`. Read plan.py (what is compared, on which work), interleave.py (the loop in a rank), results.py (ratios
with a control, as text and JSON), and gpu.py (`bench gpu`, a list of parts). launch.py starts the ranks, tasks.py and
host.py have what they do. The parent needs torch only to count GPUs, the ranks need no Jupyter."""
