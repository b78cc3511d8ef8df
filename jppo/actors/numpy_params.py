"""Converts policies with jppo's networks to the arrays that `jppo.actors.numpy_policy` applies."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jppo.actors import numpy_policy
from jppo.devices.jit import jit
from jppo.envs.contract import BrokenContractError
from jppo.envs.masks import has_mask
from jppo.envs.spaces import ACTION_MASK, ActionSpec, ObsSpec, PyTree
from jppo.errors import Refused
from jppo.networks.actor_critic import ActorCritic, RecurrentActorCritic
from jppo.networks.feed_forward import SCREEN_CONVOLUTIONS
from jppo.ppo.normalization import center_and_scale, is_moments
from jppo.ppo.policy import Policy
from jppo.ppo.types import PolicyState


@functools.cache
def _center_and_scale() -> Callable:
    return jit(center_and_scale)  # not at import, because it starts JAX's backend


def numpy_obstacle(policy: Policy) -> str:
    """Returns the reason why `jppo.actors.numpy_policy` cannot apply the policy, or ''."""
    known = type(policy.network) in (ActorCritic, RecurrentActorCritic)
    return "" if known else f"its network is your own {type(policy.network).__name__}"


def to_numpy_params(
    policy: Policy, state: PolicyState, by_leaf: bool = False
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns the description and the arrays for `numpy_policy.NumpyPolicy`.

    Args:
      by_leaf: describe observations and actions as tuples of their leaves, for containers of any type.

    Raises:
      ValueError: observations or actions are in containers other than dict, tuple and list.
    """
    network: Any = policy.network
    params = state.params["params"]
    obs_spec, action_spec = policy.obs_spec, policy.action_spec
    arrays = _head_arrays(action_spec, params)
    hidden_sizes = network.hidden_sizes
    if policy.is_recurrent:
        arrays |= _torso_arrays("encoder", len(hidden_sizes[:-1]), params)
        arrays |= {f"recurrent/{name}": array for name, array in params["recurrent"].items()}
        hidden_sizes = hidden_sizes[-1:]
    for torso in ("shared",) if network.shared_torso else ("actor", "critic"):
        arrays |= _torso_arrays(torso, len(hidden_sizes), params)
    normalizers = jax.tree.leaves(state.obs_stats, is_leaf=is_moments)
    for i, moments in enumerate(normalizers):
        arrays[f"obs/{i}/mean"], arrays[f"obs/{i}/scale"] = _center_and_scale()(moments)
    if by_leaf:
        obs_spec = tuple(jax.tree.leaves(obs_spec))
        action_spec = action_spec if isinstance(action_spec, ActionSpec) else tuple(jax.tree.leaves(action_spec))
    description = {
        "format": numpy_policy.FORMAT,
        "version": numpy_policy.VERSION,
        "observation": describe_spaces(obs_spec),
        "normalized": bool(normalizers),
        "action": describe_spaces(action_spec),
        "action_mask": _leaf_numbers(policy.obs_spec, (ACTION_MASK,))[0] if has_mask(policy.obs_spec) else None,
        "network": _describe_network(policy, params, len(hidden_sizes)),
    }
    return description, {name: np.asarray(array, np.float32, order="C") for name, array in arrays.items()}


def _head_arrays(action_spec: PyTree, params: PyTree) -> dict[str, Any]:
    """Returns the weights of the output layers and the bounds of real actions, by the names of `numpy_policy`."""
    arrays = {f"value/{name}": array for name, array in params["value"].items()}
    for number, action in enumerate(jax.tree.leaves(action_spec)):
        suffix = "" if isinstance(action_spec, ActionSpec) else f"_{number}"
        arrays |= {f"policy{suffix}/{name}": array for name, array in params[f"policy{suffix}"].items()}
        if action.is_box:
            arrays |= {f"action{suffix}/{name}": np.array(getattr(action, name)) for name in ("low", "high")}
            arrays[f"log_std{suffix}"] = params[f"log_std{suffix}"]
    return arrays


