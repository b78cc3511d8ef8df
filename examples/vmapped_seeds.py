"""Trains every learning rate with every seed in one program, with `jax.vmap`."""

import jax
import jax.numpy as jnp
import numpy as np

import jppo

LEARNING_RATES = (1e-5, 1e-3, 1e-1)


def main(total_steps: int = 100_000, num_seeds: int = 4) -> np.ndarray:
    """Returns the mean returns of the last update, [learning rates, seeds]."""
    config = jppo.PPOConfig(num_envs=16, num_steps=128)
    agent = jppo.make_anakin("CartPole-v1", config, total_steps=total_steps)

    def train(learning_rate: jax.Array, key: jax.Array) -> jax.Array:
        _, metrics = agent.train(key, jppo.Hyperparams(learning_rate=learning_rate))
        return metrics["episode/return_mean"][-1]

    over_seeds = jax.vmap(train, in_axes=(None, 0))
    over_both = jax.vmap(over_seeds, in_axes=(0, None))
    keys = jax.random.split(jax.random.key(0), num_seeds)
    returns = np.asarray(jppo.jit(over_both)(jnp.asarray(LEARNING_RATES), keys))

    print("learning rate   mean return   per seed")
    for rate, row in zip(LEARNING_RATES, returns, strict=True):
        print(f"{rate:>13g} {np.nanmean(row):>13.0f}   {' '.join(f'{x:.0f}' for x in row)}")
    return returns


if __name__ == "__main__":
    main()
