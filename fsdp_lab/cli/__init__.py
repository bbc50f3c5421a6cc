"""The `fsdp-lab` command: lab, run, compare, kernel, doctor. Floor 6.

`main` reads the command line; each command has a module of its own, imported only when it is called.
"""
