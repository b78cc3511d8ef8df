"""What is given, checked: for a run, a trial, a sweep and a plan alike."""

import numbers
from pathlib import Path
from typing import Any

import jax

from jppo.config.ppo import PPOConfig
from jppo.config.presets import PRESETS
from jppo.ppo.optimizer import adam
from jppo.runs.run_dir import read_config

_PARTS = ("network", "optimizer", "loss")


def check_preset(name: str) -> str:
    """The name. Raises ValueError where there is no such preset."""
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}; there are {', '.join(PRESETS)}")
    return name


def check_sizes(config: PPOConfig, total_steps: int) -> None:
    """Raises ValueError for more updates than the device counts, in 32 bits."""
    if (updates := config.num_updates(total_steps)) >= 2**31:
        raise ValueError(f"total_steps = {total_steps:,} makes {updates:,} updates; there must be less than 2**31")


def check_run_dir(
    run_dir: str | Path | None,
    resume: str | Path | None,
    wandb: bool,
    checkpoint_every: float | None,
    keep: int,
    num_hosts: int,
) -> Path | None:
    """The run directory. Raises ValueError for what cannot be asked of it."""
    if resume is not None and run_dir is not None and Path(resume).resolve() != Path(run_dir).resolve():
        raise ValueError(f"resume = {resume} and run_dir = {run_dir} are two runs; give one")
    several = num_hosts > 1 or (jax.distributed.is_initialized() and jax.process_count() > 1)
    for name, value in (("resume", resume), ("checkpoint_every", checkpoint_every)):
        if value is not None and several:
            raise ValueError(f"{name} is for runs in one process; those over several hosts make no checkpoints")
    path = run_dir if resume is None else resume
    if path is None and wandb:
        raise ValueError("wandb needs a run_dir")
    if path is None and checkpoint_every is not None:
        raise ValueError("checkpoint_every needs a run_dir")
    number = isinstance(checkpoint_every, numbers.Real) and not isinstance(checkpoint_every, bool)
    if checkpoint_every is not None and not (number and checkpoint_every >= 0.0):
        raise ValueError(f"checkpoint_every = {checkpoint_every!r} must be a number of seconds, at least 0")
    if isinstance(keep, bool) or not isinstance(keep, numbers.Integral) or keep < 1:
        raise ValueError(f"keep = {keep!r} must be a whole number of at least 1")
    if resume is not None:
        read_config(Path(resume))
    return None if path is None else Path(path)


def own_parts(env: Any, parts: dict[str, Any]) -> tuple[str, ...]:
    """Which of the environment, and of network, optimizer and loss (parts), are the user's own and cannot be named."""
    own = tuple(name for name, part in parts.items() if name in _PARTS and part not in (None, adam))
    return own if isinstance(env, str) else ("environment", *own)
