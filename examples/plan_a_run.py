"""Computes memory and compile time of a run before it starts, for several numbers of environments."""

from collections.abc import Sequence

import jppo


def main(sizes: Sequence[int] = (64, 512, 4096)) -> list[jppo.PlanResult]:
    """Returns a plan for each number of environments."""
    plans = []
    print("num_envs     memory   of free   compile time")
    for num_envs in sizes:
        plan = jppo.plan("CartPole-v1", config=jppo.PPOConfig(num_envs=num_envs, num_steps=32))
        needed, share = f"{plan.memory_needed / 2**20:.1f} MiB", plan.memory_needed / plan.memory_free
        print(f"{num_envs:>8} {needed:>10} {share:>9.1%} {plan.compile_seconds:>12.1f} s")
        plans.append(plan)
    print(f"up to {plans[-1].largest_num_envs:,} environments fit")
    return plans


if __name__ == "__main__":
    main()
