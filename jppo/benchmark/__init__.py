"""`jppo.bench`."""
