"""Applies a policy that `jppo.export_policy` wrote as .npz. This file needs only NumPy: it can be copied and used
without jppo.

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
from typing import Any, NamedTuple

import numpy as np

# 1: one action array without nvec, no recurrent layers. 1 and 2: all torsos see all arrays. 1 to 3: "strides" is
# a list, that of a single image.
FORMAT, VERSION = "jppo policy", 4
_READABLE = (1, 2, 3, 4)
_NORMALIZED_BOUND = 10.0
_ACTIVATIONS = {
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, 0.0),
    "swish": lambda x: x * _sigmoid(x),
}
_MISSING = np.empty(0)
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
        self._specs = [_Spec.from_json(leaf) for leaf in _descriptions(self._tree)]
        self._mask: int | None = description.get("action_mask")  # number of this array
        self._inputs = [i for i in range(len(self._specs)) if i != self._mask]  # numbers of the network's inputs
        if not self._inputs:
            raise ValueError("the observation has no arrays")
        self._normalizers = {
            number: tuple(
                _take(arrays, f"obs/{i}/{name}", self._specs[number].feature_shape) for name in ("mean", "scale")
            )
            for i, number in enumerate(self._inputs if description["normalized"] else [])
        }
        self._seen = {torso: network.get(f"{torso}_inputs", self._inputs) for torso in ("actor", "critic")}
        numbers, needed = _rebuild(self._tree, itertools.count()), {*self._seen["actor"], self._mask}
        self._unseen = {
            name
            for name, part in self._tree.get("dict", {}).items()
            if not needed.intersection(_leaves(part, numbers[name], name))
        }
        shapes = {torso: [self._specs[i].feature_shape for i in seen] for torso, seen in self._seen.items()}
        self._memory: _Memory | None = None
        if network.get("recurrent", "none") != "none":
            self._encoder = _Torso(arrays, "encoder", network, network["num_encoder_layers"], shapes["actor"])
            self._memory = _Memory(arrays, network["recurrent"], self._encoder.size)
            network, shapes = network | {"strides": {}}, {torso: [(self._memory.size,)] for torso in shapes}
        names = {torso: "shared" if network["shared_torso"] else torso for torso in shapes}
        self._actor, self._critic = (
            _Torso(arrays, names[torso], network, network["num_layers"], shapes[torso]) for torso in names
        )
        self._value = _layer(arrays, "value", self._critic.size, 1)
        self._action_tree = description["action"]
        leaves = list(_descriptions(self._action_tree))
        suffixes = [f"_{i}" for i in range(len(leaves))] if leaves != [self._action_tree] else [""]
        self._heads = [
            _Head(arrays, leaf, suffix, self._actor.size) for leaf, suffix in zip(leaves, suffixes, strict=True)
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
        built = _rebuild(self._action_tree, parts)
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
        if self._memory is None:
            if state is not None or episode_start is not None:
                raise ValueError("this policy is not recurrent: call act(obs) without state and episode_start")
            return ()
        zeros = np.zeros((size, self._memory.size), np.float32)
        leaves = (zeros,) * self._memory.num_carries
        if state is not None:
            is_sequence = isinstance(state, tuple) or (isinstance(state, list) and len(leaves) > 1)
            parts = state if is_sequence else (state,)
            found = tuple(np.asarray(leaf, _FLOAT32) for leaf in parts)
            shapes, wanted = [leaf.shape for leaf in found], [leaf.shape for leaf in leaves]
            if shapes != wanted:
                raise ValueError(f"the state has shapes {shapes}; for {size} observations it has {wanted}")
            leaves = found
        if episode_start is not None:
            try:
                start = np.asarray(episode_start)
            except ValueError:
                problem = f"episode_start is a ragged list; for {size} observations it must be {size} bools"
                raise ValueError(problem) from None
            if start.dtype != bool:
                raise ValueError(f"episode_start must be bool; it is {start.dtype}")
            if start.shape not in ((), (size,)):
                raise ValueError(f"episode_start has shape {start.shape}; for {size} observations it must be ({size},)")
            start = np.broadcast_to(start, (size,))[:, None]
            leaves = tuple(np.where(start, zeros, leaf) for leaf in leaves)
        return leaves if self._memory.num_carries > 1 else leaves[0]

    def _leaves(self, obs: Any, unneeded: Iterable[str] = ()) -> tuple[list[np.ndarray], bool]:
        """Returns the observation's arrays [B, ...], and whether `obs` is a single observation.

        Args:
          unneeded: names of the parts that may be missing; their arrays are then _MISSING.
        """
        if isinstance(obs, dict) and (missing := set(unneeded) - set(obs)):
            obs = obs | {name: _rebuild(self._tree["dict"][name], itertools.repeat(_MISSING)) for name in missing}
        pairs = zip(_leaves(self._tree, obs, "the observation"), self._specs, strict=True)
        leaves = [leaf if leaf is _MISSING else np.asarray(leaf, spec.dtype) for leaf, spec in pairs]
        found = [i for i, leaf in enumerate(leaves) if leaf is not _MISSING]
        single = leaves[found[0]].shape == self._specs[found[0]].shape
        for i in found:
            shape, wanted = leaves[i].shape, self._specs[i].shape
            leaves[i] = leaves[i][None] if single else leaves[i]
            if leaves[i].shape[1:] != wanted or not leaves[i].ndim or len(leaves[i]) != len(leaves[found[0]]):
                raise ValueError(f"an observation has shape {shape}; the policy takes {wanted} or a batch of it")
        return leaves, single

    def _features(self, leaves: list[np.ndarray], torso: str) -> list[np.ndarray]:
        """Returns the inputs of a torso, or of the encoder before it, [B, ...] f32 each."""
        features = [self._specs[i].features(leaves[i]) for i in self._seen[torso]]
        if self._normalizers:
            for place, number in enumerate(self._seen[torso]):
                mean, scale = self._normalizers[number]
                normalized = (features[place] - mean) * scale
                features[place] = np.clip(normalized, -_NORMALIZED_BOUND, _NORMALIZED_BOUND)
        return features


class _Spec(NamedTuple):
    """One array of an observation."""

    shape: tuple[int, ...]
    dtype: np.dtype
    num_categories: int
    start: int

    @classmethod
    def from_json(cls, leaf: dict[str, Any]) -> "_Spec":
        dtype = np.dtype(leaf["dtype"])
        if dtype.kind not in "biuf":
            raise ValueError(f"unknown dtype {leaf['dtype']!r}")
        return cls(tuple(leaf["shape"]), dtype, int(leaf["num_categories"]), int(leaf["start"]))

    @property
    def feature_shape(self) -> tuple[int, ...]:
        return (*self.shape, self.num_categories) if self.num_categories else self.shape

    def features(self, obs: np.ndarray) -> np.ndarray:
        if self.num_categories:
            return (obs[..., None] == np.arange(self.start, self.start + self.num_categories)).astype(np.float32)
        features = obs.astype(_FLOAT32, copy=False)
        return features / 255.0 if self.dtype == _UINT8 else features


class _Head:
    """The output layer of one array of an action."""

    def __init__(self, arrays: dict[str, np.ndarray], action: dict[str, Any], suffix: str, inputs: int) -> None:
        self._shape, self._dtype = tuple(action["shape"]), np.dtype(action["dtype"])
        self._nvec = tuple(action.get("nvec", ()))
        self._num_actions = int(action["num_actions"])
        self.is_box = not (self._num_actions or self._nvec)
        self.noise_size = outputs = self._num_actions or sum(self._nvec) or math.prod(self._shape)
        self._kernel, self._bias = _layer(arrays, f"policy{suffix}", inputs, outputs)
        self._start = np.asarray(action["start"], self._dtype)
        self._has_start = bool(self._start.any())
        if self._nvec:  # the logits of each component; missing ones repeat the first, which wins
            firsts, categories = np.cumsum([0, *self._nvec[:-1]])[:, None], np.arange(max(self._nvec))
            self._columns = firsts + np.where(categories < np.array(self._nvec)[:, None], categories, 0)  # [K, M]
        if self.is_box:
            self._std = np.exp(_take(arrays, f"log_std{suffix}", (outputs,)))
            self._low, self._high = (_take(arrays, f"action{suffix}/{bound}", (outputs,)) for bound in ("low", "high"))
            with np.errstate(over="ignore"):
                self._boxed = np.isfinite(self._high - self._low)  # bounded on both sides
            self._origin = np.where(self._boxed, self._low, 0)
            self._half = 0.5 * (np.where(self._boxed, self._high, 0) - self._origin)
            self._bounds = action["bounds"]
            if self._bounds not in ("clip", "tanh"):
                raise ValueError(f"unknown action bounds {self._bounds!r}")

    def draw(self, rng: np.random.Generator, size: int) -> np.ndarray:
        """Returns noise [B, noise_size]."""
        shape = (size, self.noise_size)
        return rng.standard_normal(shape, np.float32) if self.is_box else rng.gumbel(size=shape)

    def select(self, hidden: np.ndarray, noise: np.ndarray | None, legal: np.ndarray | None) -> np.ndarray:
        """Returns the policy's actions for hidden units [B, I]."""
        outputs = hidden.dot(self._kernel)
        outputs += self._bias  # logits, or means [B, A]
        if legal is not None:
            outputs = np.where(legal, outputs, -np.inf)
        if noise is not None:
            outputs = outputs + (self._std * noise if self.is_box else noise)
        if self.is_box:
            return outputs
        return (outputs[:, self._columns] if self._nvec else outputs).argmax(axis=-1)

    def to_env(self, action: np.ndarray) -> np.ndarray:
        """Converts the policy's actions to the environment's, [B, *shape]."""
        if not self.is_box:
            action = action.astype(self._dtype, copy=False)
            action = action + self._start if self._has_start else action
            return action.reshape(-1, *self._shape) if self._nvec else action
        unit = np.tanh(action) if self._bounds == "tanh" else np.clip(action, -1.0, 1.0)
        scaled = (unit + 1.0) * self._half + self._origin
        edge = np.clip(np.where(self._boxed, scaled, action), self._low, self._high)
        return edge.reshape(-1, *self._shape).astype(self._dtype)

    def check_mask(self, mask: np.ndarray) -> None:
        """Raises ValueError if a row of the mask [B, ...] has no legal category of some component."""
        flat = mask.reshape(len(mask), self.noise_size) != 0
        components = flat[:, self._columns] if self._nvec else flat[:, None]
        if not (legal := components.any(axis=-1).all(axis=-1)).all():
            raise ValueError(f"action_mask marks no legal action in row {legal.argmin()} of the observations")


