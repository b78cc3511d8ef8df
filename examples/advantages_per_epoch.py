"""Computes advantages anew before each epoch, with the values of the current network: a learner of your own.

Andrychowicz et al. (2021), "What matters for on-policy deep actor-critic methods? A large-scale study", section 3.5.
"""

import jax
import jax.numpy as jnp
import numpy as np

import jppo


def advantages_per_epoch(policy, config, axis_name):
    """Returns a learner that calls jppo's own, with one epoch, for each epoch of the same rollout."""
    if policy.is_recurrent or config.kl_control != "none":
        raise ValueError("advantages_per_epoch needs a feed-forward network and no kl_control")
    learner = jppo.make_learner(policy, config.replace(num_epochs=1), axis_name=axis_name)

    def values_of(policy_state, obs):
        """Returns V of observations [T, N, *obs] as [T, N] f32."""
        num_steps, num_envs = jax.tree.leaves(obs)[0].shape[:2]
        rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), obs)
        return policy.step(policy_state, rows)[1].reshape(num_steps, num_envs)

    def update(state, rollout, stats):
        def epoch(learned, _):
            # Schedules and statistics advance once per rollout, so each epoch starts with the same ones.
            policy_state = learned.policy_state.replace(obs_stats=state.policy_state.obs_stats)
            learned = learned.replace(update=state.update, reward_stats=state.reward_stats, policy_state=policy_state)
            # The action probabilities stay those of the policy that acted; only the values are new.
            value, next_value = (values_of(policy_state, obs) for obs in (rollout.obs, rollout.next_obs))
            newer = rollout.replace(value=value, next_value=jnp.where(rollout.terminated, 0.0, next_value))
            return learner.update(learned, newer, stats)

        after, metrics = jax.lax.scan(epoch, state, length=config.num_epochs)
        # If an epoch is not finite, none counts.
        finite = metrics.pop("finite").all()
        kept = jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, state)
        metrics = jax.tree.map(jnp.mean, metrics) | {"finite": finite}
        return kept.replace(update=after.update, key=after.key), metrics

    return jppo.Learner(init=learner.init, update=update)


def main(total_steps: int = 100_000) -> float:
    """Returns the mean return of the last ten updates."""
    config = {"num_envs": 16, "num_steps": 64, "num_minibatches": 4, "num_epochs": 4, "keep_next_obs": True}
    result = jppo.train("CartPole-v1", total_steps=total_steps, config=config, learner=advantages_per_epoch)
    score = float(np.nanmean(result.metrics["episode/return_mean"][-10:]))
    print(f"mean return {score:.0f}")
    return score


if __name__ == "__main__":
    main()
