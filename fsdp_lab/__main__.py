"""`python -m fsdp_lab` is `fsdp-lab`."""

from fsdp_lab.cli.main import entry

if __name__ == "__main__":
    entry()
