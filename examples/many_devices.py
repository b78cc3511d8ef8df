"""Trains the same run on one device and on all devices; the results agree up to floating-point rounding.

On a CPU, set the number of devices before JAX starts:
    XLA_FLAGS=--xla_force_host_platform_device_count=2 python examples/many_devices.py
"""

import jax
import numpy as np

import jppo


def main(total_steps: int = 200_000, num_envs: int = 512) -> tuple[jppo.PPOConfig, list[np.ndarray]]:
    """Returns the configuration, and the mean returns of all updates on one device and on all devices."""
    config = jppo.PPOConfig(num_envs=num_envs, num_steps=32)
    rate = jppo.Hyperparams(learning_rate=1e-3)
    needs = jppo.bench("CartPole-v1", config=config, dry_run=True)
    print(f"{sum(needs.memory.values()) / 2**20:.0f} MiB on each of {needs.num_devices} devices")

    returns = []
    for num_devices in (1, len(jax.devices())):
        result = jppo.train(
            "CartPole-v1", config=config, hyperparams=rate, total_steps=total_steps, num_devices=num_devices
        )
        returns.append(result.metrics["episode/return_mean"])
        speed = result.summary["steps_per_second"]
        print(f"{num_devices} device{'s' * (num_devices > 1)}: {speed:,.0f} steps/s, return {returns[-1][-1]:.0f}")
    print(f"after the first update they differ by {abs(returns[0][1] - returns[1][1]):.1e}")
    return config, returns


if __name__ == "__main__":
    main()
