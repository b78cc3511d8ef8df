"""Published configurations by name, and the environments that use them by default."""

import re
from typing import NamedTuple

from jppo.config.ppo import Hyperparams, PPOConfig
from jppo.config.schedules import linear


class Preset(NamedTuple):
    """A configuration and its source."""

    config: PPOConfig
    hyperparams: Hyperparams
    total_steps: int
    source: str
    envs: tuple[str, ...] = ()  # environments that use it by default, in any version


PRESETS = {
    "default": Preset(
        PPOConfig(num_envs=64, num_steps=128),
        Hyperparams(learning_rate=linear(1e-3, 0.0)),
        1_000_000,
        "jppo: large batches, for environments without their own preset",
    ),
    "cleanrl-classic": Preset(
        PPOConfig(num_envs=4, num_steps=128),
        Hyperparams(),
        500_000,
        "CleanRL ppo.py (Huang et al. 2022), https://docs.cleanrl.dev/rl-algorithms/ppo/#ppopy",
        ("CartPole-v1", "Acrobot-v1"),
    ),
    "mountaincar": Preset(
        PPOConfig(
            num_envs=16,
            num_steps=16,
            num_minibatches=4,
            normalize_obs=True,
            clip_value=False,
        ),
        Hyperparams(learning_rate=3e-4, gae_lambda=0.98, ent_coef=0.0),
        1_000_000,
        "rl-baselines3-zoo hyperparams/ppo.yml, MountainCar-v0 (with observations normalized, rewards not)",
        ("MountainCar-v0",),
    ),
    "pendulum": Preset(
        PPOConfig(
            num_envs=4,
            num_steps=1024,
            num_epochs=10,
            num_minibatches=64,
            clip_value=False,
        ),
        Hyperparams(learning_rate=1e-3, gamma=0.9, ent_coef=0.0),
        100_000,
        "rl-baselines3-zoo hyperparams/ppo.yml, Pendulum-v1 (without its state-dependent exploration)",
        ("Pendulum-v1",),
    ),
    "mujoco": Preset(
        PPOConfig(
            num_envs=8,
            num_steps=256,
            num_epochs=10,
            num_minibatches=32,
            normalize_obs=True,
            normalize_reward=True,
        ),
        Hyperparams(learning_rate=linear(3e-4, 0.0), ent_coef=0.0),
        1_000_000,
        "CleanRL ppo_continuous_action.py (Huang et al. 2022), https://docs.cleanrl.dev/rl-algorithms/ppo/"
        "#ppo_continuous_actionpy (there 1 environment of 2,048 steps)",
        tuple(
            f"{name}-v5"
            for name in (
                *("Ant", "HalfCheetah", "Hopper", "Humanoid", "HumanoidStandup", "InvertedDoublePendulum"),
                *("InvertedPendulum", "Pusher", "Reacher", "Swimmer", "Walker2d"),
            )
        ),
    ),
    "taxi": Preset(
        PPOConfig(num_envs=16, num_steps=128, normalize_reward=True, clip_value=False),
        Hyperparams(learning_rate=1e-3),
        200_000,
        "jppo: for Taxi with its action mask",
        ("Taxi-v4",),
    ),
    "gymnax-minatar": Preset(
        PPOConfig(
            num_envs=64,
            num_steps=128,
            num_minibatches=8,
            hidden_sizes=(256, 256),
            activation="relu",
        ),
        Hyperparams(learning_rate=5e-4, gamma=0.999),
        10_000_000,
        "gymnax-blines agents/*-MinAtar/ppo.yaml (Lange 2022; without its warm-up)",
        ("Asterix-MinAtar", "Breakout-MinAtar", "Freeway-MinAtar", "Seaquest-MinAtar", "SpaceInvaders-MinAtar"),
    ),
}


def preset_for(env_name: str) -> str:
    """Returns the name of an environment's preset.

    HalfCheetah-v4 and envpool:HalfCheetah-v4 have the preset of HalfCheetah-v5; mine:HalfCheetah, a class, does not.
    """
    env_name = re.sub(r"^[\w.]+:(?=.*-v\d+$)", "", env_name)
    for name, preset in PRESETS.items():
        if _without_version(env_name) in map(_without_version, preset.envs):
            return name
    return "default"


def _without_version(env_name: str) -> str:
    return re.sub(r"-v\d+$", "", env_name)
