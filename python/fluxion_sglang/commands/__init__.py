"""Commands that examine a server. Modules have `add_arguments(parser)` and `run(arguments)`, which returns a code."""