class _Memory:
    """A GRU or LSTM layer, see `jppo.ppo.recurrence`."""

    def __init__(self, arrays: dict[str, np.ndarray], kind: str, inputs: int) -> None:
        gates = {"gru": 3, "lstm": 4}[kind]
        self.size = size = len(arrays["recurrent/recurrent_kernel"])
        self.num_carries = gates - 2
        self._input_kernel = _take(arrays, "recurrent/input_kernel", (inputs, gates * size))
        self._input_bias = _take(arrays, "recurrent/input_bias", (gates * size,))[None]
        self._kernel = _take(arrays, "recurrent/recurrent_kernel", (size, gates * size))
        if kind == "gru":
            self._bias = _take(arrays, "recurrent/recurrent_bias", (size,))[None]

    def __call__(self, x: np.ndarray, carry: Any) -> tuple[np.ndarray, Any]:
        """Returns the output [B, H] and the next carry."""
        gates, size = x.dot(self._input_kernel) + self._input_bias, self.size
        if self.num_carries == 1:  # a GRU
            products = carry.dot(self._kernel)
            both = _sigmoid(gates[:, : 2 * size] + products[:, : 2 * size])
            new = np.tanh(gates[:, 2 * size :] + both[:, :size] * (products[:, 2 * size :] + self._bias))
            h = new + both[:, size:] * (carry - new)
            return h, h
        c, h = carry
        gates += h.dot(self._kernel)
        both = _sigmoid(gates[:, : 2 * size])
        c = both[:, size:] * c + both[:, :size] * np.tanh(gates[:, 2 * size : 3 * size])
        h = _sigmoid(gates[:, 3 * size :]) * np.tanh(c)
        return h, (c, h)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    """Returns 1 / (1 + exp(-x)) without overflow."""
    return 0.5 + 0.5 * np.tanh(0.5 * x)


