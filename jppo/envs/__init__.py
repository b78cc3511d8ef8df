"""The interface of environments, adapters for gymnax and Gymnasium, and checks."""

from jppo.envs.base import Environment, Step
from jppo.envs.gymnax import available, make_env

__all__ = ["Environment", "Step", "available", "make_env"]
