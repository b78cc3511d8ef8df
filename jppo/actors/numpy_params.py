"""Converts policies with jppo's networks to the arrays that `jppo.actors.numpy_policy` applies."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jppo.actors import numpy_policy
from jppo.devices.jit import jit
from jppo.envs.masks import has_mask, without_mask
from jppo.envs.spaces import ACTION_MASK, ActionSpec, ObsSpec
from jppo.ppo.layers import SCREEN_CONVOLUTIONS, channels_first
from jppo.ppo.networks import ActorCritic
from jppo.ppo.normalization import center_and_scale
from jppo.ppo.policy import Policy
from jppo.ppo.types import Moments, PolicyState, PyTree


@functools.cache
def _center_and_scale() -> Callable:
    return jit(center_and_scale)  # not at import, because it starts JAX's backend


def numpy_obstacle(policy: Policy) -> str:
    """Returns the reason why `jppo.actors.numpy_policy` cannot apply the policy, or ''."""
    network: Any = policy.network
    action = policy.action_spec
    if policy.is_recurrent:
        return "its network is recurrent"
    if type(network) is not ActorCritic:
        return f"its network is your own {type(network).__name__}"
    inputs = jax.tree.leaves(without_mask(policy.obs_spec))
    obstacles = {
        "its actions have several components": not isinstance(action, ActionSpec) or bool(action.nvec),
        "its network selects observation leaves (actor_obs, critic_obs)": network.actor_obs or network.critic_obs,
        "its convolutional network has several inputs": network.kind == "cnn" and len(inputs) > 1,
    }
    return next((reason for reason, applies in obstacles.items() if applies), "")


def to_numpy_params(
    network: ActorCritic, state: PolicyState, obs_spec: PyTree, action: ActionSpec, mask: int | None = None
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns the description and the arrays for `numpy_policy.NumpyPolicy`.

    Args:
      mask: number of the observation leaf `action_mask`; None if there is none.

    Raises:
      ValueError: observations are in containers other than dict, tuple and list.
    """
    params = state.params["params"]
    arrays = {f"{head}/{name}": array for head in ("policy", "value") for name, array in params[head].items()}
    for torso in ("shared",) if network.shared_torso else ("actor", "critic"):
        arrays |= _torso_arrays(torso, network, params)
    normalizers = jax.tree.leaves(state.obs_stats, is_leaf=lambda node: isinstance(node, Moments))
    for i, moments in enumerate(normalizers):
        arrays[f"obs/{i}/mean"], arrays[f"obs/{i}/scale"] = _center_and_scale()(moments)
    if not action.num_actions:
        bounds = {f"action/{name}": np.array(getattr(action, name)) for name in ("low", "high")}
        arrays |= {"log_std": params["log_std"]} | bounds
    description = {
        "format": numpy_policy.FORMAT,
        "version": numpy_policy.VERSION,
        "observation": describe_obs(obs_spec),
        "normalized": bool(normalizers),
        "action": {
            "shape": action.shape,
            "dtype": action.dtype,
            "num_actions": action.num_actions,
            "start": action.start,
            "bounds": action.bounds,
        },
        "network": _describe_network(network, params, jax.tree.leaves(obs_spec), mask),
    }
    if mask is not None:
        description["action_mask"] = mask
    return description, {name: np.ascontiguousarray(array, np.float32) for name, array in arrays.items()}


def _torso_arrays(torso: str, network: ActorCritic, params: PyTree) -> dict[str, Any]:
    """Returns a torso's weights by the names that `numpy_policy` uses."""
    arrays: dict[str, Any] = {}
    if network.kind == "cnn":
        convolutions = params[f"{torso}_conv"]
        for i, name in enumerate(sorted(convolutions)):  # conv alone, or Conv_0, Conv_1, Conv_2
            kernel = convolutions[name]["kernel"]
            if name == "conv":  # a matrix over patches
                kernel = kernel.reshape(3, 3, -1, kernel.shape[-1])
            arrays |= {f"{torso}/conv/{i}/kernel": kernel, f"{torso}/conv/{i}/bias": convolutions[name]["bias"]}
    for i in range(len(network.hidden_sizes)):
        layer = params[torso][f"Dense_{i}"]
        arrays |= {f"{torso}/dense/{i}/{name}": layer[name] for name in ("kernel", "bias")}
    return arrays


def mask_number(obs_spec: PyTree) -> int | None:
    """Returns the number of the observation leaf `action_mask` in JAX's order; None if there is none."""
    if not has_mask(obs_spec):
        return None
    is_mask = {name: jax.tree.map(lambda _, name=name: name == ACTION_MASK, part) for name, part in obs_spec.items()}
    return jax.tree.leaves(is_mask).index(True)


def _describe_network(network: ActorCritic, params: PyTree, specs: list[ObsSpec], mask: int | None) -> dict[str, Any]:
    description = {
        "shared_torso": network.shared_torso,
        "num_layers": len(network.hidden_sizes),
        "activation": network.activation,
        "strides": [],
        "channels_first": False,
    }
    if network.kind == "cnn":
        (spec,) = (spec for i, spec in enumerate(specs) if i != mask)
        small = "conv" in params["shared_conv" if network.shared_torso else "actor_conv"]
        description |= {
            "activation": "relu",
            "strides": [1] if small else [stride for _, _, stride in SCREEN_CONVOLUTIONS],
            "channels_first": channels_first(spec.feature_shape),
        }
    return description


def describe_obs(obs_spec: PyTree) -> dict[str, Any]:
    """Returns the spec as JSON. Raises ValueError if observations are in containers other than dict, tuple and list."""
    if isinstance(obs_spec, ObsSpec):
        return dataclasses.asdict(obs_spec)
    if type(obs_spec) is dict and all(isinstance(name, str) for name in obs_spec):
        return {"dict": {name: describe_obs(part) for name, part in obs_spec.items()}}
    if type(obs_spec) in (tuple, list):
        return {"tuple": [describe_obs(part) for part in obs_spec]}
    raise ValueError(
        f"observations come as {type(obs_spec).__name__}; an exported policy takes arrays, dicts with names, and tuples"
    )