class _Torso:
    """Convolutions of the images, then dense layers."""

    def __init__(
        self, arrays: dict[str, np.ndarray], name: str, network: dict[str, Any], num_layers: int, shapes: list[tuple]
    ) -> None:
        """
        Args:
          shapes: shape of each input without the batch.
        """
        strides: Any = network["strides"]
        self._images: list[list[tuple]] = []  # the convolutions of each input
        self._layers, self.size = list[tuple[np.ndarray, np.ndarray]](), 0
        for i, shape in enumerate(shapes):
            prefix = f"{name}/conv_{i}" if len(shapes) > 1 else f"{name}/conv"
            numbers = strides.get(prefix, []) if isinstance(strides, dict) else strides
            image, size = _convolutions(arrays, prefix, numbers, shape) if numbers else ([], math.prod(shape))
            self._images.append(image)
            self.size += size
        for i in range(num_layers):
            inputs, (self.size,) = self.size, arrays[f"{name}/dense/{i}/bias"].shape
            self._layers.append(_layer(arrays, f"{name}/dense/{i}", inputs, self.size))
        if network["activation"] not in _ACTIVATIONS:
            raise ValueError(f"unknown activation {network['activation']!r}")
        self._activation: Any = _ACTIVATIONS[network["activation"]]
        self._has_images = any(self._images)

    def __call__(self, leaves: list[np.ndarray]) -> np.ndarray:
        if self._has_images:
            leaves = list(map(_convolve_image, leaves, self._images))
        flat = [x if x.ndim == 2 else x.reshape(len(x), math.prod(x.shape[1:])) for x in leaves]
        x = flat[0] if len(flat) == 1 else np.concatenate(flat, axis=-1)
        for kernel, bias in self._layers:
            x = x.dot(kernel)  # for one row faster than @ and np.dot
            x += bias
            x = self._activation(x)
        return x


