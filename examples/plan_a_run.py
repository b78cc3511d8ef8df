"""Before a run: what it would need, how fast it would be, and how far it could grow, for several sizes."""

from collections.abc import Sequence

import jppo


def main(sizes: Sequence[int] = (64, 512, 4096), seconds: float = 1.0) -> list[jppo.PlanResult]:
    """A plan for each number of environments."""
    plans = []
    print("environments   memory    of free   compiling   steps/s   a million steps")
    for num_envs in sizes:
        plan = jppo.plan("CartPole-v1", config=jppo.PPOConfig(num_envs=num_envs, num_steps=32), seconds=seconds)
        needed, share = f"{plan.bytes_needed / 2**20:.0f} MiB", plan.bytes_needed / plan.bytes_free
        compiling, speed = f"{plan.compile_seconds:.1f} s", plan.steps_per_second
        print(f"{num_envs:>12} {needed:>8} {share:>10.1%} {compiling:>11} {speed:>9,.0f} {1e6 / speed:>15.1f} s")
        plans.append(plan)
    largest, population = plans[-1].largest_num_envs, plans[0].largest_population
    print(f"up to {largest:,} environments fit, or {population:,} runs of {sizes[0]}")
    return plans


if __name__ == "__main__":
    main()
