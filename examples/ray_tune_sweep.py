"""Searches learning rates and batch sizes with Ray Tune: first a grid, then values that Optuna proposes."""

import os
from collections.abc import Sequence
from typing import Any

import ray
from ray import tune
from ray.tune.schedulers import ASHAScheduler
from ray.tune.search.optuna import OptunaSearch

import jppo

CONFIG = jppo.PPOConfig(num_steps=128)


def sweep(name: str, space: dict[str, Any], total_steps: int, **settings: Any) -> tune.Result:
    """Returns the best trial. ASHA stops trials that are worse than others after the same number of steps."""
    early_end = ASHAScheduler(time_attr="env_steps", max_t=total_steps, grace_period=total_steps // 4)
    results = tune.Tuner(
        jppo.tune.trainable("CartPole-v1", total_steps=total_steps, config=CONFIG),
        param_space=space,
        tune_config=tune.TuneConfig(
            metric="return_mean", mode="max", scheduler=early_end, reuse_actors=True, **settings
        ),
        run_config=tune.RunConfig(storage_path=os.path.abspath("runs"), verbose=0),
    ).fit()

    print(f"{name}\nlearning rate   batch size   steps   mean return")
    for trial in sorted(results, key=lambda trial: trial.metrics["return_mean"]):
        batch_size = trial.config["num_envs"] * CONFIG.num_steps
        step, score = trial.metrics["env_steps"], trial.metrics["return_mean"]
        print(f"{trial.config['learning_rate']:>13.2g} {batch_size:>12} {step:>7} {score:>13.0f}")
    return results.get_best_result()


def main(
    total_steps: int = 100_000,
    learning_rates: Sequence[float] = (1e-4, 1e-3, 1e-2),
    num_envs: Sequence[int] = (4, 16),
    num_samples: int = 8,
) -> list[tune.Result]:
    """Returns the best trial of the grid and the best trial of Optuna's search."""
    grid = {"learning_rate": tune.grid_search(list(learning_rates)), "num_envs": tune.grid_search(list(num_envs))}
    within = {"learning_rate": tune.loguniform(min(learning_rates), max(learning_rates))}
    within["num_envs"] = tune.choice(list(num_envs))
    with ray.init(log_to_driver=False):  # or ray.init("auto") to use the cluster of this machine
        best = [
            sweep("grid", grid, total_steps),
            sweep("Optuna", within, total_steps, search_alg=OptunaSearch(seed=0), num_samples=num_samples),
        ]

    for trial in best:
        print(f"best: {trial.config}; try it: jppo eval {trial.checkpoint.path}")
    return best


if __name__ == "__main__":
    main()
