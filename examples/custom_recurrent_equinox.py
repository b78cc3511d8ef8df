"""Trains a recurrent equinox network on MemoryChain: the last action must repeat the bit in the first observation."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

import jppo

Array = jax.Array


class Memory(eqx.Module):
    """A GRU cell with two heads, for single observations."""

    cell: eqx.nn.GRUCell
    policy: eqx.nn.Linear
    value: eqx.nn.Linear

    def __init__(self, obs_size: int, size: int, num_actions: int, key: Array) -> None:
        keys = jax.random.split(key, 3)
        self.cell = eqx.nn.GRUCell(obs_size, size, key=keys[0])
        self.policy = eqx.nn.Linear(size, num_actions, key=keys[1])
        self.value = eqx.nn.Linear(size, "scalar", key=keys[2])

    def __call__(self, obs: Array, carry: Array) -> tuple[jppo.Categorical, Array, Array]:
        carry = self.cell(obs, carry)  # [H]
        return jppo.Categorical(self.policy(carry)), self.value(carry), carry


class RecurrentEquinoxNetwork:
    """Adapts `Memory` to `jppo.RecurrentNetwork`: separates arrays from structure, and adds the batch dimension."""

    def __init__(self, obs_size: int, size: int, num_actions: int) -> None:
        self.make = lambda key: Memory(obs_size, size, num_actions, key)
        self.size, self.static = size, eqx.partition(self.make(jax.random.key(0)), eqx.is_array)[1]

    def init(self, key: Array, obs: Array, carry: Array) -> eqx.Module:
        return eqx.filter(self.make(key), eqx.is_array)

    def initial_carry(self, batch_size: int) -> Array:
        return jnp.zeros((batch_size, self.size))

    def apply(self, params: Any, obs: Array, carry: Array) -> tuple[jppo.Categorical, Array, Array]:
        return jax.vmap(eqx.combine(params, self.static))(obs, carry)


def main(total_steps: int = 200_000) -> float:
    """Returns the mean return of the last update."""
    config = jppo.PPOConfig(num_envs=64, num_steps=32, sequence_length=16)
    network, rate = RecurrentEquinoxNetwork(3, 32, 2), jppo.Hyperparams(learning_rate=3e-3)
    result = jppo.train("MemoryChain-bsuite", total_steps=total_steps, config=config, hyperparams=rate, network=network)
    print(f"equinox with a GRU: mean return {(score := result.metrics['episode/return_mean'][-1]):.2f} of at most 1")
    return score


if __name__ == "__main__":
    main()
