"""Explores with random network distillation, a reward for observations that a network cannot predict yet.

Burda et al. (2019), "Exploration by random network distillation". In bsuite's deep sea of size 12, only one of 2**12
action sequences finds the reward. Plain PPO does not find it.
"""

import jax
import jax.numpy as jnp
from gymnax.environments.bsuite.deep_sea import DeepSea

import jppo

FEATURES, BONUS = 32, 0.5


def features(weights, obs):
    """Returns two dense layers of flattened observations, [B, FEATURES]."""
    return jax.nn.relu(obs.reshape(len(obs), -1) @ weights["first"]) @ weights["second"]


def init(key, obs):
    """Returns the predictor's weights, which are trained, and the target's weights, which are not."""
    normal, keys, size = jax.nn.initializers.lecun_normal(), jax.random.split(key, 4), obs[0].size
    predictor = {"first": normal(keys[0], (size, 64)), "second": normal(keys[1], (64, FEATURES))}
    target = {"first": normal(keys[2], (size, 64)), "second": normal(keys[3], (64, FEATURES))}
    return predictor, {"target": target, "scale": jnp.ones(())}


def error(params, state, obs):
    """Returns the squared error of each prediction, [B]."""
    return jnp.square(features(params, obs) - features(state["target"], obs)).mean(axis=-1)


@jppo.mean_over_rows
def loss(params, state, apply, batch, hyperparams, config, key):
    total, metrics = jppo.ppo_loss(apply, batch, hyperparams, config, key)
    prediction = error(params, state, batch.obs).mean()
    return total + prediction, metrics | {"loss/prediction": prediction}


def reward(params, state, rollout, axis_name):
    """Returns errors divided by their running mean, [T, N]."""
    errors = jax.vmap(lambda obs: error(params, state, obs))(rollout.obs)
    mean = errors.mean() if axis_name is None else jax.lax.pmean(errors.mean(), axis_name)
    scale = 0.99 * state["scale"] + 0.01 * mean
    return BONUS * errors / scale, state | {"scale": scale}


def main(total_steps: int = 1_000_000) -> tuple[float, float]:
    """Returns the final mean returns without and with the bonus; the best return is 0.99."""
    module, scores = jppo.LossModule(init=init, apply=loss, reward=reward), []
    for name, chosen in (("plain PPO", None), ("with RND", module)):
        result = jppo.train(DeepSea(size=12), total_steps=total_steps, num_envs=32, num_steps=64, loss=chosen)
        scores.append(float(result.metrics["episode/return_mean"][-20:].mean()))
        print(f"{name}: mean return {scores[-1]:.2f}")
    return scores[0], scores[1]


if __name__ == "__main__":
    main()
