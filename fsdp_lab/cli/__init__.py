"""The `fsdp-lab` command. `main` parses the command line. A command is a pair of functions, `add_arguments(parser)` and
`run(args) -> int`, which import what is heavy themselves, so that `fsdp-lab --help` and refusals are quick."""
