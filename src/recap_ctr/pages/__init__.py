"""HTML pages with charts: of runs, comparisons, diagnoses and benchmarks."""
