"""One run over two hosts, processes that Ray starts, and the same run in this process.

As it is, both hosts are on this machine. On a cluster of GPU nodes: main(address="auto", host_gpus=4).
"""

import numpy as np

import jppo


def main(
    total_steps: int = 200_000,
    num_hosts: int = 2,
    host_gpus: float = 0.0,
    num_devices: int | None = None,
    address: str | None = None,
) -> list[np.ndarray]:
    """Mean returns by update, over all hosts and in this process."""
    run = {
        "config": jppo.PPOConfig(num_envs=64, num_steps=128),
        "hyperparams": jppo.Hyperparams(learning_rate=1e-3),
        "total_steps": total_steps,
    }
    hosts = {"num_hosts": num_hosts, "host_gpus": host_gpus, "address": address}
    together = jppo.train("CartPole-v1", **run, **hosts, num_devices=num_devices)
    alone = jppo.train("CartPole-v1", **run, num_devices=1)

    for result in (together, alone):
        summary = result.summary
        print(
            f"{summary.get('num_hosts', 1)} host(s), {summary['num_devices']} device(s): "
            f"{summary['steps_per_second']:,.0f} steps/s, return {summary['return_mean']:.0f}"
        )
    returns = [result.metrics["episode/return_mean"] for result in (together, alone)]
    print(f"after the first update they differ by {abs(returns[0][1] - returns[1][1]):.1e}")
    return returns


if __name__ == "__main__":
    main()
