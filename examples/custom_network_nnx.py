"""Trains a flax nnx network. An adapter separates its parameters from its structure."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

import jppo


class NNXNetwork:
    """Adapts an nnx module to `jppo.Network`."""

    def __init__(self, make: Callable[[nnx.Rngs], nnx.Module]) -> None:
        self.make = make
        self.structure = nnx.graphdef(nnx.eval_shape(lambda: make(nnx.Rngs(0))))

    def init(self, key: jax.Array, obs: Any) -> nnx.State:
        return nnx.state(self.make(nnx.Rngs(key)))

    def apply(self, params: nnx.State, obs: Any) -> tuple[Any, jax.Array]:
        return nnx.merge(self.structure, params)(obs)


class ActorCritic(nnx.Module):
    """A torso with two heads."""

    def __init__(self, obs_size: int, num_actions: int, rngs: nnx.Rngs) -> None:
        self.torso = nnx.Linear(obs_size, 64, rngs=rngs)
        self.policy = nnx.Linear(64, num_actions, kernel_init=nnx.initializers.orthogonal(0.01), rngs=rngs)
        self.value = nnx.Linear(64, 1, rngs=rngs)

    def __call__(self, obs: jax.Array) -> tuple[jppo.Categorical, jax.Array]:
        x = nnx.tanh(self.torso(obs))  # obs [B, *obs]
        return jppo.Categorical(self.policy(x)), self.value(x)[:, 0]  # value [B]


def main(total_steps: int = 200_000) -> float:
    """Returns the mean return of the last update."""
    network = NNXNetwork(lambda rngs: ActorCritic(4, 2, rngs))
    config = jppo.PPOConfig(num_envs=16, num_steps=128)
    agent = jppo.make_anakin("CartPole-v1", config, total_steps=total_steps, network=network)
    state, metrics = jppo.jit(agent.train)(jax.random.key(0), jppo.Hyperparams(learning_rate=2e-3))
    module = nnx.merge(network.structure, state.train.policy_state.params)  # a module again, to inspect or save
    score = float(metrics["episode/return_mean"][-1])
    print(f"nnx, torso {module.torso.kernel.shape}: mean return {score:.0f} of at most 500")
    return score


if __name__ == "__main__":
    main()
