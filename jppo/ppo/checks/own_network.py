"""Validates the settings of jppo's own network."""

import jax

from jppo.config.ppo import PPOConfig
from jppo.envs.spaces import ACTION_MASK
from jppo.errors import Refused
from jppo.ppo.layers.feed_forward import is_image
from jppo.ppo.types import PyTree


def check_own_network(config: PPOConfig, obs_spec: PyTree) -> None:
    """Raises ValueError for a cnn without images, or names in actor_obs or critic_obs that do not exist.

    Args:
      obs_spec: the observations' specs without the mask.
    """
    shapes = [spec.feature_shape for spec in jax.tree.leaves(obs_spec)]
    if config.network == "cnn" and not any(is_image(shape) for shape in shapes):
        raise Refused(
            f'network = "cnn" needs an image [height, width, channels] of at least 3x3; the observation is '
            f'{", ".join(map(str, shapes))}: use network = "mlp"'
        )
    for option in ("actor_obs", "critic_obs"):
        names = list(obs_spec) if isinstance(obs_spec, dict) else []
        for name in set(getattr(config, option)) - set(names):
            if name == ACTION_MASK:
                raise Refused(f"{option} names {name!r}, which is never an input of the network; leave it out")
            known = f"it has {', '.join(map(str, names))}" if names else "it has no named leaves"
            raise Refused(f"{option} names {name!r}, which the observation does not have; {known}")
