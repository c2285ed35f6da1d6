"""The HTTP server: one supervisor with the listening socket, and workers that each hold one engine."""
