"""Published configurations, by name, and which environment starts with which."""

from typing import NamedTuple

from jppo.config.ppo import Hyperparams, PPOConfig
from jppo.config.schedules import linear


class Preset(NamedTuple):
    """A configuration and where it was published."""

    config: PPOConfig
    hyperparams: Hyperparams
    total_steps: int
    source: str
    envs: tuple[str, ...] = ()  # that use it unless told otherwise


PRESETS = {
    "default": Preset(
        PPOConfig(num_envs=64, num_steps=128),
        Hyperparams(learning_rate=linear(1e-3, 0.0)),
        1_000_000,
        "our own: wide batches, for environments without a preset of their own",
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
        "rl-baselines3-zoo hyperparams/ppo.yml, MountainCar-v0 (with observations normalised, rewards not)",
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
    """Name of the preset that an environment starts with."""
    return next((name for name, preset in PRESETS.items() if env_name in preset.envs), "default")
