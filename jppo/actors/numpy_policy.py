"""Applies a policy that `jppo.export_policy` wrote as .npz. This file needs only NumPy: it can be copied and used
without jppo.

    policy = numpy_policy.load("policy.npz")
    policy.act(obs)  # the most likely actions
    policy.act(obs, rng=np.random.default_rng(0))  # samples

The .npz file contains a JSON description and float32 arrays. Loading it executes no code from the file.
"""

import json
import math
import os
import zipfile
import zlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

FORMAT, VERSION = "jppo policy", 1
_NORMALIZED_BOUND = 10.0
_ACTIVATIONS = {
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, 0.0),
    "swish": lambda x: x * (0.5 + 0.5 * np.tanh(0.5 * x)),  # x * sigmoid(x), without overflow
}
_FLOAT32, _UINT8 = np.dtype(np.float32), np.dtype(np.uint8)  # dtype objects are faster than np.float32 in calls


def load(path: str | os.PathLike[str]) -> "NumpyPolicy":
    """Loads the policy of an .npz file. Raises ValueError if the file is missing, damaged or of another version."""
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
            arrays = dict(archive)
        description = json.loads(str(arrays.pop("description")))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None
    except (zipfile.BadZipFile, zlib.error, LookupError, TypeError, ValueError, EOFError, RecursionError) as error:
        raise ValueError(f"{path} is damaged or not a policy that jppo exported for NumPy") from error
    if not isinstance(description, dict) or description.get("format") != FORMAT:
        raise ValueError(f"{path} is not a policy that jppo exported for NumPy")
    if description.get("version") != VERSION:
        raise ValueError(
            f"{path} has format version {description.get('version')!r}, but this numpy_policy reads version {VERSION}; "
            "use the jppo version that exported the file"
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
      noise_size: random numbers per sampled action: the number of actions, or of an action's dimensions.
    """

    def __init__(self, description: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        """Raises ValueError, KeyError or TypeError if the arrays do not fit the description."""
        self.description = description
        action, network = description["action"], description["network"]
        self._tree, self._specs = description["observation"], list(_specs_of(description["observation"]))
        self._mask: int | None = description.get("action_mask")  # number of this array
        self._inputs = [i for i in range(len(self._specs)) if i != self._mask]  # numbers of the network's inputs
        features = [self._specs[i].feature_shape for i in self._inputs]
        if not features:
            raise ValueError("the observation has no arrays")
        self._normalizers = [
            (_take(arrays, f"obs/{i}/mean", shape), _take(arrays, f"obs/{i}/scale", shape))
            for i, shape in enumerate(features if description["normalized"] else [])
        ]
        self._actor = _torso(arrays, "shared" if network["shared_torso"] else "actor", network, features)
        self._critic = self._actor if network["shared_torso"] else _torso(arrays, "critic", network, features)
        self._shape, self._dtype = tuple(action["shape"]), np.dtype(action["dtype"])
        self._num_actions, self._start = int(action["num_actions"]), int(action["start"])
        self.noise_size = outputs = self._num_actions or math.prod(self._shape)
        if self._mask is not None and math.prod(self._specs[self._mask].shape) != outputs:
            raise ValueError(f"action_mask has shape {self._specs[self._mask].shape} for {outputs} actions")
        self._policy = _layer(arrays, "policy", self._actor.size, outputs)
        self._value = _layer(arrays, "value", self._critic.size, 1)
        if not self._num_actions:
            self._std = np.exp(_take(arrays, "log_std", (outputs,)))
            self._low, self._high = (_take(arrays, f"action/{bound}", (outputs,)) for bound in ("low", "high"))
            with np.errstate(over="ignore"):
                self._boxed = np.isfinite(self._high - self._low)  # bounded on both sides
            self._origin = np.where(self._boxed, self._low, 0)
            self._half = 0.5 * (np.where(self._boxed, self._high, 0) - self._origin)
            self._bounds = action["bounds"]
            if self._bounds not in ("clip", "tanh"):
                raise ValueError(f"unknown action bounds {self._bounds!r}")

    def act(self, obs: Any, *, rng: np.random.Generator | None = None) -> np.ndarray:
        """Returns actions for the environment: the most likely ones, or samples.

        Args:
          obs: one observation [*obs] or a batch [B, *obs], in the environment's dicts and tuples.
          rng: samples from the policy's distribution.

        Raises:
          ValueError: the observation's shape differs from the environment's, or its action_mask marks no legal action.
        """
        leaves, single = self._leaves(obs)
        if self._mask is not None and not all(legal := [row.any() for row in leaves[self._mask]]):
            raise ValueError(f"action_mask marks no legal action in row {legal.index(False)} of the observations")
        noise: Any = None
        if rng is not None:
            shape = (len(leaves[0]), self.noise_size)
            noise = rng.gumbel(size=shape) if self._num_actions else rng.standard_normal(shape, np.float32)
        actions = self.to_env(self.select_action(leaves, noise))
        return actions[0] if single else actions

    def select_action(self, leaves: list[np.ndarray], noise: np.ndarray | None) -> np.ndarray:
        """Returns the policy's actions, [B] numbers from 0 on or [B, A]. `to_env` converts them for the environment.

        Args:
          leaves: a batch of observations, arrays [B, *obs] in JAX's order. They are not checked.
          noise: [B, noise_size]: Gumbel noise for discrete actions, normal noise for continuous ones. None selects the
            most likely actions.
        """
        kernel, bias = self._policy
        outputs = self._actor(self._features(leaves)).dot(kernel) + bias  # logits, or means [B, A]
        if self._mask is not None:
            outputs = np.where(leaves[self._mask].reshape(outputs.shape) != 0, outputs, -np.inf)
        if noise is not None:
            outputs = outputs + (noise if self._num_actions else self._std * noise)
        return outputs.argmax(axis=-1) if self._num_actions else outputs

    def to_env(self, action: np.ndarray) -> np.ndarray:
        """Converts the policy's actions to the environment's [B, *shape], like `jppo.envs.spaces.to_env_action`."""
        if self._num_actions:
            action = action.astype(self._dtype, copy=False)
            return action + self._start if self._start else action
        unit = np.tanh(action) if self._bounds == "tanh" else np.clip(action, -1.0, 1.0)
        scaled = (unit + 1.0) * self._half + self._origin
        edge = np.clip(np.where(self._boxed, scaled, action), self._low, self._high)
        return edge.reshape(-1, *self._shape).astype(self._dtype)

    def value(self, obs: Any) -> np.ndarray:
        """Returns the value estimates V(obs), [] or [B] f32, in units of the (scaled) training reward."""
        leaves, single = self._leaves(obs)
        kernel, bias = self._value
        values = (self._critic(self._features(leaves)).dot(kernel) + bias)[:, 0]
        return values[0] if single else values

    def _leaves(self, obs: Any) -> tuple[list[np.ndarray], bool]:
        """Returns the observation's arrays [B, ...], and whether `obs` is a single observation."""
        found = _leaves(self._tree, obs, "the observation")
        leaves = [np.asarray(leaf, spec.dtype) for leaf, spec in zip(found, self._specs, strict=True)]
        single = leaves[0].shape == self._specs[0].shape
        leaves = [leaf[None] for leaf in leaves] if single else leaves
        for leaf, spec in zip(leaves, self._specs, strict=True):
            if leaf.shape[1:] != spec.shape or not leaf.ndim or len(leaf) != len(leaves[0]):
                shape = leaf.shape[1:] if single else leaf.shape
                raise ValueError(f"an observation has shape {shape}; the policy takes {spec.shape} or a batch of it")
        return leaves, single

    def _features(self, leaves: list[np.ndarray]) -> list[np.ndarray]:
        """Returns the network's input for each observation array, [B, ...] f32."""
        features = [self._specs[i].features(leaves[i]) for i in self._inputs]
        for i, (mean, scale) in enumerate(self._normalizers):
            features[i] = np.clip((features[i] - mean) * scale, -_NORMALIZED_BOUND, _NORMALIZED_BOUND)
        return features


class _Spec(NamedTuple):
    """One array of an observation."""

    shape: tuple[int, ...]
    dtype: np.dtype
    num_categories: int
    start: int

    @property
    def feature_shape(self) -> tuple[int, ...]:
        return (*self.shape, self.num_categories) if self.num_categories else self.shape

    def features(self, obs: np.ndarray) -> np.ndarray:
        if self.num_categories:
            return (obs[..., None] == np.arange(self.start, self.start + self.num_categories)).astype(np.float32)
        features = obs.astype(_FLOAT32, copy=False)
        return features / 255.0 if self.dtype == _UINT8 else features


class _Torso(NamedTuple):
    """Convolutions (or none), then dense layers."""

    channels_first: bool
    strides: list[int]
    convolutions: list[tuple[np.ndarray, np.ndarray]]  # kernel [height, width, channels, features], bias [features]
    layers: list[tuple[np.ndarray, np.ndarray]]  # see _layer
    activation: Any
    size: int  # number of outputs

    def __call__(self, leaves: list[np.ndarray]) -> np.ndarray:
        if self.convolutions:
            image = np.moveaxis(leaves[0], 1, -1) if self.channels_first else leaves[0]
            for (kernel, bias), stride in zip(self.convolutions, self.strides, strict=True):
                image = _convolve(image, kernel, bias, stride)
            leaves = [image]
        flat = [x if x.ndim == 2 else x.reshape(len(x), math.prod(x.shape[1:])) for x in leaves]
        x = flat[0] if len(flat) == 1 else np.concatenate(flat, axis=-1)
        for kernel, bias in self.layers:
            x = self.activation(x.dot(kernel) + bias)  # for one row, dot is faster than @ and np.dot
        return x


def _convolve(x: np.ndarray, kernel: np.ndarray, bias: np.ndarray, stride: int) -> np.ndarray:
    """Convolves x [B, H, W, C] with kernel [h, w, C, F] without padding and applies relu.

    It processes one row of the kernel at a time, because patches of whole kernels would need several times the memory.
    """
    height, width, channels, features = kernel.shape
    rows, columns = ((size - k) // stride + 1 for size, k in zip(x.shape[1:3], (height, width), strict=True))
    total = np.zeros((len(x) * rows * columns, features), np.float32)
    for i in range(height):
        lines = x[:, i : i + stride * (rows - 1) + 1 : stride]
        patches = [lines[:, :, j : j + stride * (columns - 1) + 1 : stride] for j in range(width)]
        together = np.concatenate(patches, axis=-1).reshape(-1, width * channels)
        total += together @ kernel[i].reshape(width * channels, features)
    return np.maximum(total + bias, 0.0).reshape(len(x), rows, columns, features)


def _torso(arrays: dict[str, np.ndarray], name: str, network: dict[str, Any], features: list[tuple]) -> _Torso:
    """Returns the torso of that name. Checks that the shapes of its arrays fit each other."""
    strides, channels_first = network["strides"], network["channels_first"]
    convolutions, size = [], sum(math.prod(shape) for shape in features)
    if strides:
        (image,) = features
        rows, columns, channels = (*image[1:], image[0]) if channels_first else image
        for i, stride in enumerate(strides):
            height, width, _, outputs = arrays[f"{name}/conv/{i}/kernel"].shape
            kernel = _take(arrays, f"{name}/conv/{i}/kernel", (height, width, channels, outputs))
            convolutions.append((kernel, _take(arrays, f"{name}/conv/{i}/bias", (outputs,))))
            rows, columns, channels = (rows - height) // stride + 1, (columns - width) // stride + 1, outputs
            if min(rows, columns, height, width) < 1:
                raise ValueError(f"{name}/conv/{i}/kernel is larger than the image")
        size = rows * columns * channels
    layers = []
    for i in range(network["num_layers"]):
        inputs, (size,) = size, arrays[f"{name}/dense/{i}/bias"].shape
        layers.append(_layer(arrays, f"{name}/dense/{i}", inputs, size))
    if network["activation"] not in _ACTIVATIONS:
        raise ValueError(f"unknown activation {network['activation']!r}")
    return _Torso(
        channels_first=channels_first,
        strides=strides,
        convolutions=convolutions,
        layers=layers,
        activation=_ACTIVATIONS[network["activation"]],
        size=size,
    )


def _layer(arrays: dict[str, np.ndarray], name: str, inputs: int, outputs: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns kernel [inputs, outputs] and bias [1, outputs]. Adding the bias is faster with two dimensions."""
    return _take(arrays, f"{name}/kernel", (inputs, outputs)), _take(arrays, f"{name}/bias", (outputs,))[None]


def _take(arrays: dict[str, np.ndarray], name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns an array. Raises ValueError if its shape or dtype is wrong, or if it contains NaN."""
    if arrays[name].shape != shape or arrays[name].dtype != np.float32:
        raise ValueError(f"{name} is {arrays[name].dtype}{list(arrays[name].shape)}; it must be float32{list(shape)}")
    if np.isnan(arrays[name]).any():
        raise ValueError(f"{name} contains NaN")
    return arrays[name]


def _specs_of(tree: Any) -> Iterable[_Spec]:
    """Yields the specs of an observation's arrays in JAX's order."""
    if "dict" in tree:
        for name in sorted(tree["dict"]):
            yield from _specs_of(tree["dict"][name])
    elif "tuple" in tree:
        for part in tree["tuple"]:
            yield from _specs_of(part)
    else:
        dtype = np.dtype(tree["dtype"])
        if dtype.kind not in "biuf":
            raise ValueError(f"unknown dtype {tree['dtype']!r}")
        categories, start = int(tree["num_categories"]), int(tree["start"])
        yield _Spec(shape=tuple(tree["shape"]), dtype=dtype, num_categories=categories, start=start)


def _leaves(tree: Any, obs: Any, name: str) -> Iterable[Any]:
    """Returns the arrays of an observation in JAX's order."""
    if "dict" in tree:
        if not isinstance(obs, dict) or set(obs) != set(tree["dict"]):
            raise ValueError(f"{name} must be a dict of {', '.join(sorted(tree['dict']))}")
        return [leaf for key in sorted(obs) for leaf in _leaves(tree["dict"][key], obs[key], f"{name}[{key!r}]")]
    if "tuple" in tree:
        if not isinstance(obs, tuple | list) or len(obs) != len(tree["tuple"]):
            raise ValueError(f"{name} must be a tuple of {len(tree['tuple'])}")
        parts = zip(tree["tuple"], obs, strict=True)
        return [leaf for i, (part, leaf) in enumerate(parts) for leaf in _leaves(part, leaf, f"{name}[{i}]")]
    if isinstance(obs, dict):
        raise ValueError(f"{name} must be an array; it is a dict")
    return [obs]
