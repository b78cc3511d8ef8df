"""PPO in plain JAX."""
