"""Trains in two processes that Ray Train starts on this machine, and compares with the same run in this process.

On a cluster with GPUs: call ray.init(address="auto"), and ScalingConfig(num_workers=8, use_gpu=True).
Needs pip install 'jppo[train]'.
"""

import json
import os
import socket
from pathlib import Path
from typing import Any

import jax
import ray.train
from ray.train.v2.api.config import RunConfig, ScalingConfig
from ray.train.v2.jax import JaxTrainer

import jppo


def train_here(total_steps: int, num_devices: int | None = None, run_dir: str | None = None) -> dict[str, Any]:
    """Trains in this process, and together with the others if JAX runs in several. Returns the summary."""
    config = jppo.PPOConfig(num_envs=64, num_steps=128)
    return jppo.train(
        "CartPole-v1", config=config, total_steps=total_steps, num_devices=num_devices, run_dir=run_dir
    ).summary


def train_in_worker(arguments: dict[str, Any]) -> None:
    """Runs in each worker. Ray Train calls jax.distributed.initialize on GPUs and TPUs, but not on CPUs."""
    coordinator = arguments.pop("coordinator")
    if not jax.distributed.is_initialized():
        context = ray.train.get_context()
        jax.distributed.initialize(coordinator, context.get_world_size(), context.get_world_rank())
    train_here(**arguments)  # the first process writes the run directory


def main(total_steps: int = 200_000, num_workers: int = 2, directory: str = "runs/several_hosts") -> list[float]:
    """Returns the mean return of the run in several processes, and of the run in this process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    directory = os.path.abspath(directory)
    environment = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    trainer = JaxTrainer(
        train_in_worker,
        train_loop_config={"coordinator": coordinator, "total_steps": total_steps, "run_dir": f"{directory}/run"},
        scaling_config=ScalingConfig(num_workers=num_workers, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(storage_path=directory, worker_runtime_env={"env_vars": environment}),
    )
    trainer.fit()
    together = json.loads(Path(directory, "run", "summary.json").read_text())
    alone = train_here(total_steps, num_devices=1)
    print(f"{together['num_processes']} processes, {together['num_devices']} devices: {together['return_mean']:.2f}")
    print(f"1 process, 1 device: {alone['return_mean']:.2f}")
    return [together["return_mean"], alone["return_mean"]]


if __name__ == "__main__":
    main()
