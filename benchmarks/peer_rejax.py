"""Runs rejax's PPO (Liesen et al. 2024) for versus_jax_peers.py; see serving.py.

    python peer_rejax.py ENV NUM_ENVS NUM_STEPS UPDATES

Evaluations during training are disabled. rejax does not anneal the learning rate.
"""

import sys

import gymnax
import jax
import jax.numpy as jnp
from rejax import PPO
from serving import serve


def main(name: str, num_envs: int, num_steps: int, updates: int) -> None:
    env, params = gymnax.make(name)
    total = updates * num_envs * num_steps
    agent = PPO.create(
        env=env,
        env_params=params,
        agent_kwargs={"activation": "tanh", "hidden_layer_sizes": (64, 64)},
        num_envs=num_envs,
        num_steps=num_steps,
        num_epochs=4,
        num_minibatches=4,
        total_timesteps=total,
        eval_freq=total,
        skip_initial_evaluation=True,
        learning_rate=2.5e-4,
        max_grad_norm=0.5,
        gamma=0.99,
        gae_lambda=0.95,
    )
    agent = agent.replace(eval_callback=lambda algorithm, state, key: jnp.zeros(()))
    serve(agent.train, jax.random.PRNGKey(0))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
