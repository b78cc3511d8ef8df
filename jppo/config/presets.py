"""Published configurations by name, and the environments that use them by default."""

import fnmatch
import re
from typing import NamedTuple

from jppo.config.checks import did_you_mean
from jppo.config.families import family_of, without_version
from jppo.config.ppo import Hyperparams, PPOConfig
from jppo.config.schedules import linear
from jppo.errors import Refused


class Preset(NamedTuple):
    """A configuration and its source."""

    config: PPOConfig
    hyperparams: Hyperparams
    total_steps: int
    source: str
    envs: tuple[str, ...] = ()  # environments that use it by default, in any version; patterns such as "ALE/*"


PRESETS = {
    "default": Preset(
        config=PPOConfig(num_envs=64, num_steps=128),
        hyperparams=Hyperparams(learning_rate=linear(1e-3, 0.0)),
        total_steps=1_000_000,
        source="jppo: large batches, for environments without their own preset",
    ),
    "cleanrl-classic": Preset(
        config=PPOConfig(num_envs=4, num_steps=128),
        hyperparams=Hyperparams(),
        total_steps=500_000,
        source="CleanRL ppo.py (Huang et al. 2022), https://docs.cleanrl.dev/rl-algorithms/ppo/#ppopy",
        envs=("CartPole-v1", "Acrobot-v1"),
    ),
    "mountaincar": Preset(
        config=PPOConfig(
            num_envs=16, num_steps=16, num_minibatches=4, normalize_obs=True, normalize_reward=True, clip_value=False
        ),
        hyperparams=Hyperparams(learning_rate=3e-4, gae_lambda=0.98, ent_coef=0.0),
        total_steps=1_000_000,
        source="rl-baselines3-zoo hyperparams/ppo.yml, MountainCar-v0",
        envs=("MountainCar-v0",),
    ),
    "mountaincar-continuous": Preset(
        config=PPOConfig(
            num_envs=16, num_steps=128, num_epochs=10, num_minibatches=8, normalize_obs=True, normalize_reward=True
        ),
        hyperparams=Hyperparams(learning_rate=3e-4, gamma=0.9999, gae_lambda=0.9, clip_eps=0.1, ent_coef=0.00429),
        total_steps=500_000,
        source="rl-baselines3-zoo hyperparams/ppo.yml, MountainCarContinuous-v0 (there 1 environment of 8 steps, "
        "20,000 steps, learning rate 7.77e-5, max_grad_norm 5, vf_coef 0.19, state-dependent exploration with log_std "
        "-3.29, other initial weights, and no clipping of the value)",
        envs=("MountainCarContinuous-v0",),
    ),
    "pendulum": Preset(
        config=PPOConfig(num_envs=4, num_steps=1024, num_epochs=10, num_minibatches=64, clip_value=False),
        hyperparams=Hyperparams(learning_rate=1e-3, gamma=0.9, ent_coef=0.0),
        total_steps=100_000,
        source="rl-baselines3-zoo hyperparams/ppo.yml, Pendulum-v1 (without its state-dependent exploration)",
        envs=("Pendulum-v1",),
    ),
    "memory": Preset(
        config=PPOConfig(
            num_envs=64,
            num_steps=128,
            num_epochs=4,
            num_minibatches=4,
            hidden_sizes=(64, 64),
            recurrent="gru",
            recurrent_size=64,
            sequence_length=64,
            normalize_obs=True,
        ),
        hyperparams=Hyperparams(learning_rate=linear(1e-3, 0.0), ent_coef=linear(0.01, 0.0)),
        total_steps=300_000,
        source="jppo: the memory tasks of benchmarks/learning.py",
        envs=("MemoryChain-bsuite",),
    ),
    "mujoco": Preset(
        config=PPOConfig(
            num_envs=8, num_steps=256, num_epochs=10, num_minibatches=32, normalize_obs=True, normalize_reward=True
        ),
        hyperparams=Hyperparams(learning_rate=linear(3e-4, 0.0), ent_coef=0.0),
        total_steps=1_000_000,
        source="CleanRL ppo_continuous_action.py (Huang et al. 2022), https://docs.cleanrl.dev/rl-algorithms/ppo/"
        "#ppo_continuous_actionpy (there 1 environment of 2,048 steps)",
        envs=tuple(
            f"{name}-v5"
            for name in (
                *("Ant", "HalfCheetah", "Hopper", "Humanoid", "HumanoidStandup", "InvertedDoublePendulum"),
                *("InvertedPendulum", "Pusher", "Reacher", "Swimmer", "Walker2d"),
            )
        ),
    ),
    "atari": Preset(
        config=PPOConfig(
            num_envs=8,
            num_steps=128,
            network="cnn",
            hidden_sizes=(512,),
            activation="relu",
            shared_torso=True,
            clip_reward=True,
        ),
        hyperparams=Hyperparams(clip_eps=0.1, vf_clip_eps=0.1),
        total_steps=10_000_000,
        source="CleanRL ppo_atari.py (Huang et al. 2022), "
        "https://docs.cleanrl.dev/rl-algorithms/ppo/#ppo_ataripy (there lost lives end episodes, the first "
        "action of an episode is FIRE, and actions are not sticky)",
        envs=("ALE/*",),
    ),
    "lunarlander": Preset(
        config=PPOConfig(num_envs=16, num_steps=1024, num_minibatches=256, clip_value=False),
        hyperparams=Hyperparams(learning_rate=3e-4, gamma=0.999, gae_lambda=0.98),
        total_steps=1_000_000,
        source="rl-baselines3-zoo hyperparams/ppo.yml, LunarLander-v2",
        envs=("LunarLander-v3", "LunarLanderContinuous-v3"),
    ),
    "bipedalwalker": Preset(
        config=PPOConfig(
            num_envs=32,
            num_steps=2048,
            num_epochs=10,
            num_minibatches=1024,
            normalize_obs=True,
            normalize_reward=True,
            clip_value=False,
        ),
        hyperparams=Hyperparams(learning_rate=3e-4, gamma=0.999, clip_eps=0.18, ent_coef=0.0),
        total_steps=5_000_000,
        source="rl-baselines3-zoo hyperparams/ppo.yml, BipedalWalker-v3",
        envs=("BipedalWalker-v3",),
    ),
    "bipedalwalker-hardcore": Preset(
        config=PPOConfig(
            num_envs=16,
            num_steps=2048,
            num_epochs=10,
            num_minibatches=512,
            normalize_obs=True,
            normalize_reward=True,
            clip_value=False,
        ),
        hyperparams=Hyperparams(learning_rate=linear(2.5e-4, 0.0), clip_eps=linear(0.2, 0.0), ent_coef=0.001),
        total_steps=100_000_000,
        source="rl-baselines3-zoo hyperparams/ppo.yml, BipedalWalkerHardcore-v3",
        envs=("BipedalWalkerHardcore-v3",),
    ),
    "carracing": Preset(
        config=PPOConfig(
            num_envs=8,
            num_steps=512,
            num_epochs=10,
            num_minibatches=32,
            network="cnn",
            hidden_sizes=(256,),
            activation="relu",
            shared_torso=True,
            normalize_reward=True,
            clip_value=False,
        ),
        hyperparams=Hyperparams(learning_rate=linear(1e-4, 0.0), ent_coef=0.0),
        total_steps=4_000_000,
        source="rl-baselines3-zoo hyperparams/ppo.yml, CarRacing-v0 (there every second frame, two grey frames of "
        "64 x 64, separate layers after the convolutions, GELU, other initial weights, state-dependent exploration "
        "with log_std -2)",
        envs=("CarRacing-v3",),
    ),
    "minigrid": Preset(
        config=PPOConfig(
            num_envs=8,
            num_steps=128,
            num_epochs=10,
            num_minibatches=16,
            normalize_obs=True,
            normalize_reward=True,
            clip_value=False,
        ),
        hyperparams=Hyperparams(learning_rate=2.5e-4, ent_coef=0.0),
        total_steps=100_000,
        source="rl-baselines3-zoo hyperparams/ppo.yml, MiniGrid-DoorKey-5x5-v0",
        envs=("MiniGrid-*",),
    ),
    "mpe": Preset(
        config=PPOConfig(num_envs=48, num_steps=128),
        hyperparams=Hyperparams(),
        total_steps=30_000_000,
        source="JaxMARL baselines/IPPO/config/ippo_ff_mpe.yaml (Rutherford et al. 2024): 16 environments of 3 agents",
        envs=("jaxmarl:MPE_*", "pettingzoo:mpe/*"),
    ),
    "smax": Preset(
        config=PPOConfig(
            num_envs=640, num_steps=128, hidden_sizes=(128, 128), activation="relu", recurrent="gru", recurrent_size=128
        ),
        hyperparams=Hyperparams(learning_rate=linear(4e-3, 0.0), clip_eps=0.05, vf_clip_eps=0.05, max_grad_norm=0.25),
        total_steps=50_000_000,
        source="JaxMARL baselines/IPPO/config/ippo_rnn_smax.yaml (Rutherford et al. 2024): 128 environments of "
        "5 agents (SMAX has 10, so 64 environments); there with the scenario 2s3z",
        envs=("jaxmarl:HeuristicEnemySMAX", "jaxmarl:SMAX"),
    ),
    "pettingzoo": Preset(
        config=PPOConfig(num_envs=240, num_steps=128, num_minibatches=8, normalize_obs=True, clip_value=False),
        hyperparams=Hyperparams(learning_rate=linear(1e-3, 0.0)),
        total_steps=2_000_000,
        source="jppo: 240 rows are whole environments of 2, 3, 4, 5, 6, 8, 10 or 12 agents",
        envs=("sisl/*", "butterfly/*"),
    ),
    "taxi": Preset(
        config=PPOConfig(num_envs=16, num_steps=128, normalize_reward=True, clip_value=False),
        hyperparams=Hyperparams(learning_rate=1e-3),
        total_steps=500_000,
        source="jppo: for Taxi with its action mask",
        envs=("Taxi-v4",),
    ),
    "gymnax-minatar": Preset(
        config=PPOConfig(num_envs=64, num_steps=128, num_minibatches=8, hidden_sizes=(256, 256), activation="relu"),
        hyperparams=Hyperparams(learning_rate=5e-4, gamma=0.999),
        total_steps=10_000_000,
        source="gymnax-blines agents/*-MinAtar/ppo.yaml (Lange 2022; there other initial weights, and the time limit "
        "counts as the end of a game)",
        envs=("Asterix-MinAtar", "Breakout-MinAtar", "Freeway-MinAtar", "Seaquest-MinAtar", "SpaceInvaders-MinAtar"),
    ),
    "craftax": Preset(
        config=PPOConfig(num_envs=1024, num_steps=64, num_minibatches=8, hidden_sizes=(512, 512, 512)),
        hyperparams=Hyperparams(learning_rate=linear(2e-4, 0.0), gae_lambda=0.8, max_grad_norm=1.0),
        total_steps=1_000_000_000,
        source="Craftax_Baselines ppo.py (Matthews et al. 2024), https://github.com/MichaelTMatthews/Craftax_Baselines",
        envs=("craftax:Craftax-Classic-Symbolic-v1", "craftax:Craftax-Symbolic-v1"),
    ),
    "craftax-pixels": Preset(
        config=PPOConfig(
            num_envs=1024,
            num_steps=64,
            num_minibatches=8,
            network="cnn",
            hidden_sizes=(512,),
            activation="relu",
            shared_torso=True,
        ),
        hyperparams=Hyperparams(learning_rate=linear(2e-4, 0.0), gae_lambda=0.8, max_grad_norm=1.0),
        total_steps=1_000_000_000,
        source="Craftax_Baselines ppo.py (Matthews et al. 2024), with the network of CleanRL ppo_atari.py",
        envs=("craftax:Craftax-Classic-Pixels-v1", "craftax:Craftax-Pixels-v1"),
    ),
    "playground": Preset(
        config=PPOConfig(
            num_envs=2048,
            num_steps=480,
            num_epochs=16,
            num_minibatches=32,
            hidden_sizes=(256, 256, 256),
            normalize_obs=True,
            normalize_reward=True,
            clip_value=False,
        ),
        hyperparams=Hyperparams(learning_rate=1e-3, gamma=0.995, clip_eps=0.3),
        total_steps=60_000_000,
        source="mujoco_playground/config/dm_control_suite_params.py (Zakka et al. 2025; there rollouts of 16 x "
        "30 steps, other networks, a fixed scale of rewards, no limit of the gradient, and other values for tasks of "
        "locomotion and manipulation)",
        envs=("playground:*",),
    ),
    "brax": Preset(
        config=PPOConfig(
            num_envs=2048,
            num_steps=10,
            num_minibatches=32,
            hidden_sizes=(256, 256),
            normalize_obs=True,
            normalize_reward=True,
        ),
        hyperparams=Hyperparams(learning_rate=3e-4, ent_coef=0.0),
        total_steps=50_000_000,
        source="PureJaxRL ppo_continuous_action.py (Lu et al. 2022), https://github.com/luchris429/purejaxrl",
        envs=("brax:*",),
    ),
    "jumanji": Preset(
        config=PPOConfig(
            num_envs=256,
            num_steps=64,
            num_minibatches=8,
            hidden_sizes=(256, 256),
            normalize_obs=True,
            normalize_reward=True,
        ),
        hyperparams=Hyperparams(learning_rate=linear(5e-4, 0.0)),
        total_steps=10_000_000,
        source="jppo: one MLP for all games of Jumanji, which publishes settings of A2C with a network for each game",
        envs=("jumanji:*",),
    ),
    "xminigrid": Preset(
        config=PPOConfig(num_envs=8192, num_steps=16, num_epochs=1, num_minibatches=16, recurrent="gru"),
        hyperparams=Hyperparams(learning_rate=linear(1e-3, 0.0)),
        total_steps=10_000_000,
        source="XLand-MiniGrid training/train_single_task.py (Nikulin et al. 2023; there a GRU of 1,024 units)",
        envs=("xminigrid:*",),
    ),
    "navix": Preset(
        config=PPOConfig(num_envs=16, num_steps=128, num_epochs=1, num_minibatches=8),
        hyperparams=Hyperparams(),
        total_steps=1_000_000,
        source="navix/agents/ppo.py (Pignatelli et al. 2024)",
        envs=("navix:*",),
    ),
}


def choose_preset(name: str, env_name: str) -> str:
    """Returns the name of a preset; for "auto", of the environment's preset. Raises ValueError for an unknown name."""
    if name == "auto":
        return preset_for(env_name)
    if not isinstance(name, str) or name not in PRESETS:
        raise Refused(f"unknown preset {name!r:.80}; {did_you_mean(str(name), PRESETS)}")
    return name


def preset_for(env_name: str) -> str:
    """Returns the name of an environment's preset.

    HalfCheetah-v4 and envpool:HalfCheetah-v4 have the preset of HalfCheetah-v5; mine:HalfCheetah, a class, does not.
    """
    short = env_name if family_of(env_name) else re.sub(r"^[\w.]+:(?=.*-v\d+$)", "", env_name)
    for name, preset in PRESETS.items():
        if any(fnmatch.fnmatchcase(without_version(short), without_version(env)) for env in preset.envs):
            return name
    is_atari = re.fullmatch(r"(atari|envpool):.*-v5|(ale_py:)?\w+(NoFrameskip|Deterministic)-v\d", env_name)
    return "atari" if is_atari else "default"
