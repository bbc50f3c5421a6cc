"""The `fsdp-lab` command: lab, run, compare, kernel, doctor. Floor 6.

`main` reads the command line. Each command has a module of its own with `add_arguments(parser)` and `run(args) -> int`;
what is heavy (torch, Jupyter, rich) is imported inside, so that `fsdp-lab --help` and a refusal are quick.
"""
