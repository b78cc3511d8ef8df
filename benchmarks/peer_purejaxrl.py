"""PureJaxRL's PPO (Lu et al. 2022) under `jax.vmap`, for population.py: compiles, then trains once per line it is sent.

python peer_purejaxrl.py CLONE LANES NUM_ENVS NUM_STEPS UPDATES
"""

import importlib.util
import json
import sys
import time
from pathlib import Path
from unittest.mock import MagicMock

import jax


def main(clone: str, lanes: int, num_envs: int, num_steps: int, updates: int) -> None:
    """Trains with its own settings for CartPole, but for the sizes; networks and epochs are ours by default."""
    sys.path[:0] = [clone, str(Path(clone) / "purejaxrl")]
    for package in ("brax", "navix"):  # its wrappers import them, for other environments
        if importlib.util.find_spec(package) is None:
            names = (package, "brax.envs", "brax.envs.wrappers", "brax.envs.wrappers.training")
            sys.modules |= {name: MagicMock() for name in names if name.startswith(package)}
    import ppo

    config = {
        "LR": 2.5e-4,
        "NUM_ENVS": num_envs,
        "NUM_STEPS": num_steps,
        "TOTAL_TIMESTEPS": updates * num_envs * num_steps,
        "UPDATE_EPOCHS": 4,
        "NUM_MINIBATCHES": 4,
        "GAMMA": 0.99,
        "GAE_LAMBDA": 0.95,
        "CLIP_EPS": 0.2,
        "ENT_COEF": 0.01,
        "VF_COEF": 0.5,
        "MAX_GRAD_NORM": 0.5,
        "ACTIVATION": "tanh",
        "ENV_NAME": "CartPole-v1",
        "ANNEAL_LR": True,
        "DEBUG": False,
    }
    start = time.perf_counter()
    keys = jax.random.split(jax.random.PRNGKey(0), lanes)
    # With XLA's default schedule it comes to a stop for good on a CPU, see docs/performance.md.
    options = (
        {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"} if jax.default_backend() == "cpu" else {}
    )
    train = jax.jit(jax.vmap(ppo.make_train(config))).lower(keys).compile(options)
    print(json.dumps({"seconds": time.perf_counter() - start}), flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        jax.block_until_ready(train(keys))
        print(json.dumps({"seconds": time.perf_counter() - start}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
