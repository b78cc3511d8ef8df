"""Exports a trained CartPole policy to a file and plays it in Gymnasium with NumPy only."""

import tempfile
from pathlib import Path

import gymnasium
import numpy as np

import jppo


def play(policy: jppo.numpy_policy.NumpyPolicy, episodes: int) -> float:
    """Returns the mean return of greedy actions."""
    env, total = gymnasium.make("CartPole-v1"), 0.0
    for seed in range(episodes):
        obs, _ = env.reset(seed=seed)
        over = False
        while not over:
            obs, reward, terminated, truncated, _ = env.step(int(policy.act(obs)))
            total, over = total + float(reward), terminated or truncated
    env.close()
    return total / episodes


def main(total_steps: int = 200_000, episodes: int = 10) -> tuple[np.ndarray, np.ndarray, float]:
    """Returns actions of the trained and of the exported policy, and the mean return of the exported one."""
    result = jppo.train("CartPole-v1", total_steps=total_steps)
    observations = np.random.default_rng(0).uniform(-0.2, 0.2, (100, 4)).astype(np.float32)
    with tempfile.TemporaryDirectory() as folder:
        path = jppo.export_policy(result.policy, Path(folder) / "policy.npz")
        size, policy = (
            path.stat().st_size,
            jppo.numpy_policy.load(path),
        )  # needs only NumPy; its folder can be copied to machines without jppo
    score = play(policy, episodes)
    print(f"{size:,} bytes; with NumPy alone it balances for {score:.0f} of at most 500 steps")
    return result.policy.act(observations), policy.act(observations), score


if __name__ == "__main__":
    main()
