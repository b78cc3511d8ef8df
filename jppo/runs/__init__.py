"""Run directories and finished runs."""
