"""From prepared data to one model that stands for an ensemble: probe, teachers, student, and what they cost."""
