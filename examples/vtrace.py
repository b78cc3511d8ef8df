"""Trains with V-trace advantages, which correct for a policy that is one update older than the learner's.

Espeholt et al. (2018), "IMPALA: scalable distributed deep-RL with importance weighted actor-learner architectures".
"""

import jax
import jax.numpy as jnp
import numpy as np

import jppo


def vtrace(apply, rollout, hyperparams, config):
    """Returns advantages and value targets, [T, N] each.

    delta_t = rho_t * (r_t + gamma * V(s_{t+1}) - V(s_t)),    rho_t = min(1, pi(a_t|s_t) / mu(a_t|s_t))
    v_t - V(s_t) = delta_t + gamma * lambda * rho_t * (v_{t+1} - V(s_{t+1}))
    A_t = r_t + gamma * v_{t+1} - V(s_t)
    """
    distribution, value = apply(rollout.obs)  # rows [T*N]
    shape, action = rollout.reward.shape, rollout.action
    log_prob = distribution.log_prob(action.reshape(-1, *action.shape[2:])).reshape(shape)
    value = value.reshape(shape)
    rho = jnp.minimum(1.0, jnp.exp(log_prob - rollout.log_prob))
    next_value = jnp.where(rollout.done, rollout.next_value, jnp.concatenate([value[1:], rollout.next_value[-1:]]))
    delta = rho * (rollout.reward + hyperparams.gamma * next_value - value)
    decay = jnp.where(rollout.done, 0.0, hyperparams.gamma * hyperparams.gae_lambda * rho)

    def backward(correction, step):
        delta_t, decay_t = step
        correction = delta_t + decay_t * correction
        return correction, correction

    _, correction = jax.lax.scan(backward, jnp.zeros(shape[1]), (delta, decay), reverse=True)
    following = jnp.where(rollout.done, 0.0, jnp.concatenate([correction[1:], jnp.zeros((1, shape[1]))]))
    advantage = rollout.reward + hyperparams.gamma * (next_value + following) - value
    return advantage, value + correction


def main(total_steps: int = 100_000) -> float:
    """Returns the mean return of the last ten updates with actors that are one update behind the learner."""
    ray = jppo.RayConfig(policy_lag=1)
    options = {"num_envs": 16, "num_steps": 64, "learning_rate": 1e-3}
    result = jppo.train(
        "CartPole-v1", total_steps=total_steps, backend="ray", num_actors=0, ray=ray, advantages=vtrace, **options
    )
    score = float(np.nanmean(result.metrics["episode/return_mean"][-10:]))
    print(f"mean return {score:.0f}")
    return score


if __name__ == "__main__":
    main()
