"""Tasks of learning.py, with the published scores."""

from typing import Any, NamedTuple

from memory_envs import HiddenVelocities, HostHiddenVelocities, TMaze

import jppo


class Task(NamedTuple):
    """An environment, the number of steps, and the published score for comparison."""

    total_steps: int  # as in the preset, so that `jppo train` of the environment has the same budget
    published: str = ""  # score ± standard deviation
    source: str = ""
    target: float | None = None  # lower limit of our score, of the memory tasks
    seeds: int = 10
    preset: str = ""  # default: the environment's
    env: Any = None  # default: the name in the label
    other_budget: bool = False  # the published score is that of another number of steps
    settings: tuple[jppo.PPOConfig, jppo.Hyperparams] | None = None  # instead of the preset's
    num_actors: int | None = None  # host environments; default: one per core


_CLEANRL = "CleanRL, 3 seeds"
_CLEANRL_V4 = "CleanRL, v4, 3 seeds"
_ZOO = "rl-zoo, 1 seed, greedy"
_BLINES = "gymnax-blines, 1 seed"
_SLM = "SLM-Lab, 4 seeds"

# Labels: environment, then /ray if it is stepped by actors. Numbers of steps are those of the published scores, or the
# source states another number.
TASKS = {
    "CartPole-v1": Task(500_000, "490.0 ± 6.1", _CLEANRL),
    "Acrobot-v1": Task(500_000, "-86.4 ± 1.3", _CLEANRL),
    "Pendulum-v1": Task(100_000, "-172 ± 104", _ZOO),
    "MountainCar-v0": Task(1_000_000, "-110 ± 19", _ZOO),
    "MountainCarContinuous-v0": Task(500_000, "88.3 ± 2.6", f"{_ZOO}, 20,000 steps", other_budget=True),
    "CartPole-v1/ray": Task(500_000, "490.0 ± 6.1", _CLEANRL),
    "Pendulum-v1/ray": Task(100_000, "-172 ± 104", _ZOO),
    "Asterix-MinAtar": Task(10_000_000, "15", _BLINES),
    "Breakout-MinAtar": Task(10_000_000, "28", _BLINES),
    "Freeway-MinAtar": Task(10_000_000, "58", _BLINES),
    "Seaquest-MinAtar": Task(10_000_000),
    "SpaceInvaders-MinAtar": Task(10_000_000, "131", _BLINES),
    "HalfCheetah-v5/ray": Task(1_000_000, "1443 ± 46", _CLEANRL_V4, seeds=5),
    "Hopper-v5/ray": Task(1_000_000, "2383 ± 272", _CLEANRL_V4, seeds=5),
    "Walker2d-v5/ray": Task(1_000_000, "2288 ± 572", _CLEANRL_V4, seeds=5),
    "Ant-v5/ray": Task(1_000_000, "3258 ± 1079", "Tianshou, v3, 10 seeds, greedy, best of the run", seeds=5),
    "LunarLander-v3/ray": Task(1_000_000, "242", f"{_ZOO}, v2", seeds=5),
    "Taxi-v4/ray": Task(500_000, "8", "Gymnasium's threshold"),
    "atari:Pong-v5/ray": Task(10_000_000, "20.36 ± 0.20", "CleanRL ppo_atari.py, 3 seeds", seeds=5, num_actors=0),
    "craftax:Craftax-Classic-Symbolic-v1": Task(1_000_000_000, "19.8", "derived: 90 % of 22, Craftax paper", seeds=5),
    "playground:CartpoleBalance": Task(60_000_000, "968", f"{_SLM}, 10⁸ steps", seeds=5, other_budget=True),
    "playground:CheetahRun": Task(60_000_000, "883", f"{_SLM}, 10⁸ steps", seeds=5, other_budget=True),
    "jumanji:Snake-v1": Task(10_000_000, seeds=5),
    "jumanji:Game2048-v1": Task(10_000_000, seeds=5),
    "xminigrid:MiniGrid-Empty-8x8": Task(10_000_000, seeds=5),
    "xminigrid:MiniGrid-DoorKey-5x5": Task(10_000_000, seeds=5),
    "xminigrid:MiniGrid-DoorKey-8x8": Task(10_000_000, seeds=5),
}

# Memory: the same settings for all environments. The two networks have about the same number of parameters.
_GRU = jppo.PRESETS["memory"]
NETWORKS = {
    "GRU": _GRU.config,
    "MLP": _GRU.config.replace(recurrent="none", sequence_length=None, hidden_sizes=(64, 64, 64)),
}
MEMORY_ENVS = {  # label: environment, steps, target
    "MemoryChain-bsuite": ("MemoryChain-bsuite", 300_000, 0.95),
    "CartPole without velocities": (HiddenVelocities(), 1_500_000, 475.0),
    "CartPole without velocities/host": (HostHiddenVelocities, 3_000_000, 475.0),
    "T-maze of length 20": (TMaze(), 1_000_000, 0.95),
}
MEMORY = {
    f"{label}/{network}": Task(
        steps, target=target, seeds=5, env=env, settings=(config, _GRU.hyperparams), num_actors=0
    )
    for label, (env, steps, target) in MEMORY_ENVS.items()
    for network, config in NETWORKS.items()
}
