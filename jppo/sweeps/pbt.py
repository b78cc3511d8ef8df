"""Population-based training: at each exchange, the worst runs of a program become changed copies of the best runs."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jppo.config.overrides import CONFIG_NAMES
from jppo.config.pbt import PBTConfig
from jppo.config.ppo import RANGES, Hyperparams
from jppo.config.schedules import Schedule
from jppo.envs.spaces import Array
from jppo.errors import Refused
from jppo.ppo.anakin import AnakinState
from jppo.ppo.types import derive_key
from jppo.sweeps.grid import ProgramGroup

FACTORS = (0.8, 1.25)
_LEAST_RUNS = 4
_NEAR_ONE = ("gamma", "gae_lambda")  # their distance from 1 decides, so the factor multiplies 1 - value
Ranges = Mapping[str, tuple[float, float]]


def check_pbt(pbt: PBTConfig, groups: list[ProgramGroup], values: dict[str, list[Any]]) -> None:
    """Raises ValueError if population-based training of a sweep's runs is impossible.

    Args:
      values: the values of each setting.
    """
    run = groups[0].settings.run
    if run.stop_at_return is not None and not run.eval_every:
        raise Refused(f"pbt needs evaluations for stop_at_return = {run.stop_at_return:g}; set eval_every")
    swept = {name: choices for name, choices in values.items() if len(choices) > 1}
    for name, choices in swept.items():
        if name in CONFIG_NAMES:
            raise Refused(
                f"{name} = {choices}: pbt changes fields of jppo.Hyperparams only, and {name} is a field of "
                "jppo.PPOConfig; pass one value"
            )
        for value in choices:
            if isinstance(value, Schedule) or math.isinf(value):
                raise Refused(f"{name} = {value}: pbt changes finite numbers only; pass numbers, or one value")
    if not swept:
        raise Refused("pbt needs a hyperparameter with several values, for example two values of learning_rate")
    for group in groups:
        runs, updates = len(group.runs), group.agent.num_updates
        if runs < _LEAST_RUNS:
            raise Refused(f"pbt needs at least {_LEAST_RUNS} runs, this sweep has {runs}; use more seeds or values")
        if group.max_parallel_runs is not None and group.max_parallel_runs < runs:
            raise Refused(
                f"max_parallel_runs = {group.max_parallel_runs}: pbt trains all {runs} runs of a program at once; "
                "leave it out"
            )
        if (every := pbt.updates_between_exchanges(updates)) >= updates:
            raise Refused(f"pbt.every = {every} must be less than the number of updates, {updates}")


def search_ranges(group: ProgramGroup) -> dict[str, tuple[float, float]]:
    """Returns the smallest and the largest initial value of each hyperparameter that differs between the runs."""
    values = {name: {run.settings[name] for run in group.runs} for name in group.runs[0].settings}
    return {name: (float(min(x)), float(max(x))) for name, x in values.items() if len(x) > 1}


def exchange(
    state: AnakinState, returns: Array, finite: Array, key: Array, ranges: Ranges, config: PBTConfig
) -> tuple[AnakinState, Array]:
    """Replaces the worst runs by copies of the best ones and changes the hyperparameters of the copies.

    A copy has the parameters, the optimizer's state, the normalization and the environments of the other run, but other
    random keys.

    Args:
      state: leaves [S, ...] of S >= R runs; the last S - R are padding.
      returns: [R] f32, recent mean return; NaN if no episode has ended.
      finite: [R] bool, whether the run has not diverged.
      key: [] key of this exchange.
      ranges: smallest and largest initial value of each hyperparameter to change.

    Returns:
      the new state, and the run [R] i32 from which each run was copied; the run itself if it was not replaced.
    """
    source = choose_sources(returns, finite, derive_key(key, "sources"), config.fraction)
    runs = jnp.arange(len(state.train.update))
    rows = jnp.concatenate([source, runs[len(returns) :]])
    copied = jax.tree.map(lambda x: x[rows], state)
    hyperparams = perturb(
        copied.train.hyperparams,
        (rows != runs)[: len(returns)],
        derive_key(key, "hyperparameters"),
        ranges,
        config.resample_probability,
    )
    train = copied.train.replace(hyperparams=hyperparams, key=_renew(state.train.key, rows != runs))
    collect = copied.collect.replace(key=_renew(state.collect.key, rows != runs))
    return AnakinState(train=train, collect=collect), source


def _renew(keys: Array, replaced: Array) -> Array:
    """Returns the keys [S, ...] of S runs with new ones where replaced, [S] bool.

    Runs with the same seed have the same keys, and a copy must not repeat the draws of its source.
    """
    lead = (-1, *[1] * (keys.ndim - 1))
    runs = jnp.broadcast_to(jnp.arange(len(keys)).reshape(lead), keys.shape)
    renew = jax.vmap(lambda key, run: jax.random.fold_in(derive_key(key, "copy"), run))
    return jnp.where(replaced.reshape(lead), renew(keys.ravel(), runs.ravel()).reshape(keys.shape), keys)


def choose_sources(returns: Array, finite: Array, key: Array, fraction: float) -> Array:
    """Returns for each run the run to copy, [R] i32: itself, or for the worst runs a random one of the best.

    Diverged runs are the worst and are always replaced. A run without an episode is worse than all with one. If no run
    has a return, none is replaced.
    """
    runs = len(returns)
    count = max(1, int(fraction * runs))
    score = jnp.where(jnp.logical_or(jnp.isnan(returns), ~finite), -jnp.inf, returns)
    order = jnp.argsort(-score)  # best first
    rank = jnp.argsort(order)
    num_best = jnp.minimum(count, jnp.sum(score > -jnp.inf))
    best = order[jax.random.randint(key, (runs,), 0, jnp.maximum(num_best, 1))]
    replaced = jnp.logical_or(rank >= runs - count, ~finite)
    return jnp.where(jnp.logical_and(replaced, num_best > 0), best, jnp.arange(runs)).astype(jnp.int32)


def perturb(
    hyperparams: Hyperparams, replaced: Array, key: Array, ranges: Ranges, resample_probability: float
) -> Hyperparams:
    """Changes the hyperparameters in `ranges` of the replaced runs.

    Each value is multiplied by 0.8 or 1.25 and clipped to the values that are valid for the hyperparameter, or it is
    drawn from its range: log-uniformly if the range is positive, otherwise uniformly. For gamma and gae_lambda, this
    applies to 1 - value.

    Args:
      hyperparams: leaves [S] f32, S >= R.
      replaced: [R] bool.
    """
    changed = {}
    for name, limits in ranges.items():
        draw = {purpose: derive_key(derive_key(key, name), purpose) for purpose in ("factor", "kind", "value")}
        before = getattr(hyperparams, name)
        value, (low, high) = before[: len(replaced)], limits
        if name in _NEAR_ONE:
            value, low, high = 1.0 - value, 1.0 - high, 1.0 - low
        factor = jnp.where(jax.random.bernoulli(draw["factor"], 0.5, value.shape), *FACTORS)
        fresh = _draw(draw["value"], low, high, value.shape)
        value = jnp.where(jax.random.bernoulli(draw["kind"], resample_probability, value.shape), fresh, value * factor)
        if name in _NEAR_ONE:
            value = 1.0 - value
        value = jnp.clip(value, *_valid_limits(name))
        changed[name] = before.at[: len(replaced)].set(jnp.where(replaced, value, before[: len(replaced)]))
    return hyperparams.replace(**changed)


def _draw(key: Array, low: float, high: float, shape: tuple[int, ...]) -> Array:
    """Returns samples from [low, high], log-uniform if low is positive."""
    if low > 0.0:
        return jnp.exp(jax.random.uniform(key, shape, minval=math.log(low), maxval=math.log(high)))
    return jax.random.uniform(key, shape, minval=low, maxval=high)


def _valid_limits(name: str) -> tuple[float, float]:
    """Returns the smallest and the largest valid finite value of a hyperparameter."""
    low, high, closed = RANGES[name]
    tiny, largest = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
    return max(low, -largest) if closed or low < 0.0 else tiny, min(high, largest)
