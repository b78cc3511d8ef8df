"""PPO in one file, for gymnax environments (1.0.1 or later) with discrete actions. Copy it and change it.

    python one_file_ppo.py CartPole-v1

A whole run is one function for `jax.jit`, as in PureJaxRL, and `jax.vmap` trains many seeds at once:

    train = make_train(*gymnax.make("CartPole-v1"), Config())
    params, metrics = jax.jit(jax.vmap(train))(jax.random.split(jax.random.key(0), 16))

A time limit is not a termination: the return of an episode that is cut off continues with the value of its last
observation (Pardo et al. 2018, "Time limits in reinforcement learning").

Shapes: T steps per rollout, N environments, B samples per minibatch, A actions.
"""

import dataclasses
import sys
import time
from typing import NamedTuple

import flax.linen as nn
import gymnax
import jax
import jax.numpy as jnp
import optax


@dataclasses.dataclass(frozen=True)
class Config:
    total_steps: int = 500_000  # of all environments together
    num_envs: int = 16  # N
    num_steps: int = 128  # T
    num_epochs: int = 4  # passes over each rollout
    num_minibatches: int = 4  # gradient steps per pass
    learning_rate: float = 1e-3  # falls linearly to 0
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip_eps: float = 0.2
    vf_coef: float = 0.5
    ent_coef: float = 0.01
    max_grad_norm: float = 0.5


class ActorCritic(nn.Module):
    """Two separate networks: observations [B, *obs] -> logits [B, A] and values [B]."""

    num_actions: int

    @nn.compact
    def __call__(self, obs):
        def mlp(num_outputs, gain):
            x = obs.reshape(obs.shape[0], -1).astype(jnp.float32)
            for _ in range(2):
                x = nn.tanh(nn.Dense(64, kernel_init=nn.initializers.orthogonal(2**0.5))(x))
            return nn.Dense(num_outputs, kernel_init=nn.initializers.orthogonal(gain))(x)

        return mlp(self.num_actions, gain=0.01), mlp(1, gain=1.0)[:, 0]


class Transition(NamedTuple):
    """One step of N environments. The leaves of a rollout are [T, N, ...], those of a minibatch [B, ...]."""

    obs: jax.Array
    action: jax.Array
    log_prob: jax.Array  # of the action, by the policy that sampled it
    reward: jax.Array
    next_obs: jax.Array  # after the action; at an episode's end its last observation, not the one after the reset
    terminated: jax.Array  # the episode ended
    done: jax.Array  # the episode ended or was cut off
    episode_return: jax.Array  # sum of the episode's rewards up to this step


# The first four functions draw all random numbers.
def init(key, network, env, env_params, num_envs):
    """Returns parameters, states [N, ...] and observations [N, *obs] of N environments, and a key for the updates."""
    params_key, reset_key, next_key = jax.random.split(key, 3)
    obs, env_state = jax.vmap(env.reset, in_axes=(0, None))(jax.random.split(reset_key, num_envs), env_params)
    return network.init(params_key, obs), env_state, obs, next_key


def split_update_key(key, config):
    """Returns keys for actions [T], environments [T, N], shuffles [epochs] and the next update."""
    action_key, env_key, shuffle_key, next_key = jax.random.split(key, 4)
    action_keys = jax.random.split(action_key, config.num_steps)
    env_keys = jax.random.split(env_key, (config.num_steps, config.num_envs))
    return action_keys, env_keys, jax.random.split(shuffle_key, config.num_epochs), next_key


def sample_actions(key, logits):  # [N, A] -> [N]
    return jax.random.categorical(key, logits)


def shuffle(key, size):  # -> [size], the numbers 0 to size - 1 in random order
    return jax.random.permutation(key, size)


def log_probs(logits, action):  # [B, A], [B] -> [B]
    return jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], axis=1)[:, 0]


def gae(rollout, value, next_value, config):
    """Returns advantages [T, N] for value = V(s_t) and next_value = V(s_{t+1}), [T, N] each.

        delta_t = r_t + gamma * (1 - terminated_t) * V(s_{t+1}) - V(s_t)
        A_t     = delta_t + gamma * lambda * (1 - done_t) * A_{t+1}

    Schulman et al. (2016), "High-dimensional continuous control using generalized advantage estimation", eq. 16. At a
    time limit, done_t is true and terminated_t is false: delta_t contains the value of the last observation.
    """
    delta = rollout.reward + config.gamma * jnp.where(rollout.terminated, 0.0, next_value) - value
    decay = jnp.where(rollout.done, 0.0, config.gamma * config.gae_lambda)

    def backward(next_advantage, step):
        advantage = step[0] + step[1] * next_advantage
        return advantage, advantage

    return jax.lax.scan(backward, jnp.zeros_like(delta[0]), (delta, decay), reverse=True)[1]


