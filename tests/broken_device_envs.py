"""A correct environment with gymnax's API, and variants of it with one fault each."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from gymnax.environments import environment, spaces

Array = jax.Array


def draw(key: Array) -> Array:
    """Returns a number between -0.5 and 0.5. Compiles faster than jax.random.uniform."""
    return (jax.random.key_data(key)[-1] % 1024).astype(jnp.float32) / 1024.0 - 0.5


@struct.dataclass
class State:
    place: Array  # [] f32
    time: Array  # [] i32


class Sound(environment.Environment):
    """A random walk with steps of 0.1 up or down plus noise. It terminates beyond 1 and is truncated after 12 steps."""

    @property
    def default_params(self) -> environment.EnvParams:
        return environment.EnvParams(max_steps_in_episode=12)

    def reset_env(self, key: Array, params: Any) -> tuple:
        state = State(place=0.1 * draw(key), time=jnp.zeros((), jnp.int32))
        return self.get_obs(state), state

    def step_env(self, key: Array, state: State, action: Array, params: Any) -> tuple:
        noise = 0.05 * draw(key)
        place = state.place + 0.1 * (2.0 * action.astype(jnp.float32) - 1.0) + noise
        after = State(place=place, time=state.time + 1)
        return self.get_obs(after), after, self.reward(after), self.is_terminated(after, params), {}

    def reward(self, state: State) -> Array:
        return state.place

    def is_terminated(self, state: State, params: Any) -> Array:
        return jnp.abs(state.place) > 1.0

    def get_obs(self, state: State, params: Any = None, key: Any = None) -> Array:
        return jnp.stack([state.place, 0.5 * state.place])

    def action_space(self, params: Any = None) -> Any:
        return spaces.Discrete(2)

    def observation_space(self, params: Any = None) -> Any:
        return spaces.Box(-2.0, 2.0, (2,))


class Branching(Sound):
    def reward(self, state):
        return state.place if state.place > 0.0 else -state.place


class FiveValues(Sound):
    def step(self, key, state, action, params=None):
        obs, state, reward, terminated, truncated, info = super().step(key, state, action, params)
        return obs, state, reward, terminated | truncated, info


class SixInner(Sound):
    def step_env(self, key, state, action, params):
        obs, state, reward, terminated, info = super().step_env(key, state, action, params)
        return obs, state, reward, terminated, terminated, info


class NoFinal(Sound):
    def step(self, key, state, action, params=None):
        return *super().step(key, state, action, params)[:5], {}


class FloatFlag(Sound):
    def step(self, key, state, action, params=None):
        obs, state, reward, terminated, *rest = super().step(key, state, action, params)
        return obs, state, reward, terminated.astype(jnp.float32), *rest


class Flat(Sound):
    def reset(self, key, params=None):
        return super().reset(key, params)[0]


class NoSpaces:
    default_params = None

    def reset(self, key, params):
        return jnp.zeros(1), ()

    def step(self, key, state, action, params):
        raise NotImplementedError


class Changing(Sound):
    def reset_env(self, key, params):
        obs, state = super().reset_env(key, params)
        return obs, state.replace(time=jnp.zeros(()))

    def step_env(self, key, state, action, params):
        return super().step_env(key, state.replace(time=state.time.astype(jnp.int32)), action, params)


class Alone(Sound):
    """Calls the host in a way that vmap does not support."""

    def reward(self, state):
        return jax.pure_callback(np.asarray, jax.ShapeDtypeStruct((), jnp.float32), state.place)


class Batching(Sound):
    """Its host function computes over all environments of the batch."""

    def reward(self, state):
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        return jax.pure_callback(lambda x: x - np.mean(x), shape, state.place, vmap_method="expand_dims")


class Gripper(Batching):
    """Opens only if its real-valued action is at the upper bound. Its reward has the fault of `Batching`."""

    def step_env(self, key, state, action, params):
        return super().step_env(key, state, jnp.floor(action[0]), params)

    def action_space(self, params=None):
        return spaces.Box(0.0, 1.0, (1,))


class Chaotic(Sound):
    """Multiplies differences by 50 in each step, also those between a program with vmap and one without."""

    def step_env(self, key, state, action, params):
        tiny = 1e-6 * Batching.reward(self, state)
        place = jnp.sin(50.0 * state.place + 5.0 * action[0]) + tiny
        after = State(place=place, time=state.time + 1)
        return self.get_obs(after), after, place, jnp.zeros((), bool), {}

    def action_space(self, params=None):
        return spaces.Box(-1.0, 1.0, (1,))


class OtherShape(Sound):
    def observation_space(self, params=None):
        return spaces.Box(-2.0, 2.0, (3,))


class OtherParts(Sound):
    def observation_space(self, params=None):
        return spaces.Dict({"place": spaces.Box(-2.0, 2.0, (2,))})


class OutOfBounds(Sound):
    def observation_space(self, params=None):
        return spaces.Box(-0.01, 0.01, (2,))


class OneAction(Sound):
    def action_space(self, params=None):
        return spaces.Discrete(1)


class Unbounded(Sound):
    def action_space(self, params=None):
        return spaces.Box(-jnp.inf, jnp.inf, ())


class NaNReward(Sound):
    def reward(self, state):
        return jnp.where(state.time == 7, jnp.nan, state.place)


class Unseeded(Sound):
    """Draws random numbers on the host, without the key."""

    def reward(self, state):
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        return jax.pure_callback(
            lambda x: np.float32(np.random.default_rng().uniform()), shape, state.place, vmap_method="sequential"
        )


class Certain(Sound):
    """Does not use its keys."""

    def reset_env(self, key, params):
        return super().reset_env(jax.random.key(0), params)

    def step_env(self, key, state, action, params):
        return super().step_env(jax.random.key(0), state, action, params)


class OneStart(Sound):
    """Its automatic resets always start in the same state."""

    def step(self, key, state, action, params=None):
        obs, state, reward, terminated, truncated, info = super().step(key, state, action, params)
        fixed = self.reset_env(jax.random.key(3), params)
        done = terminated | truncated
        obs, state = jax.tree.map(lambda new, old: jnp.where(done, new, old), fixed, (obs, state))
        return obs, state, reward, terminated, truncated, info


class TerminatedByTime(Sound):
    """Terminates at the time limit, like environments for gymnax 0.0.x."""

    def is_terminated(self, state, params):
        return super().is_terminated(state, params) | (state.time >= params.max_steps_in_episode)


class DeafToLimit(Sound):
    def is_truncated(self, state, params):
        return jnp.zeros((), bool)


class FinalIsReset(Sound):
    def step(self, key, state, action, params=None):
        obs, *rest, info = super().step(key, state, action, params)
        return obs, *rest, info | {"final_observation": obs}


class FinalIsEarlier(Sound):
    """Returns the observation before the last step as the final observation."""

    def step(self, key, state, action, params=None):
        *rest, info = super().step(key, state, action, params)
        done = rest[3] | rest[4]
        final = jnp.where(done, self.get_obs(state), info["final_observation"])
        return *rest, info | {"final_observation": final}


class HiddenReset(Sound):
    def step_env(self, key, state, action, params):
        _, after, reward, terminated, info = super().step_env(key, state, action, params)
        fresh = self.reset_env(key, params)[1]
        over = after.place > 0.25
        after = jax.tree.map(lambda new, old: jnp.where(over, new, old), fresh, after)
        return self.get_obs(after), after, reward, terminated, info
