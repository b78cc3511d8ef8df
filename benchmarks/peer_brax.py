"""Runs Brax's PPO (Freeman et al. 2021) for versus_jax_peers.py, with the messages of serving.py.

    python peer_brax.py ENV NUM_ENVS NUM_STEPS UPDATES

ENV is brax:NAME. One call of `brax.training.agents.ppo.train` trains until standard input ends: its callback after each
`UPDATES` updates waits for the next line. Brax compiles in the first of these parts, so its "compile time" contains one
training. The seconds are Brax's own measurement, without evaluations. Brax 0.14.2 calls `jax.device_put_replicated`,
which JAX 0.10 has removed; this script defines it for one device.
"""

import functools
import resource
import sys
import time
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
from brax import envs
from brax.training.agents.ppo import networks
from brax.training.agents.ppo.train import train
from serving import say

jax.device_put_replicated = lambda tree, devices: jax.tree.map(lambda x: jnp.asarray(x)[None], tree)
_PARTS = 1000  # more than any benchmark needs


class _Session:
    """Reports the time of each part and waits for the request of the next one."""

    def __init__(self) -> None:
        self._walltime, self._cpu = 0.0, time.process_time()

    def report(self, steps: int, metrics: dict[str, Any]) -> None:
        walltime = float(metrics["training/walltime"])
        say({"seconds": walltime - self._walltime, "cpu_seconds": time.process_time() - self._cpu})
        if not sys.stdin.readline():
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
            say({"peak_rss_mb": peak, "program_mb": None, "versions": {p: version(p) for p in ("jax", "brax", "flax")}})
            raise SystemExit
        self._walltime, self._cpu = walltime, time.process_time()


def main(name: str, num_envs: int, num_steps: int, updates: int) -> None:
    """Trains with jppo's default sizes and numbers."""
    make_networks = functools.partial(
        networks.make_ppo_networks,
        policy_hidden_layer_sizes=(64, 64),
        value_hidden_layer_sizes=(64, 64),
        activation=jax.nn.tanh,
    )
    train(
        environment=envs.get_environment(name.removeprefix("brax:")),
        num_timesteps=_PARTS * updates * num_envs * num_steps,
        num_envs=num_envs,
        episode_length=1000,
        unroll_length=num_steps,
        batch_size=num_envs // 4,
        num_minibatches=4,
        num_updates_per_batch=4,
        learning_rate=2.5e-4,
        entropy_cost=0.01,
        discounting=0.99,
        gae_lambda=0.95,
        clipping_epsilon=0.2,
        vf_loss_coefficient=0.5,
        max_grad_norm=0.5,
        network_factory=make_networks,
        max_devices_per_host=1,
        num_evals=_PARTS + 1,
        run_evals=False,
        progress_fn=_Session().report,
    )


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
