"""The values of hyperparameters at an update of a run."""

import jax.numpy as jnp

from jppo.config.ppo import Hyperparams
from jppo.config.schedules import Schedule
from jppo.ppo.types import Array, Metrics, TrainState


def evaluate_schedules(hyperparams: Hyperparams, progress: Array | float) -> Hyperparams:
    """Returns the hyperparameters with the value of each schedule at a progress in [0, 1]."""
    values = {name: x(progress) if isinstance(x, Schedule) else x for name, x in vars(hyperparams).items()}
    return Hyperparams(**values)


def current_hyperparams(state: TrainState) -> Hyperparams:
    """Returns the values of the next update; its progress is update / num_updates, at most 1."""
    return evaluate_schedules(state.hyperparams, jnp.minimum(1.0, state.update / state.num_updates))


def schedule_metrics(hyperparams: Hyperparams, current: Hyperparams) -> Metrics:
    """Returns the metrics hyperparams/*: the current value of each schedule.

    The learning rate is left out, because it is the metric "learning_rate".
    """
    names = [name for name, value in vars(hyperparams).items() if isinstance(value, Schedule)]
    return {f"hyperparams/{name}": getattr(current, name) for name in names if name != "learning_rate"}
