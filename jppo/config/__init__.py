"""User settings: what a run is configured with. Standard library only."""
