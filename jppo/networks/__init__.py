"""Networks and action distributions: plug-ins of the algorithm in `ppo/`, which needs only their protocols."""
