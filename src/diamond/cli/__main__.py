"""`python -m diamond.cli`: the same as the `diamond` command."""

from diamond.cli.main import main

main()