def _convolutions(
    arrays: dict[str, np.ndarray], prefix: str, strides: list[int], shape: tuple[int, ...]
) -> tuple[list[tuple], int]:
    """Returns (kernel [height, width, channels, features], bias [features], stride) of each convolution of images of
    this shape, and the number of outputs. Checks that the shapes of the arrays fit each other."""
    convolutions = []
    rows, columns, channels = (*shape[1:], shape[0]) if _is_channels_first(shape) else shape
    for i, stride in enumerate(strides):
        height, width, _, outputs = arrays[f"{prefix}/{i}/kernel"].shape
        kernel = _take(arrays, f"{prefix}/{i}/kernel", (height, width, channels, outputs))
        convolutions.append((kernel, _take(arrays, f"{prefix}/{i}/bias", (outputs,)), stride))
        rows, columns, channels = (rows - height) // stride + 1, (columns - width) // stride + 1, outputs
        if min(rows, columns, height, width) < 1:
            raise ValueError(f"{prefix}/{i}/kernel is larger than the image")
    return convolutions, rows * columns * channels


def _convolve_image(x: np.ndarray, convolutions: list[tuple]) -> np.ndarray:
    """Applies the convolutions of an input [B, ...], which is an image if there are any."""
    x = np.moveaxis(x, 1, -1) if convolutions and _is_channels_first(x.shape[1:]) else x
    for kernel, bias, stride in convolutions:
        x = _convolve(x, kernel, bias, stride)
    return x


def _is_channels_first(shape: tuple[int, ...]) -> bool:
    """Returns whether images of this shape have the order [channels, height, width]."""
    return shape[0] < min(shape[1:])


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


def _descriptions(tree: Any) -> Iterator[dict[str, Any]]:
    """Yields the descriptions of a space's arrays in JAX's order."""
    if "dict" in tree:
        for name in sorted(tree["dict"]):
            yield from _descriptions(tree["dict"][name])
    elif "tuple" in tree:
        for part in tree["tuple"]:
            yield from _descriptions(part)
    else:
        yield tree


def _rebuild(tree: Any, leaves: Iterator[Any]) -> Any:
    """Returns the arrays of a space in its dicts and tuples."""
    if "dict" in tree:
        return {name: _rebuild(tree["dict"][name], leaves) for name in sorted(tree["dict"])}
    return tuple(_rebuild(part, leaves) for part in tree["tuple"]) if "tuple" in tree else next(leaves)


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
