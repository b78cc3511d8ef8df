"""Population-based training (Jaderberg et al. 2017) on the device.

Hyperparameters are leaves of the state, so exploitation copies states by index, and exploration multiplies leaves.
"""

import jax
import jax.numpy as jnp
import numpy as np

import jppo

CONFIG = jppo.PPOConfig(num_envs=16, num_steps=64)


def main(num_runs: int = 16, rounds: int = 10, updates: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """Returns mean returns after each round, [rounds, runs], and the final learning rates, [runs]."""
    agent = jppo.make_anakin("CartPole-v1", CONFIG, total_steps=rounds * updates * CONFIG.batch_size)
    quarter = num_runs // 4

    def train_then_select(state, key):
        state, metrics = jax.lax.scan(lambda state, _: jax.vmap(agent.step)(state), state, length=updates)
        score = jnp.nan_to_num(metrics["episode/return_mean"][-1], nan=-jnp.inf)

        worst_first = jnp.argsort(score)
        source = jnp.arange(num_runs).at[worst_first[:quarter]].set(worst_first[-quarter:])  # exploit
        copied = source != jnp.arange(num_runs)
        train = jax.tree.map(lambda leaf: leaf[source], state.train).replace(key=state.train.key)

        factor = jnp.where(copied, jax.random.choice(key, jnp.array([0.5, 2.0]), (num_runs,)), 1.0)  # explore
        numbers = vars(train.hyperparams) | {"learning_rate": train.hyperparams.learning_rate * factor}
        return state.replace(train=train.replace(hyperparams=jppo.Hyperparams(**numbers))), score

    @jppo.jit
    def run(keys, rates, round_keys):
        start = jax.vmap(lambda key, rate: agent.init(key, jppo.Hyperparams(learning_rate=rate)))(keys, rates)
        return jax.lax.scan(train_then_select, start, round_keys)

    rates = jnp.geomspace(1e-6, 1e-2, num_runs)
    init_key, round_key = jax.random.split(jax.random.key(0))
    state, scores = run(jax.random.split(init_key, num_runs), rates, jax.random.split(round_key, rounds))
    ended = np.asarray(state.train.hyperparams.learning_rate)

    print("round   worst   median   best")
    for number, row in enumerate(np.asarray(scores)):
        print(f"{number + 1:>5} {row.min():>7.0f} {np.median(row):>8.0f} {row.max():>6.0f}")
    print(f"learning rates: {rates[0]:.0e} to {rates[-1]:.0e} at first, {ended.min():.0e} to {ended.max():.0e} at last")
    return np.asarray(scores), ended


if __name__ == "__main__":
    main()
