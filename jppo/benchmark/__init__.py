"""`jppo.bench` and `jppo.plan`."""
