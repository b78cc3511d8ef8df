"""Tests the error message when a device runs out of memory."""

import jax
import pytest

from jppo.devices.memory import explain_out_of_memory


def fail(message):
    with explain_out_of_memory("lower num_envs = 8"):
        raise jax.errors.JaxRuntimeError(message)


def test_out_of_memory_error_names_the_remedy():
    with pytest.raises(ValueError, match="does not have enough memory; lower num_envs") as caught:
        fail("RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes.")
    assert isinstance(caught.value.__cause__, jax.errors.JaxRuntimeError)


def test_other_runtime_errors_are_not_changed():
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        fail("INTERNAL: something else")
