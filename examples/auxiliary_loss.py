"""Trains with an auxiliary loss with trainable parameters: a linear model that predicts the next observation."""

import jax
import jax.numpy as jnp

import jppo

ACTIONS = 2


def init(key, obs):
    """Returns the parameters of the model, and no state."""
    size = obs.shape[-1]
    return {"kernel": 0.01 * jax.random.normal(key, (size + ACTIONS, size)), "bias": jnp.zeros((size,))}, ()


@jppo.mean_over_rows
def loss(params, state, apply, batch, hyperparams, config, key):
    """Adds the squared prediction error to PPO's loss."""
    total, metrics = jppo.ppo_loss(apply, batch, hyperparams, config, key)
    inputs = jnp.concatenate([batch.obs, jax.nn.one_hot(batch.action, ACTIONS)], axis=-1)
    predicted = inputs @ params["kernel"] + params["bias"][None]
    error = jnp.mean(jnp.square(predicted - batch.next_obs))
    return total + error, metrics | {"loss/prediction": error}


def main(total_steps: int = 100_000) -> tuple[float, float]:
    """Returns the prediction errors of the first and of the last update."""
    module = jppo.LossModule(init=init, apply=loss)
    result = jppo.train(
        "CartPole-v1", total_steps=total_steps, num_envs=16, learning_rate=3e-3, keep_next_obs=True, loss=module
    )
    first, last = (float(result.metrics["loss/prediction"][i]) for i in (0, -1))
    print(f"prediction error {first:.4f} at first, {last:.4f} after {total_steps:,} steps")
    return first, last


if __name__ == "__main__":
    main()
