"""Trains once with Stable-Baselines3 for versus_sb3.py. Takes the settings as JSON and prints the result as JSON.

It runs in Stable-Baselines3's Python environment, so it imports neither jppo nor jax.
"""

import json
import platform
import sys
import time
from importlib.metadata import version
from typing import Any

import host_envs
import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv

PACKAGES = ("stable_baselines3", "torch", "gymnasium", "numpy")


class Marks(BaseCallback):
    """Records seconds since the start, steps and the mean return of the episodes at the end of each update."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []
        self.steps: list[int] = []
        self.return_mean: list[float | None] = []
        self._start, self._returns = 0.0, list[float]()

    def _on_training_start(self) -> None:
        self._start = time.perf_counter()

    def _on_rollout_start(self) -> None:
        if self.num_timesteps:
            self._mark()

    def _on_training_end(self) -> None:
        self._mark()

    def _on_step(self) -> bool:
        self._returns += [info["episode"]["r"] for info in self.locals["infos"] if "episode" in info]
        return True

    def _mark(self) -> None:
        self.seconds.append(time.perf_counter() - self._start)
        self.steps.append(self.num_timesteps)
        self.return_mean.append(float(np.mean(self._returns)) if self._returns else None)
        self._returns = []


def make_envs(setting: dict[str, Any]) -> VecEnv:
    """Makes all environments in this process, or one process per actor with one environment each."""
    factory = getattr(host_envs, setting["env"])
    if setting["subprocesses"]:
        return SubprocVecEnv([lambda: Monitor(factory())] * setting["num_actors"])
    return DummyVecEnv([lambda: Monitor(factory())] * (setting["num_actors"] * setting["envs_per_actor"]))


def make_ppo(envs: VecEnv, setting: dict[str, Any]) -> PPO:
    return PPO(
        "MlpPolicy",
        envs,
        n_steps=setting["batch_size"] // envs.num_envs,
        batch_size=setting["batch_size"] // setting["num_minibatches"],
        n_epochs=setting["num_epochs"],
        learning_rate=setting["learning_rate"],
        gamma=setting["gamma"],
        gae_lambda=setting["gae_lambda"],
        clip_range=setting["clip_eps"],
        ent_coef=setting["ent_coef"],
        vf_coef=setting["vf_coef"] / 2,  # Stable-Baselines3 multiplies the squared error, jppo half of it
        max_grad_norm=setting["max_grad_norm"],
        policy_kwargs={"net_arch": {name: list(setting["hidden_sizes"]) for name in ("pi", "vf")}},
        seed=setting["seed"],
        device="cpu",
    )


def main() -> None:
    setting = json.loads(sys.argv[1])
    if setting["torch_threads"]:
        torch.set_num_threads(setting["torch_threads"])
    envs, marks = make_envs(setting), Marks()
    ppo = make_ppo(envs, setting)
    ppo.learn(setting["batch_size"] * setting["num_updates"], callback=marks)
    envs.close()
    result = {
        "seconds": marks.seconds,
        "steps": marks.steps,
        "return_mean": marks.return_mean[-1],
        "versions": {"python": platform.python_version()} | {name: version(name) for name in PACKAGES},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
