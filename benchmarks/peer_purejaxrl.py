"""Runs PureJaxRL's PPO (Lu et al. 2022) for versus_jax_peers.py; see serving.py.

    python peer_purejaxrl.py CLONE ENV NUM_ENVS NUM_STEPS UPDATES [RECURRENT]

CartPole and MinAtar use PureJaxRL's `ppo.py`; if RECURRENT is 1, `ppo_rnn.py`. Pendulum uses its
`ppo_continuous_action.py` with two layers of 64 and without normalization.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import flax.linen as nn
import jax
import jax.numpy as jnp
from serving import serve


def main(clone: str, env: str, num_envs: int, num_steps: int, updates: int, recurrent: int = 0) -> None:
    """Trains with PureJaxRL's settings, except for the sizes. Networks and epochs are those of jppo's defaults."""
    config = {
        "LR": 2.5e-4,
        "NUM_ENVS": num_envs,
        "NUM_STEPS": num_steps,
        "TOTAL_TIMESTEPS": updates * num_envs * num_steps,
        "UPDATE_EPOCHS": 4,
        "NUM_MINIBATCHES": 4,
        "GAMMA": 0.99,
        "GAE_LAMBDA": 0.95,
        "CLIP_EPS": 0.2,
        "ENT_COEF": 0.01,
        "VF_COEF": 0.5,
        "MAX_GRAD_NORM": 0.5,
        "ACTIVATION": "tanh",
        "ENV_NAME": env,
        "ANNEAL_LR": True,
        "NORMALIZE_ENV": False,
        "DEBUG": False,
    }
    serve(load(clone, env, bool(recurrent)).make_train(config), jax.random.PRNGKey(0))


def load(clone: str, env: str, recurrent: bool = False) -> ModuleType:
    """Imports PureJaxRL's module for this environment."""
    sys.path[:0] = [clone, str(Path(clone) / "purejaxrl")]
    if not hasattr(jax.interpreters.xla, "pytype_aval_mappings"):  # distrax 0.1.9 reads it; JAX 0.11 does not have it
        jax.interpreters.xla.pytype_aval_mappings = jax._src.core.pytype_aval_mappings
    for package in ("brax", "navix"):  # its wrappers import them for other environments
        if importlib.util.find_spec(package) is None:
            names = (package, "brax.envs", "brax.envs.wrappers", "brax.envs.wrappers.training")
            sys.modules |= {name: MagicMock() for name in names if name.startswith(package)}
    if recurrent:
        import ppo_rnn

        # its calls are those of an older flax
        ppo_rnn.nn = SimpleNamespace(Dense=nn.Dense, relu=nn.relu, GRUCell=lambda: nn.GRUCell(features=128))
        ppo_rnn.ScannedRNN.initialize_carry = staticmethod(lambda batch_size, size: jnp.zeros((batch_size, size)))
        return ppo_rnn
    if env != "Pendulum-v1":
        import ppo

        return ppo
    import ppo_continuous_action

    ppo_continuous_action.BraxGymnaxWrapper = OfGymnax
    ppo_continuous_action.ActorCritic = Narrow
    return ppo_continuous_action


class OfGymnax:
    """Replaces PureJaxRL's wrapper for Brax, so that gymnax's Pendulum can be used."""

    def __init__(self, name: str) -> None:
        import gymnax

        self._env, self._params = gymnax.make(name)

    def reset(self, key: Any, params: None) -> Any:
        return self._env.reset(key, self._params)

    def step(self, key: Any, state: Any, action: Any, params: None) -> Any:
        return self._env.step(key, state, action, self._params)

    def action_space(self, params: None) -> Any:
        return self._env.action_space(self._params)

    def observation_space(self, params: None) -> Any:
        return self._env.observation_space(self._params)


class Narrow(nn.Module):
    """Replaces PureJaxRL's network, which has layers of 256, by one with layers of 64."""

    action_dim: int
    activation: str

    @nn.compact
    def __call__(self, x: Any) -> Any:
        import distrax

        def torso(x: Any) -> Any:
            for _ in range(2):
                x = nn.tanh(nn.Dense(64, kernel_init=nn.initializers.orthogonal(2**0.5))(x))
            return x

        mean = nn.Dense(self.action_dim, kernel_init=nn.initializers.orthogonal(0.01))(torso(x))
        log_std = self.param("log_std", nn.initializers.zeros, (self.action_dim,))
        value = nn.Dense(1, kernel_init=nn.initializers.orthogonal(1.0))(torso(x))
        return distrax.MultivariateNormalDiag(mean, jnp.exp(log_std)), value[..., 0]


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:]))
