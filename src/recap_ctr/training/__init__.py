"""One training run: its loop, its optimizer, its report, and several of them side by side."""
