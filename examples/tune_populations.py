"""Searches learning rates with Ray Tune; each trial trains eight seeds in one program and reports their mean."""

import os
from collections.abc import Sequence

import ray
from ray import tune

import jppo


def main(
    total_steps: int = 100_000, learning_rates: Sequence[float] = (1e-4, 1e-3, 1e-2), num_seeds: int = 8
) -> tune.Result:
    """Returns the best trial."""
    config = jppo.PPOConfig(num_envs=8, num_steps=128)
    with ray.init(log_to_driver=False):
        results = tune.Tuner(
            jppo.tune.population("CartPole-v1", seeds=num_seeds, total_steps=total_steps, config=config),
            param_space={"learning_rate": tune.grid_search(list(learning_rates))},
            tune_config=tune.TuneConfig(metric="return_mean", mode="max"),
            run_config=tune.RunConfig(storage_path=os.path.abspath("runs"), verbose=0),
        ).fit()

    print("learning rate   interquartile mean   per seed")
    for trial in results:
        returns = [trial.metrics[f"run/{number}"] for number in range(num_seeds)]
        middle = trial.metrics["return_mean"]
        print(f"{trial.config['learning_rate']:>13g} {middle:>20.0f}   {' '.join(f'{x:.0f}' for x in returns)}")
    return results.get_best_result()


if __name__ == "__main__":
    main()
