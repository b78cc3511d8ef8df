"""Sweeps learning rates and seeds in one compiled program, with successive halving."""

from pathlib import Path

import jppo


def main(total_steps: int = 200_000, num_seeds: int = 4, sweep_dir: Path = Path("runs/sweep")) -> jppo.SweepResult:
    """Returns the result; a second call reads it from `sweep_dir`."""
    result = jppo.sweep(
        "CartPole-v1",
        seeds=num_seeds,
        total_steps=total_steps,
        config=jppo.PPOConfig(num_envs=16, num_steps=128),
        learning_rate=[1e-5, 1e-4, 1e-3, 1e-2],
        selection="successive_halving",
        sweep_dir=sweep_dir,
    )
    print("learning rate   return   95 % interval   steps per seed")
    for setting in result.settings:
        low, high = setting.interval
        steps = " ".join(str(run.env_steps) for run in setting.runs)
        print(f"{setting.settings['learning_rate']:>13g} {setting.score:>8.0f}   {low:>6.0f} {high:>6.0f}   {steps}")

    best = result.best().best_run
    print(f"best: run {best.number}, {best.settings}; it moves {best.policy.act([0.0, 0.0, 0.1, 0.0])}")
    print(f"curves: {sweep_dir / 'curves.png'}, one row per run: {sweep_dir / 'runs.csv'}")
    return result


if __name__ == "__main__":
    main()
