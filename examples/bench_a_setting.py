"""Measures the speed of a run and the shares of its parts, for several numbers of environments."""

from collections.abc import Sequence

import jppo


def main(sizes: Sequence[int] = (64, 1024), seconds: float = 1.0) -> list[jppo.BenchResult]:
    """Returns a benchmark result for each number of environments."""
    results = []
    parts = ("environment", "policy", "other", "update")
    print("num_envs    steps/s  shares: environment  policy  other  update")
    for num_envs in sizes:
        config = jppo.PPOConfig(num_envs=num_envs, num_steps=32)
        result = jppo.bench("CartPole-v1", config=config, seconds=seconds)
        environment, policy, other, update = (f"{result.shares[part]:.0%}" for part in parts)
        speed = result.run.steps_per_second
        print(f"{num_envs:>8} {speed:>10,.0f} {environment:>20} {policy:>7} {other:>6} {update:>7}")
        results.append(result)
    return results


if __name__ == "__main__":
    main()
