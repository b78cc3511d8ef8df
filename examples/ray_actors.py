"""Trains on a custom Gymnasium environment with Ray actors: a heater must keep a room at 20 degrees."""

import gymnasium
import numpy as np

import jppo


class Heater(gymnasium.Env):
    """Observations: room and outside temperature. Actions: heating off (0) or on (1). Reward: minus the error."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.room, self.weather = self.np_random.uniform([5.0, -5.0], [30.0, 15.0])
        return self.observation(), {}

    def step(self, action):
        self.weather += self.np_random.normal(scale=0.5)
        self.room += 4.0 * action + 0.1 * (self.weather - self.room)
        return self.observation(), -abs(self.room - 20.0), False, False, {}

    def observation(self):
        return np.array([(self.room - 20.0) / 10.0, self.weather / 10.0], np.float32)


def make_env() -> gymnasium.Env:
    """Makes the environment; every actor calls it once per environment."""
    return gymnasium.wrappers.TimeLimit(Heater(), 100)


def main(total_steps: int = 200_000, num_actors: int = 2) -> tuple[float, float]:
    """Returns the mean return of the first and of the last tenth of the run."""
    result = jppo.train(
        make_env,
        total_steps=total_steps,
        config=jppo.PPOConfig(num_envs=16, num_steps=128),
        hyperparams=jppo.Hyperparams(learning_rate=3e-3, gamma=0.9),
        num_actors=num_actors,  # number of processes with 16/num_actors environments each; 0: no actor processes
        ray=jppo.RayConfig(policy_lag=1),  # the actors collect while the learner learns
    )
    returns = result.metrics["episode/return_mean"]
    tenth = len(returns) // 10
    first, last = float(np.nanmean(returns[:tenth])), float(np.nanmean(returns[-tenth:]))
    speed = result.summary["steps_per_second"]
    print(f"mean return {first:.0f} at first, {last:.0f} at last; {speed:.0f} steps/s with {num_actors} actors")
    return first, last


if __name__ == "__main__":
    main()
