"""Trains Pong from pixels with the usual preprocessing: 84x84 grey images, every fourth frame, four stacked frames."""

from typing import Any

import ale_py
import gymnasium
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

import jppo


def make_env(render_mode: str | None = None) -> gymnasium.Env:
    """Makes the environment; every actor calls it, and `jppo play` passes a render_mode."""
    gymnasium.register_envs(ale_py)
    env = gymnasium.make("ALE/Pong-v5", frameskip=1, render_mode=render_mode)  # the preprocessing skips frames itself
    return FrameStackObservation(AtariPreprocessing(env), 4)


def main(total_steps: int = 10_000_000, num_actors: int = 8, num_steps: int = 128, **options: Any) -> jppo.Result:
    """Trains with the settings of CleanRL's ppo_atari.py."""
    result = jppo.train(
        make_env,
        total_steps=total_steps,
        config=jppo.PPOConfig(
            num_envs=8, num_steps=num_steps, network="cnn", hidden_sizes=(512,), activation="relu", shared_torso=True
        ),
        hyperparams=jppo.Hyperparams(learning_rate=2.5e-4, clip_eps=0.1, vf_clip_eps=0.1),
        num_actors=num_actors,
        ray=jppo.RayConfig(policy_lag=1),  # the actors collect while the learner learns
        **options,
    )
    seconds = {name: result.metrics[f"time/{name}"].sum() for name in ("wait_rollouts", "host_to_device", "update")}
    where = ", ".join(f"{value:.0f} s {name}" for name, value in seconds.items())
    print(f"mean return {result.summary['return_mean']:.1f} of at most 21 after {total_steps} steps; {where}")
    return result


if __name__ == "__main__":
    main(progress="auto", run_dir="runs/pong")
