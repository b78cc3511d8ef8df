"""Applies a policy that `jppo.export_policy` wrote as .npz. This folder needs only NumPy: it can be copied
and used without jppo.

    policy = numpy_policy.load("policy.npz")
    policy.act(obs)  # the most likely actions
    policy.act(obs, rng=np.random.default_rng(0))  # samples
    action, state = policy.act(obs, state)  # of a recurrent policy; state is None at an episode's start

The .npz file contains a JSON description and float32 arrays. Loading it executes no code from the file.
"""

import itertools
import json
import math
import os
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from .layers import Head, Memory, Torso, layer, take
from .spaces import ObsArray, array_descriptions, as_batch, flatten, rebuild, rebuild_names

# 1: one action array without nvec, no recurrent layers. 1 and 2: all torsos see all arrays. 1 to 3: "strides" is
# a list, that of a single image.
FORMAT, VERSION = "jppo policy", 4
_READABLE = (1, 2, 3, 4)
_NORMALIZED_BOUND = 10.0
_MISSING = np.empty(0)
_DAMAGE = (zipfile.BadZipFile, zlib.error, LookupError, TypeError, ValueError, EOFError, RuntimeError, MemoryError)


def load(path: str | os.PathLike[str]) -> "NumpyPolicy":
    """Loads the policy of an .npz file. Raises ValueError if the file is missing, damaged or of another version."""
    try:
        with open(os.path.expanduser(path), "rb") as file, np.load(file, allow_pickle=False) as archive:
            arrays = dict(archive)
        description = json.loads(str(arrays.pop("description")))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None
    except _DAMAGE as error:
        raise ValueError(f"{path} is damaged or not a policy that jppo exported for NumPy") from error
    if not isinstance(description, dict) or description.get("format") != FORMAT:
        raise ValueError(f"{path} is not a policy that jppo exported for NumPy")
    if description.get("version") not in _READABLE:
        raise ValueError(
            f"{path} has format version {description.get('version')!r}, but this numpy_policy reads versions 1 to "
            f"{VERSION}; use the jppo version that exported the file"
        )
    try:
        return NumpyPolicy(description, arrays)
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RecursionError) as error:
        problem = f"{error} is missing" if isinstance(error, KeyError) else error
        raise ValueError(f"{path} is damaged: {problem}") from None


