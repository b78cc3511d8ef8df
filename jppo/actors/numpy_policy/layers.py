"""The layers of jppo's networks, with weights from an exported policy."""

import math
from typing import Any

import numpy as np

from .spaces import FLOAT32, starting_rows

_ACTIVATIONS = {
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, 0.0),
    "swish": lambda x: x * _sigmoid(x),
}


class Torso:
    """Convolutions of the images, then dense layers."""

    def __init__(
        self, arrays: dict[str, np.ndarray], name: str, network: dict[str, Any], num_layers: int, shapes: list[tuple]
    ) -> None:
        """Args: shapes: shape of each input without the batch."""
        strides: Any = network["strides"]
        self._images: list[Convolutions | None] = []  # the convolutions of each input
        self._layers, self.size = list[tuple[np.ndarray, np.ndarray]](), 0
        for i, shape in enumerate(shapes):
            prefix = f"{name}/conv_{i}" if len(shapes) > 1 else f"{name}/conv"
            numbers = strides.get(prefix, []) if isinstance(strides, dict) else strides
            image = Convolutions(arrays, prefix, numbers, shape) if numbers else None
            self._images.append(image)
            self.size += image.size if image else math.prod(shape)
        for i in range(num_layers):
            inputs, (self.size,) = self.size, arrays[f"{name}/dense/{i}/bias"].shape
            self._layers.append(layer(arrays, f"{name}/dense/{i}", inputs, self.size))
        if network["activation"] not in _ACTIVATIONS:
            raise ValueError(f"unknown activation {network['activation']!r}")
        self._activation: Any = _ACTIVATIONS[network["activation"]]
        self._has_images = any(self._images)

    def __call__(self, leaves: list[np.ndarray]) -> np.ndarray:
        """Returns the hidden units [B, size] for the inputs [B, ...]."""
        if self._has_images:
            leaves = [image(x) if image else x for image, x in zip(self._images, leaves, strict=True)]
        flat = [x if x.ndim == 2 else x.reshape(len(x), math.prod(x.shape[1:])) for x in leaves]
        x = flat[0] if len(flat) == 1 else np.concatenate(flat, axis=-1)
        for kernel, bias in self._layers:
            x = x.dot(kernel)  # for one row faster than @ and np.dot
            x += bias
            x = self._activation(x)
        return x


