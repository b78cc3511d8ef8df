"""`jppo.sweep` and Ray Tune."""