def ppo_loss(params, network, batch, config):
    """Returns policy loss + vf_coef * value loss - ent_coef * entropy, and metrics.

        policy loss = -mean(min(rho * A, clip(rho, 1 - eps, 1 + eps) * A)),    rho = pi(a|s) / pi_old(a|s)
        value loss  = mean((V(s) - target)^2) / 2

    Schulman et al. (2017), "Proximal policy optimization algorithms", eq. 7 and 9, with the sign of a loss.
    """
    samples, advantage, target = batch
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    logits, value = network.apply(params, samples.obs)
    ratio = jnp.exp(log_probs(logits, samples.action) - samples.log_prob)
    clipped = jnp.clip(ratio, 1.0 - config.clip_eps, 1.0 + config.clip_eps)
    policy_loss = -jnp.minimum(ratio * advantage, clipped * advantage).mean()
    value_loss = 0.5 * jnp.square(value - target).mean()
    entropy = -jnp.sum(jax.nn.softmax(logits) * jax.nn.log_softmax(logits), axis=1).mean()
    total = policy_loss + config.vf_coef * value_loss - config.ent_coef * entropy
    return total, {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}


def make_train(env, env_params, config):
    """Returns the function train(key) -> parameters, metrics [updates]."""
    network = ActorCritic(env.action_space(env_params).n)
    batch_size = config.num_steps * config.num_envs
    num_updates = -(-config.total_steps // batch_size)

    def learning_rate(num_gradient_steps):
        update = num_gradient_steps // (config.num_epochs * config.num_minibatches)
        return config.learning_rate * (1.0 - update / num_updates)

    optimizer = optax.chain(optax.clip_by_global_norm(config.max_grad_norm), optax.adam(learning_rate, eps=1e-5))

    def env_step(params, envs, keys):
        (env_state, obs, episode_return), (action_key, env_keys) = envs, keys
        logits, _ = network.apply(params, obs)
        action = sample_actions(action_key, logits)

        # Where an episode is over, gymnax resets: new_obs is then the first observation of the next episode.
        step = jax.vmap(env.step, in_axes=(0, 0, 0, None))
        new_obs, env_state, reward, terminated, truncated, info = step(env_keys, env_state, action, env_params)
        done, episode_return = terminated | truncated, episode_return + reward
        log_prob, next_obs = log_probs(logits, action), info["final_observation"]
        transition = Transition(obs, action, log_prob, reward, next_obs, terminated, done, episode_return)
        return (env_state, new_obs, jnp.where(done, 0.0, episode_return)), transition

    def gradient_step(learner, minibatch):
        params, opt_state = learner
        gradient, metrics = jax.grad(ppo_loss, has_aux=True)(params, network, minibatch, config)
        change, opt_state = optimizer.update(gradient, opt_state)
        return (optax.apply_updates(params, change), opt_state), metrics

    def epoch(batch, learner, key):
        rows = shuffle(key, batch_size).reshape(config.num_minibatches, -1)  # [minibatches, B]
        minibatches = jax.tree.map(lambda x: x.reshape(batch_size, *x.shape[2:])[rows], batch)
        return jax.lax.scan(gradient_step, learner, minibatches)

    def update(state, _):
        learner, envs, key = state
        params, _ = learner
        action_keys, env_keys, shuffle_keys, next_key = split_update_key(key, config)

        # Collect a rollout [T, N].
        envs, rollout = jax.lax.scan(lambda envs, keys: env_step(params, envs, keys), envs, (action_keys, env_keys))

        # Compute advantages and targets of the value, [T, N].
        values = jax.vmap(lambda obs: network.apply(params, obs)[1])
        value, next_value = values(rollout.obs), values(rollout.next_obs)
        advantage = gae(rollout, value, next_value, config)
        batch = rollout, advantage, advantage + value

        # Take num_epochs * num_minibatches gradient steps.
        learner, metrics = jax.lax.scan(lambda learner, key: epoch(batch, learner, key), learner, shuffle_keys)

        # Average losses over gradient steps, and returns over the episodes that ended (NaN if none did).
        metrics = jax.tree.map(jnp.mean, metrics) | {"return": rollout.episode_return.mean(where=rollout.done)}
        return (learner, envs, next_key), metrics

    def train(key):
        params, env_state, obs, next_key = init(key, network, env, env_params, config.num_envs)
        state = (params, optimizer.init(params)), (env_state, obs, jnp.zeros(config.num_envs)), next_key
        ((params, _), _, _), metrics = jax.lax.scan(update, state, length=num_updates)
        return params, metrics

    return train


def main(env_name="CartPole-v1", config=Config(), seed=0):
    """Trains, prints the course of the return (NaN where no episode ended), and returns the metrics."""
    train, start = jax.jit(make_train(*gymnax.make(env_name), config)), time.perf_counter()
    _, metrics = jax.block_until_ready(train(jax.random.key(seed)))
    print("    steps   return   entropy")
    for update in range(0, len(metrics["return"]), max(1, len(metrics["return"]) // 20)):
        steps = (update + 1) * config.num_steps * config.num_envs
        print(f"{steps:>9} {metrics['return'][update]:>8.1f} {metrics['entropy'][update]:>9.2f}")
    last, seconds = jnp.nanmean(metrics["return"][-10:]), time.perf_counter() - start
    print(f"{env_name}: mean return {last:.1f} after {seconds:.0f} s")
    return metrics


if __name__ == "__main__":
    main(*sys.argv[1:2])
