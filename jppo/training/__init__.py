"""`jppo.train`: settings, one loop per mode, logging and progress."""
