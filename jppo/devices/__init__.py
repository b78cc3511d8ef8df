"""Compilation of programs and their distribution over devices and processes."""
