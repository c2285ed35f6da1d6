"""From data to one model that does the work of an ensemble: race or probe, teachers, student, updates, and what they
cost."""
