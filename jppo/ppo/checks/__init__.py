"""Validation of users' arguments: networks, optimizers, losses, advantages, and settings that must fit the environment.

The algorithm in `ppo/` can be read without these modules.
"""
