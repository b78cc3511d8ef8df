"""Small configs, and checks of training runs for several tests."""

import contextlib
import functools
import os

import jax
import numpy as np
import pytest

import jppo
from jppo.training import device_loop

SMALL = functools.partial(jppo.PPOConfig, num_envs=4, num_steps=8, hidden_sizes=(8,))
cpu_only = pytest.mark.skipif(
    os.environ.get("JPPO_TEST_PLATFORM", "cpu") != "cpu", reason="needs a CPU with eight devices"
)


def check_two_updates(env, config):
    agent = jppo.make_anakin(env, config, total_steps=64)
    state, metrics = jax.jit(agent.train)(jax.random.key(0))
    assert agent.num_updates == state.train.update == 2
    assert metrics["finite"].all()
    for name, metric in metrics.items():
        assert metric.shape == (2,), name
        if not name.startswith("episode/"):  # NaN where no episode ended
            assert np.isfinite(metric).all() or name == "value/explained_variance", name
    assert metrics["grad/norm"].max() > 0.0
    return agent, metrics


def share_chunks(patch):
    """Makes on-device runs of the same environment and config share the compiled program."""
    compile_chunk, programs = device_loop.compile_chunk, {}

    def compile_once(agent, hyperparams, flags=None):
        structure = jax.tree.structure((hyperparams, flags))
        key = agent.env.name, agent.config, agent.sharding.mesh.size, structure
        if key not in programs:
            programs[key] = compile_chunk(agent, hyperparams, flags)
        return programs[key]

    patch.setattr(device_loop, "compile_chunk", compile_once)


@contextlib.contextmanager
def compiled_programs(name):
    """Collects the names of the programs that XLA compiles in this context, if they contain `name`."""
    names = []

    def listen(event, seconds, **info):
        if event == "/jax/core/compile/backend_compile_duration" and name in info.get("fun_name", ""):
            names.append(info["fun_name"])

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
