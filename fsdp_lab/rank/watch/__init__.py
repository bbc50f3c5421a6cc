"""A training loop that is not the lab's, on a rank: what its model was set up with (found.py), and its steps (loop.py).

The entry is `fsdp_lab.watch` (runs/history/loops.py); the kernel has a loop as a `WatchedRun` (runs/watched.py)."""
