"""Types of the settings that `jppo.train` and its relatives take by name, for editors, type checkers and help().

The dataclasses are the source: a test compares names and types. A list may replace a tuple.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypedDict, TypeVar

from jppo.config.schedules import Schedule

T = TypeVar("T")
Many: TypeAlias = T | Iterable[T]


class AlgorithmKeywords(TypedDict, total=False):
    """Fields of `jppo.PPOConfig` and `jppo.Hyperparams`, and scale_envs."""

    scale_envs: int
    num_envs: int
    num_steps: int
    num_epochs: int
    num_minibatches: int
    hidden_sizes: tuple[int, ...] | list[int]
    activation: Literal["tanh", "relu", "swish"]
    shared_torso: bool
    normalize_obs: bool
    normalize_reward: bool
    clip_reward: bool
    normalize_advantage: bool
    clip_value: bool
    kl_control: Literal["none", "stop", "adapt"]
    action_bounds: Literal["clip", "tanh"]
    recurrent: Literal["none", "gru", "lstm"]
    recurrent_size: int
    sequence_length: int | None
    actor_obs: tuple[str, ...] | list[str]
    critic_obs: tuple[str, ...] | list[str]
    keep_next_obs: bool
    compute_dtype: Literal["float32", "bfloat16"]
    staggered_start: int
    num_strata: int
    learning_rate: float | Schedule
    gamma: float | Schedule
    gae_lambda: float | Schedule
    clip_eps: float | Schedule
    vf_clip_eps: float | Schedule
    vf_coef: float | Schedule
    ent_coef: float | Schedule
    max_grad_norm: float | Schedule
    target_kl: float | Schedule
    adam_eps: float | Schedule


class ActorKeywords(AlgorithmKeywords, total=False):
    """The same and the fields of `jppo.RayConfig`."""

    num_actors: int | None
    envs_per_actor: int | None
    policy_lag: Literal[0, 1]
    actor_cpus: float
    actor_gpus: float
    address: str | None
    actor_timeout: float | None
    max_restarts: int


class EvaluationKeywords(TypedDict, total=False):
    """Fields of `jppo.RunConfig` for evaluations and early stopping."""

    eval_every: int | None
    eval_episodes: int | None
    eval_sampled: bool | None
    eval_max_steps: int | None
    stop_at_return: float | None


class EventKeywords(EvaluationKeywords, total=False):
    """The same and the callback."""

    callback: Callable[[Any], Any] | None
    callback_every: int


class TrainKeywords(ActorKeywords, EventKeywords, total=False):
    """The keywords of `jppo.train`: fields of the four records."""

    run_dir: str | Path | None
    resume: bool
    checkpoint_seconds: float
    max_checkpoints: int
    wandb: bool
    deterministic: bool | None
    log_every: int | None
    force: bool
    video: bool | None
    progress: Any


class TrialKeywords(ActorKeywords, EventKeywords, total=False):
    """The keywords of `jppo.tune.trainable`."""


class SweepKeywords(EvaluationKeywords, total=False):
    """The keywords of `jppo.sweep`: one value or a list of values for each setting of the algorithm."""

    scale_envs: Many[int]
    num_envs: Many[int]
    num_steps: Many[int]
    num_epochs: Many[int]
    num_minibatches: Many[int]
    hidden_sizes: Many[tuple[int, ...] | list[int]]
    activation: Many[Literal["tanh", "relu", "swish"]]
    shared_torso: Many[bool]
    normalize_obs: Many[bool]
    normalize_reward: Many[bool]
    clip_reward: Many[bool]
    normalize_advantage: Many[bool]
    clip_value: Many[bool]
    kl_control: Many[Literal["none", "stop", "adapt"]]
    action_bounds: Many[Literal["clip", "tanh"]]
    recurrent: Many[Literal["none", "gru", "lstm"]]
    recurrent_size: Many[int]
    sequence_length: Many[int | None]
    actor_obs: Many[tuple[str, ...] | list[str]]
    critic_obs: Many[tuple[str, ...] | list[str]]
    keep_next_obs: Many[bool]
    compute_dtype: Many[Literal["float32", "bfloat16"]]
    staggered_start: Many[int]
    num_strata: Many[int]
    learning_rate: Many[float | Schedule]
    gamma: Many[float | Schedule]
    gae_lambda: Many[float | Schedule]
    clip_eps: Many[float | Schedule]
    vf_clip_eps: Many[float | Schedule]
    vf_coef: Many[float | Schedule]
    ent_coef: Many[float | Schedule]
    max_grad_norm: Many[float | Schedule]
    target_kl: Many[float | Schedule]
    adam_eps: Many[float | Schedule]
    progress: Any
