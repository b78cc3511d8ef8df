"""Trains with hyperparameters that change during the run, and compares constant and decreasing entropy bonuses."""

import jppo


def main(total_steps: int = 100_000, num_seeds: int = 4) -> jppo.SweepResult:
    """Returns the result of the comparison."""
    hyperparams = jppo.Hyperparams(
        learning_rate=jppo.schedules.warmup(0.1, jppo.schedules.cosine(3e-3, 0)),
        clip_eps=jppo.schedules.piecewise([0.2, 0.1], [0.5]),
        ent_coef=jppo.schedules.linear(0.02, 0),
    )
    run = jppo.train("CartPole-v1", total_steps=total_steps, hyperparams=hyperparams)
    print(f"{'update':>6} {'learning_rate':>14} {'clip_eps':>9} {'ent_coef':>9} {'return':>7}")
    length = len(run.metrics["update"])
    names = ("learning_rate", "hyperparams/clip_eps", "hyperparams/ent_coef", "episode/return_mean")
    for i in range(0, length, max(1, length // 10)):
        rate, clip, entropy, score = (run.metrics[name][i] for name in names)
        print(f"{i + 1:>6} {rate:>14.5f} {clip:>9.2f} {entropy:>9.4f} {score:>7.0f}")

    # The two linear schedules train in one program, the two constants in another.
    coefficients = [0.0, 0.01, jppo.schedules.linear(0.01, 0), jppo.schedules.linear(0.1, 0)]
    result = jppo.sweep("CartPole-v1", seeds=num_seeds, total_steps=total_steps, ent_coef=coefficients)
    for setting in result.ranked("CartPole-v1"):
        print(f"{setting.settings['ent_coef']!s:>17} {setting.score:>6.0f}")
    return result


if __name__ == "__main__":
    main()
