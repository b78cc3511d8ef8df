"""Where the time goes: the speed of a run, the ceilings of its parts, and which of them limits, for several sizes."""

from collections.abc import Sequence

import jppo


def main(sizes: Sequence[int] = (64, 1024), seconds: float = 1.0) -> list[jppo.BenchResult]:
    """A bench for each number of environments."""
    results = []
    print("environments   steps/s   ceilings: environment       policy      learner   takes most of an update")
    for num_envs in sizes:
        config = jppo.PPOConfig(num_envs=num_envs, num_steps=32)
        benched = jppo.bench("CartPole-v1", config=config, seconds=seconds)
        ceilings = [benched.ceilings[part].steps_per_second for part in ("environment", "policy", "learner")]
        shown = " ".join(f"{ceiling:>12,.0f}" for ceiling in ceilings)
        most = f"{benched.limit}, {benched.shares[benched.limit]:.0%}"
        print(f"{num_envs:>12} {benched.end_to_end.steps_per_second:>9,.0f}            {shown}   {most}")
        results.append(benched)
    print(results[-1].advice)
    return results


if __name__ == "__main__":
    main()
