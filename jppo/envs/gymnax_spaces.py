"""Observation spaces of environments on the device as jppo's specifications."""

from typing import Any

import jax

from jppo.envs.contract import BrokenContractError
from jppo.envs.device_contract import describe_leaf
from jppo.envs.observations import MisfitError, split_observation
from jppo.envs.spaces import PyTree, obs_leaf_spec
from jppo.errors import Refused


def obs_spec_of(name: str, space: Any, obs: PyTree) -> PyTree:
    """Returns the specs of observations: dtypes of the traced arrays, since declared ones are not always right.

    Args:
      space: the declared space; None for arrays of any numbers.
      obs: shapes and dtypes of an observation.
    """
    parts: dict[int, Any] = {}  # by the leaf's identity, since a space may order its parts in another way
    try:
        for path, part, leaf in split_observation(space, obs, "observation"):
            if not (hasattr(part, "shape") and hasattr(leaf, "shape")):
                continue  # some environments declare no space
            shape = list(part.shape)
            if list(leaf.shape) != shape:
                raise MisfitError(f"{path} has shape {list(leaf.shape)}; its space says {shape}")
            parts[id(leaf)] = part
    except MisfitError as error:
        remedy = "declare the space of the observations that reset and step return"
        raise BrokenContractError(f"{name}: {error}", remedy, check="spaces") from None
    if any(not leaf.size for leaf in jax.tree.leaves(obs)):
        raise Refused(f"{name}: an observation is empty: {jax.tree.map(describe_leaf, obs)}")
    return jax.tree.map(lambda leaf: obs_leaf_spec(name, parts.get(id(leaf)), tuple(leaf.shape), leaf.dtype), obs)