class NumpyPolicy:
    """Selects actions like `jppo.TrainedPolicy`.

    Attributes:
      description: the file's description of spaces and network.
      noise_size: random numbers per sampled action: the sum of the numbers of categories and of real dimensions.
    """

    def __init__(self, description: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        """Raises ValueError, KeyError or TypeError if the arrays do not fit the description."""
        self.description, network = description, description["network"]
        self._tree = description["observation"]
        self._specs = [ObsArray.from_json(leaf) for leaf in array_descriptions(self._tree)]
        self._mask: int | None = description.get("action_mask")  # number of this array
        self._inputs = [i for i in range(len(self._specs)) if i != self._mask]  # numbers of the network's inputs
        if not self._inputs:
            raise ValueError("the observation has no arrays")
        self._normalizers = {
            number: tuple(
                take(arrays, f"obs/{i}/{name}", self._specs[number].feature_shape) for name in ("mean", "scale")
            )
            for i, number in enumerate(self._inputs if description["normalized"] else [])
        }
        self._seen = {torso: network.get(f"{torso}_inputs", self._inputs) for torso in ("actor", "critic")}
        parts, needed = self._tree.get("dict", {}), {*self._seen["actor"], self._mask}
        owners = [name for name in sorted(parts) for _ in array_descriptions(parts[name])]  # of each array
        self._unseen = set(parts) - {name for number, name in enumerate(owners) if number in needed}
        shapes = {torso: [self._specs[i].feature_shape for i in seen] for torso, seen in self._seen.items()}
        self._memory: Memory | None = None
        if network.get("recurrent", "none") != "none":
            self._encoder = Torso(arrays, "encoder", network, network["num_encoder_layers"], shapes["actor"])
            self._memory = Memory(arrays, network["recurrent"], self._encoder.size)
            network, shapes = network | {"strides": {}}, {torso: [(self._memory.size,)] for torso in shapes}
        names = {torso: "shared" if network["shared_torso"] else torso for torso in shapes}
        self._actor, self._critic = (
            Torso(arrays, names[torso], network, network["num_layers"], shapes[torso]) for torso in names
        )
        self._value = layer(arrays, "value", self._critic.size, 1)
        self._action_tree = description["action"]
        leaves = list(array_descriptions(self._action_tree))
        suffixes = [f"_{i}" for i in range(len(leaves))] if leaves != [self._action_tree] else [""]
        self._heads = [
            Head(arrays, leaf, suffix, self._actor.size) for leaf, suffix in zip(leaves, suffixes, strict=True)
        ]
        self.noise_size = sum(head.noise_size for head in self._heads)
        if self._mask is not None and math.prod(self._specs[self._mask].shape) != self.noise_size:
            raise ValueError(f"action_mask has shape {self._specs[self._mask].shape} for {self.noise_size} actions")

    @property
    def is_recurrent(self) -> bool:
        """Whether the policy has a state."""
        return self._memory is not None

    def act(
        self, obs: Any, state: Any = None, episode_start: Any = None, *, rng: np.random.Generator | None = None
    ) -> Any:
        """Returns actions for the environment: the most likely ones, or samples. A recurrent policy returns (actions,
        state): pass the state to the next call.

        Args:
          obs: one observation [*obs] or a batch [B, *obs], in the environment's dicts and tuples. A dict may lack
            the parts that only the critic sees.
          state: of a recurrent policy, from the call before; None at the start of an episode.
          episode_start: of a recurrent policy, [B] bool: True where an episode starts, which resets that row's state.
          rng: samples from the policy's distribution.

        Raises:
          ValueError: the shape of the observation or of the state differs from the policy's, its action_mask marks no
            legal action, or the policy is not recurrent and a state was passed.
        """
        leaves, single = self._leaves(obs, self._unseen)
        if self._mask is not None:
            self._heads[0].check_mask(leaves[self._mask])
        size = len(leaves[self._seen["actor"][0]])
        carry = self._carry(state, episode_start, size)
        noise = None if rng is None else np.concatenate([head.draw(rng, size) for head in self._heads], 1)
        _, actions, carry = self.select_action(leaves, noise, carry)
        parts: Iterator[np.ndarray] = iter([part[0] if single else part for part in actions])
        built = rebuild(self._action_tree, parts)
        return (built, carry) if self._memory else built

    def select_action(
        self, leaves: list[np.ndarray], noise: np.ndarray | None, carry: Any = ()
    ) -> tuple[list[np.ndarray], list[np.ndarray], Any]:
        """Returns the policy's actions, the environment's actions [B, *shape], and the next carry.

        Both have one array for each space, in JAX's order. The policy's are [B] numbers from 0 on, [B, K] of them, or
        [B, A]; `jppo.envs.spaces.to_env_action` describes the conversion.

        Args:
          leaves: a batch of observations, arrays [B, *obs] in JAX's order. They are not checked.
          noise: [B, noise_size]: Gumbel noise for categories, normal noise for real numbers. None selects the most
            likely actions.
          carry: of a recurrent policy, h [B, H] of a GRU or (c, h) of an LSTM.
        """
        inputs, carry = self._remember(leaves, carry, "actor")
        hidden, actions, env_actions, first = self._actor(inputs), [], [], 0
        legal = None if self._mask is None else leaves[self._mask].reshape(len(hidden), -1) != 0
        for head in self._heads:
            last = first + head.noise_size
            action = head.select(hidden, None if noise is None else noise[:, first:last], legal)
            actions.append(action)
            env_actions.append(head.to_env(action))
            first = last
        return actions, env_actions, carry

    def value(self, obs: Any, state: Any = None) -> np.ndarray:
        """Returns the value estimates V(obs), [] or [B] f32, in units of the (scaled) training reward.

        Args:
          state: of a recurrent policy, see `act`.
        """
        leaves, single = self._leaves(obs)
        kernel, bias = self._value
        inputs, _ = self._remember(leaves, self._carry(state, None, len(leaves[0])), "critic")
        values = (self._critic(inputs).dot(kernel) + bias)[:, 0]
        return values[0] if single else values

    def _remember(self, leaves: list[np.ndarray], carry: Any, torso: str) -> tuple[list[np.ndarray], Any]:
        """Returns the inputs of a torso, and the next carry."""
        features = self._features(leaves, torso)
        if self._memory is None:
            return features, carry
        output, carry = self._memory(self._encoder(features), carry)
        return [output], carry

    def _carry(self, state: Any, episode_start: Any, size: int) -> Any:
        """Returns the carry for B = size rows, reset where an episode starts."""
        if self._memory is not None:
            return self._memory.start(state, episode_start, size)
        if state is not None or episode_start is not None:
            raise ValueError("this policy is not recurrent: call act(obs) without state and episode_start")
        return ()

    def _leaves(self, obs: Any, unneeded: Iterable[str] = ()) -> tuple[list[np.ndarray], bool]:
        """Returns the observation's arrays [B, ...], and whether `obs` is a single observation.

        Args:
          unneeded: names of the parts that may be missing; their arrays are then _MISSING.
        """
        if isinstance(obs, dict) and (missing := set(unneeded) - set(obs)):
            obs = obs | {name: rebuild(self._tree["dict"][name], itertools.repeat(_MISSING)) for name in missing}
        names = flatten(self._tree, rebuild_names(self._tree, "the observation"), "the observation")
        parts = zip(flatten(self._tree, obs, "the observation"), self._specs, names, strict=True)
        leaves = [leaf if leaf is _MISSING else spec.cast(leaf, name) for leaf, spec, name in parts]
        found = [i for i, leaf in enumerate(leaves) if leaf is not _MISSING]
        batch, single = as_batch([leaves[i] for i in found], [self._specs[i].shape for i in found])
        for i, leaf in zip(found, batch, strict=True):
            leaves[i] = leaf
        return leaves, single

    def _features(self, leaves: list[np.ndarray], torso: str) -> list[np.ndarray]:
        """Returns the inputs of a torso, or of the encoder before it, [B, ...] f32 each."""
        features = []
        for number in self._seen[torso]:
            feature = self._specs[number].features(leaves[number])
            if self._normalizers:
                mean, scale = self._normalizers[number]
                feature = np.clip((feature - mean) * scale, -_NORMALIZED_BOUND, _NORMALIZED_BOUND)
            features.append(feature)
        return features
