"""Trains on a custom environment with gymnax's interface: a point must stop at position 0."""

import jax
import jax.numpy as jnp
from flax import struct
from gymnax.environments import environment, spaces

import jppo


@struct.dataclass
class State:
    """Position, velocity and number of steps."""

    position: jax.Array
    velocity: jax.Array
    time: jax.Array


class Docking(environment.Environment):
    """The action accelerates the point; the reward is minus its distance to 0. Only the time limit ends an episode."""

    @property
    def default_params(self) -> environment.EnvParams:
        return environment.EnvParams(max_steps_in_episode=50)

    def reset_env(self, key, params):
        position = jax.random.uniform(key, (), minval=-1.0, maxval=1.0)
        state = State(position=position, velocity=jnp.zeros(()), time=jnp.zeros((), jnp.int32))
        return self.get_obs(state), state

    def step_env(self, key, state, action, params):
        velocity = 0.9 * state.velocity + 0.1 * action[0]
        state = State(position=state.position + velocity, velocity=velocity, time=state.time + 1)
        return self.get_obs(state), state, -jnp.abs(state.position), jnp.zeros((), bool), {}

    def get_obs(self, state, params=None, key=None):
        return jnp.stack([state.position, state.velocity])

    def action_space(self, params=None):
        return spaces.Box(-1.0, 1.0, (1,))

    def observation_space(self, params=None):
        return spaces.Box(-jnp.inf, jnp.inf, (2,))


def main(total_steps: int = 400_000) -> tuple[float, float]:
    """Returns the mean returns of the first and of the last update."""
    agent = jppo.make_anakin(Docking(), jppo.PPOConfig(num_envs=64, num_steps=50), total_steps=total_steps)
    hyperparams = jppo.Hyperparams(learning_rate=3e-3, gamma=0.95, ent_coef=0.0)
    _, metrics = jppo.jit(agent.train)(jax.random.key(0), hyperparams)
    first, last = (float(metrics["episode/return_mean"][i]) for i in (0, -1))
    print(f"mean return {first:.1f} at first, {last:.1f} after {total_steps} steps")
    return first, last


if __name__ == "__main__":
    main()
