"""Pages to look at: charts, and one self-contained HTML file made of them."""
