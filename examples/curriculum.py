"""A curriculum: a callback raises the difficulty, a parameter that each environment keeps in its state."""

import jax
import jax.numpy as jnp
from flax import struct
from gymnax.environments import environment, spaces

import jppo


@struct.dataclass
class Params(environment.EnvParams):
    max_steps_in_episode: int = 50
    difficulty: float = 3.0  # distance to the goal at the start of an episode


@struct.dataclass
class State(environment.EnvState):
    distance: float
    difficulty: float


class Walk(environment.Environment):  # on a line; only the step that reaches the goal is rewarded
    default_params = Params()

    def reset_env(self, key, params):
        distance = params.difficulty * jnp.sign(jax.random.normal(key))  # the goal is on the left or on the right
        return distance[None] / 30.0, State(time=0, distance=distance, difficulty=params.difficulty)

    def step(self, key, state, action, params):  # the next episode keeps the difficulty of this one
        return super().step(key, state, action, params.replace(difficulty=state.difficulty))

    def step_env(self, key, state, action, params):
        distance = state.distance + jnp.where(action == 1, -1.0, 1.0)
        state = state.replace(time=state.time + 1, distance=distance)
        return distance[None] / 30.0, state, jnp.where(distance == 0.0, 1.0, 0.0), distance == 0.0, {}

    action_space = staticmethod(lambda params: spaces.Discrete(2))
    observation_space = staticmethod(lambda params: spaces.Box(-10.0, 10.0, (1,)))


def raise_difficulty(event):
    if event.metrics["episode/return_mean"] > 0.9:
        collect, env_state = event.state.collect, event.state.collect.env_state  # leaves [num_envs]
        env_state = env_state.replace(difficulty=jnp.minimum(env_state.difficulty + 3.0, 30.0))
        event.state = event.state.replace(collect=collect.replace(env_state=env_state))
    event.log("curriculum/difficulty", event.state.collect.env_state.difficulty[0])


def main(total_steps=100_000):
    hard = jppo.make_env(Walk(), difficulty=30.0)
    results = [jppo.train(hard, total_steps=total_steps)]
    results += [jppo.train(Walk(), total_steps=total_steps, callback=raise_difficulty, callback_every=5)]
    plain, curriculum = (jppo.evaluate(hard, result.policy).returns.mean() for result in results)
    print(f"mean return at a distance of 30: {plain:.2f}, with a curriculum: {curriculum:.2f}")
    return plain, curriculum


if __name__ == "__main__":
    main()