class Convolutions:
    """The convolutions of an image, each followed by relu."""

    def __init__(self, arrays: dict[str, np.ndarray], prefix: str, strides: list[int], shape: tuple[int, ...]) -> None:
        """Checks that the shapes of the arrays fit each other and images of this shape."""
        self._is_channels_first = shape[0] < min(shape[1:])  # [channels, height, width]
        self._layers: list[tuple] = []
        rows, columns, channels = (*shape[1:], shape[0]) if self._is_channels_first else shape
        for i, stride in enumerate(strides):
            height, width, _, outputs = arrays[f"{prefix}/{i}/kernel"].shape
            kernel = take(arrays, f"{prefix}/{i}/kernel", (height, width, channels, outputs))
            self._layers.append((kernel, take(arrays, f"{prefix}/{i}/bias", (outputs,)), stride))
            rows, columns, channels = (rows - height) // stride + 1, (columns - width) // stride + 1, outputs
            if min(rows, columns, height, width) < 1:
                raise ValueError(f"{prefix}/{i}/kernel is larger than the image")
        self.size = rows * columns * channels

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Returns the features [B, rows, columns, channels] of images [B, ...]."""
        x = np.moveaxis(x, 1, -1) if self._is_channels_first else x
        for kernel, bias, stride in self._layers:
            x = _convolve(x, kernel, bias, stride)
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


class Memory:
    """A GRU or LSTM layer, see `jppo.networks.recurrent`."""

    def __init__(self, arrays: dict[str, np.ndarray], kind: str, inputs: int) -> None:
        gates = {"gru": 3, "lstm": 4}[kind]
        self.size = size = len(arrays["recurrent/recurrent_kernel"])
        self.num_carries = gates - 2
        self._input_kernel = take(arrays, "recurrent/input_kernel", (inputs, gates * size))
        self._input_bias = take(arrays, "recurrent/input_bias", (gates * size,))[None]
        self._kernel = take(arrays, "recurrent/recurrent_kernel", (size, gates * size))
        if kind == "gru":
            self._bias = take(arrays, "recurrent/recurrent_bias", (size,))[None]

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

    def start(self, state: Any, episode_start: Any, size: int) -> Any:
        """Returns the carry for B = size rows: that of `state`, and zeros where an episode starts.

        Raises:
          ValueError: state or episode_start has another shape or dtype.
        """
        zeros = np.zeros((size, self.size), np.float32)
        leaves = (zeros,) * self.num_carries
        if state is not None:
            is_sequence = isinstance(state, tuple) or (isinstance(state, list) and len(leaves) > 1)
            parts = state if is_sequence else (state,)
            found = tuple(np.asarray(leaf, FLOAT32) for leaf in parts)
            shapes, wanted = [leaf.shape for leaf in found], [leaf.shape for leaf in leaves]
            if shapes != wanted:
                raise ValueError(f"the state has shapes {shapes}; for {size} observations it has {wanted}")
            leaves = found
        if episode_start is not None:
            start = starting_rows(episode_start, size)[:, None]
            leaves = tuple(np.where(start, zeros, leaf) for leaf in leaves)
        return leaves if self.num_carries > 1 else leaves[0]


class Head:
    """The output layer of one array of an action."""

    def __init__(self, arrays: dict[str, np.ndarray], action: dict[str, Any], suffix: str, inputs: int) -> None:
        self._shape, self._dtype = tuple(action["shape"]), np.dtype(action["dtype"])
        self._nvec = tuple(action.get("nvec", ()))
        self._num_actions = int(action["num_actions"])
        self.is_box = not (self._num_actions or self._nvec)
        self.noise_size = outputs = self._num_actions or sum(self._nvec) or math.prod(self._shape)
        self._kernel, self._bias = layer(arrays, f"policy{suffix}", inputs, outputs)
        self._start = np.asarray(action["start"], self._dtype)
        self._has_start = bool(self._start.any())
        if self._nvec:  # the logits of each component; missing ones repeat the first, which wins
            firsts, categories = np.cumsum([0, *self._nvec[:-1]])[:, None], np.arange(max(self._nvec))
            self._columns = firsts + np.where(categories < np.array(self._nvec)[:, None], categories, 0)  # [K, M]
        if self.is_box:
            self._std = np.exp(take(arrays, f"log_std{suffix}", (outputs,)))
            self._low, self._high = (take(arrays, f"action{suffix}/{bound}", (outputs,)) for bound in ("low", "high"))
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


def layer(arrays: dict[str, np.ndarray], name: str, inputs: int, outputs: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns kernel [inputs, outputs] and bias [1, outputs]. Adding the bias is faster with two dimensions."""
    return take(arrays, f"{name}/kernel", (inputs, outputs)), take(arrays, f"{name}/bias", (outputs,))[None]


def take(arrays: dict[str, np.ndarray], name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns an array. Raises ValueError if its shape or dtype is wrong, or if it contains NaN."""
    if arrays[name].shape != shape or arrays[name].dtype != np.float32:
        raise ValueError(f"{name} is {arrays[name].dtype}{list(arrays[name].shape)}; it must be float32{list(shape)}")
    if np.isnan(arrays[name]).any():
        raise ValueError(f"{name} contains NaN")
    return arrays[name]


def _sigmoid(x: np.ndarray) -> np.ndarray:
    """Returns 1 / (1 + exp(-x)) without overflow."""
    return 0.5 + 0.5 * np.tanh(0.5 * x)
