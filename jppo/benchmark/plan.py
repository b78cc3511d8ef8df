"""`jppo.plan`: memory and compile time of a run, from the compiled program."""

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

import jax

from jppo.benchmark.memory import largest_num_envs, memory_by_purpose
from jppo.config.overrides import check_overrides, take_network
from jppo.config.ppo import Hyperparams, PPOConfig
from jppo.devices.memory import bytes_free, bytes_needed, show_bytes
from jppo.envs.backends import require_device
from jppo.errors import Refused
from jppo.ppo.anakin import make_anakin
from jppo.ppo.losses import Advantages, Loss, LossModule
from jppo.ppo.minibatches import Optimizer, adam
from jppo.ppo.policy import Network
from jppo.runs.display import DisplayedResult
from jppo.training.device_loop import compile_chunk, state_shapes
from jppo.training.settings import RunSettings, prepare_run


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class PlanResult(DisplayedResult):
    """Memory and compile time of a run on the device. Memory is in bytes, on each device."""

    env: str
    num_envs: int
    num_steps: int
    num_devices: int
    num_parameters: int
    memory: dict[str, int]
    """Memory by purpose."""
    memory_needed: int
    """Peak memory, the sum of `memory`."""
    memory_free: int
    compile_seconds: float
    largest_num_envs: int
    """The largest multiple of num_envs that fits, with the other settings unchanged."""

    def summary(self) -> dict[str, Any]:
        """Returns all fields as a dict for JSON."""
        return dataclasses.asdict(self)

    @property
    def _displayed(self) -> dict[str, Any]:
        names = ("env", "num_envs", "compile_seconds", "largest_num_envs")
        return {name: getattr(self, name) for name in names} | {"memory_needed": show_bytes(self.memory_needed)}


def plan(
    env: Any,
    *,
    config: PPOConfig | Mapping[str, Any] | None = None,
    hyperparams: Hyperparams | Mapping[str, Any] | None = None,
    preset: str = "auto",
    network: Network | str | None = None,
    optimizer: Optimizer = adam,
    loss: Loss | LossModule | None = None,
    advantages: Advantages | None = None,
    num_devices: int | None = None,
    **overrides: Any,
) -> PlanResult:
    """Compiles a run on the device without training, and a few larger ones to find the largest num_envs that fits.

    Evaluations during training need more memory, which is not included.

    Args:
      env, config, hyperparams, preset, network, optimizer, loss, advantages, num_devices: as for `jppo.train`.
      **overrides: fields of `jppo.PPOConfig` and `jppo.Hyperparams`, as for `jppo.train`.

    Raises:
      ValueError: an invalid argument, a Gymnasium environment, or a run that does not fit in memory.
    """
    check_overrides(plan, overrides)
    require_device(env, "plan", "pass an environment of that kind")
    network, overrides = take_network(network, overrides)
    parts: dict[str, Any] = {"network": network, "optimizer": optimizer, "loss": loss, "advantages": advantages}
    settings = RunSettings(
        env=env,
        config=config,
        hyperparams=hyperparams,
        overrides=overrides,
        preset=preset,
        num_devices=num_devices,
        **parts,
    )
    prepared = prepare_run(settings)
    agent: Any = prepared.agent
    devices, sizes = prepared.config_json["num_devices"], agent.config
    free = bytes_free(devices)
    start = time.perf_counter()
    chunk, state = compile_chunk(agent, prepared.hyperparams), state_shapes(agent, prepared.hyperparams)
    compile_seconds, needed = time.perf_counter() - start, bytes_needed(chunk)

    def measure(num_envs: int) -> int:
        larger = make_anakin(agent.env, sizes.replace(num_envs=num_envs), num_devices=devices, **parts)
        return bytes_needed(compile_chunk(larger, prepared.hyperparams))

    largest = largest_num_envs(sizes, devices, needed, free, measure)
    if needed > free:
        remedy = f"the largest num_envs that fits is {largest}" if largest else "lower num_steps as well"
        raise Refused(
            f"num_envs = {sizes.num_envs} and num_steps = {sizes.num_steps} need {show_bytes(needed)} of device "
            f"memory and {show_bytes(free)} are free; {remedy}"
        )
    return PlanResult(
        env=agent.env.name,
        num_envs=sizes.num_envs,
        num_steps=sizes.num_steps,
        num_devices=devices,
        num_parameters=sum(leaf.size for leaf in jax.tree.leaves(state.train.policy_state.params)),
        memory=memory_by_purpose(chunk, state.train, state.collect, devices),
        memory_needed=needed,
        memory_free=free,
        compile_seconds=compile_seconds,
        largest_num_envs=largest,
    )
