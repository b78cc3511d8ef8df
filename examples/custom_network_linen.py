"""Trains a flax linen network. Any module that returns (distribution, value) can be used."""

import flax.linen as nn
import jax

import jppo


class Residual(nn.Module):
    """A residual torso with layer normalization and two heads."""

    num_actions: int
    width: int = 64
    depth: int = 2

    @nn.compact
    def __call__(self, obs: jax.Array) -> tuple[jppo.Categorical, jax.Array]:
        x = nn.Dense(self.width)(obs)  # obs [B, *obs]
        for _ in range(self.depth):
            x = x + nn.Dense(self.width)(nn.silu(nn.LayerNorm()(x)))
        x = nn.LayerNorm()(x)
        policy = nn.Dense(self.num_actions, kernel_init=nn.initializers.orthogonal(0.01))
        return jppo.Categorical(policy(x)), nn.Dense(1)(x)[:, 0]  # value [B]


def main(total_steps: int = 200_000) -> float:
    """Returns the mean return of the last update."""
    config = jppo.PPOConfig(num_envs=16, num_steps=128)
    agent = jppo.make_anakin("CartPole-v1", config, total_steps=total_steps, network=Residual(num_actions=2))
    state, metrics = jppo.jit(agent.train)(jax.random.key(0), jppo.Hyperparams(learning_rate=1e-3))
    num_params = sum(leaf.size for leaf in jax.tree.leaves(state.train.policy_state.params))
    score = float(metrics["episode/return_mean"][-1])
    print(f"a residual network of {num_params} parameters: mean return {score:.0f} of at most 500")
    return score


if __name__ == "__main__":
    main()
