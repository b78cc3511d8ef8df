"""Runs jppo for versus_jax_peers.py, on all CPU devices of the process; see serving.py.

python serve_jppo.py ENV RECURRENT NUM_ENVS NUM_STEPS UPDATES
"""

import sys

import jax
from serving import serve
from throughput import Workload

import jppo


def main(env: str, recurrent: int, num_envs: int, num_steps: int, updates: int) -> None:
    config = Workload(env, num_envs, num_steps, bool(recurrent)).config
    count = len(jax.devices()) if jax.default_backend() == "cpu" else 1
    agent = jppo.make_anakin(env, config, total_steps=updates * config.batch_size, num_devices=count)
    serve(agent.train, jax.random.key(0), jppo.jit)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
