"""Trains a population of runs that copy each other and change their learning rates (population-based training).

Three of four runs start with a useless learning rate.
"""

from pathlib import Path

import jppo


def main(total_steps: int = 200_000, num_seeds: int = 4, sweep_dir: Path = Path("runs/pbt")) -> jppo.SweepResult:
    """Returns the result; a second call reads it from `sweep_dir`."""
    result = jppo.sweep(
        "CartPole-v1",
        seeds=num_seeds,
        total_steps=total_steps,
        config=jppo.PPOConfig(num_envs=16, num_steps=64),
        learning_rate=[1e-7, 1e-6, 1e-5, 1e-3],
        selection=jppo.PBTConfig(every=10),
        sweep_dir=sweep_dir,
    )
    print("run   copied at update (from run)   first and last learning rate   return")
    for run in result.runs:
        rates = run.metrics["hyperparams/learning_rate"]
        copies = ", ".join(f"{update} ({source})" for update, source in run.copies)
        print(f"{run.number:>3}   {copies:<28} {rates[0]:>14.0e} {rates[-1]:>14.0e} {run.return_mean:>8.0f}")

    print(f"best run: {result.best().best_run.number}, picture: {sweep_dir / 'curves.png'}")
    return result


if __name__ == "__main__":
    main()
