"""The argument of a user's callback, `jppo.train(callback=...)`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jppo.config.ppo import check_hyperparams
from jppo.ppo.types import PyTree
from jppo.runs.leaves import describe_array


class CallbackEvent:
    """The run after an update, which a callback may read, change and stop.

    Attributes:
      update: number of updates so far.
      steps: number of environment steps so far.
      metrics: the metrics of docs/metrics.md over the updates since the call before: means, and for episode/* the
        statistics of all episodes. They contain eval/* if the update was evaluated.
      return_mean: mean return of about the last 100 episodes; NaN before the first episode ends.
    """

    def __init__(
        self, *, update: int, steps: int, state: PyTree, metrics: dict[str, float], return_mean: float
    ) -> None:
        self.update, self.steps, self.metrics, self.return_mean = update, steps, metrics, return_mean
        self.logged: dict[str, float] = {}
        self.stop_reason: str | None = None
        self._state = state

    @property
    def state(self) -> Any:
        """The training state: `AnakinState` on the device, the learner's `TrainState` with Ray.

        Training continues with a state that is assigned to it. Its arrays are valid until the callback returns, because
        the next update reuses their memory; copy what you need later with `jax.device_get`.
        """
        return self._state

    @state.setter
    def state(self, state: PyTree) -> None:
        self._state = fit_state(self._state, state)

    def stop(self, reason: str = "stopped by the callback") -> None:
        """Ends the run after this update. summary.json contains the reason."""
        self.stop_reason = str(reason)

    def log(self, name: str, value: Any) -> None:
        """Adds a number to the metrics of this update.

        Raises:
          ValueError: the name is empty or that of another metric, or the value is not a number.
        """
        if not isinstance(name, str) or not name:
            raise ValueError(f"the name of a metric must be a text, not {name!r}")
        if name in self.metrics or name.startswith("eval/"):
            raise ValueError(f"the metric {name!r} is one of jppo's; choose another name, for example 'my/{name}'")
        number = value.item() if getattr(value, "size", 0) == 1 else value
        if not isinstance(number, int | float) or (isinstance(number, int) and number.bit_length() > _FLOAT_BITS):
            raise ValueError(f"the metric {name!r} must be a number, not {' '.join(repr(value).split())}")
        self.logged[name] = float(number)


_FLOAT_BITS = 1023  # of integers that a float can represent
Callback = Callable[[CallbackEvent], None]


def call(callback: Callback, event: CallbackEvent, before: PyTree) -> PyTree:
    """Calls a callback and returns the state with which training continues.

    Args:
      before: the state, with other dicts than that of the event, which the callback may change in place.

    Raises:
      ValueError: the callback returned something, or a value of the new state is invalid.
    """
    returned: Any = callback(event)  # type: ignore[func-returns-value]
    if returned is not None:
        raise ValueError(
            f"the callback returned a {type(returned).__name__}, but it must return None; use event.stop() to end the "
            "run and event.state = ... to change the state"
        )
    state = fit_state(before, event.state)
    old, new = ((part.train if hasattr(part, "train") else part).hyperparams for part in (before, state))
    if any(x is not y for x, y in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)):
        check_hyperparams(jax.device_get(new))
    return state


_SCALARS = {
    "a Python float": ("float32[]",),
    "a Python int": ("float32[]", "int32[]"),
}  # leaves that numbers may replace


def fit_state(old: PyTree, new: PyTree) -> PyTree:
    """Returns a new state with the shardings of the old one.

    Raises:
      ValueError: a leaf is missing or unknown, or has another shape or dtype.
    """
    wanted, found = _leaves_by_name(old), _leaves_by_name(new)
    fitted, used = [], set[int]()
    for name in wanted | found:
        needed, given = (_describe(leaves[name]) if name in leaves else "nothing" for leaves in (wanted, found))
        is_number = needed in _SCALARS.get(given, ())
        if given != needed and not is_number:
            raise ValueError(
                f"event.state{name} is {given}, but the run needs {needed}; a callback may change the values of the "
                "state, but not its structure, shapes and dtypes"
            )
        like, leaf = wanted[name], found[name]
        leaf = jnp.asarray(leaf, like.dtype) if is_number else leaf
        is_new = leaf is not like or id(leaf) in used
        used.add(id(leaf))
        # The next update reuses the memory of each leaf, so an array of the callback is copied.
        fitted.append(jax.device_put(jnp.copy(leaf), like.sharding) if is_new else leaf)
    return jax.tree.unflatten(jax.tree.structure(old), fitted)


def _leaves_by_name(state: PyTree) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}


def _describe(leaf: Any) -> str:
    if isinstance(leaf, int | float):
        return f"a Python {type(leaf).__name__}"
    if not hasattr(leaf, "dtype"):
        return f"a {type(leaf).__name__}"
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return f"a key{list(leaf.shape)} of {jax.random.key_impl(leaf)}" if is_key else describe_array(leaf)
