"""Computes memory and compile time of a run before it starts, for several numbers of environments."""

from collections.abc import Sequence

import jppo


def main(sizes: Sequence[int] = (64, 512, 4096)) -> list[jppo.BenchResult]:
    """Returns a plan for each number of environments."""
    plans = []
    print("num_envs     memory   of free   compile time")
    for num_envs in sizes:
        plan = jppo.bench("CartPole-v1", num_envs=num_envs, num_steps=32, dry_run=True)
        needed = sum(plan.memory.values())
        share = needed / plan.memory_free
        print(f"{num_envs:>8} {needed / 2**20:>6.1f} MiB {share:>9.1%} {plan.compile_seconds:>12.1f} s")
        plans.append(plan)
    print(f"up to {plans[-1].largest_num_envs:,} environments fit")
    return plans


if __name__ == "__main__":
    main()
