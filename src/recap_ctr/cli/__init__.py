"""The `recap` command: it parses, calls what `recap_ctr` offers in Python, and prints."""
