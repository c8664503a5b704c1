"""`python -m zerobubble` is the `zerobubble` command."""

from zerobubble.cli import main

main(prog_name="zerobubble")
