"""`torchrun --nproc-per-node 2 -m fsdp_lab.rank spec.json`: see `main`."""

from fsdp_lab.rank.rendezvous import end_process
from fsdp_lab.rank.torchrun import main

if __name__ == "__main__":
    end_process(main())
