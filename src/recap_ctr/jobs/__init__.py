"""Where independent work runs, and what it shows while it runs. It knows nothing of models."""
