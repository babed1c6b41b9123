"""Command line: each command is a module with ``main(argv) -> int`` (its exit status)."""
