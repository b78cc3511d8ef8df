"""Trains CartPole and uses the trained policy."""

import numpy as np

import jppo


def main(total_steps: int = 200_000, seed: int = 0) -> tuple[float, np.ndarray]:
    """Returns the mean return of the last tenth of the run, and the actions for two observations."""
    result = jppo.train("CartPole-v1", total_steps=total_steps, seed=seed)
    returns = result.metrics["episode/return_mean"]  # one entry per update, NaN where no episode ended
    score = float(np.nanmean(returns[-len(returns) // 10 :]))

    # position, velocity, angle, angular velocity: one pole that falls to the left, one to the right
    falling = np.array([[0.0, 0.0, -0.15, -0.5], [0.0, 0.0, 0.15, 0.5]], np.float32)
    actions = result.policy.act(falling)  # 0 pushes to the left, 1 to the right
    print(f"mean return {score:.0f} of at most 500 after {total_steps} steps; pushes {actions.tolist()}")
    return score, actions


if __name__ == "__main__":
    main()
