"""Rollouts of Gymnasium environments, in Ray actors or in this process."""
