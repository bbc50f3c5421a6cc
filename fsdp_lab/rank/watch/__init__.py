"""A training loop that is not the lab's, on a rank: what its model was set up with (found.py), its steps (loop.py), and
whether its updates are what they should be (audit.py).

The entry is `fsdp_lab.watch` (runs/history/loops.py); the kernel has a loop as a `WatchedRun` (runs/watched.py)."""
