"""The check of action masks, and the choice of legal actions."""

import numpy as np

from jppo.envs.checks.report import FAIL, WARN, Check, failed, passed, skipped
from jppo.envs.contract import BrokenContractError
from jppo.envs.masks import has_mask, lacks_legal_action, legal_categories, nearest_legal
from jppo.envs.spaces import ACTION_MASK, PyTree
from jppo.errors import EMPTY_MASK

_REMEDY = "return bools, or integers 0 and 1; jppo takes every number other than 0 as legal"


class Masks:
    """Records the masks of all states in which an action is chosen."""

    def __init__(self, obs_spec: PyTree, action_spec: PyTree) -> None:
        self.exist, self._spec = has_mask(obs_spec), action_spec
        self._fault: Check | None = None
        self._masks, self._legal = 0, 0  # numbers of masks and of legal categories

    def choose(self, obs: PyTree, action: PyTree, lead: tuple[int, ...] = ()) -> PyTree:
        """Returns the actions, illegal categories replaced by the next legal ones.

        Args:
          obs, action: leaves [*lead, ...].

        Raises:
          BrokenContractError: no action is legal.
        """
        if not self.exist:
            return action
        mask = np.asarray(obs[ACTION_MASK])
        self.see(mask, lead)
        if lacks_legal_action(self._spec, mask, len(lead)).any():
            raise BrokenContractError(self.judge().seen, EMPTY_MASK, check="masks")
        chosen: PyTree = nearest_legal(self._spec, mask, action)
        return chosen

    def see(self, mask: np.ndarray, lead: tuple[int, ...]) -> None:
        """Records masks [*lead, ...]."""
        legal, empty = (f(self._spec, mask, len(lead)) for f in (legal_categories, lacks_legal_action))
        self._masks, self._legal = self._masks + empty.size, self._legal + int(legal.sum())
        if empty.any():
            after = f" in the state after {self._masks - 1:,} others" if not lead else ""
            self._fault = failed("masks", f"action_mask marks no legal action{after}", EMPTY_MASK)
        elif (others := mask[(mask != 0) & (mask != 1)]).size:
            self._note(FAIL, f"action_mask contains {others.flat[0]}")
        elif mask.dtype.kind not in "biu":
            self._note(WARN, f"action_mask is {mask.dtype}")

    def _note(self, status: str, seen: str) -> None:
        if self._fault is None or (self._fault.status == WARN and status == FAIL):
            self._fault = Check(name="masks", status=status, seen=seen, advice=_REMEDY)

    def judge(self) -> Check:
        """Returns the result of the check."""
        if not self.exist:
            return skipped("masks", "applies only to observations with the leaf action_mask")
        average = f"{self._legal / max(self._masks, 1):.1f} of {self._spec.num_logits}"
        return self._fault or passed("masks", f"{self._masks:,} masks; on average, {average} entries are legal")
