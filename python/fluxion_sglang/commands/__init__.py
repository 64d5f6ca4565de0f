"""The commands that look at a server: each module has `add_arguments(parser)` and `run(arguments)`, an exit code."""