def _torso_arrays(torso: str, num_layers: int, params: PyTree) -> dict[str, Any]:
    """Returns a torso's weights by the names that `numpy_policy` uses."""
    arrays: dict[str, Any] = {}
    for image in [name for name in params if name.startswith(f"{torso}_conv")]:  # actor_conv, or actor_conv_0, ...
        prefix = image.replace("_", "/", 1)
        for i, (name, layer) in enumerate(sorted(params[image].items())):  # conv alone, or Conv_0, Conv_1, Conv_2
            kernel = layer["kernel"]
            if name == "conv":  # a matrix over patches
                kernel = kernel.reshape(3, 3, -1, kernel.shape[-1])
            arrays |= {f"{prefix}/{i}/kernel": kernel, f"{prefix}/{i}/bias": layer["bias"]}
    for i in range(num_layers):
        layer = params[torso][f"Dense_{i}"]
        arrays |= {f"{torso}/dense/{i}/{name}": layer[name] for name in ("kernel", "bias")}
    return arrays


def _leaf_numbers(obs_spec: PyTree, names: tuple[str, ...]) -> list[int]:
    """Returns the numbers of the arrays in these parts of an observation, in JAX's order."""
    named = {name: jax.tree.map(lambda _, name=name: name in names, part) for name, part in obs_spec.items()}
    return [number for number, is_named in enumerate(jax.tree.leaves(named)) if is_named]


def _describe_network(policy: Policy, params: PyTree, num_layers: int) -> dict[str, Any]:
    network: Any = policy.network
    description = {
        "shared_torso": network.shared_torso,
        "num_layers": num_layers,
        "activation": "relu" if network.kind == "cnn" else network.activation,
        "strides": {
            name.replace("_", "/", 1): [1] if "conv" in layers else [stride for _, _, stride in SCREEN_CONVOLUTIONS]
            for name, layers in params.items()
            if "_conv" in name
        },
        "recurrent": network.cell if policy.is_recurrent else "none",
        "num_encoder_layers": len(network.hidden_sizes) - num_layers,
    }
    for torso, seen in (("actor", network.actor_obs), ("critic", network.critic_obs)):
        if seen:
            description[f"{torso}_inputs"] = _leaf_numbers(policy.obs_spec, seen)
    return description


def describe_spaces(spec: PyTree) -> dict[str, Any]:
    """Returns the spec of observations or actions as JSON.

    Raises:
      ValueError: they are in containers other than dict, tuple and list.
    """
    if isinstance(spec, ObsSpec):
        return dataclasses.asdict(spec)
    if isinstance(spec, ActionSpec):  # the bounds are arrays
        return {name: part for name, part in dataclasses.asdict(spec).items() if name not in ("low", "high")}
    if type(spec) is dict and all(isinstance(name, str) for name in spec):
        return {"dict": {name: describe_spaces(part) for name, part in spec.items()}}
    if type(spec) in (tuple, list):
        return {"tuple": [describe_spaces(part) for part in spec]}
    raise Refused(
        f"observations or actions come as {type(spec).__name__}; an exported policy takes arrays, dicts with names, "
        "and tuples"
    )


def cast_leaves(obs_spec: PyTree, leaves: list[Any]) -> list[np.ndarray]:
    """Returns the leaves of observations in the dtypes of their specs.

    Raises ValueError with the leaf and the value for numbers that its space does not have.
    """
    paths = jax.tree_util.tree_leaves_with_path(obs_spec)
    try:
        return [
            numpy_policy.ObsArray.from_json(dataclasses.asdict(spec)).cast(
                leaf, f"observation{jax.tree_util.keystr(path)}"
            )
            for (path, spec), leaf in zip(paths, leaves, strict=True)
        ]
    except ValueError as error:
        raise Refused(str(error)) from None


def check_categories(obs_spec: PyTree, obs: PyTree, env_name: str = "") -> None:
    """Raises BrokenContractError if recorded observations [..., *obs] have values that `ObsSpec.is_checked` forbids."""
    specs = jax.tree.leaves(obs_spec)
    if not any(spec.is_checked for spec in specs):
        return
    try:
        cast_leaves(obs_spec, jax.tree.leaves(obs))
    except ValueError as error:
        problem = f"{env_name}: {error}" if env_name else str(error)
        raise BrokenContractError(
            problem, "declare all categories (n, start), or a larger high of the Box", "spaces"
        ) from None
