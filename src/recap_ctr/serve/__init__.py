"""The HTTP server: a supervisor that owns the listening socket, and workers that each hold one engine."""
