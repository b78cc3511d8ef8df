"""The argument of a user's callback, `jppo.train(callback=...)`."""

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jppo.config.ppo import check_hyperparams
from jppo.envs.spaces import PyTree
from jppo.errors import Refused, end_forked_process
from jppo.runs.leaves import describe_array, is_key


class RunInfo(NamedTuple):
    """Which run an event belongs to."""

    env: str
    """Name of the environment."""
    seed: int


class CallbackEvent:
    """The run after an update, which a callback may read, change and stop.

    Attributes:
      run: `run.env` and `run.seed`.
      update: number of updates so far.
      steps: number of environment steps so far.
      metrics: the metrics of docs/metrics.md over the updates since the call before: means, and for episode/* the
        statistics of all episodes. They contain eval/* if the update was evaluated.
      return_mean: mean return of about the last 100 episodes; NaN before the first episode ends.
    """

    def __init__(
        self,
        *,
        run: RunInfo,
        update: int,
        steps: int,
        read_state: Callable[[], PyTree],
        metrics: dict[str, float],
        return_mean: float,
    ) -> None:
        self.run, self.update, self.steps, self.metrics, self.return_mean = run, update, steps, metrics, return_mean
        self.logged: dict[str, float] = {}
        self.stop_reason: str | None = None
        self._read_state: Callable[[], PyTree] | None = read_state  # None after the call
        self._before: PyTree = None  # the state of the run, read at the first use
        self._state: PyTree = None

    @property
    def state(self) -> Any:
        """The training state: `AnakinState` on the device, the learner's `TrainState` with Ray.

        Training continues with a state that is assigned to it. Its arrays are valid until the callback returns, because
        the next update reuses their memory; copy what you need later with `jax.device_get`.
        """
        if self._state is None:
            self._before = self._check_open("state")()
            self._state = jax.tree.map(lambda x: x, self._before)  # other dicts, which the callback may change
        return self._state

    @state.setter
    def state(self, state: PyTree) -> None:
        self._check_open("state")
        self._state = fit_state(self.state, state)

    def _check_open(self, name: str) -> Callable[[], PyTree]:
        """Returns the function that reads the state. Raises RuntimeError after the callback has returned."""
        if self._read_state is None:
            raise RuntimeError(f"event.{name} must be used before the callback returns")
        return self._read_state

    def stop(self, reason: str = "stopped by the callback") -> None:
        """Ends the run after this update. summary.json contains the reason."""
        self._check_open("stop")
        self.stop_reason = str(reason)

    def log(self, name: str, value: Any) -> None:
        """Adds a number to the metrics of this update.

        Raises:
          ValueError: the name is empty or that of another metric, or the value is not a number.
        """
        self._check_open("log")
        if not isinstance(name, str) or not name:
            raise Refused(f"the name of a metric must be a text, not {name!r}")
        if name in self.metrics or name.startswith("eval/"):
            raise Refused(f"the metric {name!r} is one of jppo's; choose another name, for example 'my/{name}'")
        number = value.item() if getattr(value, "size", 0) == 1 else value
        if not isinstance(number, int | float):
            raise Refused(f"the metric {name!r} must be a number, not {' '.join(repr(value).split())}")
        self.logged[name] = float(number)


Callback = Callable[[CallbackEvent], None]


def call(callback: Callback, event: CallbackEvent) -> PyTree | None:
    """Calls a callback and returns the state with which training continues; None if the callback did not change it.

    Raises:
      ValueError: the callback returned something, or a value of the new state is invalid.
    """
    process = os.getpid()
    try:
        returned: Any = callback(event)  # type: ignore[func-returns-value]
    finally:
        end_forked_process(process)
        event._read_state = None
    if returned is not None:
        raise Refused(
            f"the callback returned a value of type {type(returned).__name__}, but it must return None; use "
            "event.stop() to end the run and event.state = ... to change the state"
        )
    if event._state is None:
        return None
    state: Any = fit_state(event._before, event._state)
    old, new = _leaves_by_name(event._before), _leaves_by_name(state)
    changed = [name for name in new if new[name] is not old[name]]
    if any(".hyperparams." in name for name in changed):
        check_hyperparams(jax.device_get(getattr(state, "train", state).hyperparams))
    for name in changed:
        if not name.startswith(".collect") and ".hyperparams." not in name and not _is_finite(new[name]):
            raise Refused(
                f"the callback {_name(callback)} set event.state{name} to NaN or infinity after update {event.update}; "
                "it must contain finite numbers"
            )
    return state if changed else None


def _name(callback: Callback) -> str:
    return getattr(callback, "__name__", type(callback).__name__)


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
        needed = _describe(wanted[name]) if name in wanted else "no such value"
        received = _describe(found[name]) if name in found else "missing"
        is_number = needed in _SCALARS.get(received, ())
        if received != needed and not is_number:
            remedy = "a callback may change the values of the state, but not its structure, shapes and dtypes"
            if ".hyperparams." in name and not (name in wanted and name in found):
                remedy = (
                    "numbers and schedules cannot replace each other; pass a number to jppo.train if a callback sets it"
                )
            raise Refused(f"event.state{name} is {received}, but the run needs {needed}; {remedy}")
        like, leaf = wanted[name], found[name]
        leaf = jnp.asarray(leaf, like.dtype) if is_number else leaf
        is_new = leaf is not like or id(leaf) in used
        used.add(id(leaf))
        # The next update reuses the memory of each leaf, so an array of the callback is copied.
        fitted.append(jax.device_put(jnp.copy(leaf), like.sharding) if is_new else leaf)
    return jax.tree.unflatten(jax.tree.structure(old), fitted)


def _is_finite(leaf: Any) -> bool:
    """Returns whether an array has neither NaN nor infinity. Several processes have copies of it."""
    is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
    return not is_float or bool(np.isfinite(np.asarray(leaf.addressable_data(0), np.float32)).all())


def _leaves_by_name(state: PyTree) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}


def _describe(leaf: Any) -> str:
    if isinstance(leaf, float):  # also np.float64
        return "a Python float"
    if isinstance(leaf, np.int64):
        return "a Python int"
    if isinstance(leaf, int):
        return f"a Python {type(leaf).__name__}"
    if not hasattr(leaf, "dtype"):
        return f"a {type(leaf).__name__}"
    return f"a key{list(leaf.shape)} of {jax.random.key_impl(leaf)}" if is_key(leaf) else describe_array(leaf)
