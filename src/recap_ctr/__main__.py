"""Run the command line as `python -m recap_ctr`."""

from recap_ctr.cli.main import main

main()
