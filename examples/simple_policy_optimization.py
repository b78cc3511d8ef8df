"""Trains with a custom loss: the objective of Simple Policy Optimization instead of the clipped one.

Xie et al. (2024), "Simple policy optimization", arXiv 2401.16025, eq. 11.
"""

import jax.numpy as jnp

import jppo


@jppo.mean_over_rows
def spo_loss(apply, batch, hyperparams, config, key):
    """Penalizes the squared distance of the probability ratio from 1 by |A| / (2 * eps)."""
    _, metrics = jppo.ppo_loss(apply, batch, hyperparams, config, key)
    distribution, value = apply(batch.obs)
    ratio = jnp.exp(distribution.log_prob(batch.action) - batch.log_prob)
    penalty = jnp.abs(batch.advantage) / (2.0 * hyperparams.clip_eps) * jnp.square(ratio - 1.0)
    policy_loss = -jnp.mean(ratio * batch.advantage - penalty)
    value_loss = 0.5 * jnp.mean(jnp.square(value - batch.target))
    entropy = jnp.mean(distribution.entropy())
    total = policy_loss + hyperparams.vf_coef * value_loss - hyperparams.ent_coef * entropy
    return total, metrics | {"loss/policy": policy_loss, "loss/value": value_loss}


def main(total_steps: int = 200_000) -> tuple[float, float]:
    """Returns the final mean return with the SPO loss and with the PPO loss."""
    scores = []
    for name, loss in (("SPO", spo_loss), ("PPO", jppo.ppo_loss)):
        result = jppo.train("CartPole-v1", total_steps=total_steps, num_envs=16, learning_rate=1e-3, loss=loss)
        scores.append(float(result.metrics["episode/return_mean"][-1]))
        print(
            f"{name}: mean return {scores[-1]:.0f}, clip fraction {result.metrics['policy/clip_fraction'].mean():.3f}"
        )
    return scores[0], scores[1]


if __name__ == "__main__":
    main()
