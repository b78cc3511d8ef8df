"""Trains an equinox network. An adapter separates its arrays from its structure and adds the batch dimension."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax

import jppo


class EquinoxNetwork:
    """Adapts an equinox module, which takes single observations, to `jppo.Network`."""

    def __init__(self, make: Callable[[jax.Array], eqx.Module]) -> None:
        self.make = make
        shapes = eqx.filter_eval_shape(make, jax.random.key(0))
        self.static = eqx.filter(shapes, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct), inverse=True)

    def init(self, key: jax.Array, obs: Any) -> eqx.Module:
        return eqx.filter(self.make(key), eqx.is_array)

    def apply(self, params: eqx.Module, obs: Any) -> tuple[Any, jax.Array]:
        return jax.vmap(eqx.combine(params, self.static))(obs)


class ActorCritic(eqx.Module):
    """One network for the policy and one for the value."""

    policy: eqx.nn.MLP
    value: eqx.nn.MLP

    def __init__(self, obs_size: int, num_actions: int, key: jax.Array) -> None:
        policy_key, value_key = jax.random.split(key)
        self.policy = eqx.nn.MLP(obs_size, num_actions, 64, 2, jax.nn.tanh, key=policy_key)
        self.value = eqx.nn.MLP(obs_size, "scalar", 64, 2, jax.nn.tanh, key=value_key)

    def __call__(self, obs: jax.Array) -> tuple[jppo.Categorical, jax.Array]:
        return jppo.Categorical(self.policy(obs)), self.value(obs)  # obs [*obs], value []


def main(total_steps: int = 200_000) -> float:
    """Returns the mean return of the last update."""
    network = EquinoxNetwork(lambda key: ActorCritic(4, 2, key))
    config = jppo.PPOConfig(num_envs=16, num_steps=128)
    agent = jppo.make_anakin("CartPole-v1", config, total_steps=total_steps, network=network)
    state, metrics = jppo.jit(agent.train)(jax.random.key(0), jppo.Hyperparams(learning_rate=1e-3))
    module = eqx.combine(state.train.policy_state.params, network.static)  # a module again, to inspect or save
    score = float(metrics["episode/return_mean"][-1])
    print(f"equinox, {module.policy.depth} hidden layers: mean return {score:.0f} of at most 500")
    return score


if __name__ == "__main__":
    main()
